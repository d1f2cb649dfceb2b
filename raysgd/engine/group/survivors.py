"""The survivors of a failed call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raysgd.engine.decisions.own_time import OwnTime
from raysgd.engine.gathering import roll_call
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.members import Members
from raysgd.engine.platform import Platform
from raysgd.engine.shared.types import GroupReport, Outcome

_STUCK_S = 5.0
_POLL_S = 0.1


class Survivors:
    """Finds the members of a group that live and can be counted on.

    Attributes:
        silent: Ranks that neither answered nor are known to be dead.
        stuck: Ranks that answered and did not finish what they do. They may have been stopped since.
    """

    def __init__(self, spec: GroupSpec, members: Members, poller: Platform) -> None:
        self._spec, self._members, self._poller = spec, members, poller
        self.silent: set[int] = set()
        self.stuck: set[int] = set()

    def settle(
        self, report: GroupReport, unanswered: Mapping[int, Any], tell_stuck: Callable[[], None] = lambda: None
    ) -> list[int]:
        """After a failed call: frees the ranks that wait for lost ones, and returns those that can be counted on.

        Args:
            report: What is known of the call.
            unanswered: The calls of the ranks that have not answered.
            tell_stuck: Called once if a rank that lives takes long to finish what it does.
        """
        lost = {found.rank for found in report.outcomes if _has_died(found)}
        waiting = {rank: call for rank, call in unanswered.items() if rank not in lost}
        answers = self._free(waiting, len(self._members) - len(lost) - len(waiting))
        self.silent = {rank for rank, found in answers.items() if not found.answered}
        lost |= {rank for rank, found in answers.items() if not found.ok}
        freed = {rank: call for rank, call in waiting.items() if rank not in lost}
        lost |= self._let_finish(freed, tell_stuck)
        return [rank for rank in range(len(self._members)) if rank not in lost]

    def answering(self, ranks: Sequence[int]) -> list[int]:
        """Of these ranks, which do nothing, those that live and answer; who does neither is noted as silent."""
        remote = set(self._members.remote_ranks)
        calls = self._members.submit("describe", ranks=[rank for rank in ranks if rank in remote])
        answers = self._roll_call(calls, len(ranks) - len(calls))
        self.silent |= {rank for rank, found in answers.items() if not found.answered}
        return [rank for rank in ranks if rank not in answers or answers[rank].ok]

    def _let_finish(self, calls: Mapping[int, Any], tell_stuck: Callable[[], None]) -> set[int]:
        """Waits until these calls of survivors have finished; returns those that do not, or are dead."""
        timeout_s, own_time, has_told = self._spec.settle_timeout_s, OwnTime(self._poller.now), False
        while calls and (waited_s := own_time.look()) < timeout_s:
            if len(self._poller.ready(calls.values(), _POLL_S)) == len(calls):
                break
            if not has_told and waited_s > min(_STUCK_S, timeout_s / 2):
                tell_stuck()
                has_told = True
        outcomes = [self._poller.outcome(rank, call) for rank, call in calls.items()]
        self.stuck = {found.rank for found in outcomes if not found.answered}
        if self.stuck and not has_told:  # the driver stood still meanwhile
            tell_stuck()
        return self.stuck | {found.rank for found in outcomes if _has_died(found)}

    def _free(self, waiting: Collection[int], num_others: int) -> dict[int, Outcome]:
        """Ends what these ranks wait for; returns what the remote ones answer, while so many others are alive."""
        remote = self._members.interrupt(waiting)
        return self._roll_call(remote, num_others + len(waiting) - len(remote))

    def _roll_call(self, references: Mapping[int, Any], num_others: int) -> dict[int, Outcome]:
        return roll_call(self._poller, references, num_others, self._spec.heartbeat_s)


def _has_died(found: Outcome) -> bool:
    return found.failure is not None and found.failure.kind == "died"
