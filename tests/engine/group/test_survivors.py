"""A group of many light workers, which answer as a test scripted: after a loss the driver hears who lives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from raysgd.engine.gathering import roll_call
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.members import Members
from raysgd.engine.group.survivors import Survivors
from raysgd.engine.shared.types import GroupReport, Outcome, WorkerInfo
from tests.helpers.fakes import CountingReplica, FakeClock, NullConnection, failure

NEVER = float("inf")


@dataclass(frozen=True, eq=False)
class Call:
    """A call that comes to an end at a time."""

    rank: int
    ends_at: float
    has_died: bool = False


@dataclass
class ScriptedPoller:
    """Hears calls on a clock of its own.

    Attributes:
        clock: Time, which passes while it listens.
        stalls: When the driver itself stands still, and for how long.
    """

    clock: FakeClock = field(default_factory=FakeClock)
    stalls: dict[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock.monotonic()

    @property
    def waited_s(self) -> float:
        """How long it has listened, all in all."""
        return self.now() - self.began

    def now(self) -> float:
        return self.clock.monotonic()

    def ready(self, references: Collection[Call], timeout_s: float) -> Collection[Call]:
        stall_s = sum(self.stalls.pop(at) for at in list(self.stalls) if at <= self.waited_s)
        until = min(self.now() + timeout_s, max(call.ends_at for call in references))
        self.clock.sleep(stall_s + max(0.0, until - self.now()))
        return [call for call in references if call.ends_at <= until]

    def outcome(self, rank: int, reference: Call) -> Outcome:
        if reference.ends_at > self.now():
            return Outcome(rank, answered=False)
        return Outcome(rank, failure=failure("died", rank) if reference.has_died else None)


def answers(poller: ScriptedPoller, ends_at: dict[int, float], num_others: int = 0) -> set[int]:
    """Who is silent."""
    calls = {rank: Call(rank, poller.now() + at) for rank, at in ends_at.items()}
    found = roll_call(poller, calls, num_others, 30.0)
    assert sorted(found) == sorted(calls)
    return {rank for rank, outcome in found.items() if not outcome.answered}


def test_thousands_of_answers_that_take_long_to_come_in_are_all_waited_for() -> None:
    poller = ScriptedPoller()
    assert answers(poller, {rank: rank / 100 for rank in range(2500)}) == set()
    assert 24 <= poller.waited_s < 26


def test_who_is_silent_while_the_others_answer_is_not_waited_for_long() -> None:
    poller = ScriptedPoller()
    assert answers(poller, {**{rank: 0.1 for rank in range(100)}, 7: NEVER}) == {7}
    assert 6 <= poller.waited_s < 7


def test_who_stalls_for_some_seconds_is_not_silent() -> None:
    stalled = set(range(0, 2500, 3))
    assert answers(ScriptedPoller(), {rank: 5.0 if rank in stalled else 0.2 for rank in range(2500)}) == set()


def test_time_in_which_the_driver_stood_still_counts_for_nobody() -> None:
    poller = ScriptedPoller(stalls={0.5: 20.0})
    assert answers(poller, {**{rank: 0.1 for rank in range(10)}, 3: 25.0}) == set()


def test_most_of_a_group_is_not_ended_for_being_late() -> None:
    assert answers(ScriptedPoller(), {rank: 20.0 for rank in range(10)}, num_others=9) == set()
    assert answers(ScriptedPoller(), {rank: 20.0 for rank in range(10)}, num_others=10) == set(range(10))
    assert answers(ScriptedPoller(), {rank: NEVER for rank in range(10)}, num_others=9) == set(range(10))


@dataclass
class LightWorker:
    """Takes calls, and does nothing.

    Attributes:
        rank: Who it is.
        poller: Tells the time.
        interrupted_after_s: How long it takes to answer that it was interrupted.
        has_died: Whether it is dead, which Ray says at once.
    """

    rank: int
    poller: ScriptedPoller
    interrupted_after_s: float = 0.001
    has_died: bool = False
    asked: list[str] = field(default_factory=list)
    is_local: bool = False

    def submit(self, method: str, *args: Any) -> Call:
        self.asked.append(method)
        after_s = 0.0 if self.has_died else self.interrupted_after_s
        return Call(self.rank, self.poller.now() + after_s, self.has_died)


class Scene:
    """A group in which rank 1 died while all were in a step; nobody has answered yet.

    Args:
        size: How many workers.
        interrupted_after_s: How long each takes to answer.
    """

    def __init__(self, size: int, interrupted_after_s: Callable[[int], float]) -> None:
        self.poller = ScriptedPoller()
        self.told_stuck_at: list[float] = []
        members = Members()
        self.survivors = Survivors(GroupSpec(NullConnection(), CountingReplica), members, self.poller)
        self.workers = [LightWorker(rank, self.poller, interrupted_after_s(rank), rank == 1) for rank in range(size)]
        infos = [WorkerInfo("node", "10.0.0.1", rank) for rank in range(size)]
        members.give_ranks(self.workers, infos)  # type: ignore[arg-type]

    def settle(self, num_disconnected: int = 0, stuck: Collection[int] = ()) -> list[int]:
        """Who is counted on; the first ranks had seen that the connection broke."""
        told = {1: failure("died", 1)} | {rank: failure("disconnected", rank) for rank in range(2, num_disconnected)}
        found = [Outcome(worker.rank, failure=told.get(worker.rank)) for worker in self.workers]
        calls = {rank: Call(rank, NEVER if rank in stuck else self.poller.now()) for rank in range(len(self.workers))}
        unanswered = {rank: call for rank, call in calls.items() if rank not in told}
        report = GroupReport(tuple(replace(one, answered=one.rank in told) for one in found))
        return self.survivors.settle(report, unanswered, lambda: self.told_stuck_at.append(self.poller.waited_s))


@pytest.mark.parametrize("size", [2, 1500, 2500])
@pytest.mark.parametrize("num_stalled", [0, 1, 1000, 2500])
def test_no_live_worker_is_counted_as_lost_after_a_death_also_where_they_stall(size: int, num_stalled: int) -> None:
    scene = Scene(size, lambda rank: 5.0 if rank < num_stalled else rank / 200)
    assert scene.settle() == [rank for rank in range(size) if rank != 1]
    assert scene.survivors.silent == set()
    assert {tuple(worker.asked) for worker in scene.workers if worker.rank != 1} == {("interrupt",)}


def test_silent_ranks_are_told_from_dead_ones() -> None:
    scene = Scene(50, lambda rank: NEVER if rank == 40 else 0.01)
    assert scene.settle(num_disconnected=10) == [rank for rank in range(50) if rank not in (1, 40)]
    assert scene.survivors.silent == {40}


def test_a_survivor_may_finish_its_step_for_as_long_as_it_is_allowed_to() -> None:
    scene = Scene(4, lambda rank: 0.01)
    assert scene.settle(stuck=[3]) == [0, 2]
    assert 120 <= scene.poller.waited_s < 122
    assert len(scene.told_stuck_at) == 1
    assert 5 <= scene.told_stuck_at[0] < 6
    assert scene.survivors.silent == set(), "it lives, and answers"
    assert scene.survivors.stuck == {3}, "it may have been stopped since, so it is ended like one that was"


def test_what_a_rank_is_doing_is_told_before_it_is_given_up_also_where_the_driver_stood_still() -> None:
    scene = Scene(4, lambda rank: 0.01)
    scene.poller.stalls = {1.0: 300.0}
    assert scene.settle(stuck=[3]) == [0, 2]
    assert len(scene.told_stuck_at) == 1
