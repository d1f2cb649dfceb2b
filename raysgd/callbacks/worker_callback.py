"""`WorkerCallback`: what runs in every worker, around each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.callbacks.callback import warn_of_unknown_events


class WorkerCallback:
    """Called in each worker of a `TorchTrainer`, around each step. Every method does nothing; override what you need.

    A `Callback` returns one from `worker_callback`; each worker gets a copy, so it must be possible to pickle it. All
    workers have to do the same to the model, and a collective has to be called by all of them.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Warns of methods that look like events but would never be called."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, WorkerCallback)

    def on_begin(self, operator: Any) -> None:
        """Called when the run begins, and on a worker that is new; there before `load_state_dict`."""

    def on_epoch_begin(self, operator: Any) -> None:
        """Called before the first step of an epoch on this worker."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        """Called before each optimizer step. Gradients are those of all workers, unscaled, and not clipped yet."""

    def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
        """Called after each step of a registered `torch.optim.Optimizer`, also of one that your own code steps.

        A step that mixed precision skips, and one without gradients, does not count.
        """

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called after each optimizer step that `train_batch` made.

        Args:
            operator: This worker's operator.
            step: How many batches this operator trained on, this one included.
            metrics: What `train_batch` returned.

        Returns:
            More metrics of the batch, averaged like the others; None if there are none.
        """
        return None

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        """Called when this worker has its results of the epoch. You may add entries."""

    def state_key(self) -> str:
        """Return the name of the state, by default that of the class.

        A run continues with the state of the same name. Override this to use several callbacks of one class in a run.
        """
        return type(self).__name__

    def state_dict(self) -> Any:
        """State that survives losses, and that `save` writes: tensors and plain data. Rank 0 answers for all."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Takes over what `state_dict` returned."""
