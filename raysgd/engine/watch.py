"""Looks after a group while a call runs: signs of life, snapshots taken inside the call, and when to stop for a change.

The driver calls `tick` some ten times a second while it waits for the call. All questions go to the second thread of
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
from raysgd.engine.pulse import Pulse
from raysgd.engine.replica import Capture
from raysgd.engine.types import Beat, Outcome

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


class Watch:
    """Watches one call.

    Args:
        life: Owns the group.
        can_hold: Whether the call can be stopped at a step boundary and gone on with.
        take_inside: Takes over the parts of a snapshot that the ranks took inside the call.
        at_round: Called behind each round of questions.

    Attributes:
        beats: The last sign of life of each rank.
        reason: Why the ranks were asked to stop.
    """

    def __init__(
        self,
        life: Lifecycle,
        can_hold: bool,
        take_inside: Callable[[list[Capture]], bool],
        at_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._life = life
        self._can_hold = can_hold
        self._take_inside = take_inside
        self._at_round = at_round
        self._pulse: Pulse[int] = Pulse(life.spec.heartbeat_s, self._hear_rank, life.now)
        self._round_s = self._pulse.round_s(self._num_asked)
        now = life.now()
        self._next_round = now + min(_FIRST_ROUND_S, self._round_s)
        self._next_nodes = now + _NODES_S
        self._next_growth = now + (life.rules.resize_check_s or 0.0)
        self._snapshot = 0
        self._has_collected = False
        self._margin = _MIN_MARGIN
        self._is_holding = False
        self._rate = 0.0
        self._first: dict[int, Beat] = {}
        self.beats: dict[int, Beat] = {}
        self.reason = ""

    def tick(self) -> None:
        """Does what is due."""
        self._hear()
        now = self._life.now()
        if now >= self._next_round:
            self._round_s = self._next_round_s()
            self._next_round = now + self._round_s
            self._ask()
            if self._can_hold and not self._is_holding and self._should_hold(now):
                self._hold()
            self._at_round()
        self._pulse.rest()

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the training call since the first signs of life; None where samples are not counted."""
        group = self._life.group
        spans = [(first, self.beats[rank]) for rank, first in self._first.items()]
        if group is None or len(spans) < len(group) or not all(last.at > first.at for first, last in spans):
            return None
        return sum((last.num_samples - first.num_samples) / (last.at - first.at) for first, last in spans) or None

    # ---------------------------------------------------------------------------------------------- signs of life

    def _ask(self) -> None:
        group = self._life.group
        if group is None:
            return
        self._pulse.ask(sorted(set(group.remote_ranks) - group.gone), lambda rank: group.submit_beside(rank, _beat))
        in_driver = None if group.local_replica is None else _beat(group.local_replica)
        if in_driver is not None:
            self._note(0, in_driver)
        group.recruits.look_after()

    def _hear_rank(self, rank: int, call: Any) -> Outcome:
        assert self._life.group is not None
        return self._life.group.hear(rank, call)

    def _hear(self) -> None:
        heard = self._pulse.hear()
        for rank, found in heard.answers:
            if found.ok and found.value is not None:
                self._note(rank, found.value)
        if heard.silent:
            self._end_hung(dict(heard.silent))
        if heard.answers:
            self._look_for_snapshot()

    def _note(self, rank: int, beat: Beat) -> None:
        self._life.spec.relay.tell({str(rank): beat.notes})
        before = self.beats.get(rank)
        if before is not None and beat.step > before.step >= 0 and beat.at > before.at:
            self._rate = (beat.step - before.step) / (beat.at - before.at)
        self.beats[rank] = beat
        if beat.is_training:
            self._first.setdefault(rank, beat)

    def _end_hung(self, silent: Mapping[int, float]) -> None:
        """Processes that are stopped or frozen are lost; the failure of their call then takes the usual way.

        Args:
            silent: For how many seconds each of these ranks has said nothing.
        """
        group = self._life.group
        assert group is not None
        silent_s = max(silent.values())
        cause = f"{_named(silent)} did not respond for {silent_s:.0f} s"
        logger.warning("%s\n%s", cause, self.report())
        self._life.history.record("hung", len(group), len(group), silent_s, cause)
        for rank in silent:
            group.kill_rank(rank)

    def report(self) -> str:
        """Each rank's last step and present stack, as far as it answers. Ranks with the same are told of together."""
        group = self._life.group
        if group is None:
            return "there is no group"
        asked = ask_beats(group, timeout_s=0.5)
        beats = {**self.beats, **{rank: beat for rank, beat in asked.items() if beat.step >= 0}}
        stacks: Mapping[int, str] = group.ask_beside("stack", timeout_s=1.0)
        alike: dict[str, list[int]] = {}
        for rank in range(len(group)):
            alike.setdefault(f"{_place(beats.get(rank))}\n{stacks.get(rank, '  no answer')}", []).append(rank)
        return _reported(alike)

    # ---------------------------------------------------------------------------------------------- snapshots

    def _look_for_snapshot(self) -> None:
        group = self._life.group
        if group is None or len(self.beats) < len(group):
            return
        newest = min(beat.snapshot for beat in self.beats.values())
        if newest > self._snapshot and self._collect_snapshot(newest):
            self._snapshot, self._has_collected = newest, True

    def _next_round_s(self) -> float:
        """Half the time where a snapshot was there for the taking, twice the time where none was."""
        factor, self._has_collected = 0.5 if self._has_collected else 2.0, False
        is_awaited = self._life.group is not None and self._can_hold and self._life.group.recruits.num_coming > 0
        slowest_s = self._pulse.round_s(self._num_asked)
        wanted_s = _FASTEST_ROUND_S if is_awaited else min(slowest_s, max(_FASTEST_ROUND_S, self._round_s * factor))
        return self._pulse.round_s(self._num_asked, wanted_s)

    @property
    def _num_asked(self) -> int:
        return len(self._life.group) if self._life.group is not None else 0

    def _collect_snapshot(self, number: int) -> bool:
        group = self._life.group
        if group is None:
            return False
        parts = group.ask_beside("beside", _part_of_snapshot, number)
        captures = [parts.get(rank) for rank in range(len(group))]
        if any(capture is None for capture in captures):
            return False
        return self._take_inside([capture for capture in captures if capture is not None])

    # ---------------------------------------------------------------------------------------------- stopping

    def _should_hold(self, now: float) -> bool:
        life, group = self._life, self._life.group
        if group is None:
            return False
        if now >= self._next_nodes:
            self._next_nodes = now + _NODES_S
            if life.leaving_nodes_in_use():
                self.reason = "a node is going away"
                return True
        check_s = life.rules.resize_check_s
        if check_s is None or len(group) >= life.scaling.max_workers:
            return False
        if now >= self._next_growth:
            self._next_growth = now + check_s
            if not life.spec.regroups:
                self.reason = "there is room for more workers"
                return life.find_room() > 0
            life.call_up_growth()
        if life.spec.regroups and group.recruits.num_ready and not group.recruits.num_coming:
            group.recruits.drop_dead()
            self.reason = "there is room for more workers"
            return group.recruits.num_ready > 0
        return False

    def _hold(self) -> None:
        """Agrees with all ranks on a step to stop at; if one of them is past it, the next round looks further ahead."""
        group = self._life.group
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


def _place(beat: Beat | None) -> str:
    return f"epoch {beat.epoch}, step {beat.step}, {beat.phase}" if beat is not None else "not heard of yet"


def _named(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def _reported(alike: Mapping[str, Sequence[int]]) -> str:
    """A few of the texts, by rank: those of the fewest ranks, who are what the others wait for."""
    few = sorted(alike.items(), key=lambda item: len(item[1]))[:_MOST_STACKS]
    lines = [f"{_named(ranks)}: {text}" for text, ranks in sorted(few, key=lambda item: item[1][0])]
    num_others = sum(map(len, alike.values())) - sum(len(ranks) for _, ranks in few)
    return "\n".join([*lines, f"{num_others} other ranks are elsewhere"] if num_others else lines)


def ask_beats(group: WorkerGroup, timeout_s: float = 2.0) -> dict[int, Beat]:
    """A sign of life of each rank that gives one in time."""
    answers = group.ask_beside("beside", _beat, timeout_s=timeout_s)
    return {rank: beat for rank, beat in answers.items() if beat is not None}


def _beat(replica: Any) -> Beat | None:
    return replace(replica.beat(), notes=_logging.drain()) if hasattr(replica, "beat") else None


def _part_of_snapshot(replica: Any, number: int) -> Capture | None:
    capture: Capture | None = replica.part_of_snapshot(number)
    return capture


def _propose_hold(replica: Any, margin: int, at: int | None) -> int | None:
    step: int | None = replica.propose_hold(margin, at)
    return step


def _settle_hold(replica: Any, is_agreed: bool) -> None:
    replica.settle_hold(is_agreed)
