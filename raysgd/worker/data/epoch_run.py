"""One call of `train` on one worker: how far it is, where it is held, and what is needed to continue it elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from raysgd._numbers.meters import AverageMeterCollection, MetricSummary
from raysgd._numbers.results import num_samples_of, with_lost
from raysgd.arrays.data_kinds import DataPosition
from raysgd.engine.shared.types import DataLedger
from raysgd.messages.epochs import EpochAnswer
from raysgd.worker.data.rank_rows import RankRows

logger = logging.getLogger(__name__)

METRICS = "metrics"
"""The part of a rank's row that has the running sums of its metrics."""


class NumberedRun(Protocol):
    """What a rank keeps of a training call, also after its end.

    Attributes:
        call: The number of the call.
    """

    call: int


RunT = TypeVar("RunT", bound=NumberedRun)


def run_of(kept: RunT | None, call: int) -> RunT | None:
    """Return what is kept of this call; None where the rank has not begun it: what it keeps is of an earlier one."""
    return kept if kept is not None and kept.call == call else None


class HeldAtBoundary(BaseException):
    """Ends an epoch between two steps, past any `except Exception` of user code; the call will continue."""


class Gate:
    """The place where all ranks have agreed to stop, seen from one of them.

    The training thread calls `stops` between two steps. Proposals come from a second thread.

    Args:
        planned: After how many steps all ranks stop in any case; None for nowhere.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.planned = planned
        self.proposed: int | None = None
        self._is_agreed: bool | None = None
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Propose to stop after `at` steps; False when it may be too late for that."""
        with self._changed:
            self.proposed, self._is_agreed = at, None
            # In this order: a training thread that comes to the step after this look finds the proposal.
            if completed() < at:
                return True
            self.proposed = None
            self._changed.notify_all()
            return False

    def settle(self, is_agreed: bool) -> None:
        """All ranks stop there, or none does."""
        with self._changed:
            if is_agreed:
                self._is_agreed = True
            else:
                self.proposed, self._is_agreed = None, False
            self._changed.notify_all()

    def stops(self, completed: int) -> bool:
        """Tell whether the epoch is to stop now. Waits while a proposal for this very step is not settled."""
        if self.is_planned(completed):
            return True
        if not self._is_proposed(completed):
            return False
        with self._changed:  # until now, another thread may have withdrawn the proposal and made one for a later step
            while self._is_proposed(completed) and self._is_agreed is None:
                self._changed.wait()
            return self._is_proposed(completed)

    def is_planned(self, completed: int) -> bool:
        """Tell whether all ranks stop here in any case."""
        return self.planned is not None and completed >= self.planned

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read once: it may be withdrawn at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """The state that another process needs to continue a run.

    Attributes:
        num_steps: Steps of the call completed.
        epoch_idx: The pass that the call began with.
        num_requested: How many steps the call is to take; None for the rest of the pass.
        is_exhausted: Whether no step is left, though perhaps what follows the last one.
        is_finished: Whether nothing of the call is left to do.
        name: What the rank is known by that says so.
        metrics: What it measured so far; None where that does not travel.
        others: What other ranks had measured by then, by name, as far as it knows; nothing where that does not travel.
        lost: What ranks had measured that are gone.
        place: Where it is in data that only this call has; None for registered data.
        call: The number of the call.
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
    """One training call, from its first step to its answer, whatever happens to the group in between.

    Attributes:
        epoch_idx: The pass that it began with.
        num_steps: How many steps to take; None for the rest of the pass.
        meters: What the stock loop measures with.
        rows: What all ranks have told of what they measured.
        num_steps_before: Steps completed before the stream was opened as it is now.
        answer: Set once it is finished.
        is_finished: Whether nothing is left to do, though perhaps by another rank's account.
        is_exhausted: Whether no step is left, as of the last `detach`.
        place: Where it is in data that only this call has, as of the last `detach`.
        ledger_before: The samples before it, by what became of them; None where this rank was not there.
        call: The number of the call, by which its request is told from that of another one.
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
    _stream: Any = None  # hands out the batches, and remembers where it is
    _began_at: int = 0

    def attach(self, stream: Any) -> None:
        """Take its batches from `stream` from here on."""
        self._stream, self._began_at = stream, stream.num_steps_completed

    @property
    def stream(self) -> Any:
        """The source of its batches; None where that was left."""
        return self._stream

    @property
    def num_completed(self) -> int:
        """Steps completed in all."""
        stream = self._stream  # read once: a heartbeat asks from another thread
        here = stream.num_steps_completed - self._began_at if stream is not None else 0
        return self.num_steps_before + here

    @property
    def num_steps_left(self) -> int | None:
        """Steps still to take; None for the rest of the pass."""
        return None if self.num_steps is None else max(0, self.num_steps - self.num_completed)

    def detach(self) -> None:
        """Count what was completed, and nothing else; the stream will be another one, or at another place.

        What the group had agreed on is void: a worker that joins the next one does not know of it, and would go on.
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
        """Nothing is left to do."""
        self.answer, self.is_finished = answer, True

    def state(self, with_metrics: bool) -> RunState:
        """Return what another rank, or another process later, needs to go on.

        Args:
            with_metrics: Whether this rank will be gone then. Else others go on beside it.
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
        """Count what others had measured in this call."""
        for metrics in measured:
            if metrics is not None:
                self.meters.go_on_from(metrics)

    def take_over(self, state: RunState) -> None:
        """Go on from where another rank is. What this one has measured stays, unless that one knows of more."""
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
        """The sums that all ranks had measured at the last completed step."""
        rows = self.rows.as_of(self.num_completed).items()
        return {name: row if isinstance(row, MetricSummary) else self._read(row) for name, row in rows}

    def _read(self, row: Any) -> MetricSummary:
        return self.meters.summary_of(*row.part(METRICS))

    def settle(self, present: Collection[str] | None) -> None:
        """Go on in another group, of these ranks: of others there is what they had told, which is not counted yet."""
        told = self._told
        self.rows.settle(self.num_completed, told, told if present is None else present)

    def with_lost(self, answer: EpochAnswer) -> EpochAnswer:
        """The answer of the rank that counts what ranks had measured that are gone."""
        if answer.metrics is None:
            return answer
        lost = list(self.rows.lost.values())
        self._tell_what_is_missing(lost)
        metrics = with_lost(answer.metrics, lost, self.meters.names)
        if metrics is answer.metrics:  # of a loop of the user's
            return answer
        return replace(answer, metrics=metrics, num_inherited=num_samples_of(metrics) - num_samples_of(answer.metrics))

    def _tell_what_is_missing(self, lost: Sequence[MetricSummary]) -> None:
        for name in self.meters.object_names if any(map(num_samples_of, lost)) else ():
            logger.warning("the metric object `%s` does not cover what lost workers had seen", name)
