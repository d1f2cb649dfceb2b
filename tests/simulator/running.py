"""Runs a schedule: the engine as it is, over simulated workers."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.policies import ElasticRules, FailurePolicy, ScalingPolicy
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import StateHandover, World
from tests.simulator.befalling import Befalling
from tests.simulator.invariants import Invariants
from tests.simulator.kernel import Kernel, Stopped
from tests.simulator.network import Network, SimConnection
from tests.simulator.platform import Cluster, Node, SimPlatform
from tests.simulator.processes import Process
from tests.simulator.program import Program
from tests.simulator.replica import Given, SimReplica
from tests.simulator.schedule import Schedule
from tests.simulator.transitions import Transitions
from tests.simulator.watched import WatchedGroup

SELDOM = 20_000  # new objects between two searches of Python for what is not used any more
SETTLE_S = 60.0  # longer than any process is frozen that goes on later


@dataclass(frozen=True)
class Verdict:
    """What came of a schedule.

    Attributes:
        broken: The first invariant that was broken; None if all held.
        log: What happened, for people.
        num_happened: How many of its faults came about.
    """

    broken: str | None
    log: tuple[str, ...]
    num_happened: int


def _waiting(option: Any) -> tuple[Any, float | None]:
    """Return whether survivors wait, and how often they look for room: "auto"; None, to wait; seconds, not to."""
    return ("auto", 60.0) if option == "auto" else (option is None, option)


class Simulation:
    """One run.

    Args:
        schedule: What happens.
        spec: More of the `GroupSpec`.
        scaling: More of the `ScalingPolicy`.
        options: More of the `ElasticController`.
    """

    def __init__(self, schedule: Schedule, *, spec: Any = None, scaling: Any = None, **options: Any) -> None:
        self.schedule = schedule
        self._spec, self._scaling, self._options = spec or {}, scaling or {}, options
        self.rng = random.Random(schedule.seed * 7919 + 1)
        self.kernel = self._make_kernel()
        self.network = Network(self.kernel, self.rng, schedule.tells)
        nodes = {f"n{index}": Node(f"n{index}", size) for index, size in enumerate(schedule.nodes)}
        self.cluster = Cluster(self.kernel, nodes, self._make_process)
        self.log: list[str] = []
        self.invariants = Invariants(self)
        self.befalling = Befalling(self)
        self.kernel.at_wait = self.befalling.at_wait
        self.platform = SimPlatform(self.cluster, self.invariants)
        self.transitions = Transitions(self)
        self.controller = self._controller()
        self.program = Program(self)

    def _make_kernel(self) -> Kernel:
        return Kernel()

    def _controller(self) -> ElasticController:
        schedule = self.schedule
        spec = {
            "connection": SimConnection(self.network),
            "make_replica": _not_called,
            "use_local": schedule.use_local,
            "snapshot_every_s": schedule.snapshot_every_s,
            "regroups": schedule.regroups,
            "renews": schedule.renews,
            "num_spares": schedule.num_spares,
            "heartbeat_s": schedule.heartbeat_s,
            "settle_timeout_s": 8.0,
            "reservation_timeout_s": 20.0,
            **self._spec,
        }
        num_local = int(schedule.use_local)
        options = {
            "rules": ElasticRules(*_waiting(schedule.resize_interval_s), self._leaving, lambda: True),
            "hooks": self.invariants.hooks,
            **self._options,
        }
        controller = ElasticController(
            GroupSpec(**spec),
            ScalingPolicy(schedule.num_workers, schedule.min_workers, num_local=num_local, **self._scaling),
            FailurePolicy(schedule.continues),
            platform=self.platform,  # type: ignore[arg-type]
            make_group=partial(WatchedGroup, invariants=self.invariants),
            **options,
        )
        self.transitions.follow(controller)
        return controller

    def _leaving(self) -> frozenset[str]:
        return frozenset(node.name for node in self.cluster.nodes.values() if node.is_leaving and node.is_alive)

    def run(self) -> Verdict:
        try:
            self.program.run()
            self.kernel.settle(SETTLE_S)
            self.invariants.check_end()
        except Stopped:
            pass
        verdict = Verdict(self.kernel.stopped_by, tuple(self.log), len(self.befalling.happened))
        self.kernel.end_threads()
        return verdict

    def tell(self, text: str) -> None:
        self.log.append(f"{self.kernel.now - 1000.0:9.3f}  {text}")

    # ------------------------------------------------------------------------------------ for processes

    @property
    def copy_s(self) -> float:
        return self.schedule.copy_s

    @property
    def late_s(self) -> float:
        return self.schedule.late_s

    def _make_process(self, pid: int, node: str, is_driver: bool) -> Process:
        return Process(self, pid, node, SimConnection(self.network), is_driver)

    def make_replica(self, world: World, connection: SimConnection, name: str) -> SimReplica:
        return SimReplica(world, self, connection, name)

    def check_built(self, replica: SimReplica) -> None:
        self.invariants.check_size(replica.world.size)

    def check_left(self, replica: SimReplica) -> None:
        self.invariants.note_left(replica)

    def note_death(self) -> None:
        self.befalling.num_incidents += 1

    def travel_s(self) -> float:
        return self.rng.uniform(0.0005, 0.01)

    def work_s(self) -> float:
        return self.rng.uniform(0.001, 0.1)

    def start_s(self) -> float:
        return self.rng.uniform(0.05, 0.4)

    def point_of(self, label: str, process: Process) -> Iterable[float]:
        return self.befalling.at(label, process)

    # ------------------------------------------------------------------------------------ for replicas

    @property
    def num_samples(self) -> int:
        return self.schedule.num_samples

    @property
    def batch_size(self) -> int:
        return self.schedule.batch_size

    @property
    def snapshot_every(self) -> int | None:
        return self.schedule.snapshot_every

    @property
    def is_large(self) -> bool:
        return self.schedule.is_large

    @property
    def has_halves(self) -> bool:
        return self.schedule.has_halves

    @property
    def joins_late(self) -> bool:
        return self.schedule.joins_late

    @property
    def undo(self) -> bool | None:
        return self.schedule.undo

    def point(self, label: str, replica: SimReplica) -> Iterable[float]:
        return self.point_of(label, self.process_of(replica))

    def process_of(self, replica: SimReplica) -> Process:
        return self.cluster.processes[int(replica.name) - 100]

    def now(self) -> float:
        return self.kernel.now

    def step_s(self) -> float:
        return self.rng.uniform(0.02, 0.3)

    def check_step(self, replica: SimReplica, given: Mapping[int, Given]) -> None:
        self.invariants.check_step(given)
        self.befalling.at_moment("merge", self.process_of(replica))

    def check_stepped(self, replica: SimReplica) -> None:
        self.invariants.check_replica(replica)

    def check_landed(self, replica: SimReplica, token: int | None, newest: int) -> None:
        self.invariants.check_landed(self.process_of(replica), token, newest)

    def check_formed(self, replica: SimReplica, handover: StateHandover) -> None:
        self.invariants.check_formed(replica, handover)


def _not_called(world: World) -> Any:
    raise AssertionError("the simulation makes its replicas itself")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines of the engine, which are not read here and cost more than all else, and with less searching.

    What a run leaves refers to itself, so Python has to search for it. It does so seldom: a run leaves little.
    """
    before, threshold = logging.root.manager.disable, gc.get_threshold()
    if before >= logging.CRITICAL:
        yield
        return
    logging.disable(logging.CRITICAL)
    gc.set_threshold(SELDOM, *threshold[1:])
    try:
        yield
    finally:
        logging.disable(before)
        gc.set_threshold(*threshold)


def run(schedule: Schedule) -> Verdict:
    """Runs a schedule to its end. Where there are many, all of them `quiet` cost less than each."""
    with quiet():
        return Simulation(schedule).run()
