"""Workers that do nothing, thousands of them in a few processes: what remains is what the driver does for each.

The driver is the whole engine, and every message is one of Ray's. A worker is `WorkerProcess`, as in training, with a
replica that only answers; many of them live in one asyncio actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.engine.call import Call
from raysgd.engine.connection import Connection, Unconnected
from raysgd.engine.controller import ElasticController
from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.platform import RayPlatform
from raysgd.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.engine.replica import Capture
from raysgd.engine.resources import Reservation
from raysgd.engine.slots import Slot
from raysgd.engine.types import ClusterView, Handover, Heartbeat, NodeView, ReplicaProgress, World
from raysgd.engine.worker import Answer, RemoteWorker, WorkerProcess
from raysgd.engine.worker_group import WorkerGroup

NUM_HOSTS = 2


class Idle:
    """A replica without anything to train."""

    def __init__(self, world: World) -> None:
        self.world = world

    def setup(self) -> str:
        return "idle"

    def capture(self, landed_token: int | None) -> Capture:
        return Capture(None, shared_state=None if self.world.rank else 0)

    def restore(self, shared_state: Any, own_state: Any) -> None: ...

    def shutdown(self) -> None: ...

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 1, "training", at=time.monotonic())

    def replica_progress(self) -> ReplicaProgress:
        return ReplicaProgress(0, True)

    def regroup(self, world: World, handover: Handover) -> str:
        self.world = world
        return "idle"


@dataclass(frozen=True)
class Rest:
    """What a call answers that is to take so many seconds."""

    seconds: float


def rest(replica: Idle, seconds: float) -> Rest:
    """A call."""
    return Rest(seconds)


class Host:
    """The process of many workers, as an actor."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerProcess] = {}

    async def run(self, index: int, method: str, *args: Any) -> Any:
        """Runs a method of one of them; while it rests, the others go on."""
        if index not in self._workers:
            self._workers[index] = WorkerProcess(Unconnected(), None)
        value = getattr(self._workers[index], method)(*args)
        if isinstance(value, Answer) and isinstance(value.value, Rest):
            await asyncio.sleep(value.value.seconds)
        return value


class HostedWorker(RemoteWorker):
    """The driver's handle on one of them."""

    def __init__(self, slot: Slot, host: Any, index: int) -> None:
        self.slot, self._host, self._index = slot, host, index

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._host.run.remote(self._index, method, *args)

    def kill(self) -> None: ...


class NoReservation(Reservation):
    """Workers in one process need no room for each."""

    def __init__(self, need: Any, num_workers: int, *rest: Any) -> None:
        self._num_workers = num_workers

    @property
    def is_own(self) -> bool:
        return True

    def is_granted(self) -> bool:
        return True

    def wait(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None: ...

    def nodes(self) -> list[str | None]:
        return ["node"] * self._num_workers

    def close(self, timeout_s: float) -> None: ...


class CrowdPlatform(RayPlatform):
    """Ray, with many workers in each process."""

    make_reservation: Callable[..., Reservation] = NoReservation

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts, self._num_workers = hosts, 0

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        self._num_workers += 1
        return HostedWorker(slot, self._hosts[self._num_workers % len(self._hosts)], self._num_workers)


class Crowd:
    """A controller with many workers.

    Attributes:
        num_workers: How many.
    """

    def __init__(self, num_workers: int, hosts: list[Any]) -> None:
        self.num_workers, self._hosts = num_workers, hosts
        spec = GroupSpec(Unconnected(), Idle, regroups=True, snapshot_every_s="auto")
        room = {"CPU": float(num_workers)}
        self._controller = ElasticController(
            spec,
            ScalingPolicy(num_workers),
            FailurePolicy(rejoins=True),
            make_group=partial(WorkerGroup, platform=CrowdPlatform(hosts)),
            view=lambda: ClusterView((NodeView("node", "127.0.0.1", room, {}),)),
        )
        self._controller.start()

    def call(self, seconds: float = 0.0) -> None:
        """One call to all of them, which lasts so long."""
        self._controller.run(Call(rest, lambda worlds: [(seconds,)] * len(worlds), changes_state=True))

    def ask_all(self) -> None:
        """What it takes at least to call all of them: by bare Ray."""
        import ray

        ray.get([self._hosts[i % len(self._hosts)].run.remote(i, "stack") for i in range(self.num_workers)])

    def close(self) -> None:
        """Ends it."""
        self._controller.stop(force=True)


@contextmanager
def crowd(num_workers: int) -> Iterator[Crowd]:
    """A crowd in the cluster that is running."""
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=4 * num_workers)(Host)
    hosts = [actor.remote() for _ in range(NUM_HOSTS)]
    found = Crowd(num_workers, hosts)
    try:
        yield found
    finally:
        found.close()
        for host in hosts:
            ray.kill(host)
