"""Stand-ins for the parts that the engine is made of, small enough to be read before a test that uses them.

`CountingReplica`, `SteppingReplica` and `NullConnection` also run in real worker processes, which then need no
framework. A whole trainer over simulated workers is in `tests/core/engine/trainer.py`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from raysgd.core.engine.shared.interface import Capture, GroupHistory, GroupSpec, NoConnection
from raysgd.core.engine.shared.types import (
    Failure,
    FailureKind,
    Heartbeat,
    HeldAtStep,
    Rendezvous,
    ReplicaProgress,
    StateHandover,
    WorkerInfo,
    World,
)
from raysgd.core.engine.snapshots import Snapshots
from raysgd.core.history.status import TrainerStatus, compose
from raysgd.exceptions import WorkerFault


def meeting(*ports: int, host: str = "127.0.0.1", on_one_node: bool = True) -> Rendezvous:
    """Ranks that listen at these ports of one host."""
    return Rendezvous(tuple((host, port) for port in ports), on_one_node)


class NullConnection(NoConnection):
    """Connects nothing, but takes connection errors for errors of its group."""

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
        self._kept: dict[int, float] = {}
        self._next_token = 0

    def setup(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def capture(self, landed_token: int | None) -> Capture:
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

    def restore(self, shared_state: float, own_state: int | None) -> None:
        self.total = shared_state
        self.num_own_calls = own_state or 0

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


class SteppingReplica(CountingReplica):
    """A replica that can go on in another group. A call takes steps, each of which adds 1 to the sum.

    Attributes:
        num_done: Steps of the running call completed, or of the last one; None before the first.
        has_answered: Whether the running call was finished here.
        holds_at: The step before which it stops.
        is_primed: Whether it was warmed up.
    """

    def __init__(self, world: World, is_large: bool = False) -> None:
        super().__init__(world, is_large)
        self.num_done: int | None = None
        self.has_answered = False
        self.holds_at: int | None = None
        self.is_primed = False

    def restore(self, shared_state: float, own_state: int | None) -> None:
        super().restore(shared_state, own_state)
        self.num_done, self.has_answered = None, False

    def replica_progress(self) -> ReplicaProgress:
        done = (self.num_done or 0) + self.has_answered
        return ReplicaProgress(done, True, None, f"{done} steps done")

    def warm_up(self) -> None:
        self.total, self.is_primed = -1000.0, True  # practice leaves traces; they must be taken over

    def regroup(self, world: World, handover: StateHandover) -> str:
        self.world, self.holds_at = world, None
        return f"rank {world.rank} of {world.size}"

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, self.num_done or 0, "stepping")


def walk(replica: SteppingReplica, num_steps: int) -> float | HeldAtStep:
    """A call that can be gone on with: so many steps."""
    replica.num_done, replica.has_answered = 0, False
    return walk_on(replica, num_steps)


def walk_on(replica: SteppingReplica, num_steps: int) -> float | HeldAtStep:
    """Goes on with `walk`, wherever it is."""
    replica.num_done = replica.num_done or 0
    while replica.num_done < num_steps:
        if replica.num_done == replica.holds_at:
            return HeldAtStep(replica.num_done, Capture(replica.num_own_calls))
        replica.num_done += 1
        replica.total += 1
    if not replica.has_answered:
        replica.has_answered = True
        replica.num_own_calls += 1
    return replica.total


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


def raise_from_compiled_code(kind: type[Exception], text: str) -> None:
    """Raises as libraries do whose code is compiled: without a `raise` in Python."""
    ctypes.pythonapi.PyErr_SetString(ctypes.py_object(kind), text.encode())


def status_of(
    *,
    infos: Sequence[WorkerInfo],
    heartbeats: Mapping[int, Heartbeat],
    samples_per_s: float | None,
    history: GroupHistory,
    snapshots: Snapshots | None = None,
    num_spares: int = 1,
    has_session_ended: bool = False,
) -> TrainerStatus:
    """The status of a trainer that wants three workers and takes no snapshots by itself."""
    controller: Any = SimpleNamespace(
        monitor=SimpleNamespace(is_on=False),
        history=history,
        has_session_ended=has_session_ended,
        stopped=threading.Event(),
        group=SimpleNamespace(infos=infos, standby=SimpleNamespace(num_ready=num_spares)),
        scaling=SimpleNamespace(max_workers=3),
        snapshots=no_snapshots() if snapshots is None else snapshots,
        spec=SimpleNamespace(captures=False),
        recovery=SimpleNamespace(doing=""),
    )
    return compose(controller, heartbeats, samples_per_s)


def no_snapshots() -> Snapshots:
    """What a trainer knows of snapshots before there is one."""
    return Snapshots(GroupSpec(NullConnection(), CountingReplica))
