"""Calls to several ranks at once, remote ones and the driver's own, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from raysgd.engine.decisions.own_time import OwnTime
from raysgd.engine.gathering import Listener
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.members import Members, split
from raysgd.engine.platform import Platform
from raysgd.engine.shared.types import GroupReport, Outcome, Rendezvous, hosts_of
from raysgd.engine.worker import LocalCall, notes_of

_POLL_S = 0.1


class GroupCalls:
    """Gathers what the members of a group answer.

    Attributes:
        unanswered: Of the calls that were gathered last, those without an answer, by rank.
    """

    def __init__(self, spec: GroupSpec, members: Members, platform: Platform) -> None:
        self._spec, self._members, self._platform = spec, members, platform
        self.unanswered: dict[int, Any] = {}
        self._listening: dict[Any, tuple[str, int]] = {}
        self._has_listened = False

    def gather(self, calls: Mapping[int, Any], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Waits for all answers; after the first failure, only as long as it takes to see what belongs to it."""
        local, remote = split(dict(calls))
        if local:
            outcomes = self._gather_both(local, remote, on_wait)
        else:
            outcomes = Listener(remote, self._spec.keeps_survivors, self._platform).listen(on_wait)
        self.unanswered = {rank: remote[rank] for rank, found in outcomes.items() if not found.answered}
        self._spec.relay.tell({str(rank): notes_of(found) for rank, found in sorted(outcomes.items())})
        return GroupReport(tuple(_ranked(outcomes[rank]) for rank in sorted(calls)))

    def leave(self, ranks: Iterable[int], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Lets these ranks leave the group; each tells how far it is.

        They listen for the next group at once, to be asked once less: under the addresses that it has without others.
        """
        members, asked = self._members, list(ranks)
        hosts = dict(zip(asked, hosts_of([members.infos[rank] for rank in asked]), strict=True))
        calls = {rank: members.workers[rank].submit("leave_group", host) for rank, host in hosts.items()}
        report = self.gather(calls, on_wait)
        have_left = {found.rank: found.value for found in report.outcomes if found.ok}
        self._listening = {
            members.workers[rank]: (hosts[rank], port) for rank, (_, port) in have_left.items() if port is not None
        }
        return GroupReport(tuple(replace(o, value=o.value[0]) if o.ok else o for o in report.outcomes))

    def connect(
        self, join: Callable[[Rendezvous], Mapping[int, Any]], on_wait: Callable[[], None] | None = None
    ) -> GroupReport:
        """Lets every rank listen for the others, and then join them where they listen.

        Returns:
            The answers of `join`. Where a rank could not listen for the others, no other one has answered.
        """
        members = self._members
        hosts = hosts_of(members.infos)
        listening, self._listening = self._listening, {}
        addresses = {rank: listening[w] for rank, w in enumerate(members.workers) if w in listening}
        # Who was in a group leaves it by listening for the next one.
        if not members.remote_ranks and not self._spec.connection.listens_alone and not self._has_listened:
            addresses.setdefault(0, (hosts[0], 0))
        opening = {rank: host for rank, host in enumerate(hosts) if addresses.get(rank, ("", 0))[0] != host}
        self._has_listened |= bool(opening)
        calls = {rank: members.workers[rank].submit("open_endpoint", host, rank) for rank, host in opening.items()}
        opened = self.gather(calls, on_wait)
        if not opened.ok:  # none was asked to join
            failed = {found.rank: found for found in opened.outcomes if found.failure is not None}
            return GroupReport(tuple(failed.get(rank, Outcome(rank, answered=False)) for rank in range(len(hosts))))
        addresses |= {found.rank: (opening[found.rank], found.value) for found in opened.outcomes}
        in_order = tuple(addresses[rank] for rank in range(len(hosts)))
        return self.gather(join(Rendezvous(in_order, members.is_on_one_node)), on_wait)

    def _gather_both(
        self, local: Mapping[int, LocalCall], remote: Mapping[int, Any], on_wait: Callable[[], None] | None
    ) -> dict[int, Outcome]:
        """The local call runs here while a thread listens to the remote ones.

        The local rank may be waiting for a remote one that failed. Only the end of the others frees it.
        """
        listener = Listener(remote, self._spec.keeps_survivors, self._platform)
        answers: dict[int, Outcome] = {}
        is_local_done = self._platform.make_event()

        def listen() -> None:
            answers.update(listener.listen(on_wait))
            if self._must_kill(answers, is_local_done, listener.left_s(answers)):
                self._members.kill_remote()  # whatever they answered before, they can no longer be counted on
                answers.update({rank: replace(found, answered=False) for rank, found in answers.items()})

        join = self._platform.begin_thread(listen) if remote else None
        outcomes = {}
        try:
            for rank, call in local.items():
                value, failure = call.run()
                outcomes[rank] = Outcome(rank, value, failure)
        finally:
            is_local_done.set()
            if not all(rank in outcomes and outcomes[rank].ok for rank in local):
                listener.stop([found.failure.kind for found in outcomes.values() if found.failure])
        if join is not None:
            try:
                join()
            except BaseException:  # Ctrl-C: the group is ended next, and the thread must not look at it any more
                listener.stop()
                raise
        return {**outcomes, **answers}

    def _must_kill(self, answers: Mapping[int, Outcome], is_local_done: threading.Event, left_s: float) -> bool:
        """Return whether the remote processes have to end: after their failure the local call does not return."""
        if all(found.ok for found in answers.values()):
            return False
        if self._happens_within(left_s, is_local_done):
            return False
        kinds = {found.failure.kind for found in answers.values() if found.failure}
        if self._spec.keeps_survivors and "user" not in kinds:
            self._members.interrupt(range(len(self._members)))
            return not is_local_done.wait(self._spec.settle_timeout_s)
        return True

    def _happens_within(self, timeout_s: float, event: threading.Event) -> bool:
        own_time = OwnTime(self._platform.now)
        while own_time.look(_POLL_S) < timeout_s:
            if event.wait(_POLL_S):
                return True
        return event.wait(0.0)


def _ranked(found: Outcome) -> Outcome:
    """With the rank filled in where the worker did not know its own yet."""
    failure = found.failure
    if failure is None or failure.fault.rank >= 0:
        return found
    return replace(found, failure=replace(failure, fault=replace(failure.fault, rank=found.rank)))
