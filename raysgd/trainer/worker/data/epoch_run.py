"""Progress of one call to `train` in one worker, and what other workers need to continue the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd.core.arrays.data_kinds import DataPosition
from raysgd.core.numbers.meters import MetricSummary


def run_of(kept: Any, call_number: int) -> Any:
    """Return a rank's last record if it belongs to the training call with this number; otherwise None.

    Args:
        kept: The record that a rank keeps of its last training call, even after the call has ended; or None.
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
