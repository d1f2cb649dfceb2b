"""Thousands of workers that do nothing, in a few processes, to measure the driver's cost per worker.

The driver is the whole engine, and every message goes through Ray. A worker is a `WorkerProcess`, as in training,
with a replica that only answers; many of them live in one asyncio actor. A call sends and receives the same messages
as `train`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.cluster.resources import ClusterView, NodeView
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.placement import Reservation, Slot
from raysgd.core.engine.platform import Platform, RemoteWorker
from raysgd.core.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.core.engine.shared.interface import Call, Capture, Connection, GroupSpec, NoConnection
from raysgd.core.engine.shared.types import Answered, Heartbeat, ReplicaProgress, StateHandover, World
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.numbers.meters import MetricSummary
from raysgd.core.numbers.timing import TimeSpent
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest

NUM_HOSTS = 2
REQUEST = EpochRequest(num_steps=1, info={}, profile=False, seed=0)


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

    def regroup(self, world: World, handover: StateHandover) -> str:
        self.world = world
        return "idle"


@dataclass(frozen=True)
class Rest:
    """The answers to a call that takes this many seconds before its final answer."""

    seconds: float
    answer: EpochAnswer


def rest(replica: Idle, request: EpochRequest, seconds: float) -> Rest:
    """Build a call."""
    return Rest(seconds, answer_of_training())


def answer_of_training() -> EpochAnswer:
    """Return a worker's answer to a call of `train`."""
    totals = {"train_loss": (16.0, 32.0)}
    values = {"num_samples": 32, "epoch": 1, "batch_count": 1, "train_loss": 0.5, "last_train_loss": 0.5}
    heartbeat = Heartbeat(1, 1, "training", 32, at=time.monotonic(), own_s=0.1, time=TimeSpent("1", {"steps": 1.0}))
    return EpochAnswer(MetricSummary(values, totals), None, 1, 0, heartbeat)


class Host:
    """The process of many workers, as an actor."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerProcess] = {}

    async def run(self, index: int, method: str, *args: Any) -> Any:
        """Runs a method of one of them; while it rests, the others go on."""
        if index not in self._workers:
            self._workers[index] = WorkerProcess(NoConnection(), None)
        value = getattr(self._workers[index], method)(*args)
        if isinstance(value, Answered) and isinstance(value.value, Rest):
            await asyncio.sleep(value.value.seconds)
            return replace(value, value=value.value.answer)
        return value

    async def answer(self, request: EpochRequest) -> EpochAnswer:
        """What bare Ray calls."""
        return answer_of_training()


class HostedWorker(RemoteWorker):
    """The driver's handle of one of these workers."""

    def __init__(self, slot: Slot, host: Any, index: int) -> None:
        self.slot, self._host, self._index = slot, host, index

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._host.run.remote(self._index, method.__name__, *args)

    def kill(self) -> None: ...


class NoReservation(Reservation):
    """Workers in one process need no resources each."""

    def __init__(self, need: Any, num_workers: int, *rest: Any, **options: Any) -> None:
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


class CrowdPlatform(Platform):
    """The platform of Ray, with many workers in each process.

    Args:
        hosts: The processes.
        alone: Processes with one worker each.
        room: Resources of the only node.
    """

    make_reservation: Callable[..., Reservation] = NoReservation

    def __init__(self, hosts: list[Any], alone: list[Any], room: dict[str, float]) -> None:
        self._hosts, self._alone, self._num_workers = hosts, iter(alone), 0
        self.view = lambda: ClusterView((NodeView("node", "127.0.0.1", room, {}),))

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        self._num_workers += 1
        host = next(self._alone, self._hosts[self._num_workers % len(self._hosts)])
        return HostedWorker(slot, host, self._num_workers)


class Crowd:
    """A controller with many workers.

    Attributes:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int, num_losses: int, make_host: Callable[[], Any]) -> None:
        self.num_workers = num_workers
        self._hosts, self._mortal = ([make_host() for _ in range(count)] for count in (NUM_HOSTS, num_losses))
        spec = GroupSpec(NoConnection(), Idle, regroups=True, snapshot_every_s="auto")
        room = {"CPU": float(num_workers)}
        self._controller = ElasticController(
            spec,
            ScalingPolicy(num_workers),
            FailurePolicy(continues=True),
            platform=CrowdPlatform(self._hosts, self._mortal, room),
        )
        self._controller.start()

    def call(self, seconds: float = 0.0) -> None:
        """Make one call to all workers that lasts this long."""
        args = (REQUEST, seconds)
        self._controller.run(Call(rest, lambda worlds: [args] * len(worlds), changes_state=True, resume=rest))

    def call_with_loss(self, seconds: float) -> None:
        """Make one call in which a worker is lost; the others continue."""
        import ray

        timer = threading.Timer(seconds / 2, ray.kill, [self._mortal.pop()])
        timer.start()
        self.call(seconds)
        timer.join()

    def ask_all(self) -> None:
        """Call all workers with plain Ray, which is the minimum cost."""
        import ray

        ray.get([self._hosts[i % NUM_HOSTS].answer.remote(REQUEST) for i in range(self.num_workers)])

    def close(self) -> None:
        """Stop the controller."""
        import ray

        self._controller.stop(force=True)
        for host in [*self._hosts, *self._mortal]:
            ray.kill(host)


@contextmanager
def crowd(num_workers: int, num_losses: int) -> Iterator[Crowd]:
    """Start many workers in the running cluster, of which this many can be lost."""
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=4 * num_workers)(Host)
    found = Crowd(num_workers, num_losses, actor.remote)
    try:
        yield found
    finally:
        found.close()
