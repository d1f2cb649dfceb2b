"""`WorkerCallback`, the base class of callbacks that run in every worker, around each step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raysgd.exceptions import CallbackError

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "horovod", "raysgd")


class WorkerCallback:
    """Base class for callbacks in the workers of a `TorchTrainer`.

    The methods do nothing by default; override those you need. Each worker receives a copy, so the callback must be
    picklable. If the callback changes the model, it must make the same change on all workers. If it runs a collective
    such as an all-reduce, all workers must call it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn about methods that look like events but are never called."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, WorkerCallback)

    def on_begin(self, operator: Any) -> None:
        """Called when the run begins. On a new worker, it is called before `load_state_dict`."""

    def on_epoch_begin(self, operator: Any) -> None:
        """Called before the first step of an epoch on this worker."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        """Called before each optimizer step. Gradients are averaged over all workers, unscaled, and not yet clipped."""

    def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
        """Called after each step of a registered `torch.optim.Optimizer`, even if your own code calls `step`.

        It is not called for steps that mixed precision skips, or for steps without gradients.
        """

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called after each `train_batch` that completes an optimizer step.

        Args:
            operator: This worker's operator.
            step: Number of batches that this operator has trained on, including the current batch.
            metrics: Metrics that `train_batch` returned. With gradient accumulation, their means over the step's
                batches.

        Returns:
            Additional metrics of the batch, averaged like the metrics of `train_batch`, or None.
        """
        return None

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        """Called at the end of an epoch with this worker's metrics. You may add entries."""

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        """Called before the first batch of an epoch, and again when a new worker group continues the epoch.

        `leg` describes the part of the epoch that starts here; see `raysgd.journal`.
        """

    def _on_batch(self, operator: Any, metrics: Any, is_boundary: bool) -> None:
        """Called after each batch in the library's own loops.

        Args:
            operator: This worker's operator.
            metrics: Metrics of the batch; None for padding.
            is_boundary: True if the batch completes an optimizer step. `global_step` does not count the batch yet.
        """

    def _on_norm(self, norm: Any) -> None:
        """Called with the gradient norm before clipping, but only in steps where clipping or a callback computes it."""

    def state_key(self) -> str:
        """Return the key under which the callback's state is saved. Default: the name of the class.

        A resumed run loads the state with the same key. Override this to use several callbacks of one class in a run.
        """
        return type(self).__name__

    def state_dict(self) -> Any:
        """Return the state to save in snapshots and checkpoints, as tensors and plain data. Rank 0's state is used."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load the state that `state_dict` returned."""


def refuse_equal_keys(callbacks: Sequence[WorkerCallback]) -> None:
    """Reject callbacks whose states would be saved under the same key.

    Raises:
        ValueError: Two callbacks have the same `state_key`.
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
        CallbackError: The method failed. Errors raised by `torch`, Horovod and raysgd pass through unchanged, because
            they may mean that a connection to another worker was lost.
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
    """Warn about methods whose names start with `on_` but do not exist in a base class, since they are never called."""
    known = [name for name in vars(events_of) if name.startswith("on_")]
    for name in vars(owner):
        if name.startswith("on_") and not any(hasattr(base, name) for base in owner.__bases__):
            called = f"`{events_of.__name__}` has the events {', '.join(known)}"
            logger.warning("`%s.%s` is never called: %s", owner.__name__, name, called)


def optimizers_of(operator: Any) -> list[Any]:
    """Return the optimizers that the operator registered."""
    return list(operator._raysgd.registered.optimizers)


def models_of(operator: Any) -> list[Any]:
    """Return the models that the operator registered, without wrappers such as DDP."""
    return list(operator._raysgd.registered.original_models)


def left_out_of(operator: Any) -> Collection[int]:
    """Return the `id`s of parameters that are not part of any saved state, because `setup` recreates them."""
    remade = operator._raysgd.remade
    return () if remade is None else remade.ids


def state_of(operator: Any, key: str) -> Any:
    """Return the state of the worker callback with this `state_key`, or None if no callback has this key."""
    return operator._raysgd.callbacks.state_of(key)


def rank_of(operator: Any) -> int:
    """Return the rank of the operator's worker."""
    return int(operator._raysgd.world.rank)


def is_sharded(operator: Any) -> bool:
    """Return True if the models are sharded over the workers."""
    return bool(operator._raysgd.parallel.is_sharded)


def index_of(operator: Any, optimizer: Any) -> int:
    """Return the index of an optimizer in the list of registered optimizers."""
    return next((index for index, each in enumerate(optimizers_of(operator)) if each is optimizer), 0)


def of_optimizer(name: str, index: int, operator: Any) -> str:
    """Return a metric's name for one optimizer. If several optimizers are registered, the name includes the index."""
    return f"{name}_optimizer{index}" if len(optimizers_of(operator)) > 1 else name
