"""Stand-ins for the parts that the engine is made of, small enough to be read before a test that uses them.

`CountingReplica` and `NullBackend` also run in real worker processes, which then need no framework. The others
stand in for a cluster: `FakeCluster` has slots for workers, makes groups that live in this process, and lets
happen to them what a test scripted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from raysgd.backends.base import Backend
from raysgd.engine import ranks
from raysgd.engine.controller import Clock
from raysgd.engine.replica import Capture
from raysgd.engine.types import (
    ClusterView,
    Failure,
    FailureKind,
    GroupReport,
    NodeView,
    Outcome,
    Rendezvous,
    WorkerInfo,
    World,
)
from raysgd.engine.worker import Answer
from raysgd.engine.worker_group import GroupSpec, WorkerGroup
from raysgd.exceptions import ReservationTimeoutError, WorkerFault


class NullBackend(Backend):
    """Connects nothing."""

    def load(self) -> None: ...

    def open_rendezvous(self) -> int:
        return 1

    def join(self, rendezvous: Rendezvous, world: World) -> None: ...

    def leave(self) -> None: ...

    def is_connection_error(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)


class CountingReplica:
    """A replica whose whole state is a sum that all ranks share and a count that each rank has for itself.

    Args:
        world: The place among the replicas.
        is_large: Whether the shared state has to be fetched, as that of a large model.
    """

    def __init__(self, world: World, is_large: bool = False) -> None:
        self.world = world
        self.is_large = is_large
        self.total = 0.0
        self.num_own_calls = 0
        self.is_shut_down = False
        self.landed_tokens: list[int | None] = []
        self._kept: dict[int, float] = {}
        self._next_token = 0

    def setup(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def capture(self, landed_token: int | None) -> Capture:
        self.landed_tokens.append(landed_token)
        if self.world.rank:
            return Capture(self.num_own_calls)
        if not self.is_large:
            return Capture(self.num_own_calls, shared_state=self.total)
        self._kept = {token: kept for token, kept in self._kept.items() if landed_token is None or token > landed_token}
        self._next_token += 1
        self._kept[self._next_token] = self.total
        return Capture(self.num_own_calls, token=self._next_token)

    def fetch(self, token: int) -> float:
        return self._kept[token]

    def restore(self, shared_state: float, rank_states: Sequence[int]) -> None:
        self.total = shared_state
        self.num_own_calls = rank_states[self.world.rank] if self.world.rank < len(rank_states) else 0

    def shutdown(self) -> None:
        self.is_shut_down = True


def add(replica: CountingReplica, amount: float) -> float:
    """The usual call that changes the state."""
    replica.total += amount
    replica.num_own_calls += 1
    return replica.total


def read(replica: CountingReplica) -> tuple[float, int]:
    """The usual call that changes nothing."""
    return replica.total, replica.num_own_calls


# ---------------------------------------------------------------------------------------- what may happen


@dataclass(frozen=True)
class Lost:
    """These ranks are gone; the others had done their part, but nobody waited for their answers."""

    ranks: tuple[int, ...]
    kind: FailureKind = "died"


@dataclass(frozen=True)
class Raised:
    """One rank raised. Whether the others answered decides whether the group can be used again."""

    rank: int
    error: Exception
    others_answered: bool = True


@dataclass(frozen=True)
class Interrupted:
    """Somebody pressed Ctrl-C while the driver waited."""


@dataclass(frozen=True)
class Denied:
    """The cluster did not grant the resources."""


Event = Lost | Raised | Interrupted | Denied | None


class FakeClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    def as_clock(self) -> Clock:
        return Clock(self.monotonic, self.sleep)


@dataclass
class FakeCluster:
    """One node with room for `num_slots` workers, the groups made so far, and what is to happen to them.

    Attributes:
        num_slots: How many workers the node has room for in all.
        num_taken: How many slots somebody else holds.
        starts: What happens at each start of a group; past the end, nothing.
        calls: The same for each call of a function of a test.
        restores: The same for each call that the controller makes on its own.
        transfer_s: How long a state that is fetched is on its way.
        groups: Every group that was made.
    """

    num_slots: int = 3
    num_taken: int = 0
    starts: deque[Event] = field(default_factory=deque)
    calls: deque[Event] = field(default_factory=deque)
    restores: deque[Event] = field(default_factory=deque)
    transfer_s: float = 0.0
    groups: list[FakeGroup] = field(default_factory=list)

    def make_group(self, spec: GroupSpec, num_workers: int) -> WorkerGroup:
        group = FakeGroup(self, spec, num_workers)
        self.groups.append(group)
        return cast(WorkerGroup, group)

    @property
    def num_free(self) -> int:
        used = sum(len(group) for group in self.groups if group.is_alive and not group.is_driver_only)
        return max(0, self.num_slots - self.num_taken - used)

    def view(self) -> ClusterView:
        total, free = {"CPU": float(self.num_slots)}, {"CPU": float(self.num_free)}
        return ClusterView((NodeView("node", "10.0.0.1", total, free),))

    @property
    def sizes(self) -> list[int]:
        """The sizes of all groups that were made, in order."""
        return [len(group) for group in self.groups]


class FakeGroup:
    """What the controller uses of a worker group, with replicas in this process."""

    def __init__(self, cluster: FakeCluster, spec: GroupSpec, num_workers: int) -> None:
        self.cluster, self.spec, self.num_workers = cluster, spec, num_workers
        self.worlds: list[World] = []
        self.replicas: list[Any] = []
        self.is_alive = False
        self.ended_by: str | None = None
        self.functions: list[str] = []

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_driver_only(self) -> bool:
        return self.spec.use_local and self.num_workers == 1

    @property
    def local_replica(self) -> Any:
        return self.replicas[0] if self.spec.use_local else None

    def start(self, reservation_timeout_s: float | None = None) -> GroupReport:
        event = _next(self.cluster.starts)
        if isinstance(event, Denied):
            raise ReservationTimeoutError("not granted")
        self.worlds = ranks.assign([WorkerInfo("node", "10.0.0.1", rank) for rank in range(self.num_workers)])
        self.replicas = [self.spec.make_replica(world) for world in self.worlds]
        report = self._report(event, lambda replica: replica.setup(), {}, self.spec.captures, None)
        self.is_alive = report.ok
        return report

    def on_replica(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        *,
        capture: bool = False,
        landed: int | None = None,
        tick: Callable[[], None] | None = None,
    ) -> GroupReport:
        assert self.is_alive, "a group that was given up was used again"
        self.functions.append(function.__name__)
        is_own_call = function.__module__ == "raysgd.engine.controller"
        event = _next(self.cluster.restores if is_own_call else self.cluster.calls)
        if tick is not None:
            tick()
        return self._report(event, function, args_by_rank, capture, landed)

    def _report(
        self,
        event: Event,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        capture: bool,
        landed: int | None,
    ) -> GroupReport:
        if isinstance(event, Interrupted):
            raise KeyboardInterrupt
        called = sorted(args_by_rank) if args_by_rank else range(self.num_workers)
        outcomes = []
        for rank in called:
            failure = _failure(event, rank)
            if failure is not None:
                outcomes.append(Outcome(rank, failure=failure))
                continue
            replica = self.replicas[rank]
            value = function(replica, *args_by_rank.get(rank, ()))
            answer = Answer(value, replica.capture(landed) if capture else None)
            is_heard = event is None or (isinstance(event, Raised) and event.others_answered)
            outcomes.append(Outcome(rank, answer) if is_heard else Outcome(rank, answered=False))
        return GroupReport(tuple(outcomes))

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> FakeTransfer:
        return FakeTransfer(self, lambda: function(self.replicas[rank], *args))

    def share(self, value: Any) -> list[Any]:
        return [value] * self.num_workers

    def kill(self, timeout_s: float = 5.0) -> None:
        self.is_alive, self.ended_by = False, "kill"

    def stop(self, timeout_s: float) -> None:
        self.is_alive, self.ended_by = False, "stop"


@dataclass
class FakeTransfer:
    """A state on its way. It is read when it is asked for, which is as late as that may happen."""

    group: FakeGroup
    produce: Callable[[], Any]

    def result(self, timeout_s: float | None) -> Any:
        if not self.group.is_alive:
            raise ConnectionError("the worker that held it is gone")
        if timeout_s is not None and timeout_s < self.group.cluster.transfer_s:
            raise TimeoutError("still on its way")
        return self.produce()


def fault(rank: int = 0, error: BaseException | None = None, **changes: Any) -> WorkerFault:
    """A fault of a rank, as its worker would word it."""
    error = error or RuntimeError("broken")
    values = {
        "node": f"10.0.0.{rank + 1}",
        "type_name": type(error).__name__,
        "message": str(error),
        "location": "model.py:7 in forward: x / 0",
        "traceback_text": f"Traceback of {type(error).__name__}",
        **changes,
    }
    return WorkerFault(rank=rank, error=error, **values)


def failure(kind: FailureKind, rank: int = 0, error: BaseException | None = None) -> Failure:
    """A failure of a rank."""
    return Failure(kind, fault(rank, error))


def _failure(event: Event, rank: int) -> Failure | None:
    if isinstance(event, Lost) and rank in event.ranks:
        return failure(event.kind, rank, RuntimeError("the process is gone"))
    if isinstance(event, Raised) and rank == event.rank:
        return failure("user", rank, event.error)
    return None


def _next(events: deque[Event]) -> Event:
    return events.popleft() if events else None
