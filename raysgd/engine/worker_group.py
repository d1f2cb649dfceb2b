"""All workers as one: start them, run a function on all or some, stop them.

Faults of remote workers come back as `Outcome`s; they are never raised from here, and nothing is retried here.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine import ranks
from raysgd.engine.gathering import CallPoller, Listener, RayPoller, grace_s, roll_call
from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.local_worker import LocalCall, LocalWorker
from raysgd.engine.slots import Slots
from raysgd.engine.standby import StandbyWorker, StandbyWorkers, StartupCheck
from raysgd.engine.types import GroupReport, Handover, Outcome, Rendezvous, WorkerInfo, World, hosts_of
from raysgd.engine.worker import RemoteWorker, notes_of, pack, packed_bytes
from raysgd.exceptions import ReservationTimeoutError, TrainerShutdownError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_STUCK_S = 5.0
_POLL_S = 0.1
_LATE_S = 2.0  # who has not answered within this is not asked; nobody is ended for it


class WorkerGroup:
    """A started set of workers, in rank order. Made by `start` only; `stop` is final.

    Args:
        spec: What it is started from.
        num_workers: How many.
        poller: Hears what remote workers answer.
    """

    def __init__(self, spec: GroupSpec, num_workers: int, poller: CallPoller | None = None) -> None:
        self._spec = spec
        self._poller = poller or RayPoller()
        self._slots = Slots(spec.resources, spec.packs, spec.within)
        self.standby = StandbyWorkers(spec, self._slots)
        self._workers: list[LocalWorker | RemoteWorker] = []
        self._unanswered: dict[int, Any] = {}
        self._startup: StartupCheck | None = None  # while it starts
        self._is_abandoned = False
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []
        self.silent: set[int] = set()  # ranks that at the last `settle` neither answered nor were known to be dead
        self.gone: set[int] = set()  # ranks that were let go, until a new group is formed
        self.num_workers = num_workers
        self.num_spares = spec.num_spares

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_ended(self) -> bool:
        """Whether there are no processes, any more or yet."""
        return not self._workers

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, reservation_timeout_s: float | None = None) -> GroupReport:
        """Reserves, creates, connects and builds. On anything but success nothing is left behind.

        Returns:
            The replicas' set-up answers; or the report of the step that failed.

        Raises:
            ReservationTimeoutError: When the resources were not granted in time.
        """
        self._startup = StartupCheck(self._spec.heartbeat_s)
        try:
            report = self._start(reservation_timeout_s or self._spec.reservation_timeout_s)
        except BaseException:
            self.kill()
            raise
        finally:
            self._startup = None
        if not report.ok:
            self.kill()
        return report

    def _start(self, timeout_s: float) -> GroupReport:
        self._create(timeout_s)
        report = self._prepare(timeout_s)
        if not report.ok:
            return report
        self._give_ranks(report.values)
        opened = self._open_endpoints()
        if not opened.ok:
            return opened
        rendezvous = self._rendezvous(opened)
        capture = self._spec.captures
        return self._gather(
            {
                rank: worker.submit("build", self.worlds[rank], rendezvous, self._spec.make_replica, capture)
                for rank, worker in enumerate(self._workers)
            }
        )

    def _open_endpoints(self, on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Lets every rank listen for the others; it answers where."""
        hosts = enumerate(hosts_of(self.infos))
        return self._gather(
            {rank: self._workers[rank].submit("open_endpoint", host, rank) for rank, host in hosts}, on_wait
        )

    def _rendezvous(self, opened: GroupReport) -> Rendezvous:
        """Where all listen, to be handed round."""
        addresses = zip(hosts_of(self.infos), opened.values, strict=True)
        return Rendezvous(tuple(addresses), self.is_on_one_node)

    def _give_ranks(self, infos: Sequence[WorkerInfo]) -> None:
        """Puts the workers into the order of their ranks: now that all are there, it is known where they are."""
        order = ranks.in_order(infos, first_stays=self._spec.use_local)
        self._workers = [self._workers[index] for index in order]
        self.infos = [infos[index] for index in order]
        self.worlds = ranks.assign(self.infos)

    def _create(self, timeout_s: float) -> None:
        spec = self._spec
        if spec.use_local:
            self._workers.append(LocalWorker(copy.deepcopy(spec.backend)))  # the one of the spec is sent to others
        if self.num_workers == len(self._workers):
            return
        from raysgd.engine import resources

        packed_bytes("What a worker is made of", (spec.make_replica, spec.initialization_hook))
        resources.ensure_ray()
        # The driver's share is held too.
        self._slots.reserve(
            self.num_workers + self.num_spares, timeout_s, has_driver=spec.use_local, check=self._check_wanted
        )
        slot_of_driver = self._slots.take() if spec.use_local else None
        for _ in range(len(self._workers), self.num_workers):
            worker = RemoteWorker(self._slots.take(), spec.backend, spec.num_threads)
            self._workers.append(worker)
            if self._startup is not None:
                self._startup.add(worker)
        self._check_wanted()
        if slot_of_driver is not None:
            spec.backend.use_gpus(slot_of_driver.reservation.gpus_of_driver())  # after the others were sent theirs

    def _prepare(self, timeout_s: float) -> GroupReport:
        remote = [worker for worker in self._workers if isinstance(worker, RemoteWorker)]
        placed = [worker.submit("describe") for worker in remote]  # beside the user's hook, whatever it takes
        calls = {
            index: worker.submit("prepare", self._spec.initialization_hook)
            for index, worker in enumerate(self._workers)
        }
        if placed and not self._slots.are_own:
            self._await_placement(placed, timeout_s)
        return self._gather(calls)

    def _await_placement(self, references: list[Any], timeout_s: float) -> None:
        """Inside somebody else's placement group the actors themselves may have to wait for room: not for ever."""
        import ray

        _, waiting = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        if waiting:
            from raysgd.engine import resources

            raise ReservationTimeoutError(
                f"{len(waiting)} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + resources.explain(self._spec.resources, len(references), resources.cluster_view())
            )

    # ---------------------------------------------------------------------------------------------- calling

    def on_replica(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        *,
        capture: bool = False,
        landed: int | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> GroupReport:
        """Runs `function(replica, *args)` on the ranks named in `args_by_rank` and gathers the answers."""
        packed: dict[int, tuple[Any, ...]] = {}  # by identity of the arguments: most calls say the same to every rank
        calls = {}
        for rank, args in args_by_rank.items():  # all before the first is sent: no rank begins what others cannot join
            if not self._workers[rank].is_local and id(args) not in packed:
                packed[id(args)] = pack(function, capture, landed, args)
        for rank, args in args_by_rank.items():
            worker = self._workers[rank]
            if worker.is_local:
                calls[rank] = worker.submit("on_replica", function, capture, landed, *args)
            else:
                calls[rank] = worker.submit("on_packed", *packed[id(args)])
        return self._gather(calls, on_wait)

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(replica, *args)` on a rank that may be busy. Returns a transfer with `result(timeout_s)`."""
        return self._transfer(rank, "beside", function, *args)

    def fetch(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Does what `beside` does, for what may be gigabytes. A sign of life never waits until they have left."""
        return self._transfer(rank, "send", function, *args)

    def _transfer(self, rank: int, method: str, *args: Any) -> Any:
        call = self._workers[rank].submit(method, *args)
        return _Done(call.function()) if isinstance(call, LocalCall) else _Reference(call)

    def store(self, value: Any) -> Stored:
        """Puts `value` where all ranks can take it from, once, whatever the group will look like then."""
        if self.is_driver_only:
            return Stored(value, None)
        import ray

        reference = ray.put(value)
        return Stored(ray.get(reference), reference)

    def share(self, value: Any) -> list[Any]:
        """`value`, stored already or not, as an argument for each rank: remote ranks share one copy."""
        stored = value if isinstance(value, Stored) else self.store(value)
        return [stored.value if worker.is_local else stored.reference for worker in self._workers]

    @property
    def is_driver_only(self) -> bool:
        """Whether the only worker is the driver itself, so that no worker can be lost."""
        return not self.remote_ranks

    @property
    def is_on_one_node(self) -> bool:
        """Whether all workers are on the same node."""
        return len({info.node_id for info in self.infos}) == 1

    @property
    def num_slots(self) -> int:
        """For how many workers there is reserved room, taken or not."""
        return len(self._slots)

    @property
    def local_replica(self) -> Any:
        """The replica in the driver; None when all workers are remote."""
        worker = self._workers[0]
        return worker.replica if isinstance(worker, LocalWorker) else None

    # ---------------------------------------------------------------------------------------------- regrouping

    def settle(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """After a failed call: frees the ranks that wait for lost ones, and returns those that can be counted on.

        Args:
            report: What is known of the call.
            tell_stuck: Called once if a rank that lives takes long to come to an end with what it does.
        """
        lost = {found.rank for found in report.outcomes if _has_died(found)}
        waiting = {rank: call for rank, call in self._unanswered.items() if rank not in lost}
        self._unanswered = {}
        answers = self._free(waiting, len(self._workers) - len(lost) - len(waiting))
        self.silent = {rank for rank, found in answers.items() if not found.answered}
        lost |= {rank for rank, found in answers.items() if not found.ok}
        freed = {rank: call for rank, call in waiting.items() if rank not in lost}
        lost |= self._let_finish(freed, tell_stuck)
        return [rank for rank in range(len(self._workers)) if rank not in lost]

    def _let_finish(self, calls: Mapping[int, Any], tell_stuck: Callable[[], None]) -> set[int]:
        """Waits until these calls of survivors have come to an end; returns those that do not, or are dead."""
        timeout_s, began, has_told = self._spec.settle_timeout_s, self._poller.now(), False
        while calls and (waited_s := self._poller.now() - began) < timeout_s:
            if len(self._poller.ready(calls.values(), _POLL_S)) == len(calls):
                break
            if not has_told and waited_s > min(_STUCK_S, timeout_s / 2):
                tell_stuck()
                has_told = True
        outcomes = [self._poller.outcome(rank, call) for rank, call in calls.items()]
        return {found.rank for found in outcomes if not found.answered or _has_died(found)}

    def _free(self, waiting: Collection[int], num_others: int) -> dict[int, Outcome]:
        """Ends what these ranks wait for; returns what the remote ones say to that, while so many others are alive."""
        remote = self._interrupt(waiting)
        return self._roll_call(remote, num_others + len(waiting) - len(remote))

    def _interrupt(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Ends what these ranks wait for, without waiting for that; returns the calls of the remote ones."""
        calls = {rank: self._workers[rank].submit("interrupt") for rank in ranks}
        for call in calls.values():
            if isinstance(call, LocalCall):
                call.run()
        return {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}

    def _roll_call(self, references: Mapping[int, Any], num_others: int) -> dict[int, Outcome]:
        return roll_call(self._poller, references, num_others, self._spec.heartbeat_s)

    def leave_group(self, survivors: Sequence[int], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Lets the survivors leave their group. Each tells how far it is."""
        calls = {rank: self._workers[rank].submit("leave_group") for rank in survivors}
        return self._gather(calls, on_wait)

    def answering(self, ranks: Sequence[int]) -> list[int]:
        """Of these ranks, which do nothing, those that live and answer; who does neither is noted as silent."""
        calls = {}
        for rank in ranks:
            worker = self._workers[rank]
            if isinstance(worker, RemoteWorker):
                calls[rank] = worker.submit("describe")
        answers = self._roll_call(calls, len(ranks) - len(calls))
        self.silent |= {rank for rank, found in answers.items() if not found.answered}
        return [rank for rank in ranks if rank not in answers or answers[rank].ok]

    def let_go(self, leaving: Sequence[int]) -> None:
        """Ends the workers of these ranks, dead or alive; their slots are free for others."""
        for rank in leaving:
            worker = self._workers[rank]
            assert isinstance(worker, RemoteWorker), "the driver cannot leave its own group"
            if rank in self.silent:
                self.kill_rank(rank)
            else:
                worker.kill()
            self._slots.give_back(worker.slot)
        self.silent = set()
        self.gone |= set(leaving)

    def regroup(
        self,
        survivors: Sequence[int],
        joining: Sequence[StandbyWorker],
        handover: Handover,
        on_wait: Callable[[], None] | None = None,
    ) -> GroupReport:
        """Forms a new group of the `survivors`, in this order, and those that join them.

        Args:
            survivors: Ranks in the old group, which have left it.
            joining: Workers from `standby`.
            handover: Whose state the others take over, by new rank.
            on_wait: Called now and then while it waits.

        Returns:
            The replicas' facts. On anything but success the group cannot be used any more.
        """
        self._workers = [self._workers[rank] for rank in survivors] + [each.worker for each in joining]
        self.infos = [self.infos[rank] for rank in survivors] + [each.info for each in joining]
        self.worlds = ranks.assign(self.infos)
        self.num_workers, self.gone = len(self._workers), set()
        opened = self._open_endpoints(on_wait)
        if not opened.ok:
            return opened
        rendezvous = self._rendezvous(opened)
        return self._gather(
            {
                rank: worker.submit("regroup", self.worlds[rank], rendezvous, handover)
                for rank, worker in enumerate(self._workers)
            },
            on_wait,
        )

    def start_standby(self, count: int, world_size: int, avoid: frozenset[str] = frozenset()) -> int:
        """Begins to make up to `count` more workers ready where there is reserved room; returns for how many there is.

        Args:
            count: How many are wanted beside those that are coming or ready.
            world_size: The size of the group that they are meant for.
            avoid: Nodes that are lost, as far as we know, or going away.
        """
        self.standby.avoid(avoid)
        slots = self._slots.take_usable(count, avoid)
        self.standby.start_standby(slots, world_size)
        return len(slots)

    def reserve(self, count: int, timeout_s: float) -> None:
        """Reserves room for more workers; raises `ReservationTimeoutError` if that is not granted in time."""
        self._slots.reserve(count, timeout_s, check=self._check_wanted)

    def ask_beside(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = _LATE_S
    ) -> dict[int, Any]:
        """What ranks (all, unless said) answer to `method` beside their work; without those that are late."""
        asked = range(len(self._workers)) if ranks is None else ranks
        calls = {rank: self._workers[rank].submit(method, *args) for rank in asked}
        remote = {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}
        answers = {rank: found.value for rank, found in self._within(remote, timeout_s).items() if found.ok}
        answers.update({rank: call.run()[0] for rank, call in calls.items() if isinstance(call, LocalCall)})
        return answers

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Starts a method of a remote rank's worker; returns Ray's reference to its result."""
        worker = self._workers[rank]
        assert isinstance(worker, RemoteWorker), "the worker in the driver has no references"
        return worker.submit(method, *args, **kwargs)

    def submit_beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Asks a remote rank beside its work; returns the call, for `poll`."""
        return self._workers[rank].submit("beside", function, *args)

    def poll(self, rank: int, call: Any) -> Outcome:
        """What became of a call by `submit_beside`, as of now."""
        return self._poller.outcome(rank, call)

    def kill_rank(self, rank: int) -> None:
        """Ends a worker that does not answer any more, in a way that reaches a stopped process too."""
        from raysgd.engine import resources

        self._workers[rank].kill()
        resources.kill_process(self.infos[rank])

    def _within(self, references: Mapping[int, Any], timeout_s: float) -> dict[int, Outcome]:
        if references:
            self._poller.ready(references.values(), timeout_s)
        return {rank: self._poller.outcome(rank, reference) for rank, reference in references.items()}

    # ---------------------------------------------------------------------------------------------- stopping

    def abandon(self) -> None:
        """From another thread than the one that starts or uses the group: lets that one come to an end, and kill it."""
        self._is_abandoned = True
        self._end_remote()

    def _check_wanted(self) -> None:
        if self._is_abandoned:
            raise TrainerShutdownError("The trainer was shut down while its workers were started.")

    def stop(self, timeout_s: float) -> None:
        """Lets every worker close what it has, then ends the processes and gives the resources back."""
        try:
            self._close_all()
        finally:
            self.kill(timeout_s)

    def _close_all(self) -> None:
        remote = [worker.submit("close") for worker in self._workers if isinstance(worker, RemoteWorker)]
        for worker in self._workers:
            if isinstance(worker, LocalWorker):
                worker.kill()
        if not remote:
            return
        import ray

        if not ray.is_initialized():
            return
        done, waiting = ray.wait(remote, num_returns=len(remote), timeout=_CLOSE_TIMEOUT_S)
        if waiting:
            logger.warning("%s workers did not stop within %s s; killing them", len(waiting), _CLOSE_TIMEOUT_S)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.debug("a worker failed to close: %s", error)

    def kill(self, timeout_s: float = 5.0) -> None:
        """Ends the processes at once and gives the resources back. Safe at any time, also half-started or twice."""
        workers, self._workers = self._workers, []
        try:
            self.standby.kill_all()
            for worker in sorted(workers, key=lambda w: w.is_local):  # remote first: a local one may wait for them
                worker.kill()
        finally:
            self._slots.release(timeout_s)

    # ---------------------------------------------------------------------------------------------- gathering

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks that are not the driver itself."""
        return [rank for rank, worker in enumerate(self._workers) if not worker.is_local]

    def _gather(self, calls: Mapping[int, Any], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Waits for all answers; after the first failure, only as long as it takes to see what belongs to it."""
        if on_wait is None and self._startup is not None:
            on_wait = self._startup.poll
        local = {rank: call for rank, call in calls.items() if isinstance(call, LocalCall)}
        remote = {rank: call for rank, call in calls.items() if rank not in local}
        if local:
            outcomes = self._gather_both(local, remote, on_wait)
        else:
            outcomes = Listener(remote, self._spec.regroups).listen(on_wait)
        self._unanswered = {rank: remote[rank] for rank, found in outcomes.items() if not found.answered}
        self._spec.relay.tell({str(rank): notes_of(found) for rank, found in sorted(outcomes.items())})
        return GroupReport(tuple(_ranked(outcomes[rank]) for rank in sorted(calls)))

    def _gather_both(
        self, local: Mapping[int, LocalCall], remote: Mapping[int, Any], on_wait: Callable[[], None] | None
    ) -> dict[int, Outcome]:
        """The local call runs here while a thread listens to the remote ones.

        The local rank may be waiting for a remote one that failed. Nothing but the end of the others frees it.
        """
        listener = Listener(remote, self._spec.regroups)
        polled: dict[int, Outcome] = {}
        is_local_done = threading.Event()

        def listen() -> None:
            polled.update(listener.listen(on_wait))
            if all(found.ok for found in polled.values()):
                return
            kinds: set[str] = {found.failure.kind for found in polled.values() if found.failure}
            if is_local_done.wait(grace_s(kinds)):
                return
            if self._spec.regroups and "user" not in kinds:
                self._interrupt(range(len(self._workers)))
                if is_local_done.wait(self._spec.settle_timeout_s):
                    return
            polled.update(self._kill_remote(polled))

        thread = threading.Thread(target=listen, name="raysgd-listener", daemon=True)
        if remote:
            thread.start()
        outcomes = {}
        try:
            for rank, call in local.items():
                value, failure = call.run()
                outcomes[rank] = Outcome(rank, value, failure)
        finally:
            is_local_done.set()
            if not all(rank in outcomes and outcomes[rank].ok for rank in local):
                listener.abandon()
        if remote:
            thread.join()
        return {**outcomes, **polled}

    def _kill_remote(self, polled: Mapping[int, Outcome]) -> dict[int, Outcome]:
        """Ends the remote processes; whatever they answered before, nobody can count on them any more."""
        self._end_remote()
        return {rank: replace(found, answered=False) for rank, found in polled.items()}

    def _end_remote(self) -> None:
        for worker in tuple(self._workers):
            if isinstance(worker, RemoteWorker):
                worker.kill()
            else:
                worker.interrupt()


def _has_died(found: Outcome) -> bool:
    return found.failure is not None and found.failure.kind == "died"


def _ranked(found: Outcome) -> Outcome:
    """With the rank filled in where the worker did not know its own yet."""
    failure = found.failure
    if failure is None or failure.fault.rank >= 0:
        return found
    return replace(found, failure=replace(failure, fault=replace(failure.fault, rank=found.rank)))


@dataclass(frozen=True)
class Stored:
    """A value for all ranks.

    Attributes:
        value: The value; where there are remote ranks, as it lies in the object store of the driver's node.
        reference: Ray's reference to it.
    """

    value: Any
    reference: Any


class Storing:
    """A value that a thread of the driver puts into the store, beside whatever comes next; a `Transfer`.

    Args:
        group: Whose store.
        make: Makes the value, in that thread.
    """

    def __init__(self, group: WorkerGroup, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._group, self._make = group, make
        self._stored: Future[Any] = Future()
        threading.Thread(target=self._store, name="raysgd-storing", daemon=True).start()

    def result(self, timeout_s: float | None) -> Any:
        """The value as it lies in the store.

        Raises:
            TimeoutError: It is not there yet.
        """
        try:
            return self._stored.result(timeout_s)
        except FutureTimeoutError:  # in Python 3.10 not the class that everybody else means
            raise TimeoutError from None

    def _store(self) -> None:
        try:
            with self._make() as value:
                stored = self._group.store(value)
        except BaseException as error:
            self._stored.set_exception(error)
        else:
            self._stored.set_result(stored.value)


@dataclass(frozen=True)
class _Done:
    """A transfer that needed no travel."""

    value: Any

    def result(self, timeout_s: float | None) -> Any:
        return self.value


@dataclass(frozen=True)
class _Reference:
    """A transfer through Ray's object store. Holding on to the value keeps it in the store of the driver's node."""

    reference: Any

    def result(self, timeout_s: float | None) -> Any:
        import ray

        try:
            return ray.get(self.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("still on its way") from error
