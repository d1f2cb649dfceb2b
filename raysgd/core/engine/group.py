"""The worker group: starts its workers, runs functions on them, finds the survivors of a failure, and stops.

Failures of remote workers are returned as `Outcome`s, never raised, and nothing is retried here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.core.engine import ranks as rank_rules
from raysgd.core.engine.gathering import Listener, await_all, roll_call
from raysgd.core.engine.keeper import CallNumber, KeptGroup
from raysgd.core.engine.liveness import OwnTime
from raysgd.core.engine.placement import Slots, cluster_view, explain, note_processes
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.policies import Diagnosis, LostNodes, classify, emptied_nodes, words
from raysgd.core.engine.shared.group_spec import GroupSpec
from raysgd.core.engine.shared.types import GroupReport, Outcome, Rendezvous, StateHandover, WorkerInfo, World, hosts_of
from raysgd.core.engine.startup import StandbyWorker, StandbyWorkers, StartupCheck
from raysgd.core.engine.transfers import SharedValue, StoredPart, Transfer, together
from raysgd.core.engine.worker import LocalCall, LocalWorker, RemoteWorker, notes_of, pack, packed_bytes, with_rank
from raysgd.exceptions import OnFailure, ReservationTimeoutError, TrainerShutdownError

logger = logging.getLogger(__name__)

_LATE_S = 2.0  # ranks that take longer to answer are left out, but not killed
_POLL_S = 0.1
_STUCK_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class WorkerGroup:
    """A set of workers, in rank order. Started once with `start`; `stop` and `kill` are final.

    Attributes:
        slots: Its places in the cluster.
        standby: Its standby workers.
        workers: The driver's handles, by rank. During the start, in no order yet.
        infos: Node, process and GPUs of each worker, by rank.
        worlds: The place of each rank among the others.
        gone: Ranks that were removed since the group was formed.
        silent: Ranks that did not answer in the last `settle` and were not known to be dead.
        stuck: Ranks that answered in the last `settle` but did not finish their work. They may have finished since.
    """

    def __init__(self, spec: GroupSpec, num_workers: int, platform: Platform | None = None) -> None:
        self._spec = spec
        self._platform = platform = platform or Platform()
        placed = {"packs": spec.packs, "within": spec.within, "words": spec.words}
        self.slots = Slots(partial(platform.make_reservation, spec.resources, **placed))
        self.standby = StandbyWorkers(spec, self.slots, platform)
        self._startup = StartupCheck(platform, spec.heartbeat_s)
        self._is_cancelled = False
        self.workers: list[LocalWorker | RemoteWorker] = []
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.stuck: set[int] = set()
        self.num_workers = num_workers
        self.num_spares = spec.num_spares
        self._unanswered: dict[int, Any] = {}  # of the last calls that were gathered
        self._listening: dict[Any, tuple[str, int]] = {}
        self._has_listened = False

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_ended(self) -> bool:
        """True if there are no processes, before the start or after the end."""
        return not self.workers

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks that are not in the driver."""
        return [rank for rank, worker in enumerate(self.workers) if not worker.is_local]

    @property
    def is_driver_only(self) -> bool:
        """True if the only worker is the driver itself, so that no worker can be lost."""
        return len(self.workers) <= self._spec.use_local

    @property
    def is_on_one_node(self) -> bool:
        """True if all workers are on the same node."""
        return len({info.node_id for info in self.infos}) == 1

    @property
    def local_replica(self) -> Any:
        """The replica in the driver; None if all workers are remote."""
        worker = self.workers[0]
        return worker.replica if isinstance(worker, LocalWorker) else None

    # ------------------------------------------------------------------------------------------------ start

    def start(self, reservation_timeout_s: float | None = None, min_workers: int | None = None) -> GroupReport:
        """Start the workers and connect them. If too few start, everything is cleaned up.

        Workers that die before they are connected are left out if enough others are ready. Replacements are started as
        far as allowed. The start waits for them only if too few workers are ready; otherwise they step in later.

        Args:
            reservation_timeout_s: How long to wait for room. By default, as in the spec.
            min_workers: How many workers have to be ready before they are connected. By default, all.

        Returns:
            The answers of the replicas' `setup`, or the report of the step that failed. If that was connecting or a
            later step, `renew` may continue with the workers that are alive.

        Raises:
            ReservationTimeoutError: The resources were not granted in time.
            TrainerShutdownError: After `kill_workers`.
        """
        timeout_s = reservation_timeout_s or self._spec.reservation_timeout_s
        with OnFailure(self.kill):
            self._create(timeout_s)
            report = self._make_ready(timeout_s, self.num_workers if min_workers is None else min_workers)
            if not report.ok:
                self.kill()
                return report
            # Ranks depend on the nodes of the workers, which are known now.
            order = rank_rules.in_order(report.values, first_stays=self._spec.use_local)
            self.give_ranks([self.workers[index] for index in order], [report.values[index] for index in order])
            return self._connect(partial(self._build, captures=self._spec.captures_after_calls), self._startup.poll)

    def _create(self, timeout_s: float) -> None:
        """Reserve room for the workers and the spares, and start the worker processes."""
        spec, workers = self._spec, self.workers
        if spec.use_local:
            workers.append(self._platform.new_local_worker(spec.connection))
        if self.num_workers == len(workers):
            return
        packed_bytes("What a worker is made of", (spec.make_replica, spec.initialization_hook))
        self._platform.ensure_running()
        num_slots = self.num_workers + self.num_spares  # including one for the driver
        self.slots.reserve(num_slots, timeout_s, has_driver=spec.use_local, check=self._check_wanted)
        slot_of_driver = self.slots.take_slot() if spec.use_local else None
        for _ in range(len(workers), self.num_workers):
            worker = self._platform.new_worker(self.slots.take_slot(), spec.connection, spec.num_threads)
            workers.append(worker)
            self._startup.watch_worker(worker)
        self._check_wanted()
        if slot_of_driver is not None:
            spec.connection.use_gpus(slot_of_driver.reservation.gpus_of_driver())  # the others have their copies by now

    def _make_ready(self, timeout_s: float, min_workers: int) -> GroupReport:
        """Let the workers load what they need. Return where the ready workers run, or the report of what failed."""
        num_workers = len(self.workers)
        placed = self._submit("describe", ranks=self.remote_ranks)  # answered even while the user's hook runs
        calls = self._submit("prepare", self._spec.initialization_hook)
        if placed and not self.slots.are_own:
            self._await_placement(list(placed.values()), timeout_s)
        report = self._gather(calls, self._startup.poll)
        while not report.ok:
            dead = {found.rank for found in report.outcomes if found.failure is not None}
            if classify(report).kind == "user":
                return report
            logger.warning("%s; continuing with the others", words(classify(report)))
            for rank in dead:
                worker = self._remote(rank)
                self._startup.remove(worker)
                worker.kill()
                self.slots.give_back(worker.slot)
            self.standby.replace(len(dead), num_workers)
            calls = {rank: call for rank, call in calls.items() if rank not in dead}
            if len(calls) + self.standby.num_all < min_workers:
                return report
            failed, report = report, self._gather(calls, self._startup.poll)
        joining = self.standby.take_needed(min_workers - len(calls), num_workers - len(calls), self._startup.poll)
        if joining is None:
            self._check_wanted()
            return failed
        self._look_after(joining)
        self.workers = [self.workers[rank] for rank in calls] + [each.worker for each in joining]
        return GroupReport((*report.outcomes, *(Outcome(-1, each.info) for each in joining)))

    def _await_placement(self, references: list[Any], timeout_s: float) -> None:
        """Inside another placement group, actors may have to wait for room. Raise an error after a while."""
        import ray

        _, waiting = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        if waiting:
            raise ReservationTimeoutError(
                f"{len(waiting)} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + explain(self._spec.resources, len(references), cluster_view())
            )

    def _check_wanted(self) -> None:
        if self._is_cancelled:
            raise TrainerShutdownError("The trainer was shut down while its workers were started.")

    def _look_after(self, joining: Sequence[StandbyWorker]) -> None:
        for each in joining:
            self._startup.watch_worker(each.worker)

    def _build(self, rendezvous: Rendezvous, *, captures: bool) -> Mapping[int, Any]:
        """Let all ranks join the group and build their replicas. Return the calls."""
        make_replica = self._spec.make_replica
        return {
            rank: worker.submit("build", self.worlds[rank], rendezvous, make_replica, captures)
            for rank, worker in enumerate(self.workers)
        }

    def _connect(
        self, join: Callable[[Rendezvous], Mapping[int, Any]], on_wait: Callable[[], None] | None = None
    ) -> GroupReport:
        """Let every rank listen for the others, and then connect to them.

        Returns:
            The answers of `join`. If a rank could not listen, no other rank has answered.
        """
        hosts = hosts_of(self.infos)
        listening, self._listening = self._listening, {}
        addresses = {rank: listening[worker] for rank, worker in enumerate(self.workers) if worker in listening}
        # A rank leaves its old group when it opens an endpoint for the next one.
        if self.is_driver_only and not self._spec.connection.listens_alone and not self._has_listened:
            addresses.setdefault(0, (hosts[0], 0))
        opening = {rank: host for rank, host in enumerate(hosts) if addresses.get(rank, ("", 0))[0] != host}
        self._has_listened |= bool(opening)
        calls = {rank: self.workers[rank].submit("open_endpoint", host, rank) for rank, host in opening.items()}
        opened = self._gather(calls, on_wait)
        if not opened.ok:  # no rank was asked to join
            failed = {found.rank: found for found in opened.outcomes if found.failure is not None}
            return GroupReport(tuple(failed.get(rank, Outcome(rank, answered=False)) for rank in range(len(hosts))))
        addresses |= {found.rank: (opening[found.rank], found.value) for found in opened.outcomes}
        in_order = tuple(addresses[rank] for rank in range(len(hosts)))
        return self._gather(join(Rendezvous(in_order, self.is_on_one_node)), on_wait)

    def give_ranks(self, workers: Sequence[LocalWorker | RemoteWorker], infos: Sequence[WorkerInfo]) -> None:
        """Set the group's workers. Their order gives their ranks."""
        self.workers, self.infos = list(workers), list(infos)
        note_processes(infos)
        self.worlds = rank_rules.assign(self.infos)
        self.num_workers, self.gone = len(self.workers), set()

    def take_over(self, kept: KeptGroup) -> None:
        """Continue with workers that have outlived another process."""
        self.give_ranks(kept.workers, kept.infos)
        self.slots.take_over(kept.slots, [worker.slot for worker in kept.workers])

    def to_keep(self, facts: Sequence[Any]) -> KeptGroup:
        """Return what another process needs to continue with these workers."""
        return KeptGroup(self.workers, self.infos, self.slots, facts)

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
        """Run `function(replica, *args)` on the ranks in `args_by_rank` and gather the answers."""
        workers = self.workers
        packed: dict[int, tuple[Any, ...]] = {}  # by ID of the arguments, which are mostly the same for all ranks
        calls = {}
        for rank, args in args_by_rank.items():  # pack all before sending any, so that no rank starts if one fails
            if not workers[rank].is_local and id(args) not in packed:
                packed[id(args)] = pack(function, capture, landed, args, number)
        for rank, args in args_by_rank.items():
            worker: Any = workers[rank]
            if worker.is_local:
                calls[rank] = worker.submit("on_replica", function, capture, landed, *args)
            else:
                ask = worker.ask if by_line else partial(worker.submit, "on_packed")
                calls[rank] = ask(*packed[id(args)])
        return self._gather(calls, on_wait)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a remote rank's worker. Return Ray's reference to its result."""
        return self._remote(rank).submit(method, *args, **kwargs)

    def _submit(self, method: str, *args: Any, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Call a method of these ranks' workers, by default of all. Return the calls."""
        asked = range(len(self.workers)) if ranks is None else ranks
        return {rank: self.workers[rank].submit(method, *args) for rank in asked}

    def _remote(self, rank: int) -> RemoteWorker:
        worker = self.workers[rank]
        assert isinstance(worker, RemoteWorker), "the driver itself is no remote worker"
        return worker

    def _gather(self, calls: Mapping[int, Any], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Wait for all answers. After the first failure, wait only until it is clear what belongs to it."""
        if self.is_driver_only:
            self._unanswered = {}
            return GroupReport(tuple([call.run(rank) for rank, call in calls.items()]))
        remote = {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}
        listener = Listener(remote, self._spec.keeps_survivors, self._platform)
        self._unanswered = remote  # in case Ctrl-C ends the wait
        local = {rank: call for rank, call in calls.items() if rank not in remote}
        outcomes = self._gather_both(local, listener, on_wait) if local else listener.listen(on_wait)
        self._unanswered = {rank: remote[rank] for rank, found in outcomes.items() if not found.answered}
        self._spec.relay.tell({str(rank): notes_of(found) for rank, found in sorted(outcomes.items())})
        return GroupReport(tuple(with_rank(outcomes[rank]) for rank in sorted(calls)))

    def _gather_both(
        self, local: Mapping[int, LocalCall], listener: Listener, on_wait: Callable[[], None] | None
    ) -> dict[int, Outcome]:
        """Run the local call here while a thread gathers the remote answers.

        If the local rank waits for a remote one that failed, only breaking the group or killing the others frees it.
        """
        answers: dict[int, Outcome] = {}
        is_local_done = self._platform.make_event()

        def listen() -> None:
            answers.update(listener.listen(on_wait))
            if self._must_kill(answers, is_local_done, listener.left_s(answers)):
                self._kill_remote()  # even the ranks that have answered
                answers.update({rank: replace(found, answered=False) for rank, found in answers.items()})

        join = self._platform.begin_thread(listen)
        outcomes: dict[int, Outcome] = {}
        try:
            outcomes |= {rank: call.run(rank) for rank, call in local.items()}
        finally:
            is_local_done.set()
            if not all(rank in outcomes and outcomes[rank].ok for rank in local):
                listener.stop([found.failure.kind for found in outcomes.values() if found.failure])
        with OnFailure(listener.stop):  # the group ends after an error, so the thread must not use it any more
            join()
        return {**outcomes, **answers}

    def _must_kill(self, answers: Mapping[int, Outcome], is_local_done: threading.Event, left_s: float) -> bool:
        """Return True if the remote processes must be killed, because the local call does not return otherwise."""
        if all(found.ok for found in answers.values()):
            return False
        own_time = OwnTime(self._platform.now)
        while own_time.look(_POLL_S) < left_s:
            if is_local_done.wait(_POLL_S):
                return False
        if is_local_done.wait(0.0):
            return False
        kinds = {found.failure.kind for found in answers.values() if found.failure}
        if self._spec.keeps_survivors and "user" not in kinds:
            self.interrupt()
            return not is_local_done.wait(self._spec.settle_timeout_s)
        return True

    # ------------------------------------------------------------------------------------------ during calls

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Run `function(replica, *args)` on a rank that may be busy. Return the transfer of its result."""
        return self._platform.transfer(self.submit_beside(rank, function, *args))

    def fetch(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Run `function(replica, *args)` in the worker's third thread, so that no heartbeat waits for a slow result."""
        return self._platform.transfer(self.workers[rank].submit("send", function, *args))

    def fetch_parts(self, function: Callable[..., Any], tokens: Sequence[Any]) -> Transfer:
        """Fetch a part from each rank with `function(replica, token)`, so that all parts outlive the loss of a node.

        A part goes to a partner on another node, or to the driver if there is none.
        """
        parts = [self.fetch(rank, function, token) for rank, token in enumerate(tokens)]
        keepers = rank_rules.keepers(self.infos, self._platform.home)
        relays = {}
        for rank, keeper in keepers.items():
            arrival, copy = self.submit(keeper, "relay", [parts[rank].reference])
            relays[rank] = self._platform.transfer(arrival), StoredPart(self.infos[keeper].node_id, copy)
        return together(parts, [info.node_id for info in self.infos], relays)

    def ask_beside(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = _LATE_S
    ) -> dict[int, Any]:
        """Call `method` of these ranks (by default all) during their work. Return the answers that arrive in time."""
        calls = self._submit(method, *args, ranks=ranks)
        remote = {rank: call for rank, call in calls.items() if not isinstance(call, LocalCall)}
        if remote:
            await_all(self._platform, remote.values(), timeout_s)
        outcomes = [
            self._platform.outcome(rank, call) if rank in remote else call.run(rank) for rank, call in calls.items()
        ]
        return {found.rank: found.value for found in outcomes if found.ok or found.rank not in remote}

    def submit_beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(replica, *args)` on a rank during its work. Return the call, for `poll`."""
        return self.workers[rank].submit("beside", function, *args)

    def poll(self, rank: int, call: Any) -> Outcome:
        """Return the present outcome of a call of `submit_beside`."""
        return self._platform.outcome(rank, call)

    def store(self, value: Any) -> SharedValue:
        """Put `value`, once, where all ranks of any group can read it."""
        return SharedValue(value, None) if self.is_driver_only else self._platform.store(value)

    def share(self, value: Any) -> list[Any]:
        """Return `value`, stored or not, as an argument for each rank. Remote ranks share one copy."""
        stored = value if isinstance(value, SharedValue) else SharedValue(value, None)
        if stored.reference is None:  # it may have been stored when the driver was the only worker
            stored = self.store(stored.value)
        return [stored.value if worker.is_local else stored.reference for worker in self.workers]

    # --------------------------------------------------------------------------------------------- survivors

    def settle(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """After a failed call, free the ranks that wait for lost ones. Return the ranks that can still be used.

        Args:
            report: The report of the call.
            tell_stuck: Called once if a living rank takes long to finish its work.
        """
        unanswered, self._unanswered = self._unanswered, {}
        lost = {found.rank for found in report.outcomes if found.has_died}
        waiting = {rank: call for rank, call in unanswered.items() if rank not in lost}
        freed = self._interrupt(waiting)
        answers = self._roll_call(freed, len(self.workers) - len(lost) - len(freed))
        self.silent = {rank for rank, found in answers.items() if not found.answered}
        lost |= {rank for rank, found in answers.items() if not found.ok}
        lost |= self._let_finish({rank: call for rank, call in waiting.items() if rank not in lost}, tell_stuck)
        return [rank for rank in range(len(self.workers)) if rank not in lost]

    def settle_any(self) -> list[int]:
        """Free and return the ranks like `settle`, even if they are in calls of another process."""
        self.interrupt()
        behind = self._submit("execute", _nothing, ranks=self.remote_ranks)
        self._unanswered = {**self._unanswered, **behind}
        return self.settle(GroupReport(()))

    def answering(self, ranks: Sequence[int]) -> list[int]:
        """Return the ones of these idle ranks that are alive. Those that do not answer at all become `silent`."""
        remote = set(self.remote_ranks)
        calls = self._submit("describe", ranks=[rank for rank in ranks if rank in remote])
        answers = self._roll_call(calls, len(ranks) - len(calls))
        self.silent |= {rank for rank, found in answers.items() if not found.answered}
        return [rank for rank in ranks if rank not in answers or answers[rank].ok]

    def nodes_of(self, lost: Collection[int], infos: Sequence[WorkerInfo]) -> LostNodes | None:
        """Return what is known about the nodes of lost ranks, given their places; None if that is no news."""
        emptied = emptied_nodes(lost, infos)
        if not emptied or self._platform.home in emptied:  # the driver's node is alive, so only workers were lost
            return None
        addresses = tuple(emptied.values())
        if not self._platform.living_nodes() & emptied.keys():
            return LostNodes(addresses, are_dead=True)
        return LostNodes(addresses) if len(lost) > len(emptied) else None

    def _let_finish(self, calls: Mapping[int, Any], tell_stuck: Callable[[], None]) -> set[int]:
        """Wait until these calls of survivors have finished. Return the ranks that do not finish, or are dead."""
        platform, timeout_s = self._platform, self._spec.settle_timeout_s
        own_time, has_told = OwnTime(platform.now), False
        while calls and (waited_s := own_time.look()) < timeout_s:
            if len(platform.ready(calls.values(), _POLL_S)) == len(calls):
                break
            if not has_told and waited_s > min(_STUCK_S, timeout_s / 2):
                tell_stuck()
                has_told = True
        outcomes = [platform.outcome(rank, call) for rank, call in calls.items()]
        self.stuck = {found.rank for found in outcomes if not found.answered}
        if self.stuck and not has_told:  # the driver may have stood still in the meantime
            tell_stuck()
        return self.stuck | {found.rank for found in outcomes if found.has_died}

    def _interrupt(self, ranks: Iterable[int]) -> dict[int, Any]:
        """End all waits of these ranks for others. Return the calls to remote ranks without waiting for them."""
        calls = self._submit("interrupt", ranks=ranks)
        for rank, call in [*calls.items()]:
            if isinstance(call, LocalCall):
                calls.pop(rank).run(rank)
        return calls

    def _roll_call(self, references: Mapping[int, Any], num_others: int) -> dict[int, Outcome]:
        return roll_call(self._platform, references, num_others, self._spec.heartbeat_s)

    def leave_group(self, survivors: Sequence[int], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Let the survivors leave their group, and return the progress of each.

        They also start listening for the next group, which saves a round trip. Their addresses assume that no other
        worker joins.
        """
        hosts = dict(zip(survivors, hosts_of([self.infos[rank] for rank in survivors]), strict=True))
        calls = {rank: self.workers[rank].submit("leave_group", host) for rank, host in hosts.items()}
        report = self._gather(calls, on_wait)
        ports = {found.rank: found.value[1] for found in report.outcomes if found.ok}
        self._listening = {self.workers[rank]: (hosts[rank], port) for rank, port in ports.items() if port is not None}
        return GroupReport(tuple(replace(o, value=o.value[0]) if o.ok else o for o in report.outcomes))

    def remove_workers(self, ranks: Sequence[int]) -> None:
        """Kill the workers of these ranks, dead or alive, and free their slots."""
        for rank in ranks:
            worker = self._remote(rank)
            if rank in self.silent or rank in self.stuck:
                self.kill_rank(rank)
            else:
                worker.kill()
            self.slots.give_back(worker.slot)
        self.silent.clear()
        self.stuck.clear()
        self.gone |= set(ranks)

    def regroup(
        self,
        survivors: Sequence[int],
        joining: Sequence[StandbyWorker],
        handover: StateHandover,
        on_wait: Callable[[], None] | None = None,
        places: Sequence[int] = (),
    ) -> GroupReport:
        """Form a new group of survivors and joining workers.

        Args:
            survivors: Ranks in the old group, which have left it.
            joining: Workers from `standby`.
            handover: Which new ranks take over the state, and from which rank.
            on_wait: Called regularly during the wait.
            places: The new rank of each worker, survivors first. By default, ranks follow that order.

        Returns:
            The replicas' facts. If this fails, the group is unusable.
        """
        self._give_places(survivors, joining, places)
        handover = handover.by_node(self.worlds)
        to_new, new = replace(handover, make_replica=self._spec.make_replica), {each.worker for each in joining}

        def join(rendezvous: Rendezvous) -> dict[int, Any]:
            return {
                rank: worker.submit("regroup", self.worlds[rank], rendezvous, to_new if worker in new else handover)
                for rank, worker in enumerate(self.workers)
            }

        return self._connect(join, on_wait)

    def renew(
        self,
        survivors: Sequence[int],
        joining: Sequence[StandbyWorker],
        on_wait: Callable[[], None] | None = None,
        *,
        captures: bool = False,
    ) -> GroupReport:
        """Form a new group like `regroup`, but build new replicas without state in all processes.

        Args:
            survivors: As for `regroup`.
            joining: As for `regroup`.
            on_wait: Called regularly during the wait. By default, frozen workers are killed as during a start.
            captures: True if the replicas copy their state.

        Returns:
            The answers of `setup`. If this fails, the group is unusable.
        """
        self._look_after(joining)
        self._give_places(survivors, joining)
        return self._connect(partial(self._build, captures=captures), on_wait or self._startup.poll)

    def _give_places(
        self, survivors: Sequence[int], joining: Sequence[StandbyWorker], places: Sequence[int] = ()
    ) -> None:
        workers = [self.workers[rank] for rank in survivors] + [each.worker for each in joining]
        infos = [self.infos[rank] for rank in survivors] + [each.info for each in joining]
        self.give_ranks(rank_rules.in_places(workers, places), rank_rules.in_places(infos, places))

    # ------------------------------------------------------------------------------------------------- end

    def interrupt(self) -> None:
        """Break the group: end all waits of ranks for each other."""
        self._interrupt(range(len(self.workers)))

    def kill_rank(self, rank: int) -> None:
        """Kill a worker that does not answer any more, even if its process is stopped."""
        self.workers[rank].kill()
        self._platform.kill_process(self.infos[rank])

    def kill_workers(self) -> None:
        """Make the thread that starts or uses the group return and kill it. Called from another thread."""
        self._is_cancelled = True
        self.standby.cancel()
        self._kill_remote()

    def _kill_remote(self) -> None:
        """Kill the remote processes, and free the driver's own worker if it waits for them. May run in any thread."""
        for worker in tuple(self.workers):
            if isinstance(worker, RemoteWorker):
                worker.kill()
            else:
                worker.interrupt()

    def stop(self, timeout_s: float) -> None:
        """Let every worker close, then kill the processes and release the resources."""
        try:
            remote = [worker.submit("close") for worker in self.workers if isinstance(worker, RemoteWorker)]
            for worker in self.workers:
                if isinstance(worker, LocalWorker):
                    worker.kill()
            if remote and self._platform.is_running:
                await_all(self._platform, remote, _CLOSE_TIMEOUT_S)
                found = [self._platform.outcome(-1, call) for call in remote]
                num_left = sum(not each.answered for each in found)
                if num_left:
                    logger.warning("%s workers did not stop within %s s; killing them", num_left, _CLOSE_TIMEOUT_S)
                for each in found:
                    if each.failure is not None:
                        logger.debug("a worker failed to close: %s", each.failure.fault.message)
        finally:
            self.kill(timeout_s)

    def kill(self, timeout_s: float = 5.0) -> None:
        """Kill the processes at once and release the resources. Safe at any time, even half-started or twice."""
        try:
            self.standby.kill_all()
            workers, self.workers = self.workers, []
            for worker in sorted(workers, key=lambda w: w.is_local):  # remote ones first: a local one may wait for them
                worker.kill()
        finally:
            self.slots.close(timeout_s)


def _nothing() -> None:
    """Do nothing. Runs after the present work of a worker, to see when that is done."""


class GroupHooks:
    """Hooks that follow the groups of a trainer. By default they do nothing. The lifecycle calls them in the driver.

    A hook may use the group that it gets. It must not call the controller, which is waiting for it.
    """

    def on_start(self, group: WorkerGroup) -> GroupReport | None:
        """Called when the workers run and are connected, before any call.

        Returns:
            The report of a call in which a worker died, which makes the start fail. None if all is well.
        """
        return None

    def on_change(self, group: WorkerGroup) -> None:
        """Called when the group has new members or ranks. The workers that stayed continue where they are."""

    def on_failure(self, diagnosis: Diagnosis) -> None:
        """Called when a call failed and is about to run again on new workers."""

    def on_stop(self, group: WorkerGroup) -> None:
        """Called before the workers are stopped in an orderly way, after `on_end`."""

    def on_end(self, group: WorkerGroup) -> None:
        """Called before the workers end in any way. May be called from any thread, and more than once for a group."""
