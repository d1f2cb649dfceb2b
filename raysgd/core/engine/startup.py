"""Standby workers: workers that are started outside the worker group and are ready to join it.

Standby workers replace lost workers or make the group larger. This module starts standby workers and checks that they
stay ready. Until the group needs them, they can be lent to calls that run beside training: see `Loan`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.cluster.ray_cluster import cluster_view, note_processes
from raysgd.core.cluster.resources import explain
from raysgd.core.engine.gathering import LivenessCheck, await_all, quiet_s
from raysgd.core.engine.placement import Slots
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.policies import classify, why_not_started, words
from raysgd.core.engine.shared.interface import GroupSpec, SpareReplica, method_of
from raysgd.core.engine.shared.types import UNKNOWN, Answered, Failed, GroupReport, World
from raysgd.core.engine.worker import LocalWorker, RemoteWorker, WorkerProcess, notes_of, pack
from raysgd.core.sending import packed_bytes
from raysgd.exceptions import OnFailure, ReservationTimeoutError, TrainerShutdownError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Gather: TypeAlias = Callable[[Mapping[int, Reference], Callable[[], None]], GroupReport]
"""Waits for the answers to calls. Takes the calls by rank, and a function to call regularly during the wait."""

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
        heartbeat_s: A worker that does not answer for this many seconds is killed. At least two minutes are allowed,
            because importing a framework takes time.

    Attributes:
        lost: Workers that the last `poll` killed or found dead.
    """

    def __init__(self, platform: Platform, heartbeat_s: float) -> None:
        self._platform, self._now = platform, platform.now
        self._liveness: LivenessCheck[RemoteWorker] = LivenessCheck(
            max(heartbeat_s, _LOADING_S), lambda worker, call: platform.outcome(-1, call), platform.now
        )
        self._workers: list[RemoteWorker] = []
        self._next_round = self._now()
        self.lost: list[RemoteWorker] = []

    def watch(self, workers: Iterable[LocalWorker | RemoteWorker]) -> None:
        """Start to check whether these workers answer. The driver itself is not checked."""
        new = [each for each in workers if not isinstance(each, LocalWorker) and each not in self._workers]
        self._workers += new
        self._ask(new)

    def unwatch(self, workers: Iterable[LocalWorker | RemoteWorker]) -> None:
        """Stop checking workers that have joined a group or were killed."""
        for each in workers:
            if each in self._workers and not isinstance(each, LocalWorker):
                self._workers.remove(each)
                self._liveness.remove(each)

    def poll(self) -> None:
        """Read the workers' answers, kill silent workers, and start a new round of polls if it is due.

        Call this method regularly.
        """
        answers, silent = self._liveness.poll()
        self.lost = [worker for worker, outcome in answers if outcome.has_died]
        for worker, outcome in answers:
            if isinstance(outcome, Answered):
                worker.info = outcome.value
        for worker, _ in silent:
            if worker.info is not UNKNOWN:
                self._end(worker)
                self.lost.append(worker)
            # The worker's process may be new, so its silence counts from now on.
            elif (info := self._platform.find_process(worker)) is not None:
                worker.info = info
        if self._now() >= self._next_round:
            self._next_round = self._now() + self._liveness.round_s(len(self._workers))
            self._ask(self._workers)

    def _end(self, worker: RemoteWorker) -> None:
        pid, address = worker.info.pid, worker.info.node_ip
        logger.warning("a worker outside any group (process %s on node %s) did not respond; stopping it", pid, address)
        self.unwatch([worker])
        worker.kill()
        self._platform.kill_process(worker.info)

    def _ask(self, workers: list[RemoteWorker]) -> None:
        self._liveness.ask(workers, lambda worker: worker.submit(WorkerProcess.describe))


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
        platform: Used to wait for the worker's answers and to kill its process.
        spec: Settings of the worker group. Only `heartbeat_s` and `relay` are used.

    Attributes:
        is_recalled: True if the group needs the worker. The call must then end.
        call: Ray's reference to the call that the worker runs, or None if no call was started.
    """

    def __init__(self, worker: RemoteWorker, number: int, platform: Platform, spec: GroupSpec) -> None:
        self.worker, self._number, self._platform, self._relay = worker, number, platform, spec.relay
        self.is_recalled = False
        self._liveness: LivenessCheck[RemoteWorker] = LivenessCheck(
            spec.heartbeat_s, lambda worker, call: platform.outcome(-1, call), platform.now
        )
        self._lock = threading.Lock()
        self.call: Reference | None = None
        self._has_ended = False

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
                    self.call = self.worker.submit(WorkerProcess.on_packed, *packed)
                while not self._platform.ready([self.call], _LOAN_ROUND_S):
                    on_wait()
                    self._liveness.ask([self.worker], lambda worker: worker.submit(WorkerProcess.describe))
                    if self._liveness.poll()[1]:
                        self.worker.kill()
                        self._platform.kill_process(self.worker.info)
                outcome = self._platform.outcome(-1, self.call)
        finally:
            self._has_ended = True
        self._relay.tell({"spare": notes_of(outcome)})
        if isinstance(outcome, Answered):
            return outcome if outcome.value.value is not None else None
        return outcome if isinstance(outcome, Failed) and not (self.is_recalled or outcome.has_died) else None

    def recall(self) -> None:
        """End the loan: make the worker's call stop between two batches, or prevent the call from starting.

        Callable from any thread.
        """
        with self._lock:
            self.is_recalled = True
            if self.call is not None:
                self.worker.submit(WorkerProcess.beside, method_of(SpareReplica.leave_call), self._number)

    @property
    def is_over(self) -> bool:
        """True if the worker's call has ended, or will never start."""
        is_free = self.call is None or self._platform.outcome(-1, self.call).answered
        return is_free and (self._has_ended or self.is_recalled)

    @property
    def has_died(self) -> bool:
        """True if the worker died during its call."""
        return self.call is not None and self._platform.outcome(-1, self.call).has_died


class StandbyWorkers:
    """Starts the workers of a group, and starts and supervises its standby workers.

    Errors in standby workers are logged, never raised.

    Attributes:
        startup: Kills workers of the group that freeze while they start.
        replacements: Number of replacements that are still allowed for workers that die while a group starts. All
            attempts to start a group share this number.
    """

    def __init__(self, spec: GroupSpec, slots: Slots, platform: Platform) -> None:
        self._spec, self._slots, self._platform = spec, slots, platform
        self._check = StartupCheck(platform, spec.heartbeat_s)
        self.startup = StartupCheck(platform, spec.heartbeat_s)
        self._coming: list[tuple[RemoteWorker, Reference]] = []
        self._ready: list[RemoteWorker] = []
        self._loans: list[Loan] = []
        self._num_loans = 0
        self._world_size = 1
        self._is_cancelled = False
        self._polling = threading.Lock()
        self.replacements = Replacements()

    # --------------------------------------------------------------------------------------- the workers of a new group

    def create(
        self, workers: list[LocalWorker | RemoteWorker], num_workers: int, num_spares: int, timeout_s: float
    ) -> None:
        """Reserve resources for the workers and spares of a new group, and start the worker processes.

        Args:
            workers: The list to which the workers are added.
            num_workers: Number of workers.
            num_spares: Number of spare workers for which resources are reserved as well.
            timeout_s: How long to wait until the resources are granted.
        """
        spec, platform, slots = self._spec, self._platform, self._slots
        local = platform.new_local_worker(spec.connection) if spec.use_local else None
        if local is not None:
            workers.append(local)
        if num_workers == len(workers):
            return
        packed_bytes("What a worker is made of", (spec.make_replica, spec.initialization_hook))
        platform.ensure_running()
        # The driver gets a slot, too.
        slots.reserve(num_workers + num_spares, timeout_s, has_driver=spec.use_local, check=self._check_wanted)
        if local is not None:
            local.use_gpus(slots.take_slot().reservation.gpus_of_driver())
        for _ in range(len(workers), num_workers):
            worker = platform.new_worker(slots.take_slot(), spec.connection, spec.num_threads)
            workers.append(worker)
            self.startup.watch([worker])
        self._check_wanted()

    def make_ready(
        self, workers: list[LocalWorker | RemoteWorker], min_workers: int, timeout_s: float, gather: Gather
    ) -> GroupReport:
        """Run the user's initialization hook and import the framework in all workers of a new group.

        Replace workers that die meanwhile.

        Args:
            workers: The workers. Changed to the workers that are ready.
            min_workers: Number of workers that must be ready.
            timeout_s: How long to wait until Ray has placed the workers.
            gather: Waits for the answers to calls.

        Returns:
            A report with the `WorkerInfo` of each ready worker, or the report of the failure.
        """
        num_workers, hook = len(workers), self._spec.initialization_hook
        # A worker answers this call even while it runs the user's hook.
        placed = [worker.submit(WorkerProcess.describe) for worker in workers if not worker.is_local]
        calls = {index: worker.submit(WorkerProcess.prepare, hook) for index, worker in enumerate(workers)}
        if placed and not self._slots.are_own:
            self._await_placement(placed, timeout_s)
        report = gather(calls, self.startup.poll)
        while not report.ok:
            dead = {outcome.rank for outcome in report.outcomes if outcome.failure is not None}
            if classify(report).kind == "user":
                return report
            logger.warning("%s; continuing with the others", words(classify(report)))
            for worker in [workers[index] for index in dead]:
                assert isinstance(worker, RemoteWorker), "the driver itself cannot die"
                self.startup.unwatch([worker])
                self.kill(worker)
            self.replace(len(dead), num_workers)
            calls = {index: call for index, call in calls.items() if index not in dead}
            if len(calls) + self.num_all < min_workers:
                return report
            failed, report = report, gather(calls, self.startup.poll)
        joining = self.take_needed(min_workers - len(calls), num_workers - len(calls), self.startup.poll)
        if joining is None:
            self._check_wanted()
            return failed
        self.startup.watch(joining)
        workers[:] = [*(workers[index] for index in calls), *joining]
        return GroupReport((*report.outcomes, *(Answered(-1, each.info) for each in joining)))

    def _await_placement(self, references: list[Any], timeout_s: float) -> None:
        """Wait until Ray has started all worker actors.

        The actors may have to wait for resources in an existing placement group.

        Raises:
            ReservationTimeoutError: Some actors were not started in time.
        """
        num_waiting = len(references) - len(self._platform.ready(references, timeout_s))
        if num_waiting:
            raise ReservationTimeoutError(
                f"{num_waiting} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + explain(self._spec.resources, len(references), cluster_view())
            )

    def _check_wanted(self) -> None:
        if self._is_cancelled:
            raise TrainerShutdownError("The trainer was shut down while its workers were started.")

    # ----------------------------------------------------------------------------------------------- standby workers

    @property
    def num_coming(self) -> int:
        """Number of standby workers that are still starting."""
        self.look_after()
        return len(self._coming)

    @property
    def num_ready(self) -> int:
        """Number of standby workers that are ready to join the group, including workers on loan."""
        self.look_after()
        return len(self._ready) + len(self._loans)

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
        make_replica = None if self._spec.renews else self._spec.make_replica
        for index, slot in enumerate(slots):
            world = World(rank=max(0, world_size - len(slots) + index), size=world_size)
            worker = self._platform.new_worker(slot, self._spec.connection, self._spec.num_threads)
            call = worker.submit(WorkerProcess.prepare_standby, self._spec.initialization_hook, world, make_replica)
            self._coming.append((worker, call))
            self._check.watch([worker])
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
        self, count: int, timeout_s: float = 0.0, on_wait: Callable[[], None] = lambda: None
    ) -> list[RemoteWorker]:
        """Remove up to `count` ready workers from the standby workers and return them, so that they can join the group.

        If too few workers are ready, first recall workers on loan, then wait for workers that are starting.

        Args:
            count: Largest number of workers to return.
            timeout_s: Longest time to wait for workers that are starting.
            on_wait: Called regularly during the wait.
        """
        deadline = self._platform.now() + timeout_s
        self.kill_unresponsive()
        self._recall(count - len(self._ready))
        while len(self._ready) < count and self._coming and self._platform.now() < deadline and not self._is_cancelled:
            self._platform.any_ready([call for _, call in self._coming], min(_POLL_S, deadline - self._platform.now()))
            on_wait()
            self.look_after()
        taken = [each for each in self._ready[:count] if _take_out(self._ready, each)]
        self._check.unwatch(taken)
        return taken

    def take_needed(
        self, count: int, most: int, on_wait: Callable[[], None] | None = None
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
        if not self._ready:
            return None
        self._num_loans += 1
        loan = Loan(self._ready.pop(), self._num_loans, self._platform, self._spec)
        self._loans.append(loan)
        return loan

    def _recall(self, count: int) -> None:
        """Recall up to `count` workers from their loans. A worker whose call does not stop in time stays on loan."""
        loans = self._loans[: max(0, count)]
        for loan in loans:
            loan.recall()
        calls = [loan.call for loan in loans if loan.call is not None]
        if calls:
            await_all(self._platform, calls, self._spec.settle_timeout_s)
        self._take_back()

    def _take_back(self) -> None:
        """End the loans whose call is over.

        Mark their workers as ready, or remove workers that died during the call.
        """
        for loan in [each for each in self._loans if each.is_over]:
            if not _take_out(self._loans, loan):
                continue
            if loan.has_died:
                self.kill(loan.worker)
            else:
                self._ready.append(loan.worker)

    @property
    def _idle(self) -> list[RemoteWorker]:
        """Standby workers that are ready or on loan."""
        return [*self._ready, *(loan.worker for loan in self._loans)]

    def cancel(self) -> None:
        """Abort all waits for standby workers. Call this from a thread other than the one that waits."""
        self._is_cancelled = True

    def kill_on(self, node_ids: frozenset[str]) -> None:
        """Kill standby workers on these nodes, including workers that are still starting."""
        self._drop([each for each in self._idle if each.info.node_id in node_ids])
        for each in [*self._coming] if node_ids else ():
            if self._slots.node_of(each[0].slot) in node_ids and _take_out(self._coming, each):
                self.kill(each[0])

    def kill_all(self) -> None:
        """Kill all standby workers."""
        coming, self._coming = self._coming, []
        self._drop(self._idle)
        for worker, _ in coming:
            self.kill(worker)

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
        self._check.poll()
        self._take_back()
        for each in [*self._ready]:
            if each in self._check.lost and _take_out(self._ready, each):
                logger.warning("new worker (process %s) died", each.info.pid)
                self.kill(each)
        num_died = 0
        for worker, call in [*self._coming]:
            result = self._platform.outcome(-1, call)
            if not (result.answered and _take_out(self._coming, (worker, call))):
                continue
            self._spec.relay.tell({"new worker": notes_of(result)})
            if isinstance(result, Failed):
                logger.warning("a new worker failed to start: %s", why_not_started(result.failure))
                self.kill(worker)
                num_died += result.has_died
            elif isinstance(result, Answered):
                worker.info = result.value.value
                note_processes([worker.info])
                self._ready.append(worker)
        if num_died:
            self.replace(num_died, self._world_size)

    def kill_unresponsive(self) -> None:
        """Poll the standby workers that are ready or on loan. Kill workers that do not answer.

        Call this before you move standby workers to the group. Between the trainer's calls, no other code checks them.
        """
        self.look_after()
        idle = self._idle
        if not idle:
            return
        calls = [each.submit(WorkerProcess.describe) for each in idle]
        await_all(self._platform, calls, quiet_s(self._spec.heartbeat_s))
        answers = [self._platform.outcome(-1, call) for call in calls]
        for worker, answer in zip(idle, answers, strict=True):
            if not answer.ok:
                logger.warning("new worker (process %s) died", worker.info.pid)
                self._drop([worker])
                if not answer.answered:
                    self._platform.kill_process(worker.info)  # the process may be suspended (SIGSTOP)

    def _drop(self, idle: Sequence[RemoteWorker]) -> None:
        for each in idle:
            lent = [loan for loan in self._loans if loan.worker == each and _take_out(self._loans, loan)]
            if lent or _take_out(self._ready, each):
                self.kill(each)

    def kill(self, worker: RemoteWorker) -> None:
        """Kill a worker and free its slot. The worker may be a standby worker or may have been taken out of standby."""
        self._check.unwatch([worker])
        worker.kill()
        self._slots.give_back(worker.slot)


def _take_out(items: list[T], item: T) -> bool:
    """Remove an item from a list. Return False if another thread has already removed it."""
    try:
        items.remove(item)
    except ValueError:
        return False
    return True
