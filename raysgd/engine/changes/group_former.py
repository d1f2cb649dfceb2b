"""The choice of the next group: those who stay, and others who fill it up. Workers that die meanwhile are left out.

Why survivors wait for a new worker, and when they do not: ADR 11.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine import ranks
from raysgd.engine.group import WorkerGroup
from raysgd.engine.policies import RetryBudget, ScalingPolicy, choose_source, classify, words
from raysgd.engine.shared.group_events import EventKind
from raysgd.engine.shared.types import GroupReport, ReplicaProgress

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
    """The workers that are to form the next group."""

    staying: list[int]
    progress_reports: list[ReplicaProgress]
    joining: list[Any]

    @property
    def num_workers(self) -> int:
        return len(self.staying) + len(self.joining)

    def places(self, keeps_ranks: bool) -> list[int]:
        """The next rank of each of them, first those who stay.

        Args:
            keeps_ranks: Whether those who stay have the ranks that they had, as far as there are such.
        """
        return ranks.places(self.staying if keeps_ranks else range(len(self.staying)), self.num_workers)

    @property
    def source(self) -> int:
        """Index of the one that all others go on from."""
        source = choose_source(self.progress_reports)
        if source is None:
            raise CannotForm(
                f"the survivors cannot continue by themselves: {_obstacle(self.progress_reports)}", self.staying
            )
        return source


@dataclass(frozen=True)
class GroupFormer:
    """Brings a next_group together.

    Attributes:
        group: The group that it comes from.
        scaling: Says how many are wanted, and how many needed.
        budget: What pays for going on; None for what costs nothing.
        num_awaited: To wait, until they are so many, for workers that are still being made ready; 0: for those needed.
        nodes_to_avoid: Asks for the nodes that get no new worker.
        suspect: Told, with those who answer, that others of the group have gone silent.
        now: The time.
        on_wait: Called now and then while it waits.
        goes_on: Whether those who stay go on from the state that they have.
        wait_s: How long to wait.
    """

    group: WorkerGroup
    scaling: ScalingPolicy
    budget: RetryBudget | None
    num_awaited: int
    nodes_to_avoid: Callable[[], frozenset[str]]
    suspect: Callable[[Sequence[int]], None]
    now: Callable[[], float]
    on_wait: Callable[[], None]
    goes_on: bool = True
    wait_s: float = STANDBY_WAIT_S

    def form(self, staying: Sequence[int], without_state: Collection[int] = ()) -> NextGroup:
        """Lets those who stay leave the old group, and finds others to fill it up.

        Args:
            staying: Ranks of the old group.
            without_state: Those of them that were to take over a state and did not.

        Raises:
            CannotForm: That makes no group.
        """
        next_group = self._leave_old_group(staying, without_state)
        try:
            next_group = self._fill_up(next_group, without_state)
            if not self.goes_on:  # else those would be given up, too, who are still coming
                missing = self.scaling.min_workers - next_group.num_workers
                next_group.joining += self.group.standby.take_needed(missing, missing, self.on_wait) or []
            if next_group.num_workers < self.scaling.min_workers:
                reason = f"{next_group.num_workers} of at least {self.scaling.min_workers} workers are left"
                raise CannotForm(reason, next_group.staying)
        except BaseException:  # Ctrl-C too
            for standby_worker in next_group.joining:
                self.group.standby.kill(standby_worker)
            raise
        return next_group

    def _leave_old_group(self, survivors: Sequence[int], without_state: Collection[int]) -> NextGroup:
        """Lets the survivors leave the group; those that turn out to be dead are no survivors.

        Raises:
            CannotForm: None is left that another group could be formed of, or one of them failed.
        """
        staying = list(survivors)
        while staying:
            report = self.group.leave_group(staying, self.on_wait)
            if report.ok:
                pairs = zip(staying, report.values, strict=True)
                return NextGroup(
                    staying, [replace(p, is_whole=False) if rank in without_state else p for rank, p in pairs], []
                )
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a surviving worker could not report its progress: %s", words(classify(report)))
                raise CannotForm("a surviving worker could not report its progress", staying)
            dead = {o.rank for o in failed if o.failure is not None}  # others just come later than the word of a death
            staying = [rank for rank in staying if rank not in (dead or {o.rank for o in failed})]
        if self.goes_on or not self.group.standby.num_coming + self.group.standby.num_ready:
            raise CannotForm("", ())
        return NextGroup([], [], [])

    def _fill_up(self, next_group: NextGroup, without_state: Collection[int]) -> NextGroup:
        """Lets others join, and waits for them: until they are `num_awaited`, and for those that are needed.

        Returns who is still there then.

        Raises:
            CannotForm: None of those who stay is left, or nothing pays for going on.
        """
        group, deadline = self.group, self.now() + self.wait_s
        num_awaited = max(self.num_awaited, self.scaling.min_workers)
        while True:
            self._check_state(next_group)
            group.remove_workers([r for r in range(len(group)) if r not in next_group.staying and r not in group.gone])
            has_waited = self._fill_from_standby(next_group, num_awaited, max(0.0, deadline - self.now()))
            if not has_waited:
                return next_group
            answering = group.answering(next_group.staying)  # they were not polled while they waited
            if answering == next_group.staying:
                return next_group
            self.suspect(answering)
            next_group = replace(self._leave_old_group(answering, without_state), joining=next_group.joining)

    def _check_state(self, next_group: NextGroup) -> None:
        """Raises `CannotForm` where none of those who stay can go on, or nothing pays for it."""
        if not self.goes_on:
            return
        progress = next_group.progress_reports[next_group.source].progress
        obstacle = self.budget.rejoin_obstacle(progress) if self.budget is not None else None
        if obstacle is not None:
            raise CannotForm(obstacle, next_group.staying)

    def _fill_from_standby(self, next_group: NextGroup, num_awaited: int, wait_s: float) -> bool:
        """Lets those join who are ready; and new ones, if there is room and time to wait. Returns whether it waited."""
        standby, most = self.group.standby, self.scaling.max_workers
        admits = all(each.admits for each in next_group.progress_reports)
        missing = most - next_group.num_workers if admits else 0
        if missing <= 0:
            return False
        avoided = self.nodes_to_avoid()
        standby.kill_on(avoided)
        standby.start(missing - standby.num_coming - standby.num_ready, most, avoided)
        next_group.joining += standby.take(missing, 0.0)
        missing = num_awaited - next_group.num_workers
        if not wait_s or missing <= 0 or not standby.num_coming:
            return False
        next_group.joining += standby.take(missing, wait_s, self.on_wait)
        return True


def renew_without_lost(
    group: WorkerGroup,
    report: GroupReport,
    min_workers: int,
    on_wait: Callable[[], None] | None = None,
    *,
    captures: bool = False,
) -> GroupReport:
    """Makes new replicas in those who live, where others were lost while replicas were made or given a state.

    Where too few live, it waits for standby workers as long as any are coming.

    Args:
        group: Cannot be used any more where it cannot be done.
        report: What became of it.
        min_workers: How many have to be left.
        on_wait: As for `WorkerGroup.renew`.
        captures: As for `WorkerGroup.renew`.

    Returns:
        The set-up answers; or the last report, where too few are left or not only workers were lost.
    """
    while not report.ok and not group.is_ended and classify(report).kind != "user":
        logger.warning("%s; continuing with the others", words(classify(report)))
        survivors = group.settle(report)
        lost = [rank for rank in range(len(group)) if rank not in survivors]
        if not lost:
            break
        group.remove_workers(lost)
        group.standby.replace(len(lost), len(group))
        joining = group.standby.take_needed(min_workers - len(survivors), len(lost), on_wait)
        if joining is None:
            break
        report = group.renew(survivors, joining, on_wait, captures=captures)
    return report


def _obstacle(progress_reports: Sequence[ReplicaProgress]) -> str:
    obstacles = [replica_progress.obstacle for replica_progress in progress_reports if replica_progress.obstacle]
    return obstacles[0] if obstacles else "each was in the middle of a step that had begun to change its state"
