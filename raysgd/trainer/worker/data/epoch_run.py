"""One call to `train` on one worker: its progress, where it stops, and the record from which other ranks continue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from raysgd.core.arrays.data_kinds import DataPosition
from raysgd.core.engine.shared.types import DataLedger
from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary
from raysgd.core.numbers.results import num_samples_of, with_lost
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.worker.data.rank_rows import RankRows

logger = logging.getLogger(__name__)

METRICS = "metrics"
"""Name of the part of a row that holds a rank's running sums of metrics. A row is what ranks exchange in each step."""


class NumberedRun(Protocol):
    """Base class of a rank's record of a training call. The rank keeps this record after the call has ended.

    Attributes:
        call: Number of the call.
    """

    call: int


RunT = TypeVar("RunT", bound=NumberedRun)


def run_of(kept: RunT | None, call: int) -> RunT | None:
    """Return `kept`, the rank's last record, if it belongs to the call with this number; otherwise None."""
    return kept if kept is not None and kept.call == call else None


class HeldAtBoundary(BaseException):
    """Raised to stop an epoch between two steps, so that it can continue later.

    `except Exception` does not catch it.
    """


class Gate:
    """Lets one rank take part in an agreement by which all ranks stop training after the same step.

    The training thread calls `stops` between two steps. A second thread makes the proposals.

    Args:
        planned: Number of steps after which all ranks stop without a proposal; None for no planned stop.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.planned = planned
        self.proposed: int | None = None
        self._is_agreed: bool | None = None
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Propose to stop after `at` steps. Return False if this rank may already be past that step.

        Args:
            at: Number of steps.
            completed: Returns the current number of completed steps.
        """
        with self._changed:
            self.proposed, self._is_agreed = at, None
            # Set before the check, so that a training thread that completes step `at` after the check sees it.
            if completed() < at:
                return True
            self.proposed = None
            self._changed.notify_all()
            return False

    def settle(self, is_agreed: bool) -> None:
        """Accept or withdraw the proposal.

        If `is_agreed`, all ranks stop at the proposed step; otherwise no rank stops there.
        """
        with self._changed:
            if is_agreed:
                self._is_agreed = True
            else:
                self.proposed, self._is_agreed = None, False
            self._changed.notify_all()

    def stops(self, completed: int) -> bool:
        """Return True if the epoch must stop now. Blocks while a proposal for this step is undecided."""
        if self.is_planned(completed):
            return True
        if not self._is_proposed(completed):
            return False
        with self._changed:  # check again: the second thread may have replaced the proposal with a later one
            while self._is_proposed(completed) and self._is_agreed is None:
                self._changed.wait()
            return self._is_proposed(completed)

    def is_planned(self, completed: int) -> bool:
        """Return True if all ranks stop here as planned, without a proposal."""
        return self.planned is not None and completed >= self.planned

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read once: the second thread may withdraw it at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """A rank's progress in a call, from which another process can continue the call.

    Attributes:
        num_steps: Number of completed steps of the call.
        epoch_idx: Index of the pass over the data in which the call started.
        num_requested: Number of steps that the call takes; None for the rest of the pass.
        is_exhausted: True if all steps are done. User code after the last step may still have to run.
        is_finished: True if the call is complete, including user code after the last step.
        name: Name of the rank that created this record.
        metrics: Metrics of the rank that created this record; None if that rank stays in the group and reports them
            itself.
        others: Metrics of all ranks as of the last completed step, as far as this rank received them, by rank name.
            Empty if `metrics` is set.
        lost: Metrics of lost ranks, by rank name.
        place: Position in data passed to this call; None for registered data.
        call: Number of the call.
    """

    num_steps: int
    epoch_idx: int
    num_requested: int | None
    is_exhausted: bool = False
    is_finished: bool = False
    name: str = ""
    metrics: MetricSummary | None = None
    others: Mapping[str, MetricSummary] = field(default_factory=dict)
    lost: Mapping[str, MetricSummary] = field(default_factory=dict)
    place: DataPosition | None = None
    call: int = 0

    def __str__(self) -> str:
        return f"after {self.num_steps} steps"


@dataclass
class EpochRun:
    """One training call on this rank, from its first step to its answer, even if the group changes in between.

    Attributes:
        epoch_idx: Index of the pass in which the call started.
        num_steps: Number of steps to take; None for the rest of the pass.
        meters: Meters, which accumulate the call's metrics. A step's metrics are included once the step is done.
        rows: The metrics that ranks sent to each other in each step of this call.
        num_steps_before: Number of steps completed before the current stream was attached.
        answer: This rank's answer to the call; None until the rank has finished the call.
        is_finished: True if the call is complete, possibly because another rank reported so.
        is_exhausted: True if all steps were done at the last `detach`.
        place: Position in data passed to this call, as of the last `detach`.
        gate: Agrees with the other ranks to stop between two steps.
        ledger_before: Record of which samples were used before the call; None if this rank joined during the call.
        call: Number of the training call. It distinguishes this call's requests from other calls' requests.
    """

    epoch_idx: int
    num_steps: int | None
    meters: AverageMeterCollection
    rows: RankRows
    num_steps_before: int = 0
    answer: EpochAnswer | None = None
    is_finished: bool = False
    is_exhausted: bool = False
    place: DataPosition | None = None
    gate: Gate = field(default_factory=Gate)
    ledger_before: DataLedger | None = None
    call: int = 0
    _stream: Any = None
    _began_at: int = 0

    def attach(self, stream: Any) -> None:
        """Take batches from `stream` from now on."""
        self._stream, self._began_at = stream, stream.num_steps_completed

    @property
    def stream(self) -> Any:
        """The stream of the batches; None after `detach`."""
        return self._stream

    @property
    def num_completed(self) -> int:
        """Number of completed steps of the call."""
        stream = self._stream  # read once, because heartbeats access this property from another thread
        here = stream.num_steps_completed - self._began_at if stream is not None else 0
        return self.num_steps_before + here

    @property
    def num_steps_left(self) -> int | None:
        """Number of remaining steps; None for the rest of the pass."""
        return None if self.num_steps is None else max(0, self.num_steps - self.num_completed)

    def detach(self) -> None:
        """Drop the stream, because the call continues in a new group with a new stream. Only completed steps count.

        This also cancels an agreement to stop, because workers that join the new group have not taken part in the
        agreement.
        """
        self.gate = Gate()
        self.meters.drop_held()
        self.is_exhausted = self._has_no_step_left
        self.num_steps_before, self._stream = self.num_completed, None

    @property
    def _has_no_step_left(self) -> bool:
        if self.num_steps is not None:
            return self.num_completed >= self.num_steps
        if self._stream is None:
            return self.is_exhausted
        return self.num_completed > 0 and not self._stream.is_mid_pass

    def finish(self, answer: EpochAnswer) -> None:
        """Store the answer and mark the call as finished."""
        self.answer, self.is_finished = answer, True

    def state(self, with_metrics: bool) -> RunState:
        """Return a record of the call's progress, from which another rank or a later process can continue the call.

        Args:
            with_metrics: True to include this rank's metrics, for a snapshot or because this rank leaves the group.
                False if this rank stays and reports its metrics itself.
        """
        return RunState(
            self.num_completed,
            self.epoch_idx,
            self.num_steps,
            self._has_no_step_left,
            self.is_finished,
            self.rows.name,
            metrics=self.meters.summary() if with_metrics else None,
            others={} if with_metrics else self._told,
            lost=dict(self.rows.lost),
            place=self.place,
            call=self.call,
        )

    def count(self, measured: Iterable[MetricSummary | None]) -> None:
        """Add metrics that other ranks measured in this call to this rank's meters."""
        for metrics in measured:
            if metrics is not None:
                self.meters.go_on_from(metrics)

    def take_over(self, state: RunState) -> None:
        """Continue from another rank's progress, but keep this rank's own metrics.

        If the other rank has completed one more step, that step counts on all ranks. This rank was interrupted in that
        step and has discarded the step's metrics. But it had sent its running sums with its gradients to all ranks, so
        it can restore them from the other rank's record.

        Args:
            state: The other rank's progress.
        """
        own = state.others.get(self.rows.name)
        if own is not None and self.num_completed < state.num_steps:
            self.meters.correct(own)
        self._stream = None
        self.num_steps_before, self.epoch_idx = state.num_steps, state.epoch_idx
        self.is_exhausted, self.is_finished = state.is_exhausted, state.is_finished
        self.num_steps, self.place = state.num_requested, state.place
        self.answer = None
        self.meters.skip_to(state.num_steps)
        self.rows.lost.update(state.lost)
        self.rows.settle(state.num_steps, state.others, state.others)

    @property
    def _told(self) -> dict[str, MetricSummary]:
        """All ranks' metrics as of the last completed step, by rank name."""
        rows = self.rows.as_of(self.num_completed).items()
        return {name: row if isinstance(row, MetricSummary) else self._read(row) for name, row in rows}

    def _read(self, row: Any) -> MetricSummary:
        return self.meters.summary_of(*row.part(METRICS))

    def settle(self, present: Collection[str] | None) -> None:
        """Prepare to continue in a new group. Keep metrics that lost ranks had sent, to add them when the call ends.

        Args:
            present: Names of the ranks in the new group. If None (unknown), no rank counts as lost.
        """
        told = self._told
        self.rows.settle(self.num_completed, told, told if present is None else present)

    def with_lost(self, answer: EpochAnswer) -> EpochAnswer:
        """Return the answer with lost ranks' metrics added. Called only on rank 0, so that they are counted once."""
        if answer.metrics is None:
            return answer
        lost = list(self.rows.lost.values())
        self._tell_what_is_missing(lost)
        metrics = with_lost(answer.metrics, lost, self.meters.names)
        if metrics is answer.metrics:  # the user's own loop computed these metrics
            return answer
        return replace(answer, metrics=metrics, num_inherited=num_samples_of(metrics) - num_samples_of(answer.metrics))

    def _tell_what_is_missing(self, lost: Sequence[MetricSummary]) -> None:
        for name in self.meters.object_names if any(map(num_samples_of, lost)) else ():
            logger.warning("the metric object `%s` does not cover the samples that lost workers had processed", name)
