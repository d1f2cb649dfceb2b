"""One call of `train` on one worker: how far it is, where it is held, and what is needed to continue it elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from raysgd._numbers.meters import AverageMeterCollection, MetricSummary
from raysgd.messages.epochs import EpochAnswer


class HeldAtBoundary(BaseException):
    """Ends an epoch between two steps, past any `except Exception` of user code; the call will continue."""


class Steps(Protocol):
    """Where the steps of a run come from."""

    @property
    def num_steps_completed(self) -> int:
        """Steps that are done, over all calls."""

    @property
    def is_mid_pass(self) -> bool:
        """Whether the next batch belongs to the pass that was begun last."""


class Gate:
    """Where all ranks have agreed to stop, seen from one of them.

    The training thread calls `stops` between two steps. Proposals come from a second thread.
    """

    def __init__(self) -> None:
        self.proposed: int | None = None
        self._is_agreed: bool | None = None
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Proposes to stop after `at` steps; False when it may be too late for that."""
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
        """Whether the epoch is to stop now. Waits while a proposal for this very step is not settled."""
        if not self._is_proposed(completed):
            return False
        with self._changed:  # until now, another thread may have withdrawn the proposal and made one for a later step
            while self._is_proposed(completed) and self._is_agreed is None:
                self._changed.wait()
            return self._is_proposed(completed)

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read once: it may be withdrawn at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """What another process needs to continue a run.

    Attributes:
        num_steps: Steps of the call completed.
        epoch_idx: The pass that the call began with.
        num_requested: How many steps the call is to take; None for the rest of the pass.
        is_exhausted: Whether no step is left, though perhaps what follows the last one.
        is_finished: Whether nothing of the call is left to do.
        metrics: What was measured so far by the rank that says so; None where that does not travel.
    """

    num_steps: int
    epoch_idx: int
    num_requested: int | None
    is_exhausted: bool = False
    is_finished: bool = False
    metrics: MetricSummary | None = None

    def __str__(self) -> str:
        return f"after {self.num_steps} steps"


@dataclass
class EpochRun:
    """One training call, from its first step to its answer, whatever happens to the group in between.

    Attributes:
        epoch_idx: The pass that it began with.
        num_steps: How many steps to take; None for the rest of the pass.
        meters: What the stock loop measures.
        num_steps_before: Steps completed before the stream was opened as it is now.
        answer: Set once it is finished.
        is_finished: Whether nothing is left to do, though perhaps by another rank's account.
        is_exhausted: Whether no step is left, as of the last `detach`.
    """

    epoch_idx: int
    num_steps: int | None
    meters: AverageMeterCollection
    num_steps_before: int = 0
    answer: EpochAnswer | None = None
    is_finished: bool = False
    is_exhausted: bool = False
    gate: Gate = field(default_factory=Gate)
    _stream: Steps | None = None
    _began_at: int = 0

    def attach(self, stream: Steps) -> None:
        """Takes its batches from `stream` from here on."""
        self._stream, self._began_at = stream, stream.num_steps_completed

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
        """Counts what was completed, and nothing else; the stream will be another one, or at another place.

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
        """What another rank, or another process later, needs to go on."""
        metrics = self.meters.summary() if with_metrics else None
        return RunState(
            self.num_completed, self.epoch_idx, self.num_steps, self._has_no_step_left, self.is_finished, metrics
        )

    def count(self, measured: Iterable[MetricSummary | None]) -> None:
        """Counts what others had measured in this call."""
        for metrics in measured:
            if metrics is not None:
                self.meters.go_on_from(metrics)

    def take_over(self, state: RunState) -> None:
        """Goes on from where another rank is; what this one has measured stays."""
        self._stream = None
        self.num_steps_before, self.epoch_idx = state.num_steps, state.epoch_idx
        self.is_exhausted, self.is_finished = state.is_exhausted, state.is_finished
        self.num_steps = state.num_requested
        self.answer = None
        self.meters.skip_to(state.num_steps)
