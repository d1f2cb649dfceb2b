"""Stand-ins for the parts that the engine is made of, small enough to be read before a test that uses them.

`CountingReplica` and `NullConnection` also run in real worker processes, which then need no framework. The others
stand in for a cluster: `FakeCluster` has slots for workers, makes groups that live in this process, and lets
happen to them what a test scripted.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

from raysgd.engine import ranks
from raysgd.engine.controller import ElasticController
from raysgd.engine.group import WorkerGroup
from raysgd.engine.lifecycle import Clock
from raysgd.engine.placement import Slots
from raysgd.engine.shared.connection import NoConnection
from raysgd.engine.shared.group_spec import FrontEndWords, GroupSpec
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import (
    ClusterView,
    Failure,
    FailureKind,
    GroupReport,
    Heartbeat,
    HeldAtStep,
    NodeView,
    Outcome,
    Rendezvous,
    ReplicaProgress,
    StateHandover,
    WorkerInfo,
    World,
)
from raysgd.engine.snapshots import Snapshots
from raysgd.engine.startup import Replacements, StandbyWorkers
from raysgd.engine.transfers import Transfer, together
from raysgd.engine.worker import WorkerAnswer
from raysgd.exceptions import ReservationTimeoutError, TrainerShutdownError, WorkerFault


def meeting(*ports: int, host: str = "127.0.0.1", on_one_node: bool = True) -> Rendezvous:
    """Ranks that listen at these ports of one host."""
    return Rendezvous(tuple((host, port) for port in ports), on_one_node)


WORDS = FrontEndWords(
    when_shut_down="(words for a trainer that was shut down)",
    when_interrupted="(words for an interrupted call)",
    when_starved="(words for too few workers)",
    when_spent="(words for spent retries)",
    when_not_granted="(words for resources not granted)",
    after_end="(what is left)",
    restart_point="from the last completed call",
)
"""What a front end would tell its users."""


class NullConnection(NoConnection):
    """Connects nothing, but takes connection errors for errors of its group."""

    def is_connection_error(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)


class CountingReplica:
    """A replica whose whole state is a sum that all ranks share and a count that each rank has for itself.

    Args:
        world: The place among the replicas.
        is_large: Whether the shared state has to be fetched, as that of a large model.
    """

    def __init__(self, world: World, is_large: bool = False) -> None:
        self.world = world
        self.is_large = is_large
        self.total = 0.0
        self.num_own_calls = 0
        self.is_shut_down = False
        self.landed_tokens: list[int | None] = []
        self._kept: dict[int, float] = {}
        self._next_token = 0

    def setup(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def capture(self, landed_token: int | None) -> Capture:
        self.landed_tokens.append(landed_token)
        if self.world.rank:
            return Capture(self.num_own_calls)
        if not self.is_large:
            return Capture(self.num_own_calls, shared_state=self.total)
        self._kept = {token: kept for token, kept in self._kept.items() if landed_token is None or token > landed_token}
        self._next_token += 1
        self._kept[self._next_token] = self.total
        return Capture(self.num_own_calls, token=self._next_token)

    def fetch(self, token: int) -> float:
        return self._kept[token]

    def restore(self, shared_state: float, own_state: int | None) -> None:
        self.total = shared_state
        self.num_own_calls = own_state or 0

    def shutdown(self) -> None:
        self.is_shut_down = True


def add(replica: CountingReplica, amount: float) -> float:
    """The usual call that changes the state."""
    replica.total += amount
    replica.num_own_calls += 1
    return replica.total


def read(replica: CountingReplica) -> tuple[float, int]:
    """The usual call that changes nothing."""
    return replica.total, replica.num_own_calls


class SteppingReplica(CountingReplica):
    """A replica that can go on in another group. A call takes steps, each of which adds 1 to the sum.

    Attributes:
        num_done: Steps of the running call completed, or of the last one; None before the first.
        has_answered: Whether the running call was finished here.
        breaks_after: Where a test lets the running call break off.
        obstacle: Why it cannot go on in another group.
        is_whole: Whether its state is that of a completed step.
        refuses_hold: Whether it is too late, whatever is proposed.
        proposals: Every proposal to stop, and what became of it.
        snapshot_at: After how many steps it took a snapshot inside the running call.
    """

    def __init__(self, world: World, is_large: bool = False) -> None:
        super().__init__(world, is_large)
        self.num_done: int | None = None
        self.has_answered = False
        self.breaks_after: int | None = None
        self.obstacle: str | None = None
        self.is_whole = True
        self.refuses_hold = False
        self.proposals: list[tuple[int, bool | None]] = []
        self.holds_at: int | None = None
        self.snapshot_at = 0
        self.is_primed = False

    def restore(self, shared_state: float, own_state: int | None) -> None:
        super().restore(shared_state, own_state)
        self.num_done, self.has_answered = None, False

    def restore_inside(self, shared_state: float, own_state: int | None, first: int, parts: Sequence[int]) -> None:
        self.restore(shared_state, own_state)
        self.num_done = first

    def replica_progress(self) -> ReplicaProgress:
        done = (self.num_done or 0) + self.has_answered
        return ReplicaProgress(done, self.is_whole, self.obstacle, f"{done} steps done")

    def warm_up(self) -> None:
        self.total, self.is_primed = -1000.0, True  # practice leaves traces; they must be taken over

    def hand_over(self) -> tuple[float, int | None, bool]:
        return self.total, self.num_done, self.has_answered

    def take_over(self, state: tuple[float, int | None, bool]) -> None:
        self.total, self.num_done, self.has_answered = state

    def regroup(self, world: World, handover: StateHandover) -> str:
        self.world, self.holds_at, self.is_whole = world, None, True
        return f"rank {world.rank} of {world.size}"

    @property
    def _num_done_now(self) -> int:
        """Steps of the running call: a fake group does all its waiting before it takes the first step."""
        return 0 if self.has_answered else self.num_done or 0

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, self._num_done_now, "stepping", snapshot=self.snapshot_at)

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        step = self._num_done_now + margin if at is None else at
        self.proposals.append((step, None))
        return None if self.refuses_hold else step

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        if not self.proposals:
            return
        step, _ = self.proposals[-1]
        self.proposals[-1] = (step, is_agreed)
        self.holds_at = step if is_agreed else None

    def last_hold(self) -> tuple[int, bool]:
        return len(self.proposals), bool(self.proposals and self.proposals[-1][1])

    def part_of_snapshot(self, number: int) -> Capture | None:
        """The part as it will be after so many steps."""
        steps_to_go = number - self._num_done_now
        shared = None if self.world.rank else self.total + steps_to_go
        return Capture(self.num_own_calls, shared_state=shared, progress=number) if number == self.snapshot_at else None


def walk(replica: SteppingReplica, num_steps: int) -> float | HeldAtStep:
    """A call that can be gone on with: so many steps."""
    replica.num_done, replica.has_answered = 0, False
    return walk_on(replica, num_steps)


def walk_on(replica: SteppingReplica, num_steps: int) -> float | HeldAtStep:
    """Goes on with `walk`, wherever it is."""
    replica.num_done = replica.num_done or 0
    while replica.num_done < num_steps:
        if replica.num_done == replica.breaks_after:
            replica.breaks_after = None
            raise BrokenOff
        if replica.num_done == replica.holds_at:
            shared = None if replica.world.rank else replica.total
            return HeldAtStep(
                replica.num_done, Capture(replica.num_own_calls, shared_state=shared, progress=replica.num_done)
            )
        replica.num_done += 1
        replica.total += 1
    if not replica.has_answered:
        replica.has_answered = True
        replica.num_own_calls += 1
    return replica.total


class BrokenOff(Exception):
    """The rest of the group is gone: a rank in the middle of a call does not answer."""


# ---------------------------------------------------------------------------------------- what may happen


@dataclass(frozen=True)
class Lost:
    """These ranks are gone; the others had done their part, but nobody waited for their answers.

    Attributes:
        ranks: Who is gone.
        kind: How that was seen.
        after: How many steps the others had done by then, by rank; without it, all of them.
    """

    ranks: tuple[int, ...]
    kind: FailureKind = "died"
    after: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """One rank raised; with None every one. Whether others answered decides whether the group can be used again."""

    rank: int | None
    error: Exception
    others_answered: bool = True


@dataclass(frozen=True)
class Interrupted:
    """Somebody pressed Ctrl-C while the driver waited."""


@dataclass(frozen=True)
class Denied:
    """The cluster did not grant the resources."""


@dataclass(frozen=True)
class ShutDown:
    """Another thread ends the trainer meanwhile; the event is over when that waits for this thread to come out."""

    stop: Callable[[], None]


Event = Lost | Raised | Interrupted | Denied | ShutDown | None


class FakeClock:
    """Time that passes only while somebody sleeps.

    Attributes:
        at_sleep: What happens whenever somebody has slept, for so many seconds.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []
        self.at_sleep: Callable[[float], object] = lambda seconds: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds
        self.at_sleep(seconds)

    def as_clock(self) -> Clock:
        return Clock(self.monotonic, self.sleep)


@dataclass
class FakeCluster:
    """One node with room for `num_slots` workers, the groups made so far, and what is to happen to them.

    Attributes:
        num_slots: How many workers the node has room for in all.
        num_taken: How many slots somebody else holds.
        is_settling: Whether what a group held is free only in a moment.
        starts: What happens at each start of a group; past the end, nothing.
        calls: The same for each call of a function of a test.
        restores: The same for each call that the controller makes on its own.
        stands: The same whenever survivors leave their group.
        regroups: The same whenever a group is formed again in place.
        waits: The same whenever survivors waited for somebody to join them.
        transfer_s: How long a state that is fetched is on its way.
        standby_is_slow: Whether workers that are called up are ready only when somebody waits for them.
        while_waiting: Given the driver's on_wait, lets happen what happens during each call of a function of a test.
        nodes: Nodes of the ranks of a group that starts; one node for all without it.
        silent: Ranks that do not answer any more, without a word of why.
        stuck: Ranks that answer, and do not finish what they do after a loss.
        groups: Every group that was made.
    """

    num_slots: int = 3
    num_taken: int = 0
    is_settling: bool = False
    starts: deque[Event] = field(default_factory=deque)
    calls: deque[Event] = field(default_factory=deque)
    restores: deque[Event] = field(default_factory=deque)
    stands: deque[Event] = field(default_factory=deque)
    regroups: deque[Event] = field(default_factory=deque)
    waits: deque[Event] = field(default_factory=deque)
    transfer_s: float = 0.0
    standby_is_slow: bool = False
    while_waiting: Callable[[Callable[[], None]], None] = lambda on_wait: on_wait()
    nodes: Sequence[str] = ()
    silent: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    groups: list[FakeGroup] = field(default_factory=list)

    def make_group(self, spec: GroupSpec, num_workers: int) -> WorkerGroup:
        group = FakeGroup(self, spec, num_workers)
        self.groups.append(group)
        return group

    @property
    def num_free(self) -> int:
        used = sum(len(group.slots) for group in self.groups if group.is_alive)
        return max(0, self.num_slots - self.num_taken - used)

    def view(self) -> ClusterView:
        total, free = {"CPU": float(self.num_slots)}, {"CPU": float(self.num_free)}
        return ClusterView((NodeView("node", "10.0.0.1", total, free, self.is_settling),))

    @property
    def sizes(self) -> list[int]:
        """The sizes with which all groups were made that were to be started, in order."""
        return [group.first_size for group in self.groups if group.slots.awaited_s is None]


class FakeGroup(WorkerGroup):
    """A worker group with replicas in this process.

    It is a `WorkerGroup` for type checkers only, so that it cannot drift from what it imitates: nothing of that class
    runs here, and `tests/engine/test_group.py` checks that each of its public methods has a stand-in.
    """

    infos: list[WorkerInfo] = []  # noqa: RUF012 - here and below: instead of properties of the class that it imitates
    worlds: list[World] = []  # noqa: RUF012
    silent: set[int] = set()  # noqa: RUF012
    stuck: set[int] = set()  # noqa: RUF012
    slots: FakeSlots
    standby: FakeStandbyWorkers

    def __init__(self, cluster: FakeCluster, spec: GroupSpec, num_workers: int) -> None:
        self.cluster, self.spec, self.num_workers = cluster, spec, num_workers
        self.first_size = num_workers
        self.num_spares = 0
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []
        self.replicas: list[Any] = []
        self.slots = FakeSlots(self)
        self.standby = FakeStandbyWorkers(self)
        self.is_alive = False
        self.ended_by: str | None = None
        self.is_killed_beside = False
        self.silent: set[int] = set()
        self.stuck: set[int] = set()
        self.gone: set[int] = set()
        self.functions: list[str] = []
        self.killed_ranks: list[int] = []
        self.handovers: list[StateHandover] = []

    def __len__(self) -> int:
        return self.num_workers

    @property
    def is_driver_only(self) -> bool:
        return self.spec.use_local and self.num_workers == 1

    @property
    def remote_ranks(self) -> list[int]:
        return list(range(int(self.spec.use_local), self.num_workers))

    @property
    def local_replica(self) -> Any:
        return self.replicas[0] if self.spec.use_local else None

    def start(self, reservation_timeout_s: float | None = None, min_workers: int | None = None) -> GroupReport:
        event = _next(self.cluster.starts)
        if isinstance(event, Denied):
            raise ReservationTimeoutError("not granted")
        nodes = self.cluster.nodes or ["node"] * self.num_workers
        self.infos = [WorkerInfo(nodes[rank], "10.0.0.1", rank) for rank in range(self.num_workers)]
        self.worlds = ranks.assign(self.infos)
        self.replicas = [self.spec.make_replica(world) for world in self.worlds]
        if not self.is_driver_only:  # which reserves nothing
            self.slots.num_reserved, self.slots.num_taken = self.num_workers + self.num_spares, self.num_workers
        report = self._report(event, lambda replica: replica.setup(), {}, self.spec.captures_after_calls, None)
        self.is_alive = True
        return report

    @property
    def is_ended(self) -> bool:
        return not self.is_alive

    def on_replica(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        *,
        capture: bool = False,
        landed: int | None = None,
        number: Any = None,
        on_wait: Callable[[], None] | None = None,
        by_line: bool = False,
    ) -> GroupReport:
        assert self.is_alive, "a group that was given up was used again"
        self.functions.append(function.__name__)
        is_own_call = function.__module__.startswith("raysgd.engine.")
        event = _next(self.cluster.restores if is_own_call else self.cluster.calls)
        if on_wait is not None:
            self.cluster.while_waiting(on_wait)
        return self._report(event, function, args_by_rank, capture, landed)

    def _report(
        self,
        event: Event,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        capture: bool,
        landed: int | None,
    ) -> GroupReport:
        if isinstance(event, Interrupted):
            raise KeyboardInterrupt
        if self.is_killed_beside and not self.is_driver_only:
            event = Lost(tuple(range(self.num_workers)))
        called = sorted(args_by_rank) if args_by_rank else range(self.num_workers)
        outcomes = []
        for rank in called:
            failure = _failure(event, rank)
            if failure is not None:
                outcomes.append(Outcome(rank, failure=failure))
                continue
            replica = self.replicas[rank]
            if isinstance(event, Lost) and rank in event.after:
                replica.breaks_after = event.after[rank]
            try:
                value = function(replica, *args_by_rank.get(rank, ()))
            except BrokenOff:
                outcomes.append(Outcome(rank, answered=False))
                continue
            is_over = not isinstance(value, HeldAtStep)
            answer = WorkerAnswer(value, replica.capture(landed) if capture and is_over else None)
            is_heard = event is None or (isinstance(event, Raised) and event.others_answered)
            outcomes.append(Outcome(rank, answer) if is_heard else Outcome(rank, answered=False))
        return GroupReport(tuple(outcomes))

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Transfer:
        return Transfer(FakeTransfer(self, lambda: function(self.replicas[rank], *args)).result)

    fetch = beside

    def fetch_parts(self, function: Callable[..., Any], tokens: Sequence[Any]) -> Transfer:
        parts = [self.fetch(rank, function, token) for rank, token in enumerate(tokens)]
        return together(parts, [info.node_id for info in self.infos], {})

    def share(self, value: Any) -> list[Any]:
        return [value] * self.num_workers

    # ------------------------------------------------------------------------------------ beside the work

    def submit_beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return lambda: function(self.replicas[rank], *args)

    def poll(self, rank: int, call: Callable[[], Any]) -> Outcome:
        return Outcome(rank, answered=False) if rank in self.cluster.silent else Outcome(rank, call())

    def ask_beside(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = 0.0
    ) -> dict[int, Any]:
        asked = [rank for rank in ranks or range(self.num_workers) if rank not in self.cluster.silent]
        if method == "stack":
            return {rank: f"stack of rank {rank}" for rank in asked}
        function, *rest = args
        return {rank: function(self.replicas[rank], *rest) for rank in asked}

    def interrupt(self) -> None:
        """Nothing: no rank waits for another one."""

    def kill_rank(self, rank: int) -> None:
        self.killed_ranks.append(rank)

    # ------------------------------------------------------------------------------------ formed anew

    def settle(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        lost = {o.rank for o in report.outcomes if o.failure is not None and o.failure.kind == "died"}
        self.silent = set(self.cluster.silent) - lost
        self.stuck = set(self.cluster.stuck)
        return [rank for rank in range(self.num_workers) if rank not in lost | self.silent | self.stuck]

    def leave_group(self, survivors: Sequence[int], on_wait: Callable[[], None] | None = None) -> GroupReport:
        event = _next(self.cluster.stands)
        if isinstance(event, Interrupted):
            raise KeyboardInterrupt
        if self.is_killed_beside:
            event = Lost(tuple(survivors))
        outcomes = []
        for rank in survivors:
            failure = _failure(event, rank)
            replica_progress = self.replicas[rank].replica_progress()
            outcomes.append(Outcome(rank, failure=failure) if failure else Outcome(rank, replica_progress))
        return GroupReport(tuple(outcomes))

    def answering(self, ranks: Sequence[int]) -> list[int]:
        event = _next(self.cluster.waits)
        dead = event.ranks if isinstance(event, Lost) else ()
        self.silent |= self.cluster.silent & set(ranks)
        return [rank for rank in ranks if rank not in dead and rank not in self.silent]

    def remove_workers(self, ranks: Sequence[int]) -> None:
        assert not (self.spec.use_local and 0 in ranks), "the driver cannot leave"
        for rank in (self.silent | self.stuck).intersection(ranks):
            self.kill_rank(rank)
        self.slots.num_taken -= len(ranks)
        self.gone |= set(ranks)

    def regroup(
        self,
        survivors: Sequence[int],
        joining: Sequence[Any],
        handover: StateHandover,
        on_wait: Callable[[], None] | None = None,
        places: Sequence[int] = (),
    ) -> GroupReport:
        event = _next(self.cluster.regroups)
        self.handovers.append(handover)
        self._give_places(survivors, joining, places)
        if event is None:
            for taker in handover.takers:
                self.replicas[taker].take_over(self.replicas[handover.source].hand_over())
        report = self._report(
            event, lambda replica: replica.regroup(self._world_of(replica), handover), {}, False, None
        )
        return GroupReport(tuple(replace(o, value=o.value.value) if o.ok else o for o in report.outcomes))

    def renew(
        self,
        survivors: Sequence[int],
        joining: Sequence[Any],
        on_wait: Callable[[], None] | None = None,
        *,
        captures: bool = False,
    ) -> GroupReport:
        event = _next(self.cluster.regroups)
        self._give_places(survivors, joining)
        self.replicas = [self.spec.make_replica(world) for world in self.worlds]
        return self._report(event, lambda replica: replica.setup(), {}, captures, None)

    def _give_places(self, survivors: Sequence[int], joining: Sequence[Any], places: Sequence[int] = ()) -> None:
        self.replicas = ranks.in_places([self.replicas[rank] for rank in survivors] + list(joining), places)
        new = [WorkerInfo("node", "10.0.0.1", 100 + index) for index in range(len(joining))]
        self.infos = ranks.in_places([self.infos[rank] for rank in survivors] + new, places)
        self.worlds, self.num_workers, self.gone = ranks.assign(self.infos), len(self.infos), set()

    def _world_of(self, replica: Any) -> World:
        return next(world for world, other in zip(self.worlds, self.replicas, strict=True) if other is replica)

    # ------------------------------------------------------------------------------------ the end

    @property
    def was_started(self) -> bool:
        return bool(self.replicas)

    def kill_workers(self) -> None:
        self.is_killed_beside = True

    def kill(self, timeout_s: float = 5.0) -> None:
        self.is_alive, self.ended_by = False, "kill"

    def stop(self, timeout_s: float) -> None:
        self.is_alive, self.ended_by = False, "stop"


class FakeSlots(Slots):
    """Numbers of slots, and no places; as with `FakeGroup`, nothing of the real class runs here."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self.num_reserved = 0
        self.num_taken = 0
        self.num_asked = 0
        self.awaited_s: float | None = None

    def __len__(self) -> int:
        return self.num_reserved

    def num_usable(self, avoid: Collection[str] = ()) -> int:
        return min(self.num_reserved, self._group.cluster.num_slots)

    def reserve(
        self, count: int, timeout_s: float, *, has_driver: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        if self._group.cluster.num_free < count:
            raise ReservationTimeoutError("not granted")
        self.num_reserved += count

    def ask_up_to(self, max_workers: int, num_workers: int) -> None:
        self.num_asked = max(0, max_workers - max(num_workers, self.num_reserved))

    def take_granted(self) -> None:
        num_granted = min(self.num_asked, self._group.cluster.num_free)
        self.num_asked, self.num_reserved = self.num_asked - num_granted, self.num_reserved + num_granted

    def await_room(
        self, count: int, timeout_s: float, sleep: Callable[[float], object], *, has_driver: bool = False
    ) -> None:
        self.awaited_s, self._group.ended_by = timeout_s, "it was never started"
        sleep(timeout_s)


class FakeStandbyWorkers(StandbyWorkers):
    """Replicas that are made ready beside a group; as with `FakeGroup`, nothing of the real class runs here."""

    num_coming: int = 0

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self.ready: list[Any] = []
        self.num_coming = 0
        self.replacements = Replacements()
        self.killed_standby: list[Any] = []

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    def start_more(self, count: int, world_size: int, avoid: frozenset[str] = frozenset()) -> int:
        slots, cluster = self._group.slots, self._group.cluster
        self.kill_on(avoid)
        count = max(0, min(count, slots.num_usable(avoid) - slots.num_taken))
        slots.num_taken += count
        self.num_coming += count
        if not cluster.standby_is_slow:
            self.arrive()
        return count

    def arrive(self) -> None:
        """Those that are coming are ready now."""
        for _ in range(self.num_coming):
            replica: Any = self._group.spec.make_replica(World(rank=0, size=1))
            replica.setup()
            replica.warm_up()
            self.ready.append(replica)
        self.num_coming = 0

    def replace(self, num_lost: int, world_size: int) -> None:
        left = self.replacements
        left.num_left -= self.start_more(min(num_lost, left.num_left), world_size)

    def take_needed(self, count: int, most: int, on_wait: Callable[[], None] | None = None) -> list[Any] | None:
        if count > 0:
            self.arrive()
        return self.take_ready(max(0, most)) if len(self.ready) >= count else None

    def look_after(self) -> None: ...

    def kill_unresponsive(self) -> None: ...

    def take_ready(self, count: int, timeout_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> list[Any]:
        if timeout_s:
            on_wait()
            self.arrive()
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def kill(self, standby_worker: Any) -> None:
        self.killed_standby.append(standby_worker)
        self._group.slots.num_taken -= 1

    def kill_on(self, node_ids: frozenset[str]) -> None: ...

    def kill_all(self) -> None:
        self.num_coming = 0
        while self.ready:
            self.kill(self.ready.pop())


@dataclass
class FakeTransfer:
    """A state on its way. It is read when it is asked for, which is as late as that may happen."""

    group: FakeGroup
    produce: Callable[[], Any]
    waited_s: float = 0.0

    def result(self, timeout_s: float | None) -> Any:
        if not self.group.is_alive:
            raise ConnectionError("the worker that held it is gone")
        if timeout_s is not None and self.waited_s + timeout_s < self.group.cluster.transfer_s:
            self.waited_s += timeout_s
            raise TimeoutError("still on its way")
        return self.produce()


def fault(rank: int = 0, error: BaseException | None = None, **changes: Any) -> WorkerFault:
    """A fault of a rank, as its worker would word it."""
    error = error or RuntimeError("broken")
    values = {
        "node": f"10.0.0.{rank + 1}",
        "type_name": type(error).__name__,
        "message": str(error),
        "location": "model.py:7 in forward: x / 0",
        "traceback_text": f"Traceback of {type(error).__name__}",
        **changes,
    }
    return WorkerFault(rank=rank, error=error, **values)


def failure(kind: FailureKind, rank: int = 0, error: BaseException | None = None) -> Failure:
    """A failure of a rank."""
    return Failure(kind, fault(rank, error))


def _failure(event: Event, rank: int) -> Failure | None:
    if isinstance(event, Lost) and rank in event.ranks:
        return failure(event.kind, rank, RuntimeError("the process is gone"))
    if isinstance(event, Raised) and event.rank in (rank, None):
        return failure("user", rank, event.error)
    return None


def _next(events: deque[Event]) -> Event:
    event = events.popleft() if events else None
    if isinstance(event, ShutDown):
        event.stop()
        return None
    return event


class Stopper:
    """Another thread, which stops a controller that is in the middle of something."""

    def __init__(self, controller: ElasticController, cluster: FakeCluster) -> None:
        self._controller, self._cluster = controller, cluster
        self._thread = Thread(target=controller.stop)

    def stop(self) -> None:
        """Returns when the thread has done all that it can do by itself."""
        self._thread.start()
        while not self._has_begun or not all(g.ended_by or g.is_killed_beside for g in self._cluster.groups):
            time.sleep(0.001)

    @property
    def _has_begun(self) -> bool:
        try:
            self._controller.status(None)
        except TrainerShutdownError:
            return True
        return False

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "`stop` did not return"


def raise_from_compiled_code(kind: type[Exception], text: str) -> None:
    """Raises as libraries do whose code is compiled: without a `raise` in Python."""
    ctypes.pythonapi.PyErr_SetString(ctypes.py_object(kind), text.encode())


def no_snapshots() -> Snapshots:
    """What a trainer knows of snapshots before there is one."""
    return Snapshots(GroupSpec(NullConnection(), CountingReplica))
