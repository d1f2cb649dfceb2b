"""Arguments that `TorchTrainer` had once: which are refused, which has no effect, and what replaces each.

They reach the trainer among its unknown keywords, and are taken out of these here. A value that asks for nothing is
accepted, as in the old library.
"""

from __future__ import annotations

import logging
from typing import Any

from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)

_CREATORS = ("model_creator", "data_creator", "optimizer_creator", "scheduler_creator", "loss_creator")


def take_creators(given: dict[str, Any]) -> None:
    """Refuses the creator functions that were arguments once.

    Raises:
        DeprecationWarning: One of them was passed.
    """
    if any([given.pop(name, None) for name in _CREATORS]):
        raise DeprecationWarning(
            "Creator functions are no longer arguments of `TorchTrainer`: make an operator class from them with "
            "`TrainingOperator.from_creators(...)` and pass it as `training_operator_cls`. `raysgd migrate` does so."
        )


def take_others(given: dict[str, Any]) -> Any:
    """Refuses the other arguments that were retired; returns `serialize_data_creation`, which has no effect.

    Raises:
        DeprecationWarning: One of them was passed.
    """
    _take(given, "num_replicas", "use `num_workers`")
    _take(
        given,
        "batch_size",
        f"put the batch size of all workers into `config` under `raysgd.utils.BATCH_SIZE` ({BATCH_SIZE!r})",
    )
    _take(given, "apex_args", "pass it to `TrainingOperator.register`")
    serialize_data_creation = given.pop("serialize_data_creation", None)
    if serialize_data_creation is True:
        logger.warning(
            "`serialize_data_creation` of the trainer has no effect; `TrainingOperator.from_creators` has it"
        )
    given["data_loader_args"] = given.get("data_loader_args") or None
    _take(given, "data_loader_args", "make the `DataLoader` with these options in the operator's `setup`")
    return serialize_data_creation


def _take(given: dict[str, Any], name: str, instead: str) -> None:
    if given.pop(name, None) is not None:
        raise DeprecationWarning(f"`{name}` is no longer an argument of `TorchTrainer`: {instead}.")
