"""One call of `train` on one worker: its progress, where it stops, and what another rank needs to continue it."""

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
"""Name of the part of a rank's row that has the running sums of its metrics."""


class NumberedRun(Protocol):
    """A rank's record of a training call, which it keeps after the call.

    Attributes:
        call: Number of the call.
    """

    call: int


RunT = TypeVar("RunT", bound=NumberedRun)


def run_of(kept: RunT | None, call: int) -> RunT | None:
    """Return the record if it is of this call. None if it is of an earlier one: the rank has not begun this call."""
    return kept if kept is not None and kept.call == call else None


class HeldAtBoundary(BaseException):
    """Stops an epoch between two steps so that the call can continue later. User code does not catch it by accident."""


class Gate:
    """One rank's side of the agreement of all ranks to stop after some step.

    The training thread calls `stops` between two steps. Proposals come from a second thread.

    Args:
        planned: Number of steps after which all ranks stop in any case; None for no planned stop.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.planned = planned
        self.proposed: int | None = None
        self._is_agreed: bool | None = None
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Propose to stop after `at` steps. Return False if it may be too late for that.

        Args:
            at: Number of steps.
            completed: Returns the number of completed steps.
        """
        with self._changed:
            self.proposed, self._is_agreed = at, None
            # Set before the check: if the training thread reaches the step after it, it finds the proposal.
            if completed() < at:
                return True
            self.proposed = None
            self._changed.notify_all()
            return False

    def settle(self, is_agreed: bool) -> None:
        """Settle the proposal: all ranks stop there if `is_agreed`, otherwise none does."""
        with self._changed:
            if is_agreed:
                self._is_agreed = True
            else:
                self.proposed, self._is_agreed = None, False
            self._changed.notify_all()

    def stops(self, completed: int) -> bool:
        """Return True if the epoch must stop now. Waits while a proposal for this step is not settled."""
        if self.is_planned(completed):
            return True
        if not self._is_proposed(completed):
            return False
        with self._changed:  # checks again: the second thread may have withdrawn the proposal and made a later one
            while self._is_proposed(completed) and self._is_agreed is None:
                self._changed.wait()
            return self._is_proposed(completed)

    def is_planned(self, completed: int) -> bool:
        """Return True if all ranks stop here in any case."""
        return self.planned is not None and completed >= self.planned

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read once: the second thread may withdraw it at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """The progress of a call on one rank, from which another process can continue it.

    Attributes:
        num_steps: Number of completed steps of the call.
        epoch_idx: Index of the pass in which the call began.
        num_requested: Number of steps that the call takes; None for the rest of the pass.
        is_exhausted: True if no step is left. User code after the last step may still have to run.
        is_finished: True if nothing of the call is left to do.
        name: Name of the rank that made this record.
        metrics: Metrics of that rank; None if they stay with it.
        others: Metrics of all ranks as of the last completed step, by name, as far as that rank knows; empty if
            `metrics` is set.
        lost: Metrics of lost ranks, by name.
        place: Position in data that only this call uses; None for registered data.
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
    """One training call on this rank, from its first step to its answer, across changes of the group.

    Attributes:
        epoch_idx: Index of the pass in which the call began.
        num_steps: Number of steps to take; None for the rest of the pass.
        meters: Meters of the call. They count a step when it is done.
        rows: Metrics that all ranks have sent each other in this call.
        num_steps_before: Number of steps completed before the current stream was attached.
        answer: The answer of the call; None until this rank has finished it.
        is_finished: True if nothing is left to do. Another rank may have said so.
        is_exhausted: True if no step was left at the last `detach`.
        place: Position at the last `detach` in data that only this call uses.
        gate: Agreement of the ranks to stop between two steps.
        ledger_before: Record of the samples before the call; None if this rank joined later.
        call: Number of the call, which tells its requests from those of other calls.
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
        """Take batches from `stream` from here on."""
        self._stream, self._began_at = stream, stream.num_steps_completed

    @property
    def stream(self) -> Any:
        """The stream of the batches; None after `detach`."""
        return self._stream

    @property
    def num_completed(self) -> int:
        """Number of completed steps of the call."""
        stream = self._stream  # read once: a heartbeat reads it from another thread
        here = stream.num_steps_completed - self._began_at if stream is not None else 0
        return self.num_steps_before + here

    @property
    def num_steps_left(self) -> int | None:
        """Number of steps still to take; None for the rest of the pass."""
        return None if self.num_steps is None else max(0, self.num_steps - self.num_completed)

    def detach(self) -> None:
        """Leave the stream, because the new group will continue at another place. Only completed steps count.

        An agreement to stop is void in the new group: a worker that joins it does not know of it and would go on.
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
        """Finish the call with its answer."""
        self.answer, self.is_finished = answer, True

    def state(self, with_metrics: bool) -> RunState:
        """Return the progress, from which another rank, or a later process, continues.

        Args:
            with_metrics: True to include this rank's metrics, for a snapshot or if this rank leaves. False if it stays
                in the group and reports them itself.
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
        """Count metrics that other ranks measured in this call."""
        for metrics in measured:
            if metrics is not None:
                self.meters.go_on_from(metrics)

    def take_over(self, state: RunState) -> None:
        """Continue from the progress of another rank, and keep this rank's own metrics.

        If the other rank has completed one step more, that step counts on all ranks. This rank has dropped its metrics
        of the step, but had sent its sums to all ranks with its gradients. So it takes them from the other rank's
        record.

        Args:
            state: Progress of the other rank.
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
        """Metrics of all ranks as of the last completed step, by the names of the ranks."""
        rows = self.rows.as_of(self.num_completed).items()
        return {name: row if isinstance(row, MetricSummary) else self._read(row) for name, row in rows}

    def _read(self, row: Any) -> MetricSummary:
        return self.meters.summary_of(*row.part(METRICS))

    def settle(self, present: Collection[str] | None) -> None:
        """Continue in a new group. Ranks outside it are lost; what they had sent is counted at the end of the call.

        Args:
            present: Names of the ranks in the new group; None if they are not known. Then no rank counts as lost.
        """
        told = self._told
        self.rows.settle(self.num_completed, told, told if present is None else present)

    def with_lost(self, answer: EpochAnswer) -> EpochAnswer:
        """Return the answer with the metrics of lost ranks. Rank 0 counts these."""
        if answer.metrics is None:
            return answer
        lost = list(self.rows.lost.values())
        self._tell_what_is_missing(lost)
        metrics = with_lost(answer.metrics, lost, self.meters.names)
        if metrics is answer.metrics:  # metrics of a user's own loop
            return answer
        return replace(answer, metrics=metrics, num_inherited=num_samples_of(metrics) - num_samples_of(answer.metrics))

    def _tell_what_is_missing(self, lost: Sequence[MetricSummary]) -> None:
        for name in self.meters.object_names if any(map(num_samples_of, lost)) else ():
            logger.warning("the metric object `%s` does not cover what lost workers had seen", name)
