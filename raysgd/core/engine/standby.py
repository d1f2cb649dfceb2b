"""Standby workers: workers that are started outside the worker group and are ready to join it.

Standby workers replace lost workers or make the group larger. This module starts standby workers and checks that they
stay ready. Until the group needs them, they can be lent to calls that run beside training: see `Loan`.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.cluster.ray_cluster import note_processes
from raysgd.core.engine.gathering import LivenessCheck, outcomes_within, quiet_s
from raysgd.core.engine.placement import Slots
from raysgd.core.engine.platform import LocalWorker, Platform, RemoteWorker, pack
from raysgd.core.engine.policies import why_not_started
from raysgd.core.engine.shared.interface import GroupSpec, RegroupingReplica, method_of
from raysgd.core.engine.shared.types import UNKNOWN, Answered, Failed, World
from raysgd.core.engine.worker import WorkerProcess
from raysgd.exceptions import OnFailure, TrainerShutdownError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOAN_ROUND_S = 0.5
_LOADING_S = 120.0  # importing a framework on a busy machine may hold the GIL this long


class StartupCheck:
    """Kills workers that freeze while they start or stand by, so that no caller waits for them forever.

    This class polls the workers, even while they are busy, and kills workers that do not answer. A worker that has
    never answered may not have a process yet. Its silence therefore counts only from the time when Ray reports its
    process.

    Args:
        platform: Used to read the workers' answers and to find and kill their processes.
        longest_silence_s: A worker that does not answer for this many seconds is killed.
    """

    def __init__(self, platform: Platform, longest_silence_s: float) -> None:
        self._platform, self._liveness = platform, LivenessCheck(platform, longest_silence_s)
        self._next_round = platform.now()

    def poll(self, workers: Collection[LocalWorker | RemoteWorker]) -> list[RemoteWorker]:
        """Read the workers' answers, kill silent workers, and start a new round of polls if it is due.

        Call this method regularly. The driver itself is not checked.

        Args:
            workers: The workers to check, which may change from call to call.

        Returns:
            The workers that were killed or found dead.
        """
        platform, liveness, lost = self._platform, self._liveness, list[RemoteWorker]()
        answers, silent = liveness.poll()
        for worker, outcome in answers.items():
            if isinstance(outcome, Answered):
                worker.info = outcome.value
            elif outcome.has_died and worker in workers:
                lost.append(worker)
        for worker in silent:
            # The worker's process may be new, so its silence counts from now on.
            if worker.info is UNKNOWN:
                worker.info = platform.find_process(worker) or UNKNOWN
            elif worker in workers:
                info = worker.info
                where = f"process {info.pid} on node {info.node_ip}"
                logger.warning("a worker outside any group (%s) did not respond; stopping it", where)
                worker.kill()
                platform.kill_process(info)
                lost.append(worker)
        if platform.now() >= self._next_round:
            self._next_round = platform.now() + liveness.round_s(len(workers))
            others = [each for each in workers if not isinstance(each, LocalWorker) and each not in lost]
            liveness.ask(others, WorkerProcess.describe)
        return lost


@dataclass
class Replacements:
    """The number of replacements that may still be started for workers that die while a group starts."""

    num_left: int = 0


class Loan:
    """Lets a standby worker run a call beside the training until the worker group needs the worker.

    A loan is for at most one call. While one thread waits for the call, another thread may recall the worker.

    Args:
        worker: The worker to lend.
        number: Number of the loan. Numbers increase with each loan.
        standby: Looks after the worker during the call, and kills it if it does not respond.

    Attributes:
        is_recalled: True if the group needs the worker. The call must then end.
        call: Ray's reference to the call that the worker runs. None before it starts and once it is over.
        has_died: True if the worker died during its call.
    """

    def __init__(self, worker: RemoteWorker, number: int, standby: StandbyWorkers) -> None:
        self._worker, self._number, self._standby, self._platform = worker, number, standby, standby.platform
        self._lock = threading.Lock()
        self.call: Reference | None = None
        self.is_recalled = self.has_died = self._has_ended = False

    def run_call(
        self, function: Callable[..., Any], make_args: Callable[[], Sequence[Any]], on_wait: Callable[[], None]
    ) -> Answered | Failed | None:
        """Run `function(replica, loan_number, *args)` on the standby worker and wait for the result.

        Args:
            function: Called on the worker. If the loan is recalled, it must stop between two batches and return None.
            make_args: Returns the arguments `args` for `function`.
            on_wait: Called regularly during the call. If `on_wait` or `make_args` raises, the loan is recalled.

        Returns:
            The outcome of the call. None if the worker was lost, or if it was recalled before the call was complete.
        """
        try:
            with OnFailure(self.recall):
                packed = pack(function, False, None, (self._number, *make_args()))
                # Start the call under the lock: after a recall, the worker may already be a member of the group.
                with self._lock:
                    if self.is_recalled:
                        return None
                    self.call = call = self._worker.submit(WorkerProcess.on_packed, *packed)
                while not self._platform.ready([call], _LOAN_ROUND_S):
                    on_wait()
                    self._standby.look_after()
                outcome = self._platform.outcome(-1, call)
        finally:
            self._has_ended = True
        self.has_died = outcome.has_died
        self._standby.spec.relay.tell({"spare": outcome.notes})
        if isinstance(outcome, Answered):
            return outcome if outcome.value is not None else None
        return outcome if isinstance(outcome, Failed) and not (self.is_recalled or outcome.has_died) else None

    def recall(self) -> None:
        """End the loan: make the worker's call stop between two batches, or prevent the call from starting.

        Callable from any thread.
        """
        with self._lock:
            self.is_recalled = True
            if self.call is not None:
                self._worker.submit(WorkerProcess.beside, method_of(RegroupingReplica.leave_call), self._number)

    @property
    def is_over(self) -> bool:
        """True if the worker's call has ended, or will never start."""
        call = self.call
        if call is not None and (outcome := self._platform.outcome(-1, call)).answered:
            self.has_died, self.call = outcome.has_died, None  # frees what the call returned
        return self.call is None and (self._has_ended or self.is_recalled)


class StandbyWorkers:
    """Starts and supervises the standby workers of a group.

    Errors in standby workers are logged, never raised.

    Attributes:
        startup: Kills workers of the group that freeze while they start.
        replacements: Number of replacements that are still allowed for workers that die while a group starts. All
            attempts to start a group share this number.
    """

    def __init__(self, spec: GroupSpec, slots: Slots, platform: Platform) -> None:
        self.spec, self._slots, self.platform = spec, slots, platform
        starting_s = max(spec.heartbeat_s, _LOADING_S)
        self.startup, self._check_coming = StartupCheck(platform, starting_s), StartupCheck(platform, starting_s)
        self._check_idle = StartupCheck(platform, spec.heartbeat_s)
        self._coming: dict[RemoteWorker, Reference] = {}
        self._idle: dict[RemoteWorker, Loan | None] = {}  # those that have started, and what they have been lent for
        self._numbers_of_loans = itertools.count(1)
        self._world_size = 1
        self._is_cancelled = False
        self._polling = threading.Lock()
        self.replacements = Replacements()

    def check_wanted(self) -> None:
        """Raise an error if `cancel` was called."""
        if self._is_cancelled:
            raise TrainerShutdownError("The trainer was shut down while its workers were started.")

    @property
    def num_coming(self) -> int:
        """Number of standby workers that are still starting."""
        self.look_after()
        return len(self._coming)

    @property
    def num_ready(self) -> int:
        """Number of standby workers that are ready to join the group, including workers on loan."""
        self.look_after()
        return len(self._idle)

    @property
    def num_all(self) -> int:
        """Number of all standby workers: starting, ready or on loan."""
        return self.num_coming + self.num_ready

    def start_more(self, count: int, world_size: int, avoid: frozenset[str] = frozenset()) -> int:
        """Start up to `count` more standby workers in free slots. Return how many were started.

        Args:
            count: Number of workers to start, in addition to workers that are already starting or ready.
            world_size: Size of the group for which the workers prepare.
            avoid: IDs of nodes that are probably lost or are being removed. Standby workers on these nodes are killed.
        """
        self.kill_on(avoid)
        self._world_size = world_size
        slots = self._slots.take_usable(count, avoid)
        make_replica = None if self.spec.renews else self.spec.make_replica
        for index, slot in enumerate(slots):
            world = World(rank=max(0, world_size - len(slots) + index), size=world_size)
            worker = self.platform.new_worker(slot, self.spec.connection, self.spec.num_threads)
            hook = self.spec.initialization_hook
            self._coming[worker] = worker.submit(WorkerProcess.prepare_standby, hook, world, make_replica)
        return len(slots)

    def replace(self, num_lost: int, world_size: int) -> None:
        """Start replacements for workers that died while they started, as long as replacements are still allowed.

        Args:
            num_lost: Number of workers that died.
            world_size: Size of the group for which the replacements prepare.
        """
        if not self._is_cancelled:
            left = self.replacements
            left.num_left -= self.start_more(min(num_lost, left.num_left), world_size)

    def take_ready(
        self, count: int, timeout_s: float = 0.0, on_wait: Callable[[], object] = lambda: None
    ) -> list[RemoteWorker]:
        """Remove up to `count` ready workers from the standby workers and return them, so that they can join the group.

        If too few workers are ready, first recall workers on loan, then wait for workers that are starting.

        Args:
            count: Largest number of workers to return.
            timeout_s: Longest time to wait for workers that are starting.
            on_wait: Called regularly during the wait.
        """
        deadline = self.platform.now() + timeout_s
        self.kill_unresponsive()
        self._recall(count - len(self._ready))
        while len(self._ready) < count and self._coming and self.platform.now() < deadline and not self._is_cancelled:
            self.platform.any_ready([*self._coming.values()], min(_POLL_S, deadline - self.platform.now()))
            on_wait()
            self.look_after()
        return [each for each in self._ready[: max(0, count)] if self._take_out(each)]

    def take_needed(
        self, count: int, most: int, on_wait: Callable[[], object] | None = None
    ) -> list[RemoteWorker] | None:
        """Wait until at least `count` workers are ready.

        Then remove up to `most` workers from the standby workers and return them. If `count` workers can never become
        ready, kill the workers that are ready and return None.

        Args:
            count: Smallest number of workers to return.
            most: Largest number of workers to return.
            on_wait: Called regularly during the wait.
        """
        taken = self.take_ready(max(0, count), math.inf, on_wait or self.look_after)
        if len(taken) >= count:
            return taken + self.take_ready(max(0, most - len(taken)))
        for each in taken:
            self.kill(each)
        return None

    def lend(self) -> Loan | None:
        """Lend a ready worker to a call that runs beside training. The group can recall the worker.

        Return None if no worker is ready.
        """
        with self._polling:  # wait until another thread has finished its check, so that no dead worker is lent
            self._see_to_all()
            if not (ready := self._ready):
                return None
            self._idle[ready[-1]] = loan = Loan(ready[-1], next(self._numbers_of_loans), self)
            return loan

    def _recall(self, count: int) -> None:
        """Recall up to `count` workers from their loans. A worker whose call does not stop in time stays on loan."""
        lent = [loan for loan in self._idle.copy().values() if loan is not None and not loan.is_over]
        loans = lent[: max(0, count)]
        for loan in loans:
            loan.recall()
        calls = [call for loan in loans if (call := loan.call) is not None]  # `is_over` may clear it in any thread
        outcomes_within(self.platform, dict(enumerate(calls)), self.spec.settle_timeout_s)

    @property
    def _ready(self) -> list[RemoteWorker]:
        """Standby workers that are ready and not on loan."""
        idle = self._idle.copy().items()
        return [worker for worker, loan in idle if loan is None or (loan.is_over and not loan.has_died)]

    def cancel(self) -> None:
        """Abort all waits for standby workers. Call this from a thread other than the one that waits."""
        self._is_cancelled = True

    def kill_on(self, node_ids: frozenset[str]) -> None:
        """Kill standby workers on these nodes, including workers that are still starting."""
        self._drop([each for each in self._idle.copy() if each.info.node_id in node_ids])
        if node_ids:
            self._drop([each for each in self._coming.copy() if self._slots.node_of(each.slot) in node_ids])

    def kill_all(self) -> None:
        """Kill all standby workers."""
        self._drop([*self._coming.copy(), *self._idle.copy()])

    def look_after(self) -> None:
        """Check which standby workers are ready and which have died or frozen. Call this regularly while workers start.

        May be called from any thread, because programs may request a status at any time.
        """
        if not self._polling.acquire(blocking=False):  # another thread is already checking
            return
        try:
            self._see_to_all()
        finally:
            self._polling.release()

    def _see_to_all(self) -> None:
        self._check_coming.poll(self._coming.copy())
        idle = self._idle.copy()
        self._drop([worker for worker, loan in idle.items() if loan is not None and loan.is_over and loan.has_died])
        self._drop_lost(self._check_idle.poll(idle))
        num_died = 0
        for worker, call in self._coming.copy().items():
            result = self.platform.outcome(-1, call)
            if not (result.answered and self._take_out(worker)):
                continue
            self.spec.relay.tell({"new worker": result.notes})
            if isinstance(result, Failed):
                logger.warning("a new worker failed to start: %s", why_not_started(result.failure))
                self.kill(worker)
                num_died += result.has_died
            elif isinstance(result, Answered):
                worker.info = result.value
                note_processes([worker.info])
                self._idle[worker] = None
        if num_died:
            self.replace(num_died, self._world_size)

    def kill_unresponsive(self) -> None:
        """Poll the standby workers that are ready or on loan. Kill workers that do not answer.

        Call this before you move standby workers to the group. Between the trainer's calls, no other code checks them.
        """
        self.look_after()
        idle = [*self._idle.copy()]
        calls = {index: worker.submit(WorkerProcess.describe) for index, worker in enumerate(idle)}
        answers = outcomes_within(self.platform, calls, quiet_s(self.spec.heartbeat_s))
        for worker, answer in zip(idle, answers.values(), strict=True):
            if not answer.ok:
                self._drop_lost([worker])
                if not answer.answered:
                    self.platform.kill_process(worker.info)  # the process may be suspended (SIGSTOP)

    def _drop_lost(self, workers: Iterable[RemoteWorker]) -> None:
        for each in self._drop(workers):
            logger.warning("new worker (process %s) died", each.info.pid)

    def _drop(self, workers: Iterable[RemoteWorker]) -> list[RemoteWorker]:
        """Kill workers, and return those that no other thread has taken out before."""
        dropped = [each for each in workers if self._take_out(each)]
        for each in dropped:
            self.kill(each)
        return dropped

    def _take_out(self, worker: RemoteWorker) -> bool:
        """Remove a worker from the standby workers. Return False if another thread has already removed it."""
        return self._coming.pop(worker, None) is not None or self._idle.pop(worker, ...) is not ...

    def kill(self, worker: RemoteWorker) -> None:
        """Kill a worker that has been taken out of standby, and free its slot."""
        worker.kill()
        self._slots.give_back(worker.slot)
