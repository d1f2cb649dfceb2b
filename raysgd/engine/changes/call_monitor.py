"""Watches a call while it runs: heartbeats, snapshots taken inside the call, and when to stop for a change.

The driver calls `on_wait` some ten times a second while it waits for the call. All questions go to the second thread of
each worker; between two rounds nothing is asked, so a call that takes less than a round costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd._text.log_lines import named
from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.changes.step_hold import ROOM, StepHold
from raysgd.engine.decisions.liveness import LivenessCheck
from raysgd.engine.group.worker_group import WorkerGroup
from raysgd.engine.processes import replica_calls
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import Heartbeat, Outcome

logger = logging.getLogger(__name__)

_FASTEST_ROUND_S = 0.25  # where snapshots inside the call may come that fast, or workers are about to step in
_MOST_STACKS = 8
_REPORT_S = 1.0  # for an answer; the report says which ranks gave none


class CallMonitor:
    """Watches one call.

    Args:
        lifecycle: Holds the group.
        take_inside: Takes over the parts of a snapshot that the ranks took inside the call.
        hold: Stops the call at a step boundary; None for a call that cannot be stopped and continued.
        at_round: Called behind each round of questions.
        first_round_s: When the first round is, if there are few workers; None: when any other would be.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        take_inside: Callable[[list[Capture]], bool],
        hold: StepHold | None = None,
        at_round: Callable[[], None] = lambda: None,
        first_round_s: float | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._take_inside = take_inside
        self._hold = hold
        self._at_round = at_round
        self._infos: object = None
        self._expect_no_answers()
        self._next_round = lifecycle.now() + self._first_round_s(first_round_s)
        self._snapshot = 0
        self._steps_per_s = 0.0
        self._first: dict[int, Heartbeat] = {}
        self.heartbeats: dict[int, Heartbeat] = {}

    def _first_round_s(self, wanted_s: float | None) -> float:
        """Returns the wanted time where few are asked; many are busy when they begin or go on after a loss."""
        usual_s = self._liveness.round_s(self._num_asked)
        if wanted_s is None or self._liveness.round_s(self._num_asked, wanted_s) > wanted_s:
            return usual_s
        return min(wanted_s, usual_s)

    def poll(self) -> None:
        """Does what is due."""
        self._poll()
        now = self._lifecycle.now()
        if now >= self._next_round:
            self._next_round = now + self._next_round_s()
            self._ask()
            if self._hold is not None:
                self._hold.poll(self._steps_per_s)
            self._at_round()
        self._liveness.rest()

    @property
    def reason(self) -> str:
        """The reason why the ranks were asked to stop."""
        return self._hold.reason if self._hold is not None else ROOM

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the training call since the first signs of life; None where samples are not counted."""
        group = self._lifecycle.group
        spans = [(first, self.heartbeats[rank]) for rank, first in self._first.items()]
        if group is None or len(spans) < len(group) or not all(last.at > first.at for first, last in spans):
            return None
        return sum((last.num_samples - first.num_samples) / (last.at - first.at) for first, last in spans) or None

    def _ask(self) -> None:
        group = self._lifecycle.group
        if group is None:
            return
        self._liveness.ask(
            sorted(set(group.remote_ranks) - group.gone),
            lambda rank: group.submit_beside(rank, replica_calls.heartbeat),
        )
        in_driver = None if group.local_replica is None else replica_calls.heartbeat(group.local_replica)
        if in_driver is not None:
            self._note(0, in_driver)
        group.standby.look_after()

    def _poll_rank(self, rank: int, call: Any) -> Outcome:
        assert self._lifecycle.group is not None
        return self._lifecycle.group.poll(rank, call)

    def _expect_no_answers(self) -> None:
        self._liveness: LivenessCheck[int] = LivenessCheck(
            self._lifecycle.spec.heartbeat_s, self._poll_rank, self._lifecycle.now
        )

    def _drop_debts(self) -> None:
        """Forget debts of ranks that were given to other workers: what a former one owes, its successor does not."""
        infos = self._lifecycle.group.infos if self._lifecycle.group is not None else None
        if infos is not self._infos:
            self._infos = infos
            self._expect_no_answers()

    def _poll(self) -> None:
        self._drop_debts()
        polled = self._liveness.poll()
        for rank, found in polled.answers:
            if found.ok and found.value is not None:
                self._note(rank, found.value)
        if polled.silent:
            self._kill_hung(dict(polled.silent))
        if polled.answers:
            self._look_for_snapshot()

    def _note(self, rank: int, heartbeat: Heartbeat) -> None:
        self._lifecycle.spec.relay.tell({str(rank): heartbeat.notes})
        before = self.heartbeats.get(rank)
        if before is not None and heartbeat.step > before.step >= 0 and heartbeat.at > before.at:
            self._steps_per_s = (heartbeat.step - before.step) / (heartbeat.at - before.at)
        self.heartbeats[rank] = heartbeat
        if heartbeat.is_training:
            self._first.setdefault(rank, heartbeat)

    def _kill_hung(self, silent: Mapping[int, float]) -> None:
        """Processes that are stopped or frozen are lost; the failure of their call then takes the usual way."""
        group = self._lifecycle.group
        assert group is not None
        silent_s = max(silent.values())
        cause = f"{named(silent)} did not respond for {silent_s:.0f} s"
        logger.warning("%s\n%s", cause, self.report())
        if group.is_ended:  # by Ctrl-C, which ends the wait for the report when it is pressed again and again
            return
        self._lifecycle.history.record("hung", len(group), len(group), silent_s, cause)
        for rank in silent:
            group.kill_rank(rank)

    def report(self) -> str:
        """Each rank's last step and present stack, as far as it answers. Ranks with the same are shown together."""
        group = self._lifecycle.group
        if group is None:
            return "there is no group"
        asked = ask_heartbeats(group, _REPORT_S)
        heartbeats = {
            **self.heartbeats,
            **{rank: heartbeat for rank, heartbeat in asked.items() if heartbeat.step >= 0},
        }
        stacks: Mapping[int, str] = group.ask_beside("stack", timeout_s=_REPORT_S)
        alike: dict[str, list[int]] = {}
        for rank in range(len(group)):
            alike.setdefault(f"{_place(heartbeats.get(rank))}\n{stacks.get(rank, '  no answer')}", []).append(rank)
        return _reported(alike)

    def _look_for_snapshot(self) -> None:
        group = self._lifecycle.group
        if group is None or len(self.heartbeats) < len(group):
            return
        newest = min(heartbeat.snapshot for heartbeat in self.heartbeats.values())
        if newest > self._snapshot and self._collect_snapshot(newest):
            self._snapshot = newest

    def _next_round_s(self) -> float:
        group = self._lifecycle.group
        is_awaited = self._hold is not None and group is not None and group.standby.num_coming > 0
        is_fast = is_awaited or self._lifecycle.spec.snapshots_inside
        return self._liveness.round_s(self._num_asked, *((_FASTEST_ROUND_S,) if is_fast else ()))

    @property
    def _num_asked(self) -> int:
        return len(self._lifecycle.group) if self._lifecycle.group is not None else 0

    def _collect_snapshot(self, number: int) -> bool:
        group = self._lifecycle.group
        if group is None:
            return False
        parts = group.ask_beside("beside", replica_calls.part_of_snapshot, number)
        if None in parts.values() and self._lifecycle.once.is_first("snapshots too fast"):
            logger.warning(
                "snapshots inside the call come too fast to collect each, so a rebuild may go back further. Use "
                "a larger `snapshot_every_n_steps`: so many steps should take a second or more"
            )
        captures = [parts[rank] for rank in range(len(group)) if parts.get(rank) is not None]
        return len(captures) == len(group) and self._take_inside(captures)


def _place(heartbeat: Heartbeat | None) -> str:
    return (
        f"epoch {heartbeat.epoch}, step {heartbeat.step}, {heartbeat.phase}"
        if heartbeat is not None
        else "no answer yet"
    )


def _reported(alike: Mapping[str, Sequence[int]]) -> str:
    """A few of the texts, by rank: those of the fewest ranks, who are what the others wait for."""
    few = sorted(alike.items(), key=lambda item: len(item[1]))[:_MOST_STACKS]
    lines = [f"{named(ranks)}: {text}" for text, ranks in sorted(few, key=lambda item: item[1][0])]
    num_others = sum(map(len, alike.values())) - sum(len(ranks) for _, ranks in few)
    return "\n".join([*lines, f"{num_others} other ranks are elsewhere"] if num_others else lines)


def ask_heartbeats(group: WorkerGroup, timeout_s: float) -> dict[int, Heartbeat]:
    """A sign of life of each rank that gives one in time."""
    answers = group.ask_beside("beside", replica_calls.sign_of_life, timeout_s=timeout_s)
    return {rank: heartbeat for rank, heartbeat in answers.items() if heartbeat is not None}
