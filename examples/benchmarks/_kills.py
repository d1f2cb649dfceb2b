"""Removes workers on a schedule, by a kill or with their node, and reads the trails that workers leave."""

from __future__ import annotations

import importlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOOK_S = 0.01
GRACE_S = 10.0
"""A node goes so long after Ray was told."""


class Trail:
    """What a worker writes to a folder: that it trains, since when, and how many samples it has used.

    Args:
        folder: Shared by all workers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._samples: int | None = None

    def begin(self, num_samples: int) -> None:
        """Record that a step with this many samples begins."""
        if self._samples is None:
            self._samples = self._introduce()
        os.write(self._samples, b"." * num_samples)

    def _introduce(self) -> int:
        pid = os.getpid()
        with (self._folder / "first").open("a") as file:
            file.write(f"{time.monotonic()!r}\n")
        (self._folder / f"alive-{pid}-{started_at(pid)}").touch()
        return os.open(self._folder / f"samples-{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def has_begun(folder: str) -> bool:
    """Return whether a worker has begun its first step."""
    return (Path(folder) / "first").exists()


def wall_of(folder: str, ended: float) -> float:
    """Return the seconds from the beginning of the first step of all workers until `ended`."""
    return ended - min(map(float, (Path(folder) / "first").read_text().split()))


def samples_begun(folder: str) -> int:
    """Return how many samples went into steps, including steps that were lost."""
    return sum(path.stat().st_size for path in Path(folder).glob("samples-*"))


def alive_in(folder: str) -> list[int]:
    """Return the processes that train or have trained, and have not ended."""
    told = [path.name.split("-")[1:] for path in Path(folder).glob("alive-*")]
    return sorted(int(pid) for pid, started in told if started_at(int(pid)) == int(started))


def started_at(pid: int) -> int | None:
    """Return when a process started, to tell it from a later one with the same id; None if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


class Schedule:
    """When to kill which worker. It does not wait for a contender that has not recovered: the next kill comes on time.

    Args:
        every_s: Seconds from one kill to the next, and to the first.
        seed: Seed for the choice of victims.
        max_kills: Maximum number of kills; None for no limit.
    """

    def __init__(self, every_s: float, seed: int, max_kills: int | None = None) -> None:
        self._every_s, self._chance, self._max_kills = every_s, random.Random(seed), max_kills
        self.num_kills = 0

    @property
    def is_over(self) -> bool:
        return self.num_kills == self._max_kills

    def times(self, began: float) -> Iterator[float]:
        """Yield the times of the kills."""
        number = 1
        while not self.is_over:
            yield began + number * self._every_s
            number += 1

    def victim(self, alive: Sequence[int]) -> int | None:
        """Choose a living worker; None if there is none, because a kill without a victim does not count."""
        if not alive:
            return None
        self.num_kills += 1
        return self._chance.choice(alive)


def kill(pid: int) -> None:
    """Kill a worker without notice."""
    os.kill(pid, signal.SIGKILL)


class Nodes:
    """A Ray cluster for this process alone, with nodes of one CPU each.

    Args:
        num_nodes: Number of nodes in use, besides the node of the driver.
        num_spare: Number of nodes that replace removed nodes. They run from the beginning, because Ray starts nodes
            only in the main thread.
    """

    def __init__(self, num_nodes: int, num_spare: int = 4) -> None:
        cluster: Any = importlib.import_module("ray.cluster_utils").Cluster
        self._cluster = cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(num_nodes + num_spare)]
        self._removals: list[threading.Timer] = []
        self.address: str = self._cluster.address

    def drain(self, pid: int) -> None:
        """Tell Ray that the node of a process will be removed, as a cloud would; another node replaces it."""
        by_raylet = {node.all_processes["raylet"][0].process.pid: node for node in self._nodes}
        while pid > 1 and pid not in by_raylet:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # parent of the process
        node = by_raylet.get(pid, self._nodes[0])  # if the worker has already left its node, use another node
        self._nodes.remove(node)
        protocol: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
        reason = protocol.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        worker: Any = importlib.import_module("ray._private.worker").global_worker
        worker.gcs_client.drain_node(node.node_id, reason, "preempted", int((time.time() + GRACE_S) * 1000))
        self._removals.append(threading.Timer(GRACE_S, self._cluster.remove_node, [node]))
        self._removals[-1].start()

    def shutdown(self) -> None:
        for removal in self._removals:
            removal.cancel()
        self._cluster.shutdown()


@contextmanager
def nodes(num_nodes: int) -> Iterator[Nodes]:
    """Start a cluster with this many nodes, and connect to it."""
    ray: Any = importlib.import_module("ray")
    cluster = Nodes(num_nodes)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Killer(threading.Thread):
    """Follows a schedule, from the first step on.

    Args:
        folder: Folder where the workers leave their trails.
        schedule: Schedule to follow.
        take: Removes the worker with this process id.
    """

    def __init__(self, folder: str, schedule: Schedule, take: Callable[[int], None] = kill) -> None:
        super().__init__(name="killer", daemon=True)
        self._folder, self._schedule, self._take = folder, schedule, take
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not has_begun(self._folder):
            if self._is_stopped.wait(_LOOK_S):
                return
        for due in self._schedule.times(time.monotonic()):
            if self._is_stopped.wait(max(0.0, due - time.monotonic())):
                return
            victim = self._schedule.victim(alive_in(self._folder))
            if victim is not None:
                self._take(victim)

    def stop(self) -> None:
        self._is_stopped.set()


@contextmanager
def killing(folder: str, schedule: Schedule | None, take: Callable[[int], None] = kill) -> Iterator[None]:
    """Remove workers inside the block; without a schedule, none is removed."""
    if schedule is None:
        yield
        return
    killer = Killer(folder, schedule, take)
    killer.start()
    try:
        yield
    finally:
        killer.stop()
        killer.join()
