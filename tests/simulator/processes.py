"""Simulated worker processes: what they answer, when, and what is left of that when they die, freeze or come back."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any, Protocol

from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.engine.shared.types import (
    LOOPBACK,
    Answered,
    Failure,
    HeldAtStep,
    Outcome,
    Rendezvous,
    StateHandover,
    StepLacksMemory,
    Unanswered,
    WorkerInfo,
    World,
)
from raysgd.core.engine.worker import outcome_of
from raysgd.exceptions import WorkerFault
from tests.simulator.kernel import Future, Kernel, Running, Task
from tests.simulator.network import LostConnectionError, SimConnection
from tests.simulator.replica import SimReplica

_NEVER = float("inf")
_LANES = {
    **dict.fromkeys(("describe", "interrupt", "last_call"), "signs"),
    **dict.fromkeys(("beside", "stack"), "beside"),
    "send": "sending",
}


class Call(Future):
    """A call of a worker, as the driver sees it: its value is what arrives, its error a `Failure`."""

    __slots__ = ("method", "pid")

    def __init__(self, method: str, pid: int = 0) -> None:
        super().__init__()
        self.method, self.pid = method, pid

    def outcome(self, rank: int) -> Outcome:
        if not self.is_done:
            return Unanswered(rank)
        return outcome_of(rank, self.value if self.error is None else self.error)


class Host(Protocol):
    """What a process needs of the simulation."""

    kernel: Kernel
    rng: random.Random
    copy_s: float
    """How long a copy of the state takes."""
    late_s: float
    """How long what is asked beside the work waits at most, because something else has the interpreter."""

    def travel_s(self) -> float:
        """How long a message is on its way."""

    def work_s(self) -> float:
        """How long something short takes."""

    def start_s(self) -> float:
        """How long a process takes to start."""

    def point_of(self, label: str, process: Process) -> Iterable[float]:
        """A place where something may happen."""

    def check_built(self, replica: SimReplica) -> None:
        """After a rank of a new group was built."""

    def check_left(self, replica: SimReplica) -> None:
        """When a rank says how far it is."""

    def note_death(self) -> None:
        """A process died that the driver has not ended."""

    def make_replica(self, world: World, connection: SimConnection, name: str) -> SimReplica: ...


def death(rank: int, words: str) -> Failure:
    return Failure("died", WorkerFault(rank, "unknown", None, "ActorDiedError", words, "the worker process", ""))


class Process:
    """A worker process on a node.

    Attributes:
        is_dead: Whether it does nothing any more.
        is_killed: Whether the driver has asked for its end.
        is_frozen: Whether it answers nothing, and may go on later.
        loads: Whether it works while it is frozen.
        is_endless: Whether it does so without an end.
        outlives_kill: Whether nothing reaches it while it is frozen, so that it goes on for a while when killed.
        is_driver: Whether it is the driver itself, whose end is the end of all.
        died_at: When it ended.
        thawed_at: When it last went on after it was frozen.
        answered_at: When its last answer arrived.
        ready_at: When it was ready to step in.
        num_repeated: So many of the next questions that are asked beside its work arrive twice.
    """

    def __init__(self, host: Host, pid: int, node: str, connection: SimConnection, is_driver: bool = False) -> None:
        self.host, self.pid, self.node, self.connection = host, pid, node, connection
        self.is_driver, self.num_repeated = is_driver, 0
        self.world = World(rank=-1, size=0)
        self.replica: SimReplica | None = None
        self.is_dead = self.is_killed = self.is_frozen = self.outlives_kill = self.is_up = False
        self.loads = self.is_endless = False
        self.died_at, self.thawed_at, self.answered_at, self._looks_at = _NEVER, -_NEVER, -_NEVER, -_NEVER
        self.ready_at = _NEVER
        self._number: CallNumber | None = None
        self._reply: Answered | None = None
        self._parked: list[Callable[[], None]] = []
        self._queues: dict[str, deque[tuple[Call, Task]]] = {}
        self._open: dict[Call, None] = {}
        self._running: dict[str, Running] = {}
        if is_driver:
            self.is_up = True
        else:
            host.kernel.after(host.start_s(), self._come_up)

    def __str__(self) -> str:
        return f"process {self.pid} (rank {self.world.rank} of {self.world.size}, on {self.node})"

    @property
    def is_working(self) -> bool:
        """Whether it runs one of the calls that come one after the other."""
        return "work" in self._running and not self.is_dead

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.node, f"address of {self.node}", self.pid)

    # ------------------------------------------------------------------------------------ calls

    def submit(self, method: str, args: tuple[Any, ...]) -> Call:
        call = Call(method, self.pid)
        call.then(self.host.kernel.note_answer)
        if self.is_dead:
            self.host.kernel.after(self.host.travel_s(), lambda: call.set(error=death(-1, "it was dead already")))
            return call
        self._open[call] = None
        for each in (call, Call(method)) if self._is_repeated(method) else (call,):
            task = getattr(self, f"_{method}")(*args)
            self.host.kernel.after(self._way_s(method), lambda each=each, task=task: self._enqueue(each, task))
        return call

    def _way_s(self, method: str) -> float:
        """How long it takes until this is looked at; what is asked beside the work keeps its order."""
        way_s = self.host.travel_s()
        if _LANES.get(method) != "beside" or not self.host.late_s:
            return way_s
        now = self.host.kernel.now
        self._looks_at = max(self._looks_at, now + way_s + self.host.late_s * self.host.rng.random())
        return self._looks_at - now

    def _is_repeated(self, method: str) -> bool:
        if method not in _LANES or not self.num_repeated:
            return False
        self.num_repeated -= 1
        return True

    def run_here(self, method: str, args: tuple[Any, ...]) -> Any:
        """Does what is asked in the driver's own thread; raises as the worker in the driver does."""
        kernel = self.host.kernel
        running = kernel.begin(getattr(self, f"_{method}")(*args))
        try:
            kernel.block(lambda: running.done.is_done)
        except BaseException:
            running.close()
            raise
        return running.done.value if running.done.error is None else self._failure(running.done.error)

    def close_here(self) -> None:
        """The worker in the driver ends; its process goes on."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.shutdown()
        self.connection.leave()

    def _enqueue(self, call: Call, task: Task) -> None:
        lane = _LANES.get(call.method, "work")
        self._queues.setdefault(lane, deque()).append((call, task))
        if lane not in self._running:
            self._run_next(lane)

    def _come_up(self) -> None:
        if not self._may_run(self._come_up):
            return
        self.is_up = True
        for lane in list(self._queues):
            if lane not in self._running:
                self._run_next(lane)

    def _run_next(self, lane: str) -> None:
        queue = self._queues.get(lane)
        if not queue or self.is_dead or not self.is_up:
            self._running.pop(lane, None)
            return
        call, task = queue.popleft()
        running = self._running[lane] = self.host.kernel.begin(task, self._may_run)
        running.done.then(lambda: self._answer(lane, call, running.done))

    def _answer(self, lane: str, call: Call, done: Future) -> None:
        failure = None if done.error is None else self._failure(done.error)
        self.host.kernel.after(self.host.travel_s(), lambda: self._arrive(call, done.value, failure))
        self._run_next(lane)

    def _arrive(self, call: Call, value: Any, failure: Failure | None) -> None:
        self._open.pop(call, None)
        self.answered_at = self.host.kernel.now
        call.set(value, failure)

    def _failure(self, error: Exception) -> Failure:
        is_lost = self.world.is_distributed and isinstance(error, LostConnectionError)
        lack = isinstance(error, StepLacksMemory)
        if is_lost or lack:
            self.connection.interrupt()
        name = type(error).__name__
        fault = WorkerFault(self.world.rank, self.node, error, name, str(error), f"train.py:1 in {name}", "")
        return Failure("memory" if lack else "disconnected" if is_lost else "user", fault)

    def _may_run(self, go_on: Callable[[], None]) -> bool:
        if self.is_dead:
            return False
        if self.is_frozen:
            self._parked.append(go_on)
            return False
        return True

    # ------------------------------------------------------------------------------------ what befalls it

    def die(self, told_after_s: float, words: str = "it died") -> None:
        """Ends it; the driver hears of that a little later, and so do the ranks that wait for it."""
        if self.is_dead:
            return
        self.is_dead, self.died_at = True, self.host.kernel.now
        if not self.is_killed:
            self.host.note_death()
        for running in self._running.values():
            running.kill()
        self.host.kernel.after(self.host.travel_s(), self.connection.leave)
        self.host.kernel.after(told_after_s, lambda: self._tell_of_death(words))

    def _tell_of_death(self, words: str) -> None:
        open_calls, self._open = self._open, {}
        for call in open_calls:
            call.set(error=death(self.world.rank, words))

    def kill(self, reaches_stopped: bool) -> None:
        """The driver ends it."""
        self.is_killed = True
        if self.is_frozen and not self.loads and (self.outlives_kill or not reaches_stopped):
            return
        self.host.kernel.after(self.host.travel_s(), lambda: self.die(self.host.travel_s(), "it was killed"))

    def freeze(self) -> None:
        self.is_frozen, self.loads = True, False

    def load(self, is_endless: bool) -> None:
        """It works, and answers nothing."""
        self.is_frozen, self.loads, self.is_endless = True, True, is_endless

    def thaw(self) -> None:
        """It goes on; where it was killed meanwhile, not for long."""
        if not self.is_frozen or self.is_dead:
            return
        self.is_frozen = self.loads = False
        self.thawed_at = self.host.kernel.now
        parked, self._parked = self._parked, []
        for go_on in parked:
            self.host.kernel.soon(go_on)
        if self.is_killed:
            self.host.kernel.after(0.5, lambda: self.die(0.01, "it was killed"))

    # ------------------------------------------------------------------------------------ what it does when called

    def _point(self, label: str) -> Iterable[float]:
        return self.host.point_of(label, self)

    def _describe(self) -> Task:
        yield 0.0
        return self.info

    def _prepare(self, hook: Any) -> Task:
        yield from self._point("prepare")
        yield self.host.work_s()
        return self.info

    def _open_endpoint(self, host: str) -> Task:
        yield from self._point("open")
        return self.connection.open_endpoint(host)

    def _build(self, world: World, rendezvous: Rendezvous, make_replica: Any, capture: bool) -> Task:
        self.world, self.replica = world, None
        yield from self._point("join")
        yield from self.connection.joining(rendezvous, world)
        yield from self._point("joined")
        self.replica = self.host.make_replica(world, self.connection, str(self.pid))
        self.host.check_built(self.replica)
        facts = self.replica.setup()
        yield from self._point("built")
        return Answered(world.rank, facts, self.replica.capture(None) if capture else None)

    def _prepare_standby(self, hook: Any, world: World, make_replica: Any) -> Task:
        yield from self._point("prepare")
        yield self.host.work_s()
        if make_replica is None:
            return self.info
        alone = Rendezvous(((LOOPBACK, self.connection.open_endpoint(LOOPBACK)),), on_one_node=True)
        yield from self.connection.joining(alone, World(rank=0, size=1), even_alone=True)
        self.replica = self.host.make_replica(world, self.connection, str(self.pid))
        self.replica.setup()
        yield from self._point("warm up")
        yield self.host.work_s()
        self.ready_at = self.host.kernel.now
        return self.info

    def _leave_group(self, host: str) -> Task:
        yield from self._point("leave")
        self.connection.leave()
        assert self.replica is not None
        self.host.check_left(self.replica)
        progress = self.replica.replica_progress()
        self.replica.leave_group()
        return progress, self.connection.open_endpoint(host)

    def _regroup(self, world: World, rendezvous: Rendezvous, handover: StateHandover) -> Task:
        self.world = world
        yield from self._point("join")
        yield from self.connection.joining(rendezvous, world, even_alone=True)
        yield from self._point("joined")
        assert self.replica is not None
        return (yield from self.replica.regroup(world, handover))

    def _on_packed(self, packed: bytes, *values: Any) -> Task:
        function, capture, landed, args, _, number = pickle.loads(packed)
        if number is None or number != self._number:
            self._number = number or self._number
            self._reply = yield from self._on_replica(function, capture, landed, *args)
        return self._reply

    def _last_call(self) -> Task:
        yield 0.0
        return self._number

    def _on_replica(self, function: Callable[..., Any], capture: bool, landed: int | None, *args: Any) -> Task:
        yield from self._point("called")
        assert self.replica is not None
        value = function(self.replica, *args)
        if isinstance(value, Generator):
            value = yield from value
        else:
            yield self.host.work_s()
        is_over = not isinstance(value, HeldAtStep)
        part = None
        if capture and is_over:
            part = replace(self.replica.capture(landed), seconds=self.host.copy_s)
            if self.host.copy_s:
                yield self.host.copy_s
        yield from self._point("answer")
        return Answered(self.world.rank, value, part)

    def _execute(self, function: Callable[..., Any]) -> Task:
        yield 0.0
        return function()

    def _beside(self, function: Callable[..., Any], *args: Any) -> Task:
        yield 0.0
        return None if self.replica is None else function(self.replica, *args)

    def _send(self, function: Callable[..., Any], *args: Any) -> Task:
        yield from self._point("send")
        yield self.host.work_s()
        yield from self._point("on its way")
        return None if self.replica is None else function(self.replica, *args)

    def _interrupt(self) -> Task:
        yield 0.0
        self.connection.interrupt()

    def _stack(self) -> Task:
        yield 0.0
        return "  a stack"

    def _close(self) -> Task:
        yield self.host.work_s()
        self.close_here()
