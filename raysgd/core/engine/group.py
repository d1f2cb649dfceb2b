"""The worker group: starts workers, runs functions on them, finds the survivors of a failure, and stops the workers.

Failures of remote workers are returned as `Outcome`s, never raised. A start replaces workers that die before they are
connected. Nothing else is retried here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.cluster.keeper import CallNumber, KeptGroup
from raysgd.core.cluster.ray_cluster import note_processes
from raysgd.core.cluster.resources import explain
from raysgd.core.engine.gathering import Listener, OwnTime, outcomes_within, quiet_s, roll_call
from raysgd.core.engine.placement import Slots
from raysgd.core.engine.platform import LocalWorker, Platform, RemoteWorker, WorkerMethod, pack
from raysgd.core.engine.policies import (
    Diagnosis,
    LostNodes,
    assign_ranks,
    classify,
    emptied_nodes,
    rank_order,
    shard_keepers,
    words,
)
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import (
    Answered,
    Failed,
    GroupReport,
    Outcome,
    Rendezvous,
    StateHandover,
    Unanswered,
    WorkerInfo,
    World,
    hosts_of,
)
from raysgd.core.engine.standby import StandbyWorkers
from raysgd.core.engine.transfers import SharedValue, StoredPart, Transfer, together
from raysgd.core.engine.worker import LocalCall, WorkerProcess
from raysgd.core.sending import packed_bytes
from raysgd.exceptions import OnFailure, ReservationTimeoutError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LATE_S = 2.0  # how long `ask_beside` waits for answers by default
_POLL_S = 0.1
_STUCK_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class WorkerGroup:
    """A trainer's workers, ordered by rank. `start` may be called once. After `stop` or `kill`, no worker is left.

    Attributes:
        slots: The group's slots: reserved resources for one worker each.
        standby: Workers outside the group that are starting or ready to join.
        workers: The driver's handles to the workers, by rank. Unordered until `start` has assigned ranks.
        infos: Node, process and GPUs of each worker, by rank.
        worlds: The `World` of each rank: rank, size, local rank and so on.
        gone: Ranks that were removed since the group was formed.
        silent: Ranks that did not answer a poll in the last `settle` or in a later `answering`, although Ray did not
            report their death.
        stuck: Ranks that answered the poll in the last `settle` but did not finish the failed call in time. They may
            have finished that call since.
        on_wait: Called regularly while the driver waits for the workers. At first, it kills workers that freeze while
            they start.
    """

    def __init__(self, spec: GroupSpec, num_workers: int, platform: Platform | None = None) -> None:
        self._spec = spec
        self._platform = platform = platform or Platform()
        placed = {"packs": spec.packs, "within": spec.within, "words": spec.words}
        self.slots = Slots(partial(platform.make_reservation, spec.resources, **placed))
        self.standby = StandbyWorkers(spec, self.slots, platform)
        self.workers: list[LocalWorker | RemoteWorker] = []
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.stuck: set[int] = set()
        self.num_workers = num_workers
        self.on_wait: Callable[[], object] = lambda: self.standby.startup.poll(self.workers)
        self._unanswered: dict[int, Reference] = {}  # by rank: calls for which the last `_gather` got no answer
        self._listening: dict[LocalWorker | RemoteWorker, tuple[str, int]] = {}
        self._has_listened = False

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_ended(self) -> bool:
        """True while the group has no workers: before the group is started and after it is stopped."""
        return not self.workers

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks that run outside the driver process."""
        return [rank for rank, worker in enumerate(self.workers) if not worker.is_local]

    @property
    def is_driver_only(self) -> bool:
        """True if the driver process is the only worker. Such a group cannot lose a worker."""
        return len(self.workers) <= self._spec.use_local

    @property
    def is_on_one_node(self) -> bool:
        """True if all workers are on the same node."""
        return len({info.node_id for info in self.infos}) == 1

    @property
    def local_replica(self) -> Any:
        """The replica in the driver process, or None if all workers are remote."""
        worker = self.workers[0]
        return worker.replica if isinstance(worker, LocalWorker) else None

    # ------------------------------------------------------------------------------------------------ start

    def start(
        self,
        reservation_timeout_s: float | None = None,
        min_workers: int | None = None,
        num_spares: int | None = None,
    ) -> GroupReport:
        """Start the workers and connect them. If too few workers start, kill them and release the resources.

        If a worker dies before the replicas are built, a replacement is started, as long as replacements are left. This
        method waits for replacements only if too few workers are ready. Otherwise the replacements join later.

        Args:
            reservation_timeout_s: How long to wait until the resources are granted. Default: the spec's timeout.
            min_workers: Number of workers that must be left. Default: all workers.
            num_spares: Number of spare workers for which resources are reserved as well. Default: the spec's number.

        Returns:
            A report with what each replica's `setup` returned, or the report of the step that failed.

        Raises:
            ReservationTimeoutError: The resources were not granted in time.
            TrainerShutdownError: `kill_workers` was called.
        """
        spec, min_workers = self._spec, self.num_workers if min_workers is None else min_workers
        timeout_s = reservation_timeout_s or spec.reservation_timeout_s
        with OnFailure(self.kill):
            self._create_workers(spec.num_spares if num_spares is None else num_spares, timeout_s)
            report = self._make_ready(min_workers, timeout_s)
            if report.ok:
                # Ranks are assigned now, because they depend on the workers' nodes.
                for worker, info in zip(self.workers, report.values, strict=True):
                    worker.info = info
                order = rank_order(report.values, first_stays=spec.use_local)
                self.give_ranks([self.workers[index] for index in order])
                captures = spec.captures_after_calls
                report = self.without_lost(self._build(captures=captures), min_workers, captures=captures)
            if not report.ok:
                self.kill()
            return report

    def _create_workers(self, num_spares: int, timeout_s: float) -> None:
        """Reserve resources for the workers and spares, and start the worker processes."""
        spec, platform, slots, workers = self._spec, self._platform, self.slots, self.workers
        local = platform.new_local_worker(spec.connection) if spec.use_local else None
        if local is not None:
            workers.append(local)
        if self.num_workers == len(workers):
            return
        packed_bytes("What a worker is made of", (spec.make_replica, spec.initialization_hook))
        platform.ensure_running()
        # The driver gets a slot, too.
        num_slots, check = self.num_workers + num_spares, self.standby.check_wanted
        slots.reserve(num_slots, timeout_s, has_driver=spec.use_local, check=check)
        if local is not None:
            local.use_gpus(slots.take_slot().reservation.gpus_of_driver())
        for _ in range(len(workers), self.num_workers):
            workers.append(platform.new_worker(slots.take_slot(), spec.connection, spec.num_threads))
        check()

    def _make_ready(self, min_workers: int, timeout_s: float) -> GroupReport:
        """Run the user's initialization hook and import the framework in all workers. Replace workers that die.

        Return a report with the `WorkerInfo` of each ready worker, or the report of the failure.
        """
        standby, num_workers = self.standby, self.num_workers
        # A worker answers this call even while it runs the user's hook.
        placed = [worker.submit(WorkerProcess.describe) for worker in self.workers if isinstance(worker, RemoteWorker)]
        calls = self._submit(range(num_workers), WorkerProcess.prepare, self._spec.initialization_hook)
        if placed and not self.slots.are_own:
            self._await_placement(placed, timeout_s)
        report = self._gather(calls)
        while not report.ok:
            dead = {outcome.rank for outcome in report.outcomes if outcome.failure is not None}
            if classify(report).kind == "user":
                return report
            logger.warning("%s; continuing with the others", words(classify(report)))
            for index in dead:
                standby.kill(self.remote(index))
            standby.replace(len(dead), num_workers)
            calls = {index: call for index, call in calls.items() if index not in dead}
            if len(calls) + standby.num_all < min_workers:
                return report
            failed, report = report, self._gather(calls)
        joining = standby.take_needed(min_workers - len(calls), num_workers - len(calls), self.on_wait)
        if joining is None:
            standby.check_wanted()
            return failed
        self.workers = [*(self.workers[index] for index in calls), *joining]
        return GroupReport((*report.outcomes, *(Answered(-1, each.info) for each in joining)))

    def _await_placement(self, references: Sequence[Reference], timeout_s: float) -> None:
        """Wait until Ray has started all worker actors.

        The actors may have to wait for resources in an existing placement group.

        Raises:
            ReservationTimeoutError: Some actors were not started in time.
        """
        num_waiting = len(references) - len(self._platform.ready(references, timeout_s))
        if num_waiting:
            raise ReservationTimeoutError(
                f"{num_waiting} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + explain(self._spec.resources, len(references), self._platform.view())
            )

    def without_lost(self, report: GroupReport, min_workers: int, *, captures: bool = False) -> GroupReport:
        """If workers were lost while replicas were built or restored, form a group without these workers.

        The survivors' replicas are rebuilt, and standby workers that are ready replace the lost workers. If too few
        workers survive, wait for standby workers as long as any standby worker is starting.

        Args:
            report: The report of the call in which the replicas were built or restored.
            min_workers: Number of workers that must be left.
            captures: True to copy the replicas' state after `setup`.

        Returns:
            A report with what each replica's `setup` returned. If too few workers are left or user code failed, the
            report of the last failure. The group is then unusable.
        """
        standby = self.standby
        while self._spec.keeps_processes and not report.ok and not self.is_ended and classify(report).kind != "user":
            logger.warning("%s; continuing with the others", words(classify(report)))
            survivors = self.settle(report)
            lost = [rank for rank in range(len(self)) if rank not in survivors]
            if not lost:
                break
            self.remove_workers(lost)
            standby.replace(len(lost), len(self))
            joining = standby.take_needed(min_workers - len(survivors), len(lost), self.on_wait)
            if joining is None:
                break
            report = self.renew(survivors, joining, captures=captures)
        return report

    def _build(self, *, captures: bool) -> GroupReport:
        """Connect the ranks, and make each rank build its replica."""
        return self._connect(WorkerProcess.build, [(self._spec.make_replica, captures)] * len(self.workers))

    def _connect(self, method: Any, args: Sequence[tuple[Any, ...]]) -> GroupReport:
        """Make every rank listen on a port, then connect the ranks to each other.

        Args:
            method: The worker's method that connects. Takes the worker's `World`, the addresses of all ranks, and
                further arguments.
            args: The further arguments of each rank.

        Returns:
            The answers of `method`. If a rank could not listen, the report contains that rank's failure, and the other
            ranks count as unanswered.
        """
        hosts = hosts_of(self.infos)
        listening, self._listening = self._listening, {}
        addresses = {rank: listening[worker] for rank, worker in enumerate(self.workers) if worker in listening}
        # A driver that is the only worker need not listen. But if it has listened before, it must listen again, because
        # `open_endpoint` also makes a rank leave its old group.
        if self.is_driver_only and not self._has_listened:
            addresses.setdefault(0, (hosts[0], 0))
        opening = {rank: host for rank, host in enumerate(hosts) if addresses.get(rank, ("", 0))[0] != host}
        self._has_listened |= bool(opening)
        calls = {rank: self.workers[rank].submit(WorkerProcess.open_endpoint, host) for rank, host in opening.items()}
        opened = self._gather(calls)
        if not opened.ok:  # a rank cannot listen, so do not let any rank join
            failed = {outcome.rank: outcome for outcome in opened.outcomes if outcome.failure is not None}
            return GroupReport(tuple(failed.get(rank, Unanswered(rank)) for rank in range(len(hosts))))
        addresses |= {rank: (opening[rank], number) for rank, number in zip(opening, opened.values, strict=True)}
        rendezvous = Rendezvous(tuple(addresses[rank] for rank in range(len(hosts))), self.is_on_one_node)
        joining = zip(self.workers, self.worlds, args, strict=True)
        calls = {world.rank: worker.submit(method, world, rendezvous, *rest) for worker, world, rest in joining}
        return self._gather(calls)

    def give_ranks(self, workers: Sequence[LocalWorker | RemoteWorker]) -> None:
        """Set the group's workers. A worker's rank is its index in `workers`."""
        self.workers, self.infos = list(workers), [worker.info for worker in workers]
        note_processes(self.infos)
        self.worlds = assign_ranks(self.infos)
        self.num_workers, self.gone = len(self.workers), set()

    def ranks_of(self, workers: Collection[Any]) -> list[int]:
        """Return the ranks of these workers."""
        return [rank for rank, worker in enumerate(self.workers) if worker in workers]

    def of_ranks(self, ranks: Iterable[int]) -> frozenset[Any]:
        """Return the workers of these ranks."""
        return frozenset(self.workers[rank] for rank in ranks)

    def take_over(self, kept: KeptGroup) -> None:
        """Adopt the workers and slots that the trainer's previous process left behind."""
        self.give_ranks(kept.workers)
        self.slots.take_over(kept.slots, [worker.slot for worker in kept.workers])

    # ------------------------------------------------------------------------------------------------ calls

    def on_replica(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        *,
        capture: bool = False,
        landed: int | None = None,
        number: CallNumber | None = None,
        on_wait: Callable[[], None] | None = None,
        by_line: bool = False,
    ) -> GroupReport:
        """Run `function(replica, *args)` on the ranks in `args_by_rank` and gather the outcomes.

        Args:
            function: Called with the replica and the rank's arguments.
            args_by_rank: The arguments of each rank.
            capture: True to copy the training state after the call, for a snapshot.
            landed: Token of the newest snapshot that has arrived in the driver. Workers can discard their copy of this
                snapshot and older copies.
            number: Number of the call. A worker that receives the same number again repeats its reply without running
                the call.
            on_wait: Called regularly during the wait, instead of the group's `on_wait`.
            by_line: True to send the call over a Unix socket if possible, which is faster than a Ray call. See
                `call_lines`.
        """
        workers = self.workers
        # Keyed by the `id` of the arguments, because ranks often share one object.
        packed: dict[int, tuple[Any, ...]] = {}
        calls = {}
        # Pack all arguments before sending any of them, so that no rank has started if packing fails.
        for rank, args in args_by_rank.items():
            if not workers[rank].is_local and id(args) not in packed:
                packed[id(args)] = pack(function, capture, landed, args, number)
        for rank, args in args_by_rank.items():
            worker: Any = workers[rank]
            if worker.is_local:
                calls[rank] = worker.submit(WorkerProcess.on_replica, function, capture, landed, *args)
            else:
                ask = worker.ask if by_line else partial(worker.submit, WorkerProcess.on_packed)
                calls[rank] = ask(*packed[id(args)])
        return self._gather(calls, on_wait)

    def submit(self, rank: int, method: WorkerMethod[P], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call a method of the worker at a remote rank. Return Ray's reference to the result."""
        return self.remote(rank).submit(method, *args, **kwargs)

    def _submit(
        self, ranks: Iterable[int], method: WorkerMethod[P], *args: P.args, **kwargs: P.kwargs
    ) -> dict[int, Reference]:
        """Start a call of a worker method on `ranks`. Return the calls by rank."""
        return {rank: self.workers[rank].submit(method, *args, **kwargs) for rank in ranks}

    def remote(self, rank: int) -> RemoteWorker:
        """Return the handle to the worker at a remote rank."""
        worker = self.workers[rank]
        assert isinstance(worker, RemoteWorker), "the driver itself is no remote worker"
        return worker

    def _gather(self, calls: Mapping[int, Reference], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Wait for the answers to all calls. After the first failure, wait only until its cause is clear.

        See `Listener`.
        """
        if self.is_driver_only:
            self._unanswered = {}
            return GroupReport(tuple([call.run(rank) for rank, call in calls.items() if isinstance(call, LocalCall)]))
        remote = {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}
        local = {rank: call for rank, call in calls.items() if isinstance(call, LocalCall)}
        listener = Listener(remote, self._spec.keeps_survivors, self._platform)
        self._unanswered = remote  # stays set if Ctrl-C ends the wait
        listen = partial(listener.listen, on_wait or self.on_wait)
        outcomes = self._run_local(local, listener, listen) if local else listen()
        self._unanswered = {rank: remote[rank] for rank, outcome in outcomes.items() if not outcome.answered}
        self._spec.relay.tell({str(rank): outcome.notes for rank, outcome in sorted(outcomes.items())})
        return GroupReport(tuple(outcomes[rank] for rank in sorted(calls)))

    def _run_local(
        self, local: Mapping[int, LocalCall], listener: Listener, listen: Callable[[], dict[int, Outcome]]
    ) -> dict[int, Outcome]:
        """Run the call of the rank in this process, while another thread listens to the remote ranks.

        If a remote rank fails while the local rank waits for it in a collective, the local call would never return. In
        that case, the remote workers are killed. If survivors can be reused and no user code raised an exception, the
        ranks' collectives are interrupted first, and the workers are killed only if this does not help.

        Args:
            local: The call of the rank in this process, by rank.
            listener: Gathers the answers of the remote ranks.
            listen: Waits for these answers.

        Returns:
            The outcomes of all ranks, by rank.
        """
        answers: dict[int, Outcome] = {}
        is_local_done = self._platform.make_event()

        def must_kill() -> bool:
            if all(outcome.ok for outcome in answers.values()):
                return False
            own_time, left_s = OwnTime(self._platform.now), listener.left_s(answers)
            while own_time.look(_POLL_S) < left_s:
                if is_local_done.wait(_POLL_S):
                    return False
            if is_local_done.wait(0.0):
                return False
            kinds = {outcome.failure.kind for outcome in answers.values() if outcome.failure}
            if self._spec.keeps_survivors and "user" not in kinds:
                self.interrupt()
                return not is_local_done.wait(self._spec.settle_timeout_s)
            return True

        def listen_to_remote() -> None:
            answers.update(listen())
            if must_kill():
                self._kill_remote()  # this kills even ranks that have answered
                answers.update({rank: _of_killed(outcome) for rank, outcome in answers.items()})

        join = self._platform.begin_thread(listen_to_remote)
        outcomes: dict[int, Outcome] = {}
        try:
            outcomes |= {rank: call.run(rank) for rank, call in local.items()}
        finally:
            is_local_done.set()
            if not all(rank in outcomes and outcomes[rank].ok for rank in local):
                listener.stop([outcome.failure.kind for outcome in outcomes.values() if outcome.failure])
        # After an error, the group is killed, so the listening thread must stop using it.
        with OnFailure(listener.stop):
            join()
        return {**outcomes, **answers}

    # ------------------------------------------------------------------------------------------ during calls

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Run `function(replica, *args)` in the second thread of a rank, even while the rank runs a call.

        Returns:
            A `Transfer`, which receives the function's result.
        """
        return self._platform.transfer(self.submit_beside(rank, function, *args))

    def fetch(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Run `function(replica, *args)` in the third thread of a rank. Use this for functions with a large result.

        Sending a large result from the second thread would delay the rank's heartbeats.

        Returns:
            A `Transfer`, which receives the function's result.
        """
        return self._platform.transfer(self.workers[rank].submit(WorkerProcess.send, function, *args))

    def fetch_parts(self, function: Callable[..., Any], tokens: Sequence[Any]) -> Transfer:
        """Fetch a shard of the training state from each rank, and store copies that survive the loss of a node.

        A shard is copied to a partner rank on another node, or to the driver if there is no such partner.

        Args:
            function: Called on each rank as `function(replica, token)`. Returns the rank's shard.
            tokens: For each rank, the token that identifies its shard.

        Returns:
            A `Transfer`, which receives a `DividedValue` of all shards.
        """
        parts = [self.fetch(rank, function, token) for rank, token in enumerate(tokens)]
        keepers = shard_keepers(self.infos, self._platform.home)
        relays = {}
        for rank, keeper in keepers.items():
            arrival, copy = self.submit(keeper, WorkerProcess.relay, [parts[rank].reference])
            relays[rank] = self._platform.transfer(arrival), StoredPart(self.infos[keeper].node_id, copy)
        return together(parts, [info.node_id for info in self.infos], relays)

    def ask_beside(
        self,
        function: Callable[..., T],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float = _LATE_S,
    ) -> dict[int, T | None]:
        """Run `function(replica, *args)` in the second thread of `ranks`, even while the ranks run other calls.

        Args:
            function: Called with the replica and `args`.
            *args: Further arguments.
            ranks: The ranks to call. Default: all ranks.
            timeout_s: How long to wait for the answers.

        Returns:
            The answers that arrive in time, by rank. None for a rank that has no replica.
        """
        return self.ask_workers(WorkerProcess.beside, function, *args, ranks=ranks, timeout_s=timeout_s)

    def ask_workers(
        self, method: Any, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = _LATE_S
    ) -> dict[int, Any]:
        """Call a worker method that runs beside calls. Return what `ask_beside` returns."""
        calls = self._submit(range(len(self.workers)) if ranks is None else ranks, method, *args)
        remote = {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}
        outcomes = outcomes_within(self._platform, remote, timeout_s)
        outcomes |= {rank: call.run(rank) for rank, call in calls.items() if isinstance(call, LocalCall)}
        answers = {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Answered)}
        return {rank: answers.get(rank) for rank in calls if rank in answers or rank not in remote}

    def submit_beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Reference:
        """Start `function(replica, *args)` in the second thread of a rank, even while the rank runs a call.

        Return a reference to the remote call.
        """
        return self.workers[rank].submit(WorkerProcess.beside, function, *args)

    @property
    def is_cut_off(self) -> bool:
        """True if all ranks run outside the driver and Ray was stopped. Ray then no longer reports lost workers."""
        return self.local_replica is None and self._platform.is_head_gone()

    def store(self, value: Any) -> SharedValue:
        """Store one copy of a value in Ray's object store, from which the ranks of any group can read it.

        If the driver is the only worker, the value stays in this process.
        """
        return SharedValue(value, None) if self.is_driver_only else self._platform.store(value)

    def share(self, value: Any) -> list[Any]:
        """Return the argument with which to pass a value to each rank, by rank.

        For remote ranks, the argument is a reference to one stored copy. For a local rank, it is the value itself.
        """
        stored = value if isinstance(value, SharedValue) else SharedValue(value, None)
        if stored.reference is None:  # `store` does not use Ray's store if the driver is the only worker
            stored = self.store(stored.value)
        return [stored.value if worker.is_local else stored.reference for worker in self.workers]

    # --------------------------------------------------------------------------------------------- survivors

    def settle(self, report: GroupReport | None, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """After a failed call, find the ranks that survived and can be used again.

        Survivors may still be inside the failed call, waiting for lost ranks. This method interrupts them and waits
        until their calls have finished.

        Args:
            report: The outcomes of the failed call. None if the ranks may still run one, for example because the
                trainer's previous process started it.
            tell_stuck: Called once if a live rank takes long to finish the failed call.

        Returns:
            The ranks that can still be used.
        """
        if report is None:
            self.interrupt()
            self._unanswered = {**self._unanswered, **self._submit(self.remote_ranks, WorkerProcess.execute, _nothing)}
        unanswered, self._unanswered = self._unanswered, {}
        lost = {outcome.rank for outcome in report.outcomes if outcome.has_died} if report is not None else set()
        waiting = {rank: call for rank, call in unanswered.items() if rank not in lost}
        freed = self._interrupt(waiting)
        answers = self._roll_call(freed, len(self.workers) - len(lost) - len(freed))
        self.silent = {rank for rank, outcome in answers.items() if not outcome.answered}
        lost |= {rank for rank, outcome in answers.items() if not outcome.ok}
        lost |= self._let_finish({rank: call for rank, call in waiting.items() if rank not in lost}, tell_stuck)
        return [rank for rank in range(len(self.workers)) if rank not in lost]

    def answering(self, ranks: Sequence[int]) -> list[int]:
        """Poll ranks and return the ranks that answer. Add the ranks that do not answer to `silent`.

        Args:
            ranks: The ranks to poll. They may be running a call. A rank in the driver process counts as answering.
        """
        remote = set(self.remote_ranks)
        calls = self._submit([rank for rank in ranks if rank in remote], WorkerProcess.describe)
        answers = self._roll_call(calls, len(ranks) - len(calls))
        self.silent |= {rank for rank, outcome in answers.items() if not outcome.answered}
        return [rank for rank in ranks if rank not in answers or answers[rank].ok]

    def nodes_of(self, lost: Collection[int], infos: Sequence[WorkerInfo]) -> LostNodes | None:
        """Return a description of the nodes that lost all of their workers, if every lost rank was on such a node.

        Args:
            lost: Ranks whose workers were lost.
            infos: Node and process of each rank's worker, by rank, before the loss.

        Returns:
            The lost nodes. None if the node of a lost rank still has workers, or is the driver's node. Also None if
            each of the nodes lost only one worker and at least one of the nodes is alive.
        """
        emptied = emptied_nodes(lost, infos)
        # The driver's node cannot be lost, because this code runs on it.
        if not emptied or self._platform.home in emptied:
            return None
        addresses = tuple(emptied.values())
        if not self._platform.living_nodes() & emptied.keys():
            return LostNodes(addresses, are_dead=True)
        return LostNodes(addresses) if len(lost) > len(emptied) else None

    def _let_finish(self, calls: Mapping[int, Reference], tell_stuck: Callable[[], None]) -> set[int]:
        """Wait until the survivors' calls finish. Return the ranks that died or did not finish in time.

        Args:
            calls: The unfinished calls, by rank.
            tell_stuck: Called once if a call takes long to finish.
        """
        platform, timeout_s = self._platform, self._spec.settle_timeout_s
        patience_s = min(_STUCK_S, timeout_s / 2)
        outcomes = outcomes_within(platform, calls, patience_s)
        if not all(outcome.answered for outcome in outcomes.values()):
            tell_stuck()
            outcomes = outcomes_within(platform, calls, timeout_s - patience_s)
        self.stuck = {rank for rank, outcome in outcomes.items() if not outcome.answered}
        return self.stuck | {rank for rank, outcome in outcomes.items() if outcome.has_died}

    def _interrupt(self, ranks: Iterable[int]) -> dict[int, Reference]:
        """Interrupt the collectives of `ranks`.

        Return the remote ranks' calls of `interrupt`, without waiting for them.
        """
        calls = self._submit(ranks, WorkerProcess.interrupt)
        for rank, call in [*calls.items()]:
            if isinstance(call, LocalCall):
                del calls[rank]
                call.run(rank)
        return calls

    def _roll_call(self, references: Mapping[int, Reference], num_others: int) -> dict[int, Outcome]:
        heartbeat_s = self._spec.heartbeat_s
        # Once Ray was stopped, frozen workers stay frozen, and Ray ends this process after a minute.
        patience_s = quiet_s(heartbeat_s) if self.is_cut_off else heartbeat_s
        return roll_call(self._platform, references, num_others, patience_s)

    def tear_down(self, survivors: Sequence[int]) -> GroupReport:
        """Make the survivors leave their group. Return a report with each survivor's progress.

        The survivors also start to listen for the ranks of the next group, which saves a round trip later. The ports
        can be used only if the next group listens at the same host addresses, for example if no other worker joins.

        Args:
            survivors: The ranks that leave.
        """
        hosts = dict(zip(survivors, hosts_of([self.infos[rank] for rank in survivors]), strict=True))
        calls = {rank: self.workers[rank].submit(WorkerProcess.leave_group, host) for rank, host in hosts.items()}
        report = self._gather(calls)
        ports = {each.rank: each.value[1] for each in report.outcomes if isinstance(each, Answered)}
        self._listening = {self.workers[rank]: (hosts[rank], port) for rank, port in ports.items()}
        return GroupReport(
            tuple(replace(o, value=o.value[0]) if isinstance(o, Answered) else o for o in report.outcomes)
        )

    def remove_workers(self, ranks: Sequence[int]) -> None:
        """Kill the workers of these ranks, dead or alive, and free their slots."""
        for rank in ranks:
            if rank in self.silent or rank in self.stuck:
                self.kill_rank(rank)
            self.standby.kill(self.remote(rank))
        self.silent.clear()
        self.stuck.clear()
        self.gone |= set(ranks)

    def regroup(
        self,
        survivors: Sequence[int],
        joining: Sequence[RemoteWorker],
        handover: StateHandover,
        places: Sequence[int] = (),
    ) -> GroupReport:
        """Form a new group of survivors and joining workers.

        Args:
            survivors: Ranks in the old group. They have already left that group.
            joining: Workers taken from `standby`.
            handover: Which new rank sends the training state, and which new ranks receive it.
            places: Each worker's new rank, first for the survivors, then for the joining workers. Default: 0, 1, 2 and
                so on.

        Returns:
            A report with what each replica's `regroup` returned, or a report with the failure. After a failure, the
            group cannot run calls until it is formed again.
        """
        workers = [*(self.workers[rank] for rank in survivors), *joining]
        order = sorted(range(len(workers)), key=places.__getitem__) if places else range(len(workers))
        self.give_ranks([workers[index] for index in order])
        handover = handover.by_node(self.worlds)
        to_new, new = replace(handover, make_replica=self._spec.make_replica), set(joining)
        handovers = [(to_new if worker in new else handover,) for worker in self.workers]
        return self._connect(WorkerProcess.regroup, handovers)

    def renew(
        self, survivors: Sequence[int], joining: Sequence[RemoteWorker], *, captures: bool = False
    ) -> GroupReport:
        """Form a new group like `regroup`, but rebuild the replica in every process, without any training state.

        Args:
            survivors: Ranks in the old group. They have already left that group.
            joining: Workers taken from `standby`.
            captures: True to copy the replicas' state after `setup`.

        Returns:
            A report with what each replica's `setup` returned, or a report with the failure. After a failure, the group
            cannot run calls until it is formed again.
        """
        self.give_ranks([*(self.workers[rank] for rank in survivors), *joining])
        return self._build(captures=captures)

    # ------------------------------------------------------------------------------------------------- end

    def interrupt(self) -> None:
        """Interrupt the collectives of all ranks. Afterwards, the group cannot run calls until it is formed again."""
        self._interrupt(range(len(self.workers)))

    def kill_rank(self, rank: int) -> None:
        """Kill a worker that no longer answers, even if its process is suspended (SIGSTOP)."""
        self.workers[rank].kill()
        self._platform.kill_process(self.infos[rank])

    def kill_workers(self) -> None:
        """Kill the workers. A thread that is starting the group or waiting for a call then returns.

        Call this from a different thread.
        """
        self.standby.cancel()
        self._kill_remote()

    def _kill_remote(self) -> None:
        """Kill the remote workers and interrupt the local worker, which may be waiting for them.

        Callable from any thread.
        """
        for worker in tuple(self.workers):
            if isinstance(worker, RemoteWorker):
                worker.kill()
            else:
                worker.interrupt()

    def stop(self, timeout_s: float) -> None:
        """Close every replica, then kill the processes and release the resources.

        Args:
            timeout_s: How long to wait until the resources are released, in seconds. Closing has a separate timeout.
        """
        try:
            remote = self._submit(self.remote_ranks, WorkerProcess.close)
            for worker in self.workers:
                if isinstance(worker, LocalWorker):
                    worker.kill()
            if remote and self._platform.is_running:
                outcomes = outcomes_within(self._platform, remote, _CLOSE_TIMEOUT_S).values()
                num_left = sum(not each.answered for each in outcomes)
                if num_left:
                    logger.warning("%s workers did not stop within %s s; killing them", num_left, _CLOSE_TIMEOUT_S)
                for each in outcomes:
                    if each.failure is not None:
                        logger.debug("a worker failed to close: %s", each.failure.fault.message)
        finally:
            self.kill(timeout_s)

    def kill(self, timeout_s: float = 5.0) -> None:
        """Kill the remote workers without closing their replicas, and release the resources.

        A replica in the driver process is closed, because the driver stays alive. This method may be called at any
        time, even during a start, and more than once.

        Args:
            timeout_s: How long to wait until the resources are released, in seconds.
        """
        try:
            self.standby.kill_all()
            workers, self.workers = self.workers, []
            for worker in sorted(workers, key=lambda w: w.is_local):  # remote first: the local worker may wait for them
                worker.kill()
        finally:
            self.slots.close(timeout_s)


def _of_killed(outcome: Outcome) -> Outcome:
    """Return the outcome of a call whose worker was then killed. A failure is kept, because it may be the cause."""
    return replace(outcome, answered=False) if isinstance(outcome, Failed) else Unanswered(outcome.rank)


def _nothing() -> None:
    """Do nothing. A worker runs this function after its current call.

    The answer shows that the current call has ended.
    """


class GroupHooks:
    """Callbacks that notify a front end, such as `TorchTrainer`, when a worker group starts, changes or ends.

    These callbacks (hooks) run in the driver. A hook may use the group that it receives. It must not call the
    controller, because the controller is waiting for the hook. By default, hooks do nothing.
    """

    def on_start(self, group: WorkerGroup) -> GroupReport | None:
        """Called after the workers have started and connected, before any call.

        Returns:
            None, or the report of a call in which a worker died. The start then fails.
        """
        return None

    def on_change(self, group: WorkerGroup) -> None:
        """Called after the group's members or ranks changed without a restart. Workers that stay keep their state."""

    def on_failure(self, diagnosis: Diagnosis) -> None:
        """Called after a call has failed, before all workers restart."""

    def on_stop(self, group: WorkerGroup) -> None:
        """Called after `on_end` and before the replicas are closed. Not called if the workers are killed."""

    def on_end(self, group: WorkerGroup) -> None:
        """Called before the workers are stopped or killed, from any thread, and perhaps more than once per group."""
