"""Lets the faults of a schedule come about, each at its place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from raysgd.core.engine.shared.types import StepLacksMemory
from tests.simulator.kernel import DriverThread
from tests.simulator.processes import Process
from tests.simulator.schedule import Fault

if TYPE_CHECKING:
    from tests.simulator.running import Simulation

_REGISTER_S = 60.0
FATAL = ("die", "die with another", "freeze", "stall", "load long")
"""What does not happen to the driver's own process: with it, all ends."""
ENDLESS = 7
"""As `which` of a fault: it has no end."""
FOREVER_S = 10.0**6
AWAITED = {"step", "half"}
USER_CODE = {"called", "step", "half", "note", "look", "load", "warm up", "validate"}


class UserBugError(Exception):
    """What user code raises."""


class Befalling:
    """The faults that are still to come, and those that came about.

    Attributes:
        happened: Those that came about.
        num_incidents: How many processes and connections were lost, by fault or as a consequence of one.
        is_poisoned: Whether replicas that join another group now break it with their next step.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._faults: defaultdict[str, dict[int, list[Fault]]] = defaultdict(dict)
        for fault in simulation.schedule.faults:
            self._faults[fault.point].setdefault(fault.nth, []).append(fault)
        self._counts: Counter[str] = Counter()
        self.happened: list[Fault] = []
        self.kinds: Counter[str] = Counter()
        self.num_incidents = 0
        self.is_poisoned = False

    def at(self, label: str, process: Process) -> Iterable[float]:
        """A worker is at a place, and waits there as long as what happens takes."""
        if label == "built":
            self.is_poisoned = False
        elif label == "regroup" and process.replica is not None:
            process.replica.is_poisoned = self.is_poisoned
            if self.is_poisoned:  # what it breaks it breaks later, maybe calls later
                self.kinds["poisoned"] += 1
        due = self._due(label)
        return self._come_about(due, label, process) if due else ()

    def _come_about(self, due: list[Fault], label: str, process: Process) -> Iterator[float]:
        for fault in due:
            if fault.kind == "raise":
                if label in USER_CODE:
                    self._note(fault, str(process))
                    is_beside = label in ("warm up", "validate") or process.world.rank < 0  # on a spare that validates
                    self.kinds["raise in a call"] += not is_beside
                    yield 0.0
                    raise UserBugError(f"a bug at {label!r}")
            elif fault.kind == "lack":
                self._note(fault, str(process))
                yield 0.0
                raise StepLacksMemory(1) from UserBugError("out of memory")
            elif fault.kind == "slow":
                self._note(fault, str(process))
                self.num_incidents += 1
                yield self._slow_s(fault, label, process)
            else:
                self._happen(fault, process)
        yield 0.0

    def _slow_s(self, fault: Fault, label: str, process: Process) -> float:
        """How long it takes. User code may also hang, where others wait for it that lose patience some day."""
        is_awaited = label in AWAITED and process.world.is_distributed and not process.is_driver
        return FOREVER_S if is_awaited and not fault.which % 2 else self._simulation.rng.uniform(0.5, 12.0)

    def at_moment(self, label: str, process: Process) -> None:
        """All have given their part of a step, and none has heard of the others."""
        for fault in self._due(label):
            self._happen(fault, process)

    def at_wait(self, thread: DriverThread) -> None:
        """The driver waits."""
        for fault in self._due("wait"):
            if fault.kind == "interrupt":
                self._interrupt(fault)
            elif fault.kind == "stop":
                self._note(fault, "")
                self._simulation.program.stop_beside(force=bool(fault.which % 2))
            else:
                self.befall_one(fault)

    @property
    def num_run(self) -> int:
        """How many steps and notes the ranks have begun, all together."""
        return self._counts["step"] + self._counts["note"]

    def end(self) -> None:
        """Nothing more happens."""
        self._faults.clear()

    def befall_one(self, fault: Fault) -> None:
        """Something happens to one of the workers that live, if there are any."""
        if live := self._simulation.cluster.live:
            self._happen(fault, live[fault.which % len(live)])

    def _due(self, label: str) -> list[Fault]:
        self._counts[label] += 1
        faults = self._faults.get(label)
        return faults.pop(self._counts[label], []) if faults else []

    def _note(self, fault: Fault, whom: str) -> None:
        self.happened.append(fault)
        self.kinds[fault.kind] += 1
        self._simulation.tell(f"FAULT {fault}: {whom}")

    def _interrupt(self, fault: Fault) -> None:
        thread = self._simulation.kernel.threads[0]
        if not self._simulation.program.is_in_call:
            return
        self._note(fault, "the driver")
        thread.interrupt = KeyboardInterrupt()

    def _happen(self, fault: Fault, process: Process) -> None:
        if process.is_driver and fault.kind in FATAL:
            return
        name = fault.kind.replace(" ", "_")
        act: Callable[[Fault, Process], None] | None = getattr(self, f"_{name}", None)
        if act is not None:
            self._note(fault, str(process))
            self._simulation.kernel.soon(lambda: act(fault, process))

    # ------------------------------------------------------------------------------------ what it may be

    def _kill(self, process: Process) -> None:
        process.die(self._simulation.rng.uniform(0.005, 0.04))

    def _die(self, fault: Fault, process: Process) -> None:
        live = self._simulation.cluster.live
        self._kill(live[fault.which % len(live)] if fault.which >= 6 and live else process)

    def _die_with_another(self, fault: Fault, process: Process) -> None:
        others = [each for each in self._simulation.cluster.live if each is not process]
        for each in [process, *others[fault.which % len(others) :][:1]] if others else [process]:
            self._kill(each)

    def _die_but_one(self, fault: Fault, process: Process) -> None:
        live = self._simulation.cluster.live
        for index, each in enumerate(live):
            if index != fault.which % len(live):
                self._kill(each)

    def _lose_node(self, fault: Fault, process: Process) -> None:
        if process.node in self._simulation.cluster.nodes and not self._is_of_driver(process.node):
            self._simulation.cluster.lose_node(process.node)

    def _is_of_driver(self, node: str) -> bool:
        return self._simulation.schedule.use_local and node == self._simulation.cluster.node_of_driver

    def _freeze(self, fault: Fault, process: Process) -> None:
        self.num_incidents += 1
        process.freeze()
        process.outlives_kill = False
        if not process.is_up:  # Ray ends a process that does not register with it
            self._simulation.kernel.after(_REGISTER_S, lambda: self._kill(process))

    def _stall(self, fault: Fault, process: Process) -> None:
        self.num_incidents += 2  # one more where it goes on and stops again
        process.freeze()
        process.outlives_kill = True
        self._simulation.kernel.after(self._simulation.rng.uniform(0.5, 25.0), process.thaw)

    def _load_long(self, fault: Fault, process: Process) -> None:
        """It works and answers nothing, as long as a library loads on a busy machine; now and then without an end."""
        is_endless = fault.which == ENDLESS
        process.load(is_endless)
        if not is_endless:
            self._simulation.kernel.after(self._simulation.rng.uniform(5.0, 60.0), process.thaw)

    def _lose_connection(self, fault: Fault, process: Process) -> None:
        if process.world.is_distributed:
            self.num_incidents += 1
            process.connection.interrupt()

    def _repeat(self, fault: Fault, process: Process) -> None:
        process.num_repeated += 1 + fault.which

    def _poison(self, fault: Fault, process: Process) -> None:
        self.num_incidents += 2
        self.is_poisoned = True

    def _drain(self, fault: Fault, process: Process) -> None:
        cluster = self._simulation.cluster
        if process.node in cluster.nodes:
            cluster.nodes[process.node].is_leaving = True
            cluster.nodes[process.node].leaving_since = self._simulation.kernel.now
            if not self._is_of_driver(process.node):
                self._simulation.kernel.after(
                    self._simulation.rng.uniform(5.0, 40.0), lambda: cluster.lose_node(process.node)
                )

    def _room_goes(self, fault: Fault, process: Process) -> None:
        cluster = self._simulation.cluster
        for node in cluster.nodes.values():
            if cluster.num_free(node):
                node.num_taken += 1
                return

    def _room_comes(self, fault: Fault, process: Process) -> None:
        nodes = list(self._simulation.cluster.nodes.values())
        dead = [node for node in nodes if not node.is_alive]
        taken = [node for node in nodes if node.num_taken]
        if dead:
            dead[0].is_alive, dead[0].is_leaving = True, False
        elif taken:
            taken[0].num_taken -= 1
        else:
            nodes[fault.which % len(nodes)].num_slots += 1
