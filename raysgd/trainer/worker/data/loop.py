"""`Loop`: the framework-specific part of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from raysgd.core.engine.shared.time_spent import OTHER
from raysgd.core.engine.shared.types import DataLedger
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.messages.joint_work import JointWork
from raysgd.trainer.worker.data.batch_streams import PlaceInStep
from raysgd.trainer.worker.data.epoch_run import EpochRun
from raysgd.trainer.worker.data.feed import DataFeed


class Loop:
    """The framework-specific part of a training loop over a feed's batches.

    A step boundary is the point between two steps. Subclasses know whether the replica is at a boundary or inside a
    step. This base class assumes that the replica is always at a boundary.

    Attributes:
        first_bin: Category in the time `Ledger` to which time before the first batch is assigned. If the library draws
            no batches, the whole call is assigned to it.
    """

    first_bin: ClassVar[str] = OTHER

    def __init__(self, feed: DataFeed) -> None:
        self._feed = feed

    @property
    def place(self) -> PlaceInStep:
        """The replica's position in its step."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """True if the current state is the state after a completed step."""
        return True

    @property
    def can_return(self) -> bool:
        """True if the state after the last completed step can be restored when user code raises.

        The value is the same on all ranks.
        """
        return self.is_whole

    @property
    def has_stock_loop(self) -> bool:
        """True if the library's loop runs the epoch. It adds the sample count and logged metrics to batches itself."""
        return False

    def is_lost(self, error: BaseException) -> bool:
        """Return True if an exception means that the worker group is broken, for example because a worker was lost."""
        return False

    def may_be_parted(self, error: BaseException) -> bool:
        """Return True if an exception may have been raised because ranks ran different operations."""
        return False

    @property
    def own_s(self) -> float | None:
        """Seconds of the training call that this rank did not spend waiting for other ranks; None if not measured."""
        return None

    @property
    def joint_work(self) -> JointWork | None:
        """Record of the training call's actions that must be the same on all ranks; None if nothing is recorded."""
        return None

    def plain(self, value: Any) -> Any:
        """Convert a result to a type that the driver can read, such as a one-element tensor to a number."""
        return value

    def note_boundary(self) -> None:
        """Called at a step boundary, when a step is complete."""

    def note_restored(self) -> None:
        """Called after the state was replaced by the state from a step boundary."""
        self.note_boundary()

    def begin_call(self) -> None:
        """Called before a new training call, to discard the state of the previous call."""

    def return_to_boundary(self) -> None:
        """Restore the state at the last step boundary. The batches since then will be repeated."""

    def end_call(self) -> None:
        """Called when a training call's answer is complete."""

    def stream(self, request: EpochRequest, *, is_begun: bool = False) -> Any:
        """Return the stream of batches for a training call; see `DataFeed.training`."""
        return self._feed.training(request, is_begun=is_begun)

    def pass_index(self, stream: Any) -> int:
        """Return the index of the pass to which the next batch belongs."""
        return self._feed.pass_index(stream)

    def can_resume(self, stream: Any) -> bool:
        """Return True if a call over this stream can resume in the middle."""
        return self._feed.is_divided(stream)

    def break_off(self) -> None:
        """Discard an interrupted step, so that its batches are yielded again."""
        self._feed.break_off()

    @property
    def order_obstacle(self) -> str | None:
        """Reason why this process cannot repeat the rest of the pass in the same sample order; None if it can."""
        return None

    def ledger(self) -> DataLedger | None:
        """Return the record of which samples were used; None if the library does not shard the data.

        Called from two threads.
        """
        return self._feed.ledger()

    def progress_text(self) -> str:
        """Return a description of the training call's progress for the log."""
        data = self.ledger()
        return "" if data is None else f"no sample lost, {data.in_flight} in flight are repeated ({data})"

    def num_samples(self, run: EpochRun) -> int:
        """Return the number of samples that this rank used in a training call; 0 if samples are not counted."""
        return int(run.meters.n)

    def results(self, run: EpochRun) -> Any:
        """Return this rank's metrics for an epoch that another rank finished, so that this rank need not finish it."""
        return run.meters.summary()

    def extra_results(self) -> dict[str, Any]:
        """Return the entries that the library adds to the metrics of a training call."""
        return {"epoch": self._feed.epoch}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        """Return the arguments for the operator's `validate` in addition to the batches and `info`."""
        return {}
