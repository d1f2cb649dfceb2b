"""The simulated cluster: nodes, room, reservations, and the platform that the engine reaches them through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from raysgd.core.cluster.resources import ClusterView, NodeView, Resources
from raysgd.core.engine.placement import Reservation, Slot
from raysgd.core.engine.platform import LocalWorker, RemoteWorker
from raysgd.core.engine.shared.interface import NO_WORDS, Connection, FrontEndWords
from raysgd.core.engine.shared.types import Outcome, WorkerInfo
from raysgd.core.engine.transfers import SharedValue, Transfer
from raysgd.core.engine.worker import LocalCall, WorkerProcess
from raysgd.exceptions import ReservationTimeoutError
from tests.simulator.kernel import Condition, DriverThread, Event, Future, Kernel
from tests.simulator.processes import Call, Process

if TYPE_CHECKING:
    from tests.simulator.invariants import Invariants


@dataclass
class Node:
    """A machine with room for so many workers, some of it taken by others."""

    name: str
    num_slots: int
    num_taken: int = 0
    is_alive: bool = True
    is_leaving: bool = False
    leaving_since: float = 0.0


@dataclass
class Cluster:
    """All nodes, what is reserved on them, and the processes there; whether Ray itself is gone."""

    kernel: Kernel
    nodes: dict[str, Node]
    make_process: Callable[[int, str, bool], Process]
    reservations: list[SimReservation] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    is_head_gone: bool = False

    def num_free(self, node: Node) -> int:
        if not node.is_alive:
            return 0
        held = sum(each.bundles.count(node.name) for each in self.reservations)
        return max(0, node.num_slots - node.num_taken - held)

    @property
    def room(self) -> int:
        return sum(self.num_free(node) for node in self.nodes.values())

    def view(self) -> ClusterView:
        if self.is_head_gone:
            return ClusterView((), is_head_gone=True)
        return ClusterView(
            tuple(
                NodeView(node.name, node.name, {"CPU": float(node.num_slots)}, {"CPU": float(self.num_free(node))})
                for node in self.nodes.values()
                if node.is_alive and not node.is_leaving
            )
        )

    @property
    def node_of_driver(self) -> str:
        return next(iter(self.nodes))

    def place(self) -> str | None:
        """The node with the most room; None where there is none."""
        free = {node.name: self.num_free(node) for node in self.nodes.values() if not node.is_leaving}
        name = max(free, key=lambda each: free[each], default=None)
        return name if name is not None and free[name] else None

    def lose_node(self, name: str) -> None:
        """Its processes die; Ray moves what was reserved there, if there is room elsewhere."""
        self.nodes[name].is_alive = False
        for process in self.processes:
            if process.node == name and not process.is_driver:
                process.die(3.0, "its node died")
        for reservation in self.reservations:
            reservation.move_from(name)

    @property
    def live(self) -> list[Process]:
        """Those that can be lost."""
        return [process for process in self.processes if not process.is_dead and not process.is_driver]


class SimReservation(Reservation):
    """Room for some workers, all or none."""

    def __init__(
        self,
        cluster: Cluster,
        check_given_back: Callable[[SimReservation], None],
        need: Resources,
        num_workers: int,
        has_driver: bool = False,
        packs: bool = False,
        within: Any = None,
        words: FrontEndWords = NO_WORDS,
    ) -> None:
        self._cluster, self._num_workers, self._has_driver = cluster, num_workers, has_driver
        self._check_given_back, self.is_own = check_given_back, True
        self.bundles: list[str | None] = []
        self.is_closing = False
        self.used_by: dict[int, Process] = {}

    def wait(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        kernel = self._cluster.kernel
        deadline = kernel.now + timeout_s
        try:
            while not self.is_granted():
                kernel.sleep(0.2)
                check()
                if kernel.now >= deadline:
                    raise ReservationTimeoutError("not granted")
        except BaseException:
            self.close(5.0)
            raise

    def is_granted(self) -> bool:
        if self.bundles:
            return True
        if self._cluster.room < self._num_workers:
            return False
        self._cluster.reservations.append(self)
        for index in range(self._num_workers):
            is_of_driver = self._has_driver and not index
            self.bundles.append(self._place_of_driver() if is_of_driver else self._cluster.place())
        if None not in self.bundles:
            return True
        self._give_up()
        return False

    def _place_of_driver(self) -> str | None:
        node = self._cluster.nodes[self._cluster.node_of_driver]
        return node.name if self._cluster.num_free(node) else None

    def gpus_of_driver(self) -> list[str]:
        return []

    def _give_up(self) -> None:
        self.bundles = []
        if self in self._cluster.reservations:
            self._cluster.reservations.remove(self)

    def move_from(self, name: str) -> None:
        for index, node in enumerate(self.bundles):
            if node == name:
                self.bundles[index] = None
                self.bundles[index] = self._cluster.place()

    def nodes(self) -> list[str | None]:
        return list(self.bundles)

    def close(self, timeout_s: float) -> None:
        if not self.bundles:
            return
        self.is_closing = True
        self._check_given_back(self)
        for process in self.used_by.values():
            process.kill(reaches_stopped=True)
        is_given_up = Future()
        self._cluster.kernel.after(0.05, lambda: is_given_up.set(self._give_up()))
        self._cluster.kernel.block(lambda: is_given_up.is_done, timeout_s)


class SimWorker(RemoteWorker):
    """The driver's handle on a simulated process."""

    def __init__(self, slot: Slot, process: Process) -> None:
        self.slot, self.process = slot, process

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        return self.process.submit(method.__name__, args)

    def ask(self, packed: bytes, *values: Any) -> Call:
        return self.submit(WorkerProcess.on_packed, packed, *values)

    def kill(self) -> None:
        self.process.kill(reaches_stopped=False)


class SimLocalWorker(LocalWorker):
    """The driver's handle on the worker in its own process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> LocalCall:
        return LocalCall(lambda: self.process.run_here(method.__name__, args))

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:
        pass

    def interrupt(self) -> None:
        self.process.connection.interrupt()

    @property
    def replica(self) -> Any:
        return self.process.replica

    def kill(self) -> None:
        self.process.close_here()


class SimPlatform:
    """What the engine sees of all that."""

    is_running = True

    def __init__(self, cluster: Cluster, invariants: Invariants) -> None:
        self._cluster, self._kernel, self._invariants = cluster, cluster.kernel, invariants
        self.stored: list[Any] = []
        self.view = cluster.view
        _platforms[id(self)] = self
        self.make_reservation: Callable[..., Reservation] = partial(
            SimReservation, cluster, invariants.check_given_back
        )

    @property
    def home(self) -> str:
        return self._cluster.node_of_driver

    def ensure_running(self) -> None: ...

    def is_head_gone(self) -> bool:
        return self._cluster.is_head_gone

    def living_nodes(self) -> frozenset[str]:
        return frozenset(node.name for node in self._cluster.nodes.values() if node.is_alive)

    def now(self) -> float:
        return self._kernel.now

    def sleep(self, seconds: float) -> None:
        self._kernel.sleep(seconds)

    def ready(self, references: Collection[Call], timeout_s: float) -> Collection[Call]:
        self._kernel.block(lambda: all(call.is_done for call in references), timeout_s)
        return [call for call in references if call.is_done]

    def any_ready(self, references: Sequence[Call], timeout_s: float | None) -> Collection[Call]:
        num_seen = -1

        def has_come() -> bool:  # looks only where a call was answered: an event is mostly something else
            nonlocal num_seen
            if num_seen == self._kernel.num_answered:
                return False
            num_seen = self._kernel.num_answered
            return any(call.is_done for call in references)

        self._kernel.block(has_come, timeout_s)
        self._kernel.settle(0.0)  # all that come at this moment, in one go
        return [call for call in references if call.is_done]

    def outcome(self, rank: int, reference: Call) -> Outcome:
        return reference.outcome(rank)

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        reservation = slot.reservation
        assert isinstance(reservation, SimReservation)
        node = reservation.bundles[slot.index] if reservation.bundles else None
        process = self._cluster.make_process(100 + len(self._cluster.processes), node or "nowhere", False)
        self._cluster.processes.append(process)
        self._invariants.check_new_process(process, reservation, slot.index)
        reservation.used_by[slot.index] = process
        if node is None or not self._cluster.nodes[node].is_alive:
            process.die(1.0, "its node died")
        return SimWorker(slot, process)

    def new_local_worker(self, connection: Connection) -> LocalWorker:
        cluster = self._cluster
        process = cluster.make_process(100 + len(cluster.processes), cluster.node_of_driver, True)
        cluster.processes.append(process)
        return SimLocalWorker(process)

    def begin_thread(self, body: Callable[[], None]) -> Callable[[], None]:
        thread = self._kernel.run_thread(body, is_user=False)
        return lambda: self._join(thread)

    def _join(self, thread: DriverThread) -> None:
        self._kernel.block(lambda: thread.is_over)

    def make_event(self) -> Event:
        return Event(self._kernel)

    def make_condition(self) -> Condition:
        return Condition(self._kernel)

    def find_process(self, worker: RemoteWorker) -> WorkerInfo | None:
        assert isinstance(worker, SimWorker)
        return worker.process.info if worker.process.is_up else None

    def kill_process(self, info: WorkerInfo) -> None:
        process = self._process_of(info)
        self._invariants.check_ended(process)
        process.kill(reaches_stopped=True)

    def _process_of(self, info: WorkerInfo) -> Process:
        return next(process for process in self._cluster.processes if process.pid == info.pid)

    def transfer(self, call: Call | LocalCall) -> Transfer:
        if isinstance(call, LocalCall):
            value = call.function()
            return Transfer(lambda timeout_s: value)
        return Transfer(partial(_sent, self._kernel, call))

    def store(self, value: Any) -> SharedValue:
        self.stored.append(value)
        return SharedValue(value, _Reference(self, len(self.stored) - 1))


class _Reference:
    """What is sent in place of a stored value: it is small, and where it arrives, it is the value."""

    def __init__(self, platform: SimPlatform, number: int) -> None:
        self._place = id(platform), number

    def __reduce__(self) -> Any:
        return _value_at, self._place


_platforms: WeakValueDictionary[int, SimPlatform] = WeakValueDictionary()


def _value_at(platform: int, number: int) -> Any:
    return _platforms[platform].stored[number]


def _sent(kernel: Kernel, call: Call, timeout_s: float | None) -> Any:
    """What a call returns that is on its way to the driver."""
    if timeout_s != 0.0:
        kernel.block(lambda: call.is_done, timeout_s)
    if not call.is_done:
        raise TimeoutError("still on its way")
    if call.error is not None:
        raise ConnectionError(call.error.fault.message)
    return call.value
