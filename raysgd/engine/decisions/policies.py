"""Pure: facts in, decision out. Nothing here sleeps, asks Ray, or touches a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raysgd.engine.decisions.failures import Diagnosis
from raysgd.engine.shared.types import ClusterView, ReplicaProgress, Resources

_TOLERANCE = 1e-6  # Ray counts resources in 1/10000; sums of floats may be off by less


@dataclass(frozen=True)
class Resize:
    """Start a group of `num_workers`."""

    num_workers: int


@dataclass(frozen=True)
class WaitForWorkers:
    """Too few workers fit now, says `reason`; look again in `delay_s`."""

    delay_s: float
    reason: str


@dataclass(frozen=True)
class GiveUpWaiting:
    """Too few workers fit, says `reason`, and the attempts are spent."""

    reason: str


@dataclass(frozen=True)
class KeepGroup:
    """Leave the group as it is."""


@dataclass(frozen=True)
class Rejoin:
    """Let the survivors form a new group and continue the call."""


@dataclass(frozen=True)
class Rebuild:
    """Start new workers, restore the last snapshot, and run the call again."""


@dataclass(frozen=True)
class RaiseError:
    """Nothing more can be tried. `lost` tells a loss of workers (True) from an error in user code (False)."""

    lost: bool


def num_fitting(amounts: Mapping[str, float], need: Resources) -> int:
    """Return how many workers fit into one node's `amounts`."""
    bundle = need.bundle()
    if not bundle:
        return 10**6
    return min(int((amounts.get(name, 0.0) + _TOLERANCE) / amount) for name, amount in bundle.items())


def capacity(view: ClusterView, need: Resources, *, free_only: bool = True) -> int:
    """Return how many workers the cluster holds, node by node: of what is free, or of all there is."""
    return sum(num_fitting(node.available if free_only else node.total, need) for node in view.nodes)


@dataclass(frozen=True)
class ScalingPolicy:
    """Decides how many workers to run.

    Attributes:
        max_workers: Never more than this.
        min_workers: Never fewer than this.
        num_attempts: How often to look for resources before giving up.
        first_delay_s: The first wait; each further one is twice as long.
        max_delay_s: No wait is longer.
        jitter: Each wait is lengthened by up to this share, so that many trainers do not look at once.
        draw: Source of the jitter, a number in [0, 1).
        num_local: Workers that run in the driver, reserved or not.
    """

    max_workers: int
    min_workers: int = 1
    num_attempts: int = 10
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0
    jitter: float = 0.1
    draw: Callable[[], float] = random.random
    num_local: int = 0

    def decide(self, view: ClusterView, need: Resources, attempt: int) -> Resize | WaitForWorkers | GiveUpWaiting:
        """Return what to do in `attempt` (from 0) to get a new group out of what is free."""
        fitting = max(self.num_local, min(self.max_workers, capacity(view, need)))
        if fitting >= self.min_workers:
            return Resize(fitting)
        reason = f"{fitting} of at least {self.min_workers} workers fit"
        if attempt + 1 >= self.num_attempts:
            return GiveUpWaiting(f"{reason} after {attempt + 1} attempts")
        return WaitForWorkers(self.delay_s(attempt), reason)

    def grow(self, view: ClusterView, need: Resources, num_workers: int, num_reserved: int) -> Resize | KeepGroup:
        """Return the larger size that fits now, if there is one; a group of `num_workers` gives `num_reserved` back."""
        target = min(self.max_workers, num_reserved + capacity(view, need))
        return Resize(target) if target > num_workers else KeepGroup()

    def delay_s(self, attempt: int) -> float:
        """Exponential back-off: 1, 2, 4, ... seconds, capped and jittered."""
        delay = min(self.max_delay_s, self.first_delay_s * 2.0**attempt)
        return delay * (1.0 + self.jitter * self.draw())


class RetryBudget:
    """The restarts that one call may use up, or several that make up one piece of work.

    A rejoin is free where there was progress: at least a step of the call, and more than one since the last rejoin.
    Anything else costs one, and so does a worker that hangs: its code may do so again and again. Survivors that went on
    and completed no step do not go on again: the way they went on may be what ended them.

    Attributes:
        num_spent: How many were used up.
        num_refused: How many losses came when none was left.

    Args:
        num_restarts: How many there are, possibly without end; with 0 the first loss ends the call, whatever it would
            cost.
    """

    def __init__(self, num_restarts: float) -> None:
        self.num_restarts = num_restarts
        self.renew()

    def renew(self) -> None:
        """Starts afresh, for the next piece of work."""
        self.num_spent = 0
        self.num_refused = 0
        self._rejoined_at: int | None = None  # steps done in all when survivors went on, since the workers were new
        self._has_hung = False

    @property
    def is_spent(self) -> bool:
        return self.num_spent >= self.num_restarts

    def rejoin_obstacle(self, progress: int) -> str | None:
        """Returns why survivors stop after `progress` steps in all; None when going on is free or can be paid for."""
        if self._rejoined_at is not None and progress <= self._rejoined_at:
            return "no step was completed since the survivors went on the last time"
        if not self.num_restarts or (self.is_spent and not self._is_free(progress)):
            return "no retry is left to pay for going on"
        return None

    def note_hang(self) -> None:
        """Notes that what comes next is because of a worker that hung."""
        self._has_hung = True

    def _is_free(self, progress: int) -> bool:
        """Return whether a rejoin costs nothing. What fails at every step completes one between two losses."""
        least = 1 if self._rejoined_at is None else self._rejoined_at + 2
        return progress >= least and not self._has_hung

    def pay_for_rejoin(self, progress: int) -> None:
        self.num_spent += not self._is_free(progress)
        self._rejoined_at, self._has_hung = progress, False

    def pay_for_rebuild(self) -> None:
        self.num_spent += 1
        self._rejoined_at, self._has_hung = None, False

    def refuse(self) -> None:
        """Notes a loss that nothing is left for."""
        self.num_refused += 1


@dataclass(frozen=True)
class FailurePolicy:
    """Decides what follows a failed call. The loss of workers is retried; an error in user code only if you say so.

    Attributes:
        rejoins: Whether survivors are kept where that is possible.
        retries_user_errors: Whether an error in user code costs a retry, and new workers, as a loss does.
    """

    rejoins: bool = False
    retries_user_errors: bool = False

    def decide(self, diagnosis: Diagnosis, budget: RetryBudget, can_rejoin: bool) -> Rejoin | Rebuild | RaiseError:
        """Return what to do next; `can_rejoin` says whether the call could continue with the survivors."""
        if diagnosis.kind == "user":
            return Rebuild() if self.retries_user_errors and not budget.is_spent else RaiseError(lost=False)
        if self.rejoins and can_rejoin and budget.num_restarts > 0:
            return Rejoin()
        return RaiseError(lost=True) if budget.is_spent else Rebuild()


def choose_source(reports: Sequence[ReplicaProgress]) -> int | None:
    """Index of the replica that all others go on from: the most advanced whole one; None when no one can go on.

    A step that one replica has completed carries every rank's gradient, those of lost ranks too.
    """
    if any(report.obstacle for report in reports):
        return None
    whole = [(-report.progress, index) for index, report in enumerate(reports) if report.is_whole]
    return min(whole)[1] if whole else None


def are_alike(reports: Sequence[ReplicaProgress]) -> bool:
    """Return whether all replicas are in one and the same state: that of a completed step, after equally many."""
    return all(each.is_whole for each in reports) and len({each.progress for each in reports}) == 1


def takers(reports: Sequence[ReplicaProgress], source: int) -> tuple[int, ...]:
    """Indices of the replicas that have to take over the state of `source`."""
    progress = reports[source].progress
    return tuple(index for index, report in enumerate(reports) if not report.is_whole or report.progress != progress)
