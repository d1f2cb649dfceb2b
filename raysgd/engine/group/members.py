"""The workers of a group, in rank order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from raysgd.engine.decisions import ranks
from raysgd.engine.gathering import await_all
from raysgd.engine.placement import note_processes
from raysgd.engine.platform import Platform
from raysgd.engine.shared.types import WorkerInfo, World
from raysgd.engine.worker import LocalCall, LocalWorker, RemoteWorker

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class Members:
    """The workers of a group in rank order, and where they live.

    Attributes:
        workers: The drivers' handles on them; while they start, in no order yet.
        infos: Where each of them lives.
        worlds: The place of each among the others.
    """

    def __init__(self) -> None:
        self.workers: list[LocalWorker | RemoteWorker] = []
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []

    def __len__(self) -> int:
        return len(self.workers)

    def give_ranks(self, workers: Sequence[LocalWorker | RemoteWorker], infos: Sequence[WorkerInfo]) -> None:
        """Makes `workers` the members, with the ranks in which they come."""
        self.workers, self.infos = list(workers), list(infos)
        note_processes(infos)
        self.worlds = ranks.assign(self.infos)

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks that are not the driver itself."""
        return [rank for rank, worker in enumerate(self.workers) if not worker.is_local]

    @property
    def is_on_one_node(self) -> bool:
        """True if all workers are on the same node."""
        return len({info.node_id for info in self.infos}) == 1

    def submit(self, method: str, *args: Any, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Starts a method of these ranks (all, unless said); returns the calls."""
        asked = range(len(self.workers)) if ranks is None else ranks
        return {rank: self.workers[rank].submit(method, *args) for rank in asked}

    def remote(self, rank: int) -> RemoteWorker:
        """The worker of a rank that is not the driver."""
        worker = self.workers[rank]
        assert isinstance(worker, RemoteWorker), "the driver itself is no remote worker"
        return worker

    def interrupt(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Ends what these ranks wait for, without waiting for that; returns the calls of the remote ones."""
        local, remote = split(self.submit("interrupt", ranks=ranks))
        for call in local.values():
            call.run()
        return remote

    def kill_remote(self) -> None:
        """From any thread: kills the remote processes, and frees the driver's own worker if it waits for them."""
        for worker in tuple(self.workers):
            if isinstance(worker, RemoteWorker):
                worker.kill()
            else:
                worker.interrupt()

    def close(self, calls: Platform) -> None:
        """Lets every worker close what it has; `calls` hears when they have."""
        remote = [worker.submit("close") for worker in self.workers if isinstance(worker, RemoteWorker)]
        for worker in self.workers:
            if isinstance(worker, LocalWorker):
                worker.kill()
        if remote and calls.is_running:
            _await_closing(calls, remote)

    def kill(self) -> None:
        """Kills all processes at once. Harmless where there are none, or a second time."""
        workers, self.workers = self.workers, []
        for worker in sorted(workers, key=lambda w: w.is_local):  # remote first: a local one may wait for them
            worker.kill()


def split(calls: dict[int, Any]) -> tuple[dict[int, LocalCall], dict[int, Any]]:
    """The calls that run in the driver, and the others."""
    local = {rank: call for rank, call in calls.items() if isinstance(call, LocalCall)}
    return local, {rank: call for rank, call in calls.items() if rank not in local}


def _await_closing(calls: Platform, references: list[Any]) -> None:
    await_all(calls, references, _CLOSE_TIMEOUT_S)
    done = calls.ready(references, 0.0)
    if len(done) < len(references):
        logger.warning(
            "%s workers did not stop within %s s; killing them", len(references) - len(done), _CLOSE_TIMEOUT_S
        )
    for found in [calls.outcome(-1, reference) for reference in done]:
        if found.failure is not None:
            logger.debug("a worker failed to close: %s", found.failure.fault.message)
