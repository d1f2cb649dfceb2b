"""Who is to form the next group: those who stay, and others who fill it up. Workers that die meanwhile are left out.

Why survivors wait for a new worker, and when they do not: ADR 11.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine.failures import classify, words
from raysgd.engine.history import EventKind
from raysgd.engine.policies import RetryBudget, ScalingPolicy, choose_source
from raysgd.engine.types import ReplicaProgress
from raysgd.engine.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

STANDBY_WAIT_S = 30.0  # survivors do not wait longer for somebody new; who is late steps in later


class CannotForm(Exception):
    """The ranks cannot form a new group: only a rebuild is left.

    Args:
        reason: Why; empty where that is plain, because no one is left.
        staying: Who is left.
        is_loss: Whether a worker was lost that is not counted among those who are gone.
        kind: What the rebuild is called in the history.
        cause: What led to it.
    """

    def __init__(
        self,
        reason: str,
        staying: Collection[int],
        is_loss: bool = False,
        kind: EventKind = "rebuilt",
        cause: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason, self.staying, self.is_loss, self.kind, self.cause = reason, staying, is_loss, kind, cause


@dataclass
class NextGroup:
    """Who is to form the next group."""

    staying: list[int]
    progress_reports: list[ReplicaProgress]
    joining: list[Any]

    @property
    def source(self) -> int:
        """Index of the one that all others go on from."""
        source = choose_source(self.progress_reports)
        if source is None:
            raise CannotForm(
                f"the survivors cannot go on by themselves: {_obstacle(self.progress_reports)}", self.staying
            )
        return source


@dataclass(frozen=True)
class GroupFormer:
    """Brings a next_group together.

    Attributes:
        group: The group that it comes from.
        scaling: Says how many are wanted, and how many needed.
        budget: What pays for going on; None for what costs nothing.
        can_wait: Whether to wait for workers that are still being made ready.
        nodes_to_avoid: Asks for the nodes that get no new worker.
        suspect: Told, with those who answer, that others of the group have gone silent.
        now: The time.
        on_wait: Called now and then while it waits.
        goes_on: Whether those who stay go on from the state that they have.
    """

    group: WorkerGroup
    scaling: ScalingPolicy
    budget: RetryBudget | None
    can_wait: bool
    nodes_to_avoid: Callable[[], frozenset[str]]
    suspect: Callable[[Sequence[int]], None]
    now: Callable[[], float]
    on_wait: Callable[[], None]
    goes_on: bool = True

    def form(self, staying: Sequence[int]) -> NextGroup:
        """Lets those who stay leave the old group, and finds others to fill it up.

        Raises:
            CannotForm: That makes no group.
        """
        next_group = self._leave_old_group(staying)
        try:
            next_group = self._fill_up(next_group)
            num_workers, min_workers = len(next_group.staying) + len(next_group.joining), self.scaling.min_workers
            if num_workers < min_workers:
                raise CannotForm(f"{num_workers} of at least {min_workers} workers are left", next_group.staying)
        except BaseException:  # Ctrl-C too
            for standby_worker in next_group.joining:
                self.group.standby.kill(standby_worker)
            raise
        return next_group

    def _leave_old_group(self, survivors: Sequence[int]) -> NextGroup:
        """Lets the survivors leave the group; those that turn out to be dead are no survivors.

        Raises:
            CannotForm: None is left, or one of them failed.
        """
        ranks = list(survivors)
        while ranks:
            report = self.group.leave_group(ranks, self.on_wait)
            if report.ok:
                return NextGroup(ranks, report.values, [])
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a surviving worker could not report its progress: %s", words(classify(report)))
                raise CannotForm("a surviving worker could not report its progress", ranks)
            dead = {o.rank for o in failed if o.failure is not None}  # others just come later than the word of a death
            ranks = [rank for rank in ranks if rank not in (dead or {o.rank for o in failed})]
        raise CannotForm("", ())

    def _fill_up(self, next_group: NextGroup) -> NextGroup:
        """Lets others join, and waits for them if `can_wait`; returns who is still there then.

        Raises:
            CannotForm: None of those who stay is left, or nothing pays for going on.
        """
        group, deadline = self.group, self.now() + STANDBY_WAIT_S
        while True:
            self._check_state(next_group)
            group.remove_workers([r for r in range(len(group)) if r not in next_group.staying and r not in group.gone])
            has_waited = self._fill_from_standby(next_group, max(0.0, deadline - self.now()) if self.can_wait else 0.0)
            if not has_waited:
                return next_group
            answering = group.answering(next_group.staying)  # they were not polled while they waited
            if answering == next_group.staying:
                return next_group
            self.suspect(answering)
            next_group = replace(self._leave_old_group(answering), joining=next_group.joining)

    def _check_state(self, next_group: NextGroup) -> None:
        """Raises `CannotForm` where none of those who stay can go on, or nothing pays for it."""
        if not self.goes_on:
            return
        progress = next_group.progress_reports[next_group.source].progress
        obstacle = self.budget.rejoin_obstacle(progress) if self.budget is not None else None
        if obstacle is not None:
            raise CannotForm(obstacle, next_group.staying)

    def _fill_from_standby(self, next_group: NextGroup, wait_s: float) -> bool:
        """Lets those join who are ready; and new ones, if there is room and time to wait. Returns whether it waited."""
        standby, most = self.group.standby, self.scaling.max_workers
        missing = most - len(next_group.staying) - len(next_group.joining)
        if missing <= 0:
            return False
        avoided = self.nodes_to_avoid()
        standby.kill_on(avoided)
        standby.start(missing - standby.num_coming - standby.num_ready, most, avoided)
        found = standby.take(missing, 0.0)
        next_group.joining += found
        if not wait_s or len(found) == missing or not standby.num_coming:
            return False
        next_group.joining += standby.take(missing - len(found), wait_s, self.on_wait)
        return True


def _obstacle(progress_reports: Sequence[ReplicaProgress]) -> str:
    obstacles = [replica_progress.obstacle for replica_progress in progress_reports if replica_progress.obstacle]
    return obstacles[0] if obstacles else "each was in the middle of a step that had begun to change its state"
