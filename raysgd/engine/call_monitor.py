"""Looks after a group while a call runs: signs of life, snapshots taken inside the call, and when to stop for a change.

The driver calls `on_wait` some ten times a second while it waits for the call. All questions go to the second thread of
each worker; between two rounds nothing is asked, so a call that takes less than a round costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysgd import _logging
from raysgd.engine.failures import listed
from raysgd.engine.liveness import LivenessCheck
from raysgd.engine.replica import Capture
from raysgd.engine.types import Heartbeat, Outcome

if TYPE_CHECKING:
    from raysgd.engine.lifecycle import Lifecycle
    from raysgd.engine.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_FIRST_ROUND_S = 0.2
_FASTEST_ROUND_S = 0.25  # where snapshots inside the call come that fast, or workers are about to step in
_NODES_S = 2.0
_HOLD_AHEAD_S = 0.05
_MIN_MARGIN = 2
_MOST_STACKS = 8


class CallMonitor:
    """Watches one call.

    Args:
        lifecycle: Owns the group.
        can_hold: Whether the call can be stopped at a step boundary and gone on with.
        take_inside: Takes over the parts of a snapshot that the ranks took inside the call.
        at_round: Called behind each round of questions.

    Attributes:
        heartbeats: The last sign of life of each rank.
        reason: Why the ranks were asked to stop.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        can_hold: bool,
        take_inside: Callable[[list[Capture]], bool],
        at_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._lifecycle = lifecycle
        self._can_hold = can_hold
        self._take_inside = take_inside
        self._at_round = at_round
        self._liveness: LivenessCheck[int] = LivenessCheck(lifecycle.spec.heartbeat_s, self._poll_rank, lifecycle.now)
        self._round_s = self._liveness.round_s(self._num_asked)
        now = lifecycle.now()
        self._next_round = now + min(_FIRST_ROUND_S, self._round_s)
        self._next_nodes = now + _NODES_S
        self._next_growth = now + (lifecycle.rules.resize_check_s or 0.0)
        self._snapshot = 0
        self._has_collected = False
        self._margin = _MIN_MARGIN
        self._is_holding = False
        self._rate = 0.0
        self._first: dict[int, Heartbeat] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self.reason = ""

    def poll(self) -> None:
        """Does what is due."""
        self._poll()
        now = self._lifecycle.now()
        if now >= self._next_round:
            self._round_s = self._next_round_s()
            self._next_round = now + self._round_s
            self._ask()
            if self._can_hold and not self._is_holding and self._should_hold(now):
                self._hold()
            self._at_round()
        self._liveness.rest()

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the training call since the first signs of life; None where samples are not counted."""
        group = self._lifecycle.group
        spans = [(first, self.heartbeats[rank]) for rank, first in self._first.items()]
        if group is None or len(spans) < len(group) or not all(last.at > first.at for first, last in spans):
            return None
        return sum((last.num_samples - first.num_samples) / (last.at - first.at) for first, last in spans) or None

    # ---------------------------------------------------------------------------------------------- signs of life

    def _ask(self) -> None:
        group = self._lifecycle.group
        if group is None:
            return
        self._liveness.ask(
            sorted(set(group.remote_ranks) - group.gone), lambda rank: group.submit_beside(rank, _heartbeat)
        )
        in_driver = None if group.local_replica is None else _heartbeat(group.local_replica)
        if in_driver is not None:
            self._note(0, in_driver)
        group.standby.look_after()

    def _poll_rank(self, rank: int, call: Any) -> Outcome:
        assert self._lifecycle.group is not None
        return self._lifecycle.group.poll(rank, call)

    def _poll(self) -> None:
        polled = self._liveness.poll()
        for rank, found in polled.answers:
            if found.ok and found.value is not None:
                self._note(rank, found.value)
        if polled.silent:
            self._end_hung(dict(polled.silent))
        if polled.answers:
            self._look_for_snapshot()

    def _note(self, rank: int, heartbeat: Heartbeat) -> None:
        self._lifecycle.spec.relay.tell({str(rank): heartbeat.notes})
        before = self.heartbeats.get(rank)
        if before is not None and heartbeat.step > before.step >= 0 and heartbeat.at > before.at:
            self._rate = (heartbeat.step - before.step) / (heartbeat.at - before.at)
        self.heartbeats[rank] = heartbeat
        if heartbeat.is_training:
            self._first.setdefault(rank, heartbeat)

    def _end_hung(self, silent: Mapping[int, float]) -> None:
        """Processes that are stopped or frozen are lost; the failure of their call then takes the usual way.

        Args:
            silent: For how many seconds each of these ranks has said nothing.
        """
        group = self._lifecycle.group
        assert group is not None
        silent_s = max(silent.values())
        cause = f"{_named(silent)} did not respond for {silent_s:.0f} s"
        logger.warning("%s\n%s", cause, self.report())
        self._lifecycle.history.record("hung", len(group), len(group), silent_s, cause)
        for rank in silent:
            group.kill_rank(rank)

    def report(self) -> str:
        """Each rank's last step and present stack, as far as it answers. Ranks with the same are told of together."""
        group = self._lifecycle.group
        if group is None:
            return "there is no group"
        asked = ask_heartbeats(group, timeout_s=0.5)
        heartbeats = {
            **self.heartbeats,
            **{rank: heartbeat for rank, heartbeat in asked.items() if heartbeat.step >= 0},
        }
        stacks: Mapping[int, str] = group.ask_beside("stack", timeout_s=1.0)
        alike: dict[str, list[int]] = {}
        for rank in range(len(group)):
            alike.setdefault(f"{_place(heartbeats.get(rank))}\n{stacks.get(rank, '  no answer')}", []).append(rank)
        return _reported(alike)

    # ---------------------------------------------------------------------------------------------- snapshots

    def _look_for_snapshot(self) -> None:
        group = self._lifecycle.group
        if group is None or len(self.heartbeats) < len(group):
            return
        newest = min(heartbeat.snapshot for heartbeat in self.heartbeats.values())
        if newest > self._snapshot and self._collect_snapshot(newest):
            self._snapshot, self._has_collected = newest, True

    def _next_round_s(self) -> float:
        """Half the time where a snapshot was there for the taking, twice the time where none was."""
        factor, self._has_collected = 0.5 if self._has_collected else 2.0, False
        is_awaited = (
            self._lifecycle.group is not None and self._can_hold and self._lifecycle.group.standby.num_coming > 0
        )
        slowest_s = self._liveness.round_s(self._num_asked)
        wanted_s = _FASTEST_ROUND_S if is_awaited else min(slowest_s, max(_FASTEST_ROUND_S, self._round_s * factor))
        return self._liveness.round_s(self._num_asked, wanted_s)

    @property
    def _num_asked(self) -> int:
        return len(self._lifecycle.group) if self._lifecycle.group is not None else 0

    def _collect_snapshot(self, number: int) -> bool:
        group = self._lifecycle.group
        if group is None:
            return False
        parts = group.ask_beside("beside", _part_of_snapshot, number)
        captures = [parts.get(rank) for rank in range(len(group))]
        if any(capture is None for capture in captures):
            return False
        return self._take_inside([capture for capture in captures if capture is not None])

    # ---------------------------------------------------------------------------------------------- stopping

    def _should_hold(self, now: float) -> bool:
        lifecycle, group = self._lifecycle, self._lifecycle.group
        if group is None:
            return False
        if now >= self._next_nodes:
            self._next_nodes = now + _NODES_S
            if lifecycle.leaving_nodes_in_use():
                self.reason = "a node is going away"
                return True
        check_s = lifecycle.rules.resize_check_s
        if check_s is None or len(group) >= lifecycle.scaling.max_workers:
            return False
        if now >= self._next_growth:
            self._next_growth = now + check_s
            if not lifecycle.spec.regroups:
                self.reason = "there is room for more workers"
                return lifecycle.find_room() > 0
            lifecycle.start_growth()
        if lifecycle.spec.regroups and group.standby.num_ready and not group.standby.num_coming:
            group.standby.kill_unresponsive()
            self.reason = "there is room for more workers"
            return group.standby.num_ready > 0
        return False

    def _hold(self) -> None:
        """Agrees with all ranks on a step to stop at; if one of them is past it, the next round looks further ahead."""
        group = self._lifecycle.group
        assert group is not None
        margin = max(self._margin, math.ceil(self._rate * _HOLD_AHEAD_S))
        first = group.ask_beside("beside", _propose_hold, margin, None, ranks=[0])
        at = first.get(0)
        answers = {0: at}
        if at is not None:
            answers |= group.ask_beside("beside", _propose_hold, margin, at, ranks=range(1, len(group)))
        is_agreed = len(answers) == len(group) and all(answer == at for answer in answers.values()) and at is not None
        group.ask_beside("beside", _settle_hold, is_agreed)
        self._is_holding = is_agreed
        self._margin = _MIN_MARGIN if is_agreed else self._margin * 2


def _place(heartbeat: Heartbeat | None) -> str:
    return (
        f"epoch {heartbeat.epoch}, step {heartbeat.step}, {heartbeat.phase}"
        if heartbeat is not None
        else "no answer yet"
    )


def _named(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def _reported(alike: Mapping[str, Sequence[int]]) -> str:
    """A few of the texts, by rank: those of the fewest ranks, who are what the others wait for."""
    few = sorted(alike.items(), key=lambda item: len(item[1]))[:_MOST_STACKS]
    lines = [f"{_named(ranks)}: {text}" for text, ranks in sorted(few, key=lambda item: item[1][0])]
    num_others = sum(map(len, alike.values())) - sum(len(ranks) for _, ranks in few)
    return "\n".join([*lines, f"{num_others} other ranks are elsewhere"] if num_others else lines)


def ask_heartbeats(group: WorkerGroup, timeout_s: float = 2.0) -> dict[int, Heartbeat]:
    """A sign of life of each rank that gives one in time."""
    answers = group.ask_beside("beside", _heartbeat, timeout_s=timeout_s)
    return {rank: heartbeat for rank, heartbeat in answers.items() if heartbeat is not None}


def _heartbeat(replica: Any) -> Heartbeat | None:
    return replace(replica.heartbeat(), notes=_logging.drain()) if hasattr(replica, "heartbeat") else None


def _part_of_snapshot(replica: Any, number: int) -> Capture | None:
    capture: Capture | None = replica.part_of_snapshot(number)
    return capture


def _propose_hold(replica: Any, margin: int, at: int | None) -> int | None:
    step: int | None = replica.propose_hold(margin, at)
    return step


def _settle_hold(replica: Any, is_agreed: bool) -> None:
    replica.settle_hold(is_agreed)
