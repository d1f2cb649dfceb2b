"""All workers as one: start them, run a function on all or some, stop them.

Faults of remote workers come back as `Outcome`s; they are never raised from here, and nothing is retried here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.engine.decisions import ranks
from raysgd.engine.group.group_calls import GroupCalls
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.loans import StandbyWorker
from raysgd.engine.group.members import Members, split
from raysgd.engine.group.standby import StandbyWorkers
from raysgd.engine.group.startup import Startup
from raysgd.engine.group.survivors import Survivors
from raysgd.engine.processes.gathering import await_all
from raysgd.engine.processes.local_worker import LocalWorker
from raysgd.engine.processes.outliving import CallNumber, KeptGroup
from raysgd.engine.processes.platform import Platform
from raysgd.engine.processes.slots import Slots
from raysgd.engine.processes.snapshots import Transfer
from raysgd.engine.processes.transfers import FetchedParts, PartRelay, SharedValue, StoredPart
from raysgd.engine.processes.worker import pack
from raysgd.engine.shared.types import GroupReport, Outcome, Rendezvous, StateHandover, WorkerInfo, World

_LATE_S = 2.0  # who has not answered within this is left out; nothing is killed for it


class WorkerGroup:
    """A started set of workers, in rank order. Made by `start` only; `stop` and `kill` are final.

    Attributes:
        slots: The places that it has in the cluster.
        standby: The standby workers beside it.
        gone: Ranks that were removed, until a new group is formed.
    """

    def __init__(self, spec: GroupSpec, num_workers: int, platform: Platform | None = None) -> None:
        self._spec = spec
        self._platform = platform = platform or Platform()
        self.slots = Slots(
            spec.resources, spec.packs, spec.within, spec.words.when_not_granted, platform.make_reservation
        )
        self._members = Members()
        self._calls = GroupCalls(spec, self._members, platform)
        self.standby = StandbyWorkers(spec, self.slots, platform)
        self._start = Startup(spec, self.slots, self._members, self._calls, self.standby, platform)
        self._survivors = Survivors(spec, self._members, platform)
        self.gone: set[int] = set()
        self.num_workers = num_workers
        self.num_spares = spec.num_spares

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_ended(self) -> bool:
        """True if there are no processes, any more or yet."""
        return not len(self._members)

    @property
    def infos(self) -> list[WorkerInfo]:
        """The places of the workers, by rank."""
        return self._members.infos

    @property
    def worlds(self) -> list[World]:
        """The place of each rank among the others."""
        return self._members.worlds

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks that are not the driver itself."""
        return self._members.remote_ranks

    @property
    def is_driver_only(self) -> bool:
        """True if the only worker is the driver itself, so that no worker can be lost."""
        return not self.remote_ranks

    @property
    def is_on_one_node(self) -> bool:
        """True if all workers are on the same node."""
        return self._members.is_on_one_node

    @property
    def local_replica(self) -> Any:
        """The replica in the driver; None when all workers are remote."""
        worker = self._members.workers[0]
        return worker.replica if isinstance(worker, LocalWorker) else None

    def start(self, reservation_timeout_s: float | None = None, min_workers: int | None = None) -> GroupReport:
        """Reserves, creates, connects and builds. Where too few can be made ready, nothing is left behind.

        Args:
            reservation_timeout_s: How long to wait for room, unless the spec says it.
            min_workers: How many have to be ready to connect them; all unless said.

        Returns:
            The replicas' set-up answers; or the report of the step that failed. Where that is a later one, `renew`
            may go on with the workers that live.

        Raises:
            ReservationTimeoutError: When the resources were not granted in time.
        """
        timeout_s = reservation_timeout_s or self._spec.reservation_timeout_s
        needed = self.num_workers if min_workers is None else min_workers
        try:
            report = self._start.prepare(self.num_workers, self.num_spares, timeout_s, needed)
            if not report.ok:
                self.kill()
                return report
            self.num_workers = len(self._members)
            return self._start.connect()
        except BaseException:
            self.kill()
            raise

    def take_over(self, kept: KeptGroup) -> None:
        """Goes on with workers that have outlived another process."""
        self._members.give_ranks(kept.workers, kept.infos)
        self.slots.take_over(kept.slots, [worker.slot for worker in kept.workers])
        self.num_workers = len(kept.workers)

    def to_keep(self, facts: Sequence[Any]) -> KeptGroup:
        """Return what another process needs to go on with these workers."""
        return KeptGroup(self._members.workers, self._members.infos, self.slots, facts)

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
        """Runs `function(replica, *args)` on the ranks named in `args_by_rank` and gathers the answers."""
        workers = self._members.workers
        packed: dict[int, tuple[Any, ...]] = {}  # by identity of the arguments: most calls say the same to every rank
        calls = {}
        for rank, args in args_by_rank.items():  # all before the first is sent: no rank begins what others cannot join
            if not workers[rank].is_local and id(args) not in packed:
                packed[id(args)] = pack(function, capture, landed, args, number)
        for rank, args in args_by_rank.items():
            if workers[rank].is_local:
                calls[rank] = workers[rank].submit("on_replica", function, capture, landed, *args)
            else:
                worker: Any = workers[rank]
                ask = worker.ask if by_line else partial(worker.submit, "on_packed")
                calls[rank] = ask(*packed[id(args)])
        return self._calls.gather(calls, on_wait)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Starts a method of a remote rank's worker; returns Ray's reference to its result."""
        return self._members.remote(rank).submit(method, *args, **kwargs)

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Runs `function(replica, *args)` on a rank that may be busy. Returns a transfer with `result(timeout_s)`."""
        return self._platform.transfer(self._members.workers[rank].submit("beside", function, *args))

    def fetch(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        """Does what `beside` does, for what may be gigabytes or wait for the device. A heartbeat never waits for it."""
        return self._platform.transfer(self._members.workers[rank].submit("send", function, *args))

    def fetch_parts(self, function: Callable[..., Any], tokens: Sequence[Any]) -> FetchedParts:
        """Does what `fetch` does with `function(replica, token)` on each rank, for parts that have to outlive a node.

        A part goes to a partner on another node, or where there is none, to the driver.
        """
        parts = [self.fetch(rank, function, token) for rank, token in enumerate(tokens)]
        keepers = ranks.keepers(self.infos, self._platform.home)
        relays = {rank: self._relay(keeper, parts[rank]) for rank, keeper in keepers.items()}
        return FetchedParts(parts, [info.node_id for info in self.infos], relays)

    def _relay(self, keeper: int, part: Any) -> PartRelay:
        arrival, copy = self.submit(keeper, "relay", [part.reference])
        return PartRelay(self._platform.transfer(arrival), StoredPart(self.infos[keeper].node_id, copy))

    def ask_beside(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = _LATE_S
    ) -> dict[int, Any]:
        """Return what ranks (all, unless said) answer to `method` beside their work; without those that are late."""
        local, remote = split(self._members.submit(method, *args, ranks=ranks))
        if remote:
            await_all(self._platform, remote.values(), timeout_s)
        outcomes = [self._platform.outcome(rank, call) for rank, call in remote.items()]
        answers = {found.rank: found.value for found in outcomes if found.ok}
        answers.update({rank: call.run()[0] for rank, call in local.items()})
        return answers

    def submit_beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Asks a remote rank beside its work; returns the call, for `poll`."""
        return self._members.workers[rank].submit("beside", function, *args)

    def poll(self, rank: int, call: Any) -> Outcome:
        """Return what became of a call by `submit_beside`, as of now."""
        return self._platform.outcome(rank, call)

    def store(self, value: Any) -> SharedValue:
        """Puts `value` where all ranks can take it from, once, whatever the group will look like then."""
        return SharedValue(value, None) if self.is_driver_only else self._platform.store(value)

    def share(self, value: Any) -> list[Any]:
        """`value`, stored already or not, as an argument for each rank: remote ranks share one copy."""
        stored = value if isinstance(value, SharedValue) else SharedValue(value, None)
        if stored.reference is None:  # perhaps it was stored while the driver was alone
            stored = self.store(stored.value)
        return [stored.value if worker.is_local else stored.reference for worker in self._members.workers]

    @property
    def silent(self) -> set[int]:
        """Ranks that at the last `settle` neither answered nor were known to be dead."""
        return self._survivors.silent

    @property
    def stuck(self) -> set[int]:
        """Ranks that at the last `settle` answered and did not finish what they do."""
        return self._survivors.stuck

    def settle(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """After a failed call: frees the ranks that wait for lost ones, and returns those that can be counted on.

        Args:
            report: What is known of the call.
            tell_stuck: Called once if a rank that lives takes long to finish what it does.
        """
        unanswered, self._calls.unanswered = self._calls.unanswered, {}
        return self._survivors.settle(report, unanswered, tell_stuck)

    def answering(self, ranks: Sequence[int]) -> list[int]:
        """Of these ranks, which do nothing, those that live and answer; who does neither is noted as silent."""
        return self._survivors.answering(ranks)

    def leave_group(self, survivors: Sequence[int], on_wait: Callable[[], None] | None = None) -> GroupReport:
        """Lets the survivors leave their group. Each tells how far it is."""
        return self._calls.leave(survivors, on_wait)

    def remove_workers(self, ranks: Sequence[int]) -> None:
        """Kills the workers of these ranks, dead or alive; their slots are free for others."""
        for rank in ranks:
            worker = self._members.remote(rank)
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
        """Forms a new group of the `survivors` and those that join them.

        Args:
            survivors: Ranks in the old group, which have left it.
            joining: Workers from `standby`.
            handover: Whose state the others take over, by new rank.
            on_wait: Called now and then while it waits.
            places: The rank that each of them gets; unless given, they get them in this order.

        Returns:
            The replicas' facts. On anything but success the group cannot be used any more.
        """
        self._give_places(survivors, joining, places)
        members = self._members
        handover = handover.by_node(members.worlds)
        to_new, new = replace(handover, make_replica=self._spec.make_replica), {each.worker for each in joining}

        def join(rendezvous: Rendezvous) -> dict[int, Any]:
            return {
                rank: worker.submit("regroup", members.worlds[rank], rendezvous, to_new if worker in new else handover)
                for rank, worker in enumerate(members.workers)
            }

        return self._calls.connect(join, on_wait)

    def renew(
        self,
        survivors: Sequence[int],
        joining: Sequence[StandbyWorker],
        on_wait: Callable[[], None] | None = None,
        *,
        captures: bool = False,
    ) -> GroupReport:
        """Does what `regroup` does with new replicas in all processes, which have no state yet.

        Args:
            survivors: As for `regroup`.
            joining: As for `regroup`.
            on_wait: Called now and then while it waits; unless given, frozen workers are looked for as in a start.
            captures: Whether they copy their state.

        Returns:
            Their set-up answers. On anything but success the group cannot be used any more.
        """
        self._start.add(joining)
        self._give_places(survivors, joining)
        return self._calls.connect(partial(self._start.build, captures=captures), on_wait or self._start.look_after)

    def _give_places(
        self, survivors: Sequence[int], joining: Sequence[StandbyWorker], places: Sequence[int] = ()
    ) -> None:
        members = self._members
        workers = [members.workers[rank] for rank in survivors] + [each.worker for each in joining]
        infos = [members.infos[rank] for rank in survivors] + [each.info for each in joining]
        members.give_ranks(ranks.in_places(workers, places), ranks.in_places(infos, places))
        self.num_workers, self.gone = len(members), set()

    def interrupt(self) -> None:
        """Ends all waiting of ranks for each other, and so breaks their group."""
        self._members.interrupt(range(len(self)))

    def kill_rank(self, rank: int) -> None:
        """Kills a worker that does not answer any more, in a way that reaches a stopped process too."""
        self._members.workers[rank].kill()
        self._platform.kill_process(self.infos[rank])

    def kill_workers(self) -> None:
        """From another thread than the one that starts or uses the group: makes that one return, and kill the group."""
        self._start.cancel()
        self.standby.cancel()
        self._members.kill_remote()

    def stop(self, timeout_s: float) -> None:
        """Lets every worker close what it has, then kills the processes and gives the resources back."""
        try:
            self._members.close(self._platform)
        finally:
            self.kill(timeout_s)

    def kill(self, timeout_s: float = 5.0) -> None:
        """Kills the processes at once and gives the resources back. Safe at any time, also half-started or twice."""
        try:
            self.standby.kill_all()
            self._members.kill()
        finally:
            self.slots.close(timeout_s)
