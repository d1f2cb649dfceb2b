"""The loop that takes the steps of a training call and tells where they are, and whether one is half done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from raysgd.engine.shared.time_spent import OTHER
from raysgd.engine.shared.types import DataLedger
from raysgd.messages.epochs import EpochRequest
from raysgd.messages.joint_work import JointWork
from raysgd.worker.data.batch_streams import PlaceInStep
from raysgd.worker.data.epoch_run import EpochRun
from raysgd.worker.data.feed import Feed


class Loop:
    """A loop over batches of a feed that has not changed anything yet; a subclass knows when a step has.

    Attributes:
        first_bin: What the time of a call is booked as before a batch is drawn, and where the library draws no batch.
    """

    first_bin: ClassVar[str] = OTHER

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    @property
    def place(self) -> PlaceInStep:
        """The place of the replica in the running call."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """True if the state is that of a completed step."""
        return True

    @property
    def can_return(self) -> bool:
        """True if the state can be made that of a completed step where user code raised, on all ranks alike."""
        return self.is_whole

    @property
    def has_stock_loop(self) -> bool:
        """True if the epoch runs in the loop of the library, which completes the metrics of its batches itself."""
        return False

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an exception means that the group is broken."""
        return False

    def may_be_parted(self, error: BaseException) -> bool:
        """Return whether an exception may come of ranks that did different things."""
        return False

    @property
    def own_s(self) -> float | None:
        """Seconds of the training call that this rank did not spend waiting for others; None if not measured."""
        return None

    @property
    def joint_work(self) -> JointWork | None:
        """The record of what all ranks have to do alike in the training call; None where there is none."""
        return None

    def plain(self, value: Any) -> Any:
        """A result as something that the driver can read: tensors of one element as numbers."""
        return value

    def note_boundary(self) -> None:
        """Called where the state is that of a completed step."""

    def note_restored(self) -> None:
        """Called where the state was replaced by that of a completed step."""
        self.note_boundary()

    def begin_call(self) -> None:
        """Forget what the call before has left."""

    def return_to_boundary(self) -> None:
        """Forget what was counted since the last boundary: those batches will be repeated."""

    def end_call(self) -> None:
        """Called when a training call has its answer."""

    def stream(self, request: EpochRequest, *, is_begun: bool = False) -> Any:
        """Return where the batches of a training call come from; a `Stream`."""
        return self._feed.training(request, is_begun=is_begun)

    def pass_index(self, stream: Any) -> int:
        """Index of the pass that the next batch belongs to."""
        return self._feed.pass_index(stream)

    def can_resume(self, stream: Any) -> bool:
        """Tell whether a call with these batches can continue from inside."""
        return self._feed.is_divided(stream)

    def break_off(self) -> None:
        """Forget the step that broke off, if there is one; it will be repeated."""
        self._feed.break_off()

    @property
    def order_obstacle(self) -> str | None:
        """The reason why this process cannot repeat the rest of this pass in its order."""
        return None

    def ledger(self) -> DataLedger | None:
        """Return the fate of the samples; None where the library does not divide them. Called from two threads."""
        return self._feed.ledger()

    def progress_text(self) -> str:
        """Return how far the training call is, in the user's terms."""
        data = self.ledger()
        return "" if data is None else f"no sample lost, {data.in_flight} in flight are repeated ({data})"

    def num_samples(self, run: EpochRun) -> int:
        """Samples that this rank has worked on in a training call; 0 where they are not counted."""
        return int(run.meters.n)

    def results(self, run: EpochRun) -> Any:
        """Return what an epoch returns that this rank has not completed, but others have."""
        return run.meters.summary()

    def extra_results(self) -> dict[str, Any]:
        """Return what the library adds to the metrics of a training call."""
        return {"epoch": self._feed.epoch}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        """Return what the operator's `validate` is given besides batches and info."""
        return {}
