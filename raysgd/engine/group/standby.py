"""Standby workers, which start beside the group or wait to step in; and a check on all workers that start."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.engine.decisions.liveness import LivenessCheck
from raysgd.engine.decisions.silence import quiet_s
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.processes.gathering import await_all, outcome
from raysgd.engine.processes.platform import Platform
from raysgd.engine.processes.resources import find_process, kill_process, watch_process
from raysgd.engine.processes.slots import Slots
from raysgd.engine.processes.worker import RemoteWorker, StandbyReady, notes_of
from raysgd.engine.shared.types import Outcome, WorkerInfo, World

logger = logging.getLogger(__name__)
_POLL_S = 0.005
_LONGEST_POLL_S = 0.1  # where the wait takes as long as a worker takes to start
_LOADING_S = 10.0  # the interpreter may be locked for as long while a large library is loaded
_LONGEST_WATCH_S = 60.0  # on a busy machine the process that looks takes as long to start; a dead node says nothing
_MOST_WATCHES = 20  # of a worker that uses the processor and does not answer; then it hangs in what it does


class StartupCheck:
    """Kills workers that freeze while they start, so that nothing waits for them forever.

    It asks them for heartbeats, beside whatever they do.

    A worker counts from its first answer on. One that has never answered counts from when Ray knows its process: before
    that, the process may not exist yet. One that is silent but uses the processor is not frozen: on a busy machine a
    library takes long to load.

    Args:
        heartbeat_s: A worker that does not answer for so long is killed unless it works; never less than a library
            takes to load.
        poll: What became of a question, as of now.
        kill: Kills a process, also a stopped one.
        find: Finds the process of a worker that has not answered yet; None while there is none.
        watch: Asks whether a process works; a call.
        now: Time.
    """

    def __init__(
        self,
        heartbeat_s: float,
        poll: Callable[[int, Any], Outcome] = outcome,
        kill: Callable[[WorkerInfo], None] = kill_process,
        find: Callable[[RemoteWorker], WorkerInfo | None] = lambda worker: find_process(worker.actor),
        watch: Callable[[WorkerInfo], Any] = watch_process,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll, self._kill, self._find, self._watch, self._now = poll, kill, find, watch, now
        self._liveness: LivenessCheck[RemoteWorker] = LivenessCheck(
            max(heartbeat_s, _LOADING_S), lambda worker, call: poll(-1, call), now
        )
        self._workers: list[RemoteWorker] = []
        self._infos: dict[RemoteWorker, WorkerInfo] = {}
        self._watches: dict[RemoteWorker, tuple[Any, float]] = {}
        self._num_watches: Counter[RemoteWorker] = Counter()
        self._next_round = now()

    @classmethod
    def on(cls, platform: Platform, heartbeat_s: float) -> StartupCheck:
        """A check of workers on `platform`."""
        return cls(
            heartbeat_s,
            platform.outcome,
            platform.kill_process,
            platform.find_process,
            platform.watch_process,
            platform.now,
        )

    def add(self, worker: RemoteWorker) -> None:
        """Checks `worker` from now on."""
        self._workers.append(worker)
        self._ask([worker])

    def remove(self, worker: RemoteWorker) -> None:
        """Checks `worker` no longer: it is ready, or was killed."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._infos.pop(worker, None)
            self._forget_silence(worker)
            self._liveness.remove(worker)

    def poll(self) -> None:
        """Reads the answers, kills silent workers, and asks again when that is due. Call it now and then."""
        polled = self._liveness.poll()
        for worker, found in polled.answers:
            self._forget_silence(worker)
            if found.ok:
                self._infos[worker] = found.value
        for worker, _ in polled.silent:
            self._judge(worker)
        for worker, (watch, _) in list(self._watches.items()):
            self._look_at(worker, watch)
        if self._now() >= self._next_round:
            self._next_round = self._now() + self._liveness.round_s(len(self._workers))
            self._ask(self._workers)

    def _judge(self, worker: RemoteWorker) -> None:
        """Has a silent worker looked at from beside. The worker itself is asked again in the next round."""
        info = self._infos.get(worker)
        if info is None:  # its process may have been made just now
            found = self._find(worker)
            if found is not None:
                self._infos[worker] = found
        elif worker in self._watches:
            if self._now() - self._watches[worker][1] > _LONGEST_WATCH_S:
                self._end(worker, info)
        elif self._num_watches[worker] >= _MOST_WATCHES:
            self._end(worker, info)
        else:
            self._watches[worker] = self._watch(info), self._now()
            self._num_watches[worker] += 1

    def _look_at(self, worker: RemoteWorker, watch: Any) -> None:
        found = self._poll(-1, watch)
        if not found.answered:
            return
        del self._watches[worker]
        if found.ok and found.value:
            logger.debug("a worker (process %s) works and does not respond: it loads", self._infos[worker].pid)
        else:
            self._end(worker, self._infos[worker])

    def _end(self, worker: RemoteWorker, info: WorkerInfo) -> None:
        logger.warning(
            "a worker (process %s on node %s) did not respond while it started; stopping it", info.pid, info.node_ip
        )
        self.remove(worker)
        worker.kill()
        self._kill(info)

    def _forget_silence(self, worker: RemoteWorker) -> None:
        self._watches.pop(worker, None)
        self._num_watches.pop(worker, None)

    def _ask(self, workers: list[RemoteWorker]) -> None:
        self._liveness.ask(workers, lambda worker: worker.submit("describe"))


@dataclass(frozen=True)
class StandbyWorker:
    """A worker that is ready to join a group."""

    worker: RemoteWorker
    info: WorkerInfo
    facts: Any


@dataclass
class Replacements:
    """How many more workers may be started in the place of those that die while a group starts."""

    num_left: int = 0


class StandbyWorkers:
    """Makes workers ready beside a group that runs or starts. Their faults are logged, never raised.

    Attributes:
        replacements: Those of a start, which all its attempts share.
    """

    def __init__(self, spec: GroupSpec, slots: Slots, platform: Platform) -> None:
        self._spec, self._slots, self._platform = spec, slots, platform
        self._startup = StartupCheck.on(platform, spec.heartbeat_s)
        self._coming: list[tuple[RemoteWorker, Any]] = []
        self._ready: list[StandbyWorker] = []
        self._world_size = 1
        self._is_cancelled = False
        self.replacements = Replacements()

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

    def start(self, count: int, world_size: int, avoid: frozenset[str] = frozenset()) -> int:
        """Begins to make up to `count` more workers ready where there is reserved room; returns for how many there is.

        Args:
            count: How many are wanted beside those that are coming or ready.
            world_size: The size of the group that they are meant for.
            avoid: Nodes that are lost, as far as we know, or going away.
        """
        self.kill_on(avoid)
        self._world_size = world_size
        slots = self._slots.take_usable(count, avoid)
        make_replica = None if self._spec.renews else self._spec.make_replica
        for index, slot in enumerate(slots):
            world = World(rank=max(0, world_size - len(slots) + index), size=world_size)
            worker = self._platform.new_worker(slot, self._spec.connection, self._spec.num_threads)
            call = worker.submit("prepare_standby", self._spec.initialization_hook, world, make_replica)
            self._coming.append((worker, call))
            self._startup.add(worker)
        return len(slots)

    def replace(self, num_lost: int, world_size: int) -> None:
        """Begins to make workers ready instead of those that died while they started, as far as these are allowed."""
        if not self._is_cancelled:
            left = self.replacements
            left.num_left -= self.start(min(num_lost, left.num_left), world_size)

    def look_after(self) -> None:
        """Sees who is ready, and who froze over it. To be called now and then while workers are made ready."""
        self._poll()

    def take(
        self, count: int, timeout_s: float = 0.0, on_wait: Callable[[], None] = lambda: None
    ) -> list[StandbyWorker]:
        """Up to `count` ready workers, waiting up to `timeout_s` for those that are being made ready.

        `on_wait` is called now and then while it waits.
        """
        deadline, pause_s = self._platform.now() + timeout_s, _POLL_S
        self.kill_unresponsive()
        while len(self._ready) < count and self._coming and self._platform.now() < deadline:
            if self._is_cancelled:
                break
            self._platform.sleep(pause_s)
            pause_s = min(1.05 * pause_s, _LONGEST_POLL_S)
            on_wait()
            self._poll()
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def take_needed(
        self, count: int, most: int, on_wait: Callable[[], None] | None = None
    ) -> list[StandbyWorker] | None:
        """`count` ready workers, as soon as there are so many; None where there will not be.

        Takes up to `most` where more are ready by then.
        """
        taken = self.take(max(0, count), math.inf, on_wait or self.look_after)
        if len(taken) >= count:
            return taken + self.take(max(0, most - len(taken)))
        for standby_worker in taken:
            self.kill(standby_worker)
        return None

    def cancel(self) -> None:
        """From another thread: lets no one wait for them any more."""
        self._is_cancelled = True

    def kill(self, standby_worker: StandbyWorker) -> None:
        """Ends a worker that was taken and is not needed after all."""
        self._kill(standby_worker.worker)

    def kill_on(self, node_ids: frozenset[str]) -> None:
        """Kills those on nodes that are going away, also those that are still being made ready."""
        for each in [each for each in self._ready if each.info.node_id in node_ids]:
            self._ready.remove(each)
            self._kill(each.worker)
        coming = self._coming if node_ids else []
        for worker, call in [each for each in coming if self._slots.node_of(each[0].slot) in node_ids]:
            self._coming.remove((worker, call))
            self._kill(worker)

    def kill_all(self) -> None:
        """Ends all of them."""
        workers = [worker for worker, _ in self._coming] + [each.worker for each in self._ready]
        self._coming, self._ready = [], []
        for worker in workers:
            self._kill(worker)

    def _poll(self) -> None:
        self._startup.poll()
        still_coming, num_died = [], 0
        for worker, call in self._coming:
            result = self._platform.outcome(-1, call)
            if not result.answered:
                still_coming.append((worker, call))
                continue
            self._startup.remove(worker)
            self._spec.relay.tell({"standby worker": notes_of(result)})
            if result.failure is not None:
                logger.warning("a standby worker failed to start: %s", result.failure.fault.message)
                self._kill(worker)
                num_died += result.failure.kind == "died"
            else:
                ready: StandbyReady = result.value
                self._ready.append(StandbyWorker(worker, ready.info, ready.facts))
        self._coming = still_coming
        self.replace(num_died, self._world_size)

    def kill_unresponsive(self) -> None:
        """Ends those that were ready and do not answer any more: they are not polled while they wait."""
        self._poll()
        if not self._ready:
            return
        calls = [each.worker.submit("describe") for each in self._ready]
        await_all(self._platform, calls, quiet_s(self._spec.heartbeat_s))
        answers = [self._platform.outcome(-1, call) for call in calls]
        for standby_worker, answer in zip(self._ready, answers, strict=True):
            if not answer.ok:
                logger.warning("standby worker (process %s) died", standby_worker.info.pid)
                self._kill(standby_worker.worker)
                if not answer.answered:
                    self._platform.kill_process(standby_worker.info)  # it may be stopped
        self._ready = [standby_worker for standby_worker, answer in zip(self._ready, answers, strict=True) if answer.ok]

    def _kill(self, worker: RemoteWorker) -> None:
        self._startup.remove(worker)
        worker.kill()
        self._slots.give_back(worker.slot)
