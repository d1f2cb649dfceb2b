"""Workers outside the group: those being made ready, and the spares that wait to step in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.engine.gathering import outcome
from raysgd.engine.newcomers import Newcomers
from raysgd.engine.resources import kill_process
from raysgd.engine.seats import Seat, Seats
from raysgd.engine.types import WorkerInfo, World
from raysgd.engine.worker import Enlisted, RemoteWorker, notes_of

if TYPE_CHECKING:
    from raysgd.engine.worker_group import GroupSpec

logger = logging.getLogger(__name__)
_POLL_S = 0.005
_SILENCE_S = 1.0  # a worker that does nothing answers at once


@dataclass(frozen=True)
class Recruit:
    """A worker that is ready to join a group."""

    worker: RemoteWorker
    info: WorkerInfo
    facts: Any


class Recruits:
    """Makes workers ready beside a running group. Their faults are logged, never raised: nobody depends on them yet.

    Args:
        spec: What the group is started from.
        seats: Where they find a place.
    """

    def __init__(self, spec: GroupSpec, seats: Seats) -> None:
        self._spec, self._seats = spec, seats
        self._newcomers = Newcomers(spec.heartbeat_s)
        self._coming: list[tuple[RemoteWorker, Any]] = []
        self._ready: list[Recruit] = []

    @property
    def num_coming(self) -> int:
        """How many are being made ready."""
        self._poll()
        return len(self._coming)

    @property
    def num_ready(self) -> int:
        """How many could step in now."""
        self._poll()
        return len(self._ready)

    def call_up(self, seats: list[Seat], world_size: int) -> None:
        """Begins to make one worker ready on each of `seats`, for a group of `world_size`. Does not wait."""
        for index, seat in enumerate(seats):
            world = World(rank=max(0, world_size - len(seats) + index), size=world_size)
            worker = RemoteWorker(seat, self._spec.backend, self._spec.num_threads)
            call = worker.submit("enlist", self._spec.initialization_hook, world, self._spec.make_replica)
            self._coming.append((worker, call))
            self._newcomers.add(worker)

    def look_after(self) -> None:
        """Sees who is ready, and who froze over it. To be called now and then while workers are made ready."""
        self._poll()

    def take(self, count: int, timeout_s: float = 0.0, tick: Callable[[], None] = lambda: None) -> list[Recruit]:
        """Up to `count` ready workers, waiting up to `timeout_s` for those that are being made ready.

        `tick` is called now and then while it waits.
        """
        deadline = time.monotonic() + timeout_s
        self.drop_dead()
        while len(self._ready) < count and self._coming and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            tick()
            self._poll()
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def dismiss(self, recruit: Recruit) -> None:
        """Ends a worker that was taken and is not needed after all."""
        self._end(recruit.worker)

    def avoid(self, node_ids: frozenset[str]) -> None:
        """Ends those on nodes that are going away."""
        for recruit in [recruit for recruit in self._ready if recruit.info.node_id in node_ids]:
            self._ready.remove(recruit)
            self._end(recruit.worker)

    def dismiss_all(self) -> None:
        """Ends all of them."""
        workers = [worker for worker, _ in self._coming] + [recruit.worker for recruit in self._ready]
        self._coming, self._ready = [], []
        for worker in workers:
            self._end(worker)

    def _poll(self) -> None:
        self._newcomers.tick()
        still_coming = []
        for worker, call in self._coming:
            result = outcome(-1, call)
            if not result.answered:
                still_coming.append((worker, call))
                continue
            self._newcomers.remove(worker)
            self._spec.relay.tell({"standby worker": notes_of(result)})
            if result.failure is not None:
                logger.warning("a standby worker failed to start: %s", result.failure.fault.message)
                self._end(worker)
            else:
                enlisted: Enlisted = result.value
                self._ready.append(Recruit(worker, enlisted.info, enlisted.facts))
        self._coming = still_coming

    def drop_dead(self) -> None:
        """Ends those that were ready and do not answer any more: nobody looks after them while they wait."""
        self._poll()
        if not self._ready:
            return
        import ray

        calls = [recruit.worker.submit("describe") for recruit in self._ready]
        ray.wait(calls, num_returns=len(calls), timeout=_SILENCE_S)
        answers = [outcome(-1, call) for call in calls]
        for recruit, answer in zip(self._ready, answers, strict=True):
            if not answer.ok:
                logger.warning("standby worker (process %s) died", recruit.info.pid)
                self._end(recruit.worker)
                if not answer.answered:
                    kill_process(recruit.info)  # it may be stopped
        self._ready = [recruit for recruit, answer in zip(self._ready, answers, strict=True) if answer.ok]

    def _end(self, worker: RemoteWorker) -> None:
        self._newcomers.remove(worker)
        worker.kill()
        self._seats.give_back(worker.seat)
