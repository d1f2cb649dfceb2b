"""Training on plain Ray actors: the best that a library on Ray can reach.

This is not a peer, because it only trains: no failures, no snapshots, no user metrics. Each worker is an actor with a
`DistributedDataParallel` model; an epoch is one call to each actor and one `ray.get` for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from _workloads import WORKLOADS, HandWritten, Workload, stamp


@ray.remote(num_cpus=1)
class _Worker:
    """One rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        self._training: HandWritten | None = None

    def open(self) -> int:
        """On rank 0, open the rendezvous and return its port."""
        self._store = dist.TCPStore("127.0.0.1", 0, self._world_size, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, port: int, workload: str, num_steps: int) -> None:
        """Form the process group, then create the model and the data."""
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", port, self._world_size, is_master=False)
        dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._world_size)
        self._training = HandWritten(WORKLOADS[workload].with_steps(num_steps), self._rank, self._world_size)

    def train_epoch(self, stamps: str | None) -> list[float]:
        """Train one epoch; return the sum of the losses and the number of samples."""
        assert self._training is not None
        totals = self._training.train_epoch()
        if stamps is not None:
            stamp(Path(stamps), self._rank)
        return list(totals.tolist())


class FloorGroup:
    """Actors that train `workload` together.

    Args:
        workload: The workload to train.
        num_workers: Number of actors to start.
    """

    def __init__(self, workload: Workload, num_workers: int) -> None:
        self._workers = [_Worker.remote(rank, num_workers) for rank in range(num_workers)]
        port = ray.get(self._workers[0].open.remote())
        ray.get([worker.join.remote(port, workload.name, workload.num_steps) for worker in self._workers])

    def train_epoch(self, stamps: Path | None = None) -> float:
        """Train one epoch; return the mean loss. Each rank writes a stamp into the folder `stamps` at the end."""
        folder = None if stamps is None else str(stamps)
        totals = ray.get([worker.train_epoch.remote(folder) for worker in self._workers])
        return float(sum(loss_sum for loss_sum, _ in totals) / sum(count for _, count in totals))

    def stop(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            ray.kill(worker)
