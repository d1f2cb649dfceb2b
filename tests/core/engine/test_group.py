"""A worker group without processes: its driver, its survivors, and the hooks around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.gathering import roll_call
from raysgd.core.engine.group import GroupHooks, WorkerGroup
from raysgd.core.engine.placement import Reservation
from raysgd.core.engine.platform import LocalWorker, Platform
from raysgd.core.engine.shared.interface import GroupSpec, NoConnection
from raysgd.core.engine.shared.types import (
    Answered,
    Failed,
    Failure,
    GroupReport,
    Outcome,
    Rendezvous,
    Unanswered,
    WorkerInfo,
    World,
)
from raysgd.core.engine.transfers import SharedValue
from raysgd.exceptions import TrainerShutdownError, WorkerFault
from tests.core.engine.trainer import RESTARTS, Trainer, befalls, dies
from tests.helpers.fakes import CountingReplica, FakeClock, NullConnection, failure


class Listens(NullConnection):
    """Can open no endpoint."""

    def open_endpoint(self, host: str) -> int:
        raise OSError("no port was free")


class Joining(NoConnection):
    """Notes the groups that it leaves; the other rank of the first one is gone by the time this one joins."""

    def __init__(self) -> None:
        self.size = self.num_left = 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        if world.is_distributed:
            self.size = world.size
            raise ConnectionError("the other rank is gone")

    def leave(self) -> None:
        self.num_left += bool(self.size)
        self.size = 0


class DyingWorker:
    """A remote worker that dies when this is asked of it."""

    is_local = False

    def __init__(self, method: str) -> None:
        self._method = method

    def submit(self, method: Callable[..., Any], *args: Any) -> Outcome:
        words = "ActorDiedError", "it died", "the worker process", ""
        died = Failure("died", WorkerFault(1, "node", None, *words))
        return Failed(1, died) if method.__name__ == self._method else Answered(1, 4711)


class AnsweringPlatform(Platform):
    """One whose remote calls are over at once."""

    def any_ready(self, references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
        return references

    def outcome(self, rank: int, reference: Any) -> Outcome:
        return reference

    def store(self, value: Any) -> SharedValue:
        return SharedValue(value, f"reference to {value}")


def test_a_driver_that_is_the_only_worker_need_not_listen() -> None:
    spec = GroupSpec(Listens(), CountingReplica, Resources(1, 1), use_local=True)
    group = WorkerGroup(spec, 1)
    assert group.start().ok
    group.stop(1.0)


class Calls:
    """Calls to the driver and others."""

    def __init__(self, *others: DyingWorker) -> None:
        self.connection = Joining()
        self._driver = LocalWorker(self.connection)
        spec = GroupSpec(self.connection, CountingReplica, regroups=True, use_local=True)
        self._group = WorkerGroup(spec, 1 + len(others), AnsweringPlatform())
        self.give_ranks(*others)

    def give_ranks(self, *others: Any) -> None:
        workers = [self._driver, *others]
        for worker in workers:
            worker.info = WorkerInfo("node", "10.0.0.1", 1)
        self._group.give_ranks(workers)

    def connect(self) -> GroupReport:
        return self._group._build(captures=False)


def test_a_driver_that_goes_on_as_the_only_worker_leaves_the_group_that_it_was_in() -> None:
    calls = Calls(DyingWorker("build"))
    assert not calls.connect().ok
    assert (calls.connection.size, calls.connection.num_left) == (2, 0)
    calls.give_ranks()
    assert calls.connect().ok
    assert (calls.connection.size, calls.connection.num_left) == (0, 1)


def test_where_a_rank_dies_before_others_join_it_they_have_not_answered() -> None:
    report = Calls(DyingWorker("open_endpoint")).connect()
    assert [found.answered for found in report.outcomes] == [False, True]
    assert report.outcomes[1].failure is not None


def test_a_value_that_was_stored_while_the_driver_was_alone_reaches_those_who_joined_it() -> None:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, use_local=True), 1, AnsweringPlatform())
    assert group.start().ok
    stored = group.store("a state")
    assert group.share(stored) == ["a state"]
    group.workers.append(DyingWorker(""))  # type: ignore[arg-type]
    assert group.share(stored) == ["a state", "reference to a state"]
    group.workers.pop()
    group.stop(1.0)


NEVER = float("inf")


@dataclass(frozen=True, eq=False)
class TimedCall:
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
        self.make_reservation = Reservation

    @property
    def waited_s(self) -> float:
        """How long it has listened, all in all."""
        return self.now() - self.began

    def now(self) -> float:
        return self.clock.monotonic()

    def is_head_gone(self) -> bool:
        return False

    def ready(self, references: Collection[TimedCall], timeout_s: float) -> Collection[TimedCall]:
        stall_s = sum(self.stalls.pop(at) for at in list(self.stalls) if at <= self.waited_s)
        until = min(self.now() + timeout_s, max(call.ends_at for call in references))
        self.clock.sleep(stall_s + max(0.0, until - self.now()))
        return [call for call in references if call.ends_at <= until]

    def outcome(self, rank: int, reference: TimedCall) -> Outcome:
        if reference.ends_at > self.now():
            return Unanswered(rank)
        return Failed(rank, failure("died", rank)) if reference.has_died else Answered(rank)


def answers(poller: ScriptedPoller, ends_at: dict[int, float], num_others: int = 0) -> set[int]:
    """Who is silent."""
    calls = {rank: TimedCall(rank, poller.now() + at) for rank, at in ends_at.items()}
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

    def submit(self, method: Callable[..., Any], *args: Any) -> TimedCall:
        self.asked.append(method.__name__)
        after_s = 0.0 if self.has_died else self.interrupted_after_s
        return TimedCall(self.rank, self.poller.now() + after_s, self.has_died)


class Scene:
    """A group in which rank 1 died while all were in a step; nobody has answered yet.

    Args:
        size: How many workers.
        interrupted_after_s: How long each takes to answer.
    """

    def __init__(self, size: int, interrupted_after_s: Callable[[int], float]) -> None:
        self.poller = ScriptedPoller()
        self.told_stuck_at: list[float] = []
        platform: Any = self.poller
        self.group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica), size, platform)
        self.workers = [LightWorker(rank, self.poller, interrupted_after_s(rank), rank == 1) for rank in range(size)]
        for rank, worker in enumerate(self.workers):
            worker.info = WorkerInfo("node", "10.0.0.1", rank)
        self.group.give_ranks(self.workers)  # type: ignore[arg-type]

    def settle(self, num_disconnected: int = 0, stuck: Collection[int] = ()) -> list[int]:
        """Who is counted on; the first ranks had seen that the connection broke."""
        told = {1: failure("died", 1)} | {rank: failure("disconnected", rank) for rank in range(2, num_disconnected)}
        ranks = range(len(self.workers))
        found = [Failed(rank, told[rank]) if rank in told else Unanswered(rank) for rank in ranks]
        calls = {
            rank: TimedCall(rank, NEVER if rank in stuck else self.poller.now()) for rank in range(len(self.workers))
        }
        self.group._unanswered = {rank: call for rank, call in calls.items() if rank not in told}
        return self.group.settle(GroupReport(tuple(found)), lambda: self.told_stuck_at.append(self.poller.waited_s))


@pytest.mark.parametrize("size", [2, 1500, 2500])
@pytest.mark.parametrize("num_stalled", [0, 1, 1000, 2500])
def test_no_live_worker_is_counted_as_lost_after_a_death_also_where_they_stall(size: int, num_stalled: int) -> None:
    scene = Scene(size, lambda rank: 5.0 if rank < num_stalled else rank / 200)
    assert scene.settle() == [rank for rank in range(size) if rank != 1]
    assert scene.group.silent == set()
    assert {tuple(worker.asked) for worker in scene.workers if worker.rank != 1} == {("interrupt",)}


def test_silent_ranks_are_told_from_dead_ones() -> None:
    scene = Scene(50, lambda rank: NEVER if rank == 40 else 0.01)
    assert scene.settle(num_disconnected=10) == [rank for rank in range(50) if rank not in (1, 40)]
    assert scene.group.silent == {40}


def test_a_survivor_may_finish_its_step_for_as_long_as_it_is_allowed_to() -> None:
    scene = Scene(4, lambda rank: 0.01)
    assert scene.settle(stuck=[3]) == [0, 2]
    assert 120 <= scene.poller.waited_s < 122
    assert len(scene.told_stuck_at) == 1
    assert 5 <= scene.told_stuck_at[0] < 6
    assert scene.group.silent == set(), "it lives, and answers"
    assert scene.group.stuck == {3}, "it may have been stopped since, so it is ended like one that was"


def test_what_a_rank_is_doing_is_told_before_it_is_given_up_also_where_the_driver_stood_still() -> None:
    scene = Scene(4, lambda rank: 0.01)
    scene.poller.stalls = {1.0: 300.0}
    assert scene.settle(stuck=[3]) == [0, 2]
    assert len(scene.told_stuck_at) == 1


FAULT = WorkerFault(0, "node", RuntimeError(), "ActorDiedError", "gone", "", "")
LOST = GroupReport((Failed(0, Failure("died", FAULT)),))


class NotingHooks(GroupHooks):
    """Notes what it is told of which group, by the process of its rank 0, and answers the first start as it is to."""

    def __init__(self, answer: GroupReport | Exception | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self.answer = answer

    def on_start(self, group: Any) -> GroupReport | None:
        self.told.append(("start", group.infos[0].pid))
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_stop(self, group: Any) -> None:
        self.told.append(("stop", group.infos[0].pid))

    def on_end(self, group: Any) -> None:
        if not any(process.is_killed for process in group.processes):  # else what it was to see off was gone already
            self.told.append(("end", group.infos[0].pid))


@pytest.mark.parametrize(("force", "goodbye"), [(False, [("stop", 100)]), (True, [])])
def test_hooks_come_after_the_start_and_before_the_end_and_a_forced_end_has_no_goodbye(
    force: bool, goodbye: list[Any]
) -> None:
    hooks = NotingHooks()
    Trainer(hooks=hooks).started().controller.stop(force)
    assert hooks.told == [("start", 100), ("end", 100), *goodbye]


@pytest.mark.parametrize(
    ("answer", "at_start", "told"),
    [
        (None, {}, [("start", 100), ("end", 100), ("start", 103)]),
        (None, dies(0, at="built", nth=[1]), [("start", 103), ("end", 103), ("start", 106)]),  # a failed start
        (LOST, {}, [("start", 100), ("end", 100), ("start", 103), ("end", 103), ("start", 106)]),  # another one
    ],
)
def test_every_group_is_seen_that_has_started(answer: Any, at_start: Any, told: list[Any]) -> None:
    hooks = NotingHooks(answer)
    Trainer(hooks=hooks, **RESTARTS).started(at_start).look(dies(1, at="look", nth=[1]))
    assert hooks.told == told


def test_an_exception_in_the_hook_is_raised_and_leaves_nothing() -> None:
    trainer = Trainer(hooks=NotingHooks(KeyError("a mistake")))
    with pytest.raises(KeyError):
        trainer.started()
    trainer.kernel.sleep(5.0)
    assert trainer.cluster.live == []


def test_a_group_that_is_killed_from_another_thread_is_told_of_too() -> None:
    hooks = NotingHooks()
    trainer = Trainer(hooks=hooks).started()
    with pytest.raises(TrainerShutdownError):
        trainer.walk(5, befalls(trainer.stop, 0))
    assert hooks.told[1] == ("end", 100)
