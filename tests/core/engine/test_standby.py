"""Workers that are made ready, those that wait, and loans of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared.interface import GroupSpec, NoConnection
from raysgd.core.engine.shared.types import (
    UNKNOWN,
    Answered,
    Failed,
    Failure,
    FailureKind,
    Outcome,
    Unanswered,
    WorkerInfo,
)
from raysgd.core.engine.standby import Loan, StandbyWorkers, StartupCheck
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import FakeClock, fault


@dataclass(eq=False)
class Process:
    """A worker whose process is made at some time, and may be stopped at another."""

    pid: int
    is_there: bool = True
    is_known: bool = False
    is_stopped: bool = False
    is_dead: bool = False
    info: WorkerInfo = UNKNOWN
    calls: list[str] = field(default_factory=list)

    def submit(self, method: Callable[..., Any]) -> Process:
        self.calls.append(method.__name__)
        return self

    def kill(self) -> None:
        self.calls.append("kill")
        self.is_dead = True


class StartupScene:
    """Starting workers, checked ten times a second, and the platform that they start on."""

    def __init__(self, *processes: Process, heartbeat_s: float = 130.0) -> None:
        self.clock = FakeClock()
        self.ended: list[int] = []
        self.startup = StartupCheck(cast(Platform, self), heartbeat_s)
        self.processes: list[Any] = [*processes]

    def now(self) -> float:
        return self.clock.monotonic()

    def kill_process(self, info: WorkerInfo) -> None:
        self.ended.append(info.pid)

    def outcome(self, rank: int, process: Any) -> Outcome:
        if process.is_dead:
            return failed("died")
        if process.is_stopped or not process.is_there:
            return Unanswered(rank)
        return Answered(rank, WorkerInfo("node", "10.0.0.1", process.pid))

    def find_process(self, worker: Any) -> WorkerInfo | None:
        return WorkerInfo("node", "10.0.0.1", worker.pid) if worker.is_known else None

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.sleep(0.1)
            self.startup.poll(self.processes)


def test_whoever_freezes_is_ended_after_the_time_for_a_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    frozen, other = Process(1), Process(2)
    scene = StartupScene(frozen, other)
    scene.pass_time(1)
    frozen.is_stopped = True
    scene.pass_time(129)
    assert scene.ended == []
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        scene.pass_time(4)
    assert scene.ended == [1]
    assert "kill" in frozen.calls, "so that Ray does not wait for it either"
    assert "kill" not in other.calls
    assert "process 1 on node 10.0.0.1" in caplog.text
    scene.pass_time(140)
    assert scene.ended == [1], "once"


def test_whoever_takes_long_but_answers_is_left_alone() -> None:
    slow = Process(1)
    scene = StartupScene(slow)
    scene.pass_time(300)
    assert scene.ended == []
    assert len(slow.calls) == pytest.approx(300, abs=30), "about once a second, and never twice at a time"


Happening = tuple[float, bool, Mapping[str, bool]]
"""For so many seconds, and whether the process is ended then, a process is like this."""

ANSWERS, SILENT = {"is_stopped": False}, {"is_stopped": True}
STORIES: dict[str, tuple[dict[str, Any], float, list[Happening]]] = {
    "it answers now and then": ({}, 130.0, [(125, False, SILENT), (2, False, ANSWERS)] * 4),
    "it is not there yet": (
        {"is_there": False},
        130.0,
        [(400, False, {}), (1, False, {"is_there": True}), (134, True, SILENT)],
    ),
    "it freezes before it ever answers": (
        {"is_there": False},
        130.0,
        [(200, False, {}), (129, False, {"is_known": True}), (135, True, {})],  # found, it may still answer
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_process_is_ended_only_if_it_does_not_answer_for_long(name: str) -> None:
    options, heartbeat_s, happenings = STORIES[name]
    process = Process(1, **options)
    scene = StartupScene(process, heartbeat_s=heartbeat_s)
    for seconds, is_ended, changes in happenings:
        for attribute, value in changes.items():
            setattr(process, attribute, value)
        scene.pass_time(seconds)
        assert scene.ended == [1] * is_ended


def test_whoever_is_ready_is_not_looked_after_any_more() -> None:
    ready = Process(1)
    scene = StartupScene(ready)
    scene.pass_time(1)
    scene.processes.clear()
    ready.is_stopped = True
    scene.pass_time(140)
    assert scene.ended == []


class Spare:
    """A machine with one spare on it, ready at once; what it answers later comes late."""

    slot, info = None, UNKNOWN

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.clock = FakeClock()
        self.now = self.clock.monotonic
        self.ended: list[Any] = []

    def take_usable(self, count: int, avoid: frozenset[str]) -> list[Any]:
        return [None] * count

    def new_worker(self, slot: Any, connection: Any, num_threads: int | None) -> Any:
        return copy(self)

    def submit(self, method: Callable[..., Any], *arguments: Any) -> tuple[str, float]:
        return method.__name__, self.now() + (self.late_s if method is WorkerProcess.describe else 0.0)

    def ready(self, calls: list[tuple[str, float]], timeout_s: float) -> list[tuple[str, float]]:
        self.clock.sleep(timeout_s)
        return [call for call in calls if call[1] <= self.now()]

    def outcome(self, rank: int, call: tuple[str, float]) -> Outcome:
        if self.now() < call[1]:
            return Unanswered(rank)
        info = WorkerInfo("node", "10.0.0.1", 7)
        return Answered(rank, info)

    def kill(self) -> None:
        self.ended.append("kill")

    def kill_process(self, info: WorkerInfo) -> None:
        self.ended.append(info.pid)

    def find_process(self, worker: Any) -> None: ...

    def give_back(self, slot: Any) -> None: ...


@pytest.mark.parametrize(("late_s", "is_there"), [(5.0, True), (7.0, False)])
def test_a_spare_may_answer_as_late_as_another_worker_that_does_nothing(late_s: float, is_there: bool) -> None:
    machine: Any = Spare(late_s)
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None), heartbeat_s=30.0)
    spares = StandbyWorkers(spec, machine, machine)
    assert spares.start_more(1, world_size=2) == 1
    spares.kill_unresponsive()
    assert (spares.num_ready == 1, machine.ended == []) == (is_there, is_there)


class Loading(Spare):
    """A machine on which a worker loads its libraries, in which time it answers nothing."""

    def outcome(self, rank: int, call: tuple[str, float]) -> Outcome:
        return Unanswered(rank)

    def find_process(self, worker: Any) -> Any:
        return WorkerInfo("node", "10.0.0.1", 7)


def test_a_worker_that_loads_libraries_has_two_minutes_where_the_heartbeat_is_short() -> None:
    machine: Any = Loading(0.0)
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None), heartbeat_s=0.5)
    standby = StandbyWorkers(spec, machine, machine)
    standby.start_more(1, world_size=2)
    for num_ended, seconds in ((0, 239), (2, 10)):  # from the time on at which its process was found
        for _ in range(seconds):
            machine.clock.sleep(1.0)
            standby.look_after()
        assert len(machine.ended) == num_ended


class DyingStarts(Spare):
    """A machine on which so many of the workers that are started one after the other die over it."""

    def __init__(self, num_deaths: int, kind: FailureKind = "died") -> None:
        super().__init__(0.0)
        self.num_deaths, self.kind, self.num_started, self.num_free = num_deaths, kind, 0, 1

    any_ready = Spare.ready

    def take_usable(self, count: int, avoid: frozenset[str]) -> list[Any]:
        taken = min(max(0, count), self.num_free)
        self.num_free -= taken
        return [None] * taken

    def give_back(self, slot: Any) -> None:
        self.num_free += 1

    def new_worker(self, slot: Any, connection: Any, num_threads: int | None) -> Any:
        self.num_started += 1
        return copy(self)

    def outcome(self, rank: int, call: tuple[str, float]) -> Outcome:
        if call[0] != "prepare_standby" or self.num_started > self.num_deaths:
            return super().outcome(rank, call)
        return Failed(rank, Failure(self.kind, fault()))


@pytest.mark.parametrize(
    ("kind", "num_deaths", "num_replacements", "num_ready", "num_started"),
    [
        ("died", 0, 2, 1, 1),
        ("died", 2, 2, 1, 3),
        ("died", 3, 2, None, 3),
        ("died", 1, 0, None, 1),
        ("user", 1, 2, None, 1),
    ],
)
def test_a_worker_that_dies_while_it_starts_is_replaced_a_few_times_but_not_after_an_exception(
    kind: FailureKind, num_deaths: int, num_replacements: int, num_ready: int | None, num_started: int
) -> None:
    machine: Any = DyingStarts(num_deaths, kind)
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None))
    standby = StandbyWorkers(spec, machine, machine)
    standby.replacements.num_left = num_replacements
    standby.start_more(1, world_size=1)
    taken = standby.take_needed(1, 1)
    assert (taken and len(taken), machine.num_started) == (num_ready, num_started)


def test_those_that_are_ready_are_ended_where_they_are_too_few() -> None:
    machine: Any = Spare(0.0)
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None))
    standby = StandbyWorkers(spec, machine, machine)
    standby.start_more(2, world_size=3)
    assert standby.take_needed(3, 3) is None
    assert (machine.ended, standby.num_ready) == (["kill", "kill"], 0)


class Watched(Spare):
    """A machine on which another thread asks for the status while a thread asks what became of a start."""

    def outcome(self, rank: int, call: tuple[str, float]) -> Outcome:
        asking = threading.Thread(target=lambda: self.counts.append(self.standby.num_ready))
        if threading.current_thread() is threading.main_thread():
            asking.start()
            asking.join(10)
        return super().outcome(rank, call)

    def __init__(self) -> None:
        super().__init__(0.0)
        self.counts: list[int] = []
        self.standby: Any = None


def test_a_worker_counts_once_when_two_threads_look_at_the_same_time() -> None:
    machine: Any = Watched()
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None))
    machine.standby = standby = StandbyWorkers(spec, machine, machine)
    standby.start_more(2, world_size=2)
    assert (standby.num_ready, max(machine.counts)) == (2, 1)
    assert len(standby.take_ready(3)) == 2


class LosesSpare(Spare):
    """A machine whose spare dies while a thread waits for its answer, and another one asks for the status."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.standby: Any = None
        self.is_dead = False
        self.num_given_back = 0
        self.num_asked = 0

    def ready(self, calls: list[tuple[str, float]], timeout_s: float) -> list[tuple[str, float]]:
        self.is_dead = True
        for _ in range(3):
            self.clock.sleep(1.0)
            self.standby.look_after()
        return super().ready(calls, timeout_s)

    def outcome(self, rank: int, call: tuple[str, float]) -> Outcome:
        has_died = self.is_dead and call[0] == "describe"
        return Failed(rank, Failure("died", fault())) if has_died else super().outcome(rank, call)

    def take_usable(self, count: int, avoid: frozenset[str]) -> list[Any]:
        self.num_asked += 1
        return super().take_usable(count, avoid)

    def give_back(self, slot: Any) -> None:
        self.num_given_back += 1

    def node_of(self, slot: Any) -> str:
        self.standby.look_after()
        return "node"


@pytest.fixture
def losing() -> Any:
    machine: Any = LosesSpare()
    spec: Any = GroupSpec(connection=cast(Any, None), make_replica=cast(Any, None))
    machine.standby = StandbyWorkers(spec, machine, machine)
    machine.standby.start_more(1, world_size=2)
    return machine


def test_the_slot_of_a_dead_spare_is_free_once_when_two_threads_find_it_dead(losing: Any) -> None:
    losing.standby.kill_unresponsive()
    assert (losing.standby.num_all, losing.num_given_back) == (0, 1)


def test_a_worker_that_gets_ready_while_its_node_is_looked_up_is_ended_once(losing: Any) -> None:
    losing.standby.kill_on(frozenset({"node"}))
    assert (losing.standby.num_ready, losing.num_given_back) == (0, 1)


def test_a_look_asks_for_no_room_unless_somebody_died(losing: Any) -> None:
    assert (losing.standby.num_ready, losing.num_asked) == (1, 1)


SPEC = GroupSpec(NoConnection(), lambda world: None, heartbeat_s=3.0)  # type: ignore[arg-type,return-value]
INFO = WorkerInfo("node", "10.0.0.1", 7)


def function(replica: Any, number: int) -> None:
    """What a loan runs."""


class Scene:
    """A loan, its worker, and the platform that this is on."""

    info = INFO

    def __init__(self, found: Outcome | None = None) -> None:
        self.clock, self.found, self.is_silent = FakeClock(), found, False
        self.calls: list[str] = []
        self.platform, self.spec = self, SPEC
        self.loan = Loan(cast(Any, self), 1, cast(StandbyWorkers, self))

    def look_after(self) -> None:
        if self.is_silent:
            self.found = failed("died")

    def submit(self, method: Callable[..., Any], *args: Any) -> str:
        self.calls.append(method.__name__)
        return method.__name__

    def ready(self, calls: list[str], timeout_s: float) -> list[str]:
        self.clock.sleep(0.0 if self.found else timeout_s)
        return calls if self.found else []

    def outcome(self, rank: int, call: str) -> Outcome:
        return self.found or Unanswered(rank)

    def run(self, on_wait: Any = lambda: None) -> Outcome | None:
        return self.loan.run_call(function, lambda: (), on_wait)


def failed(kind: FailureKind) -> Outcome:
    return Failed(-1, Failure(kind, fault(-1)))


def test_a_call_that_is_answered_counts() -> None:
    scene = Scene(Answered(-1, "value"))
    assert scene.run() == scene.found
    assert scene.loan.is_over
    assert not scene.loan.has_died


def test_no_call_begins_after_a_recall() -> None:
    scene = Scene(Answered(-1, "value"))
    scene.loan.recall()
    assert scene.loan.is_over
    assert scene.run() is None
    assert scene.calls == []


@pytest.mark.parametrize(
    ("found", "counts"),
    [(Answered(-1, None), False), (failed("user"), False), (Answered(-1, 1), True)],
)
def test_a_call_that_gave_up_or_failed_after_a_recall_does_not_count(found: Outcome, counts: bool) -> None:
    scene = Scene()

    def recall() -> None:
        scene.loan.recall()
        assert not scene.loan.is_over
        scene.found = found

    assert (scene.run(recall) is not None) == counts
    assert scene.calls[:2] == ["on_packed", "beside"]
    assert scene.loan.is_over


def test_an_error_of_user_code_counts_without_a_recall() -> None:
    scene = Scene(failed("user"))
    assert scene.run() == scene.found
    assert not scene.loan.has_died


def test_a_call_ends_with_a_worker_that_was_ended_because_it_did_not_answer() -> None:
    scene = Scene()
    scene.is_silent = True
    assert scene.run() is None
    assert scene.calls == ["on_packed"]
    assert scene.loan.has_died


def test_what_is_raised_meanwhile_ends_the_loan() -> None:
    scene = Scene()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.run(interrupt)
    assert scene.calls == ["on_packed", "beside"]
    assert not scene.loan.is_over
    scene.found = Answered(-1, None)
    assert scene.loan.is_over
