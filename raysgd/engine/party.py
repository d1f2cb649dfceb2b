"""Who is to form the next group: those who stay, and others who fill it up. Whoever dies meanwhile is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine.failures import classify, words
from raysgd.engine.policies import RetryBudget, ScalingPolicy, choose_source
from raysgd.engine.types import Standing
from raysgd.engine.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

RECRUIT_S = 30.0  # survivors do not wait longer for somebody new; who is late steps in later


class CannotForm(Exception):
    """The ranks cannot form a new group.

    Args:
        reason: Why; empty where that is plain, because nobody is left.
        staying: Who is left.
        is_loss: Whether somebody was lost that is not counted among those who are gone.
    """

    def __init__(self, reason: str, staying: Collection[int], is_loss: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.staying, self.is_loss = reason, staying, is_loss


@dataclass
class Party:
    """Who is to form the next group.

    Attributes:
        staying: Ranks that stay.
        standings: How far each of them is.
        joining: Recruits that join them.
    """

    staying: list[int]
    standings: list[Standing]
    joining: list[Any]

    @property
    def source(self) -> int:
        """Index of the one that all others go on from."""
        source = choose_source(self.standings)
        if source is None:
            raise CannotForm(f"the survivors cannot go on by themselves: {_obstacle(self.standings)}", self.staying)
        return source


@dataclass(frozen=True)
class Muster:
    """Brings a party together.

    Attributes:
        group: The group that it comes from.
        scaling: Says how many are wanted, and how many needed.
        budget: What pays for going on; None for what costs nothing.
        can_wait: Whether to wait for workers that are still being made ready.
        nodes_to_avoid: Asks for the nodes that nobody new should be placed on.
        suspect: Told, with those who answer, that others of the group have gone silent.
        now: The time.
        tick: Called now and then while it waits.
    """

    group: WorkerGroup
    scaling: ScalingPolicy
    budget: RetryBudget | None
    can_wait: bool
    nodes_to_avoid: Callable[[], frozenset[str]]
    suspect: Callable[[Sequence[int]], None]
    now: Callable[[], float]
    tick: Callable[[], None]

    def assemble(self, staying: Sequence[int]) -> Party:
        """Lets those who stay leave the old group, and finds others to fill it up.

        Raises:
            CannotForm: That makes no group.
        """
        party = self._stand(staying)
        try:
            party = self._fill_up(party)
            num_workers, min_workers = len(party.staying) + len(party.joining), self.scaling.min_workers
            if num_workers < min_workers:
                raise CannotForm(f"{num_workers} of at least {min_workers} workers are left", party.staying)
        except BaseException:  # Ctrl-C too
            for recruit in party.joining:
                self.group.recruits.dismiss(recruit)
            raise
        return party

    def _stand(self, survivors: Sequence[int]) -> Party:
        """Lets the survivors leave the group; those that turn out to be dead are no survivors.

        Raises:
            CannotForm: None is left, or one of them failed.
        """
        ranks = list(survivors)
        while ranks:
            report = self.group.stand(ranks, self.tick)
            if report.ok:
                return Party(ranks, report.values, [])
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a surviving worker could not report its progress: %s", words(classify(report)))
                raise CannotForm("a surviving worker could not report its progress", ranks)
            ranks = [rank for rank in ranks if rank not in {o.rank for o in failed}]
        raise CannotForm("", ())

    def _fill_up(self, party: Party) -> Party:
        """Lets others join, and waits for them where that is asked for; returns who is still there then.

        Raises:
            CannotForm: Nobody of those who stay is left, or nothing pays for going on.
        """
        group, deadline = self.group, self.now() + RECRUIT_S
        while True:
            progress = party.standings[party.source].progress
            obstacle = self.budget.rejoin_obstacle(progress) if self.budget is not None else None
            if obstacle is not None:
                raise CannotForm(obstacle, party.staying)
            group.let_go([r for r in range(len(group)) if r not in party.staying and r not in group.gone])
            has_waited = self._recruit(party, max(0.0, deadline - self.now()) if self.can_wait else 0.0)
            if not has_waited:
                return party
            answering = group.answering(party.staying)  # nobody looked after them while they waited
            if answering == party.staying:
                return party
            self.suspect(answering)
            party = replace(self._stand(answering), joining=party.joining)

    def _recruit(self, party: Party, wait_s: float) -> bool:
        """Lets those join who are ready; and new ones, if there is room and time to wait. Returns whether it waited."""
        recruits, most = self.group.recruits, self.scaling.max_workers
        missing = most - len(party.staying) - len(party.joining)
        if missing <= 0:
            return False
        avoided = self.nodes_to_avoid()
        recruits.avoid(avoided)
        self.group.call_up(missing - recruits.num_coming - recruits.num_ready, most, avoided)
        found = recruits.take(missing, 0.0)
        party.joining += found
        if not wait_s or len(found) == missing or not recruits.num_coming:
            return False
        party.joining += recruits.take(missing - len(found), wait_s, self.tick)
        return True


def _obstacle(standings: Sequence[Standing]) -> str:
    obstacles = [standing.obstacle for standing in standings if standing.obstacle]
    return obstacles[0] if obstacles else "each was in the middle of a step that had begun to change its state"
