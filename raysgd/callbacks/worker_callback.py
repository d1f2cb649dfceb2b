"""`WorkerCallback`: the base class of callbacks that are called in every worker, around each step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.core.numbers.meters import PendingMetric
from raysgd.exceptions import CallbackError

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "horovod", "raysgd")


class WorkerCallback:
    """Base class for callbacks in the workers of a `TorchTrainer`.

    By default, the methods do nothing. Override what you need. Each worker receives a copy of the callback, which
    must therefore be picklable. If the callback changes the model, it must make the same change in all workers. If it
    runs a collective operation such as an all-reduce, it must do so in all workers.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn if the subclass defines a method that is never called although its name starts with `on_`."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, WorkerCallback)

    def on_begin(self, operator: Any) -> None:
        """Called when the run begins, and in each worker that joins later. A saved state is loaded afterward.

        Called again if a checkpoint is loaded that was saved without this callback.
        """

    def on_epoch_begin(self, operator: Any) -> None:
        """Called before the first step of an epoch on this worker."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        """Called before each optimizer step, when gradients are averaged over all workers but not clipped yet.

        With mixed precision, the gradients are already unscaled.
        """

    def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
        """Called after each step of a registered `torch.optim.Optimizer`, even if your own code calls `step`.

        This method is not called for steps that mixed precision skips, or for steps without gradients.
        """

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called after each `train_batch` that completes an optimizer step.

        Args:
            operator: This worker's operator.
            step: Number of batches that this operator has trained on, including the current batch.
            metrics: Metrics that `train_batch` returned. With gradient accumulation, their means over the batches of
                the step.

        Returns:
            More metrics of the batch, or None. They are averaged like the metrics that `train_batch` returned.
        """
        return None

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        """Called at the end of an epoch with this worker's metrics of the epoch, to which you may add entries."""

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        """Called before the first batch of an epoch, and again when a new group of workers continues the epoch.

        Args:
            operator: This worker's operator.
            leg: Description of the part of the epoch that starts now and that one group of workers runs. See
                `raysgd.journal`.
        """

    def _on_batch(self, operator: Any, metrics: Sequence[PendingMetric] | None, is_boundary: bool) -> None:
        """Called after each batch if the library's own training loop runs.

        Args:
            operator: This worker's operator.
            metrics: Metrics of the batch. The meters have already read them, so callbacks need not read them again.
                None if the batch is padding, whose samples do not count.
            is_boundary: True if the batch completes an optimizer step. `global_step` does not count the batch yet.
        """

    def _see_loss(self, operator: Any, loss: Any) -> Any:
        """Called with each loss of `self.backward`. Return the loss whose gradients are computed."""
        return loss

    def _leaves_out(self, operator: Any, optimizer: Any) -> bool:
        """Called before `on_gradients`. Return True to leave the optimizer's step out, on all workers alike.

        The optimizer then does not step, and the step's metrics and samples are not counted. Override `_see_loss`, too.
        """
        return False

    def _on_left_out(self, entry: Mapping[str, Any]) -> None:
        """Called with a description of a step that was left out. See `raysgd.journal.entries.LeftOutLine`."""

    def _on_norm(self, norm: Any) -> None:
        """Called with the gradient norm before clipping, in steps in which clipping or a callback has computed it."""

    def _news(self, operator: Any, received: Any) -> Any:
        """Return what this callback has recorded about steps and the driver does not have yet.

        Args:
            operator: This worker's operator.
            received: Says what the driver already has. The callback can discard it.
        """

    def state_key(self) -> str:
        """Return the key under which the callback's state is saved. Default: the name of the class.

        A resumed run loads the state with the same key. Override this method if you use several callbacks of one class
        in a run.
        """
        return type(self).__name__

    def state_dict(self) -> Any:
        """Return the state of this callback for snapshots and checkpoints, as tensors and plain data.

        The state of rank 0 is saved, and all workers load it.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load the state that `state_dict` of this callback returned, possibly in another worker or run."""

    def _check_state(self, operator: Any, state: Any) -> None:
        """Called before anything of a saved state is loaded, to reject this callback's part of it with a `ValueError`.

        Args:
            operator: This worker's operator.
            state: State to be loaded with `load_state_dict`.
        """


def news_of(replica: Any, received: Mapping[type[WorkerCallback], Any]) -> dict[type[WorkerCallback], Any]:
    """Return what callbacks in one worker have recorded about steps and the driver does not have yet, by their class.

    A second thread of the worker runs this function during training, because reading metrics may wait for the GPU.

    Args:
        replica: The object in the worker that holds the training operator.
        received: What the driver already has, by the class of the callback. Classes of which the worker has no callback
            are left out of the answer.
    """
    operator = replica.operator
    asked = {kind: operator._raysgd.callbacks.of_kind(kind) for kind in received}
    return {kind: each._news(operator, received[kind]) for kind, each in asked.items() if each is not None}


def refuse_equal_keys(callbacks: Sequence[WorkerCallback]) -> None:
    """Check that no two callbacks save their states under the same key.

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
    """Return True if the class of a callback overrides `state_dict`, so that it may have a state to save."""
    return type(callback).state_dict is not WorkerCallback.state_dict


def call_event(callback: WorkerCallback, method: str, *args: Any) -> Any:
    """Call a method of a worker callback, and return the result.

    Raises:
        CallbackError: The method failed. Errors whose class is defined in `torch`, Horovod or raysgd are raised
            unchanged, because they may mean that the connection to another worker was lost.
    """
    try:
        return getattr(callback, method)(*args)
    except Exception as error:  # a user's callback may raise any exception
        if type(error).__module__.partition(".")[0] in _LIBRARIES:
            raise
        raise CallbackError(
            f"The callback `{type(callback).__name__}` failed in `{method}`: {type(error).__name__}: {error}"
        ).with_traceback(error.__traceback__) from error


def warn_of_unknown_events(owner: type, events_of: type) -> None:
    """Warn about each method of a user's class whose name starts with `on_` if no base class has this method.

    Such a method is never called. Its name is probably misspelled.

    Args:
        owner: The user's class.
        events_of: The library's base class, whose methods the warning lists.
    """
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


def rank_of(operator: Any) -> int:
    """Return the rank of the operator's worker."""
    return int(operator._raysgd.world.rank)


def is_sharded(operator: Any) -> bool:
    """Return True if the models are sharded over the workers."""
    return bool(operator._raysgd.parallel.is_sharded)


def index_of(operator: Any, optimizer: Any) -> int:
    """Return the index of an optimizer in the list of registered optimizers, or 0 if it is not registered."""
    return next((index for index, each in enumerate(optimizers_of(operator)) if each is optimizer), 0)


def of_optimizer(name: str, index: int, operator: Any) -> str:
    """Return the name of a metric for one optimizer. With several optimizers, append the index of the optimizer."""
    return f"{name}_optimizer{index}" if len(optimizers_of(operator)) > 1 else name
