"""Remote workers that are being made ready: those that freeze over it are ended, so that nobody waits for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from raysgd.engine.gathering import outcome
from raysgd.engine.liveness import LivenessCheck
from raysgd.engine.resources import find_process, kill_process
from raysgd.engine.types import Outcome, WorkerInfo
from raysgd.engine.worker import RemoteWorker

logger = logging.getLogger(__name__)

_LOADING_S = 10.0  # the interpreter may be locked for as long while a large library is loaded


class Newcomers:
    """Asks for signs of life beside whatever the workers do.

    A worker counts from its first answer on. One that has not answered for long counts from when Ray tells where its
    process is: before that, it may still have to be made.

    Args:
        heartbeat_s: Who gives no sign of life for so long is ended; never less than a library takes to be loaded.
        poll: What became of a question, as of now.
        end: Ends a process in a way that reaches a stopped one too.
        find: Finds the process of a worker that has not answered yet; None while there is none.
        now: Time.
    """

    def __init__(
        self,
        heartbeat_s: float,
        poll: Callable[[int, Any], Outcome] = outcome,
        end: Callable[[WorkerInfo], None] = kill_process,
        find: Callable[[RemoteWorker], WorkerInfo | None] = lambda worker: find_process(worker.actor),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._find, self._now = end, find, now
        self._liveness: LivenessCheck[RemoteWorker] = LivenessCheck(
            max(heartbeat_s, _LOADING_S), lambda worker, call: poll(-1, call), now
        )
        self._workers: list[RemoteWorker] = []
        self._infos: dict[RemoteWorker, WorkerInfo] = {}
        self._next_round = now()

    def add(self, worker: RemoteWorker) -> None:
        """Looks after `worker` from now on."""
        self._workers.append(worker)
        self._ask([worker])

    def remove(self, worker: RemoteWorker) -> None:
        """Looks after `worker` no longer: it is ready, or was ended."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._infos.pop(worker, None)
            self._liveness.forget(worker)

    def poll(self) -> None:
        """Hears the answers, ends who is silent, and asks anew when that is due. To be called now and then."""
        polled = self._liveness.poll()
        for worker, found in polled.answers:
            if found.ok:
                self._infos[worker] = found.value
        for worker, silent_s in polled.silent:
            self._judge(worker, silent_s)
        if self._now() >= self._next_round:
            self._next_round = self._now() + self._liveness.round_s(len(self._workers))
            self._ask(self._workers)

    def _judge(self, worker: RemoteWorker, silent_s: float) -> None:
        info = self._infos.get(worker)
        if info is None:  # its process may have been made just now: it is asked once more
            found = self._find(worker)
            if found is not None:
                self._infos[worker] = found
            return
        logger.warning(
            "a worker (process %s on node %s) did not respond for %.0f s while it started; stopping it",
            info.pid,
            info.node_ip,
            silent_s,
        )
        self.remove(worker)
        worker.kill()
        self._end(info)

    def _ask(self, workers: list[RemoteWorker]) -> None:
        self._liveness.ask(workers, lambda worker: worker.submit("describe"))
