"""Rules for the checkpoints of `Trainer`: which stay, by which scores they are judged. Nothing is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysgd._numbers.ranking import MAX, as_score
from raysgd.air.config import CheckpointConfig
from raysgd.train.constants import TIMESTAMP


@dataclass
class CheckpointStrategy:
    """The rule that says which checkpoints of a run stay on disk.

    Attributes:
        num_to_keep: How many; None for all, 0 for none (the latest one is then kept in memory only).
        checkpoint_score_attribute: The key of a checkpoint by which it is judged.
        checkpoint_score_order: Whether "max" or "min" of it is best. Of equals the newer one is better.

    Raises:
        ValueError: A number below 0, or another order.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = TIMESTAMP
    checkpoint_score_order: str = MAX

    def __post_init__(self) -> None:
        if self.checkpoint_score_attribute is None:
            raise ValueError("`checkpoint_score_attribute=None`: need the name of a value in the checkpoints.")
        CheckpointConfig(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)  # checks them


def check_strategy(strategy: CheckpointStrategy | None) -> None:
    """Checks what says which checkpoints stay.

    Raises:
        TypeError: It is neither a strategy nor None.
    """
    if strategy is not None and not isinstance(strategy, CheckpointStrategy):
        raise TypeError(
            f"`checkpoint_strategy={strategy!r}`: need a `CheckpointStrategy`, such as "
            "`CheckpointStrategy(num_to_keep=2)`, or None, which keeps all."
        )


def checked_score(strategy: CheckpointStrategy, score: Any) -> float | None:
    """The value of a checkpoint's score attribute as a number; None where nothing is kept, so that none is needed.

    Raises:
        ValueError: It is missing or no number.
    """
    if strategy.num_to_keep == 0:
        return None
    name = strategy.checkpoint_score_attribute
    if score is None:
        raise ValueError(
            f"The checkpoint has no {name!r}, by which `checkpoint_score_attribute` has it judged: pass it to "
            "`save_checkpoint`."
        )
    number = as_score(score)
    if number is None:
        raise ValueError(f"The checkpoint's {name!r} is {score!r}: the score must be a number.")
    return number
