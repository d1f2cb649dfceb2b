"""`WorkerCallback`, which runs in every worker, around each step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raysgd.exceptions import CallbackError

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "horovod", "raysgd")


class WorkerCallback:
    """Base class for callbacks in the workers of a `TorchTrainer`. Its methods do nothing; override the ones you need.

    Each worker gets a copy, so the callback must pickle. All workers must do the same to the model, and all of them
    must call each collective.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn about methods that look like events but are never called."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, WorkerCallback)

    def on_begin(self, operator: Any) -> None:
        """Called when the run begins. On a new worker it is called before `load_state_dict`."""

    def on_epoch_begin(self, operator: Any) -> None:
        """Called before the first step of an epoch on this worker."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        """Called before each optimizer step. The gradients are those of all workers, unscaled and not yet clipped."""

    def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
        """Called after each step of a registered `torch.optim.Optimizer`, even if your own code makes the step.

        It is not called for a step that mixed precision skips, or for one without gradients.
        """

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called after each optimizer step that `train_batch` made.

        Args:
            operator: This worker's operator.
            step: Number of batches that this operator has trained on, including this one.
            metrics: Metrics that `train_batch` returned. For a step of several batches, their means.

        Returns:
            More metrics of the batch, averaged like the others; None if there are none.
        """
        return None

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        """Called when this worker has its metrics of the epoch. You may add entries."""

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        """Called before the first batch that this worker's group trains on in an epoch; see `raysgd.journal`."""

    def _on_batch(self, operator: Any, metrics: Any, is_boundary: bool) -> None:
        """Called after each batch of the library's loops; `is_boundary` if the optimizer step ends with it.

        `metrics` are those of the batch, None for padding. `global_step` does not count the batch yet.
        """

    def _on_norm(self, norm: Any) -> None:
        """Called in a step with the norm of an optimizer's gradients, before clipping, if something has computed it."""

    def state_key(self) -> str:
        """Return the name of the state. The default is the name of the class.

        A run continues with the state of the same name. Override this to use several callbacks of one class in a run.
        """
        return type(self).__name__

    def state_dict(self) -> Any:
        """Return the state to keep in snapshots and files, as tensors and plain data. That of rank 0 counts."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load a state that `state_dict` returned."""


def refuse_equal_keys(callbacks: Sequence[WorkerCallback]) -> None:
    """Refuse callbacks whose states could not be told apart.

    Raises:
        ValueError: Two of them have the same `state_key`.
    """
    for key, count in Counter(key_of(each) for each in callbacks if has_state(each)).items():
        if count > 1:
            raise ValueError(
                f"`callbacks` has {count} of `{key}`, whose states could not be told apart: pass one of them, or "
                "override `state_key` in their class."
            )


def key_of(callback: WorkerCallback) -> str:
    """Return the `state_key` of a callback."""
    return str(call_event(callback, "state_key"))


def has_state(callback: WorkerCallback) -> bool:
    """Return True if a callback has a state to save."""
    return type(callback).state_dict is not WorkerCallback.state_dict


def call_event(callback: WorkerCallback, method: str, *args: Any) -> Any:
    """Call a method of a callback.

    Raises:
        CallbackError: The method failed. Errors of libraries are not wrapped, so that lost connections are recognized.
    """
    try:
        return getattr(callback, method)(*args)
    except Exception as error:  # user code
        if type(error).__module__.partition(".")[0] in _LIBRARIES:
            raise
        raise CallbackError(
            f"The callback `{type(callback).__name__}` failed in `{method}`: {type(error).__name__}: {error}"
        ).with_traceback(error.__traceback__) from error


def warn_of_unknown_events(owner: type, events_of: type) -> None:
    """Warn about methods named like an event, `on_...`, that no base class has."""
    known = [name for name in vars(events_of) if name.startswith("on_")]
    for name in vars(owner):
        if name.startswith("on_") and not any(hasattr(base, name) for base in owner.__bases__):
            called = f"`{events_of.__name__}` has the events {', '.join(known)}"
            logger.warning("`%s.%s` is never called: %s", owner.__name__, name, called)


def optimizers_of(operator: Any) -> list[Any]:
    """Return the registered optimizers."""
    return list(operator._raysgd.registered.optimizers)


def models_of(operator: Any) -> list[Any]:
    """Return the registered models, without wrappers."""
    return list(operator._raysgd.registered.original_models)


def left_out_of(operator: Any) -> Collection[int]:
    """Return the ids of the parameters that no state holds, because `setup` makes them again."""
    remade = operator._raysgd.remade
    return () if remade is None else remade.ids


def state_of(operator: Any, key: str) -> Any:
    """Return the state of a worker callback by its `state_key`; None if there is none."""
    return operator._raysgd.callbacks.state_of(key)


def rank_of(operator: Any) -> int:
    """Return the rank of the operator's worker."""
    return int(operator._raysgd.world.rank)


def is_sharded(operator: Any) -> bool:
    """Return True if each worker has only a part of the models."""
    return bool(operator._raysgd.parallel.is_sharded)


def index_of(operator: Any, optimizer: Any) -> int:
    """Return the index of an optimizer among the registered ones."""
    return next((index for index, each in enumerate(optimizers_of(operator)) if each is optimizer), 0)


def of_optimizer(name: str, index: int, operator: Any) -> str:
    """Return the name of a metric for one optimizer. It has a number if there are several."""
    return f"{name}_optimizer{index}" if len(optimizers_of(operator)) > 1 else name
