"""Progress of one call to `train` in one worker, and what other workers need to continue the call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from raysgd.core.arrays.data_kinds import DataPosition
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary
from raysgd.core.numbers.results import num_samples_of, with_lost
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.worker.data.rank_rows import RankRows

logger = logging.getLogger(__name__)

METRICS = "metrics"
"""Name of the part of a rank's row that has the sums of its metrics.

A row is the data that a rank sends to all other ranks in every step.
"""


class NumberedRun(Protocol):
    """Record that a rank keeps of its last training call, even after the call has ended.

    Attributes:
        call_number: Number of the training call.
    """

    call_number: int


RunT = TypeVar("RunT", bound=NumberedRun)


def run_of(kept: RunT | None, call_number: int) -> RunT | None:
    """Return a rank's last record if it belongs to the training call with the number `call_number`; otherwise None.

    Args:
        kept: The rank's last record, or None.
        call_number: Number of a training call.
    """
    return kept if kept is not None and kept.call_number == call_number else None


class HeldAtBoundary(BaseException):
    """Raised inside the user's training loop to stop an epoch between two steps. The epoch can continue later.

    An `except Exception` in the user's code does not catch this exception.
    """


class Gate:
    """One rank's part in an agreement by which all ranks stop a training call after the same step.

    The driver proposes a step to all ranks, and then reports to them whether all have agreed. A second thread of the
    worker receives these messages. The training thread calls `stops` between two steps.

    Args:
        planned: Number of steps after which all ranks stop without a proposal, or None for no planned stop.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.planned = planned
        self.proposed: int | None = None
        self._is_resolved = False  # True once it is known if all ranks stop at the proposed step
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Receive the proposal to stop training after `at` steps.

        Return False if this rank may already have begun the next step.

        Args:
            at: Number of completed steps of the call at which to stop.
            completed: Function that returns the current number of completed steps.
        """
        with self._changed:
            self.proposed, self._is_resolved = at, False
            # `proposed` is set before this check. Therefore, if the training thread completes the step after the check,
            # it finds the proposal, and waits for the decision of all ranks.
            if completed() < at:
                return True
            self.proposed = None
            self._changed.notify_all()
            return False

    def resolve(self, is_agreed: bool) -> None:
        """Accept the current proposal if all ranks have agreed to stop at its step.

        Otherwise, withdraw the proposal.
        """
        with self._changed:
            if not is_agreed:
                self.proposed = None
            self._is_resolved = True
            self._changed.notify_all()

    def stops(self, completed: int) -> bool:
        """Return True if the training call must stop now, after `completed` steps.

        If it is not yet known whether all ranks agree to stop at this step, wait until this is known.
        """
        if self.is_planned(completed):
            return True
        if not self._is_proposed(completed):
            return False
        with self._changed:  # check again, because the second thread may have replaced the proposal by a later step
            while self._is_proposed(completed) and not self._is_resolved:
                self._changed.wait()
            return self._is_proposed(completed)

    def is_planned(self, completed: int) -> bool:
        """Return True if all ranks stop after `completed` steps because this was planned before the call."""
        return self.planned is not None and completed >= self.planned

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read only once, because the second thread may withdraw the proposal at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """A rank's progress in a training call, from which another process can continue the call.

    Attributes:
        num_steps: Number of completed steps of the call.
        epoch_idx: Index of the pass over the data in which the call started.
        num_requested: Number of steps that the call was asked to take, or None for the rest of the pass.
        is_exhausted: True if all steps are done. User code after the last step may still have to run.
        is_finished: True if the call is complete, including user code after the last step.
        name: Name of the rank that created this record. Unlike a number, it stays the same in later groups.
        metrics: Metrics that this rank has measured in the call. None if the rank continues in the next group and
            reports its metrics itself.
        others: Metrics of all ranks as of the last completed step, as far as this rank received them, by rank name.
            Empty if `metrics` is set.
        lost: Metrics of lost ranks, by rank name.
        place: Position in the data that the user passed to this call. None if the call uses registered data.
        call_number: Number of the training call.
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
    call_number: int = 0

    def __str__(self) -> str:
        return f"after {self.num_steps} steps"

    def for_others(self) -> RunState:
        """Return a copy for ranks that do not continue this rank's metrics: without its metric objects."""
        return self if self.metrics is None else replace(self, metrics=self.metrics.without_objects())


@dataclass
class EpochRun:
    """The progress and the metrics of one training call on this rank, which are kept if the group of workers changes.

    The subclass `TrainingCall` runs the call. The framework-specific code depends only on this class.

    Attributes:
        epoch_idx: Index of the pass over the data in which the call started.
        num_steps: Number of steps to take, or None for the rest of the pass.
        meters: Accumulates the metrics of the call. The metrics of a step are included once the step is completed.
        rows: Stores the metrics that the ranks have last sent to each other, and the metrics of lost ranks.
        num_steps_before: Number of steps of the call that were completed with earlier cursors.
        answer: This rank's answer to the call. None until the rank has finished the call.
        is_finished: True if the call is complete, possibly because another rank reported this.
        is_exhausted: True if all steps were completed when the last cursor was detached.
        place: Position in the data that the user passed to this call, as of the last snapshot or change of the group.
            None if the call uses registered data.
        gate: Agreement with the other ranks to stop the call between two steps.
        samples_before: Record of which samples were used before the call. None if this rank joined during the call.
        call_number: Number of the training call, by which requests for this call are recognized.
        began_at: Number to subtract from the cursor's `num_steps_completed` to get the number of completed steps of
            the call.
        cursor: The cursor from which the call takes its batches. None after `detach`.
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
    samples_before: SamplesUsed | None = None
    call_number: int = 0
    began_at: int = 0
    cursor: Any = None

    def attach(self, cursor: Any) -> None:
        """Let the rest of the call take its batches from this cursor."""
        # `began_at` is set first, because another thread may read `num_completed`.
        self.began_at, self.cursor = cursor.num_steps_completed - self.num_steps_before, cursor

    @property
    def num_completed(self) -> int:
        """Number of steps of the call that all ranks have completed."""
        cursor = self.cursor  # read only once, because another thread uses this property and `detach` may intervene
        return self.num_steps_before if cursor is None else cursor.num_steps_completed - self.began_at

    @property
    def num_steps_left(self) -> int | None:
        """Number of steps that remain to be taken. None if the call takes the rest of the pass."""
        return None if self.num_steps is None else max(0, self.num_steps - self.num_completed)

    def detach(self) -> None:
        """Drop the cursor, because the call will continue in a new group of workers with a new cursor.

        An interrupted step does not count. An agreement to stop is canceled, because workers that join the new group
        have not taken part in it.
        """
        self.gate = Gate()
        self.meters.drop_pending()
        self.is_exhausted = self._has_no_step_left
        self.num_steps_before, self.cursor = self.num_completed, None

    @property
    def _has_no_step_left(self) -> bool:
        if self.num_steps is not None:
            return self.num_completed >= self.num_steps
        if self.cursor is None:
            return self.is_exhausted
        return self.num_completed > 0 and not self.cursor.is_mid_pass

    def state(self, with_metrics: bool) -> RunState:
        """Return a record of the call's progress, from which another rank or a later process can continue the call.

        Args:
            with_metrics: Whether to include this rank's metrics. Pass True for a snapshot, or if this rank leaves the
                group. Pass False if this rank stays in the group and reports its metrics itself.
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
            call_number=self.call_number,
        )

    def take_over(self, state: RunState) -> None:
        """Continue the call from another rank's progress, but keep this rank's own metrics.

        If the other rank has completed one more step, that step counts on all ranks. This rank was interrupted in that
        step and has discarded the metrics of the step. But in each step, every rank sends the sums of its metrics to
        all ranks. The other rank has received the sums of this rank, from which this rank restores its metrics.

        Args:
            state: The other rank's progress.
        """
        own = state.others.get(self.rows.name)
        if own is not None and self.num_completed < state.num_steps:
            self.meters.correct(own)
        self.cursor = None
        self.num_steps_before, self.epoch_idx = state.num_steps, state.epoch_idx
        self.is_exhausted, self.is_finished = state.is_exhausted, state.is_finished
        self.num_steps, self.place = state.num_requested, state.place
        self.answer = None
        self.meters.skip_to(state.num_steps)
        self.rows.lost.update(state.lost)
        self.rows.keep_lost(state.num_steps, state.others, state.others)

    @property
    def _told(self) -> dict[str, MetricSummary]:
        """The metrics of all ranks as of the last completed step, by rank name."""
        rows = self.rows.as_of(self.num_completed).items()
        return {name: row if isinstance(row, MetricSummary) else self._read(row) for name, row in rows}

    def _read(self, row: Any) -> MetricSummary:
        return self.meters.summary_of(*row.part(METRICS))

    def keep_lost(self, present: Collection[str] | None, left: Iterable[RunState] = ()) -> None:
        """Keep the metrics of ranks that are missing from the new group of workers in which the call continues.

        These metrics are added to the result when the call ends.

        Args:
            present: Names of the ranks in the new group. If None, the names are unknown and no rank counts as lost.
            left: Progress and metrics of the ranks that left the group as planned, without a failure.
        """
        told = self._told
        self.rows.keep_lost(self.num_completed, told, told if present is None else present)
        self.rows.lost.update((each.name, each.metrics) for each in left)

    def with_lost(self, answer: EpochAnswer, rank: int) -> EpochAnswer:
        """Return a rank's answer to the driver. On rank 0, add the metrics of ranks that were lost during the call.

        The other ranks do not add them, so that they are counted once.
        """
        if rank or not self.rows.lost or answer.metrics is None:
            return answer
        lost = list(self.rows.lost.values())
        self._tell_what_is_missing(lost)
        metrics = with_lost(answer.metrics, lost, self.meters.names)
        if metrics is answer.metrics:  # nothing was added, because the user's own training loop computed the metrics
            return answer
        return replace(answer, metrics=metrics, num_inherited=num_samples_of(metrics) - num_samples_of(answer.metrics))

    def _tell_what_is_missing(self, lost: Sequence[MetricSummary]) -> None:
        for name in self.meters.object_names if any(map(num_samples_of, lost)) else ():
            logger.warning("the metric object `%s` does not cover the samples that lost workers had processed", name)
