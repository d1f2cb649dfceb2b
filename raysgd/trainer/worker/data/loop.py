"""`Loop`: the part of a worker's training calls that differs between PyTorch and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from raysgd.core.numbers.time_spent import OTHER
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.messages.joint_work import JointWork
from raysgd.trainer.worker.data.batch_streams import CurrentLeg
from raysgd.trainer.worker.data.epoch_run import EpochRun
from raysgd.trainer.worker.data.feed import DataFeed


class Loop:
    """The framework-specific part of a worker's training calls. Each framework has a subclass.

    A step boundary is the point between two steps. Subclasses keep track of whether the worker is at a boundary or
    inside a step. This base class assumes that the worker is always at a boundary.

    Attributes:
        first_bin: Category of time, in the worker's `Ledger`, to which the time before the first batch is assigned. If
            the user's code reads its data itself, the whole call is assigned to this category.
        has_stock_loop: True if the library's own training loop runs the epoch, not one that the user wrote. The
            library's loop adds the number of samples and the logged metrics to the metrics of each batch itself.
    """

    first_bin: ClassVar[str] = OTHER
    has_stock_loop = False

    def __init__(self, feed: DataFeed) -> None:
        self._feed = feed

    @property
    def leg(self) -> CurrentLeg:
        """Tracks the current batch of the call."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """True if the worker's training state is the state after a completed step, not a state inside a step."""
        return True

    @property
    def can_return(self) -> bool:
        """True if the training state after the last completed step can be restored when user code raises an error.

        This property has the same value on all ranks.
        """
        return self.is_whole

    def is_lost(self, error: BaseException) -> bool:
        """Return True if an error means that workers cannot communicate anymore, for example because one was lost."""
        return False

    def may_be_parted(self, error: BaseException) -> bool:
        """Return True if an error may have been raised because ranks ran different collective operations."""
        return False

    @property
    def own_s(self) -> float | None:
        """Seconds of the training call that this rank did not spend waiting for other ranks. None if not measured."""
        return None

    @property
    def joint_work(self) -> JointWork | None:
        """Record of this rank's actions in the call, such as all-reduces, that all ranks must take in the same order.

        None if such actions are not recorded.
        """
        return None

    def plain(self, value: Any) -> Any:
        """Convert a metric to a type that the driver can read. A one-element tensor, for example, becomes a number."""
        return value

    def note_boundary(self) -> None:
        """Called between two steps, when a step is complete."""

    def note_restored(self) -> None:
        """Called after another training state was loaded, which is always the state after a completed step."""
        self.note_boundary()

    def begin_call(self) -> None:
        """Called before a new training call, to discard what this object remembers about the previous call."""

    def return_to_boundary(self) -> None:
        """Restore the training state after the last completed step. The batches since then will be repeated."""

    def end_leg(self, num_batches: int) -> None:
        """Called when `train_epoch` has returned, before its last step counts as completed.

        Args:
            num_batches: Number of batches that this worker group has drawn in the call.
        """

    def end_call(self) -> None:
        """Called when the worker has completed its answer to a training call."""

    def stream(self, request: EpochRequest, *, is_begun: bool = False) -> Any:
        """Return the stream of batches for a training call. See `DataFeed.training`."""
        return self._feed.training(request, is_begun=is_begun)

    def pass_index(self, stream: Any) -> int:
        """Return the index of the pass over the data to which the next batch of the stream belongs."""
        return self._feed.pass_index(stream)

    def can_resume(self, stream: Any) -> bool:
        """Return True if a training call on this stream can continue in the middle of the data."""
        return self._feed.is_divided(stream)

    def break_off(self) -> None:
        """Discard an interrupted step, so that the batches of the step are yielded again."""
        self._feed.break_off()

    @property
    def order_obstacle(self) -> str | None:
        """Reason why this worker cannot use the remaining samples of the pass in the same order as before.

        None if it can.
        """
        return None

    def progress_text(self) -> str:
        """Return a text for the log about the repeated samples of an interrupted call. Empty if these are unknown."""
        data = self._feed.samples_used()
        return "" if data is None else f"no sample lost, {data.in_flight} in flight are repeated ({data})"

    def num_samples(self, run: EpochRun) -> int:
        """Return the number of samples that this rank used in a training call, or 0 if samples are not counted."""
        return int(run.meters.n)

    def results(self, run: EpochRun) -> Any:
        """Return this rank's metrics of an epoch that another rank has finished and this rank has not."""
        return run.meters.summary()

    def extra_results(self) -> dict[str, Any]:
        """Return the entries that the library adds to the result of a training call, such as the epoch number."""
        return {"epoch": self._feed.epoch}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        """Return the keyword arguments with which to call the operator's `validate`, besides the batches and `info`."""
        return {}
