"""A trainer without a front end: the engine as it is, over the workers, nodes and time of `tests/simulator`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.policies import RetryBudget
from raysgd.core.engine.shared.interface import Call, FrontEndWords
from tests.simulator.kernel import Future
from tests.simulator.platform import Node
from tests.simulator.processes import Process
from tests.simulator.replica import State, Walked, look, note, walk, walk_on
from tests.simulator.running import Simulation
from tests.simulator.schedule import Schedule

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

Act = Callable[[Process], object] | Exception
"""Happens to a process; or is raised by the user's code in it."""
Befall = Mapping[tuple[str, int, int], Act]
"""What happens when a rank comes to a point of the simulator for the n-th time in a call."""

RESTARTS: Any = {"regroups": False, "continues": False}
"""Of a trainer whose replicas never go on in another group."""


def die(process: Process) -> None:
    process.die(0.01)


def press_ctrl_c(process: Process) -> None:
    """In the driver, which waits while something happens in a worker."""
    raise KeyboardInterrupt


def disconnect(process: Process) -> None:
    process.connection.interrupt()


def befalls(act: Act, *ranks: int, at: str = "step", nth: Iterable[int] = (3,)) -> Befall:
    return {(at, rank, number): act for rank in ranks for number in nth}


def dies(*ranks: int, at: str = "step", nth: Iterable[int] = (3,)) -> Befall:
    return befalls(die, *ranks, at=at, nth=nth)


def in_note(act: Act, *ranks: int) -> Befall:
    """In the middle of a call that can only be begun again."""
    return befalls(act, *ranks, at="note", nth=[1])


class Trainer(Simulation):
    """Makes calls, each with what befalls the workers in it. All that the simulator checks is checked meanwhile.

    Args:
        nodes: How many workers each node has room for.
        options: Of the schedule, and as for `Simulation`.

    Attributes:
        rule: Says what user code raises at a point in a process, if anything.
    """

    def __init__(self, *, nodes: tuple[int, ...] = (3,), spec: Any = None, **options: Any) -> None:
        names = {each.name for each in fields(Schedule)} & options.keys()
        given = {"seed": 1, "num_workers": 3, "num_samples": 400, **{name: options.pop(name) for name in names}}
        self.seen: Counter[tuple[str, int]] = Counter()
        self.due: dict[tuple[str, int, int], Act] = {}
        self._befallen: set[tuple[str, int]] = set()
        self.rule: Callable[[str, Process], Exception | None] = lambda label, process: None
        self._num_calls = 0
        super().__init__(Schedule(nodes=nodes, **given), spec={"words": WORDS, **(spec or {})}, **options)

    def started(self, befall: Befall | None = None, **options: Any) -> Trainer:
        self.expect(befall or {})
        self.controller.start(**options)
        return self

    def expect(self, *befall: Befall) -> None:
        """Lets this happen in the next call, or at the start."""
        self.seen.clear()
        self._befallen.clear()
        self.due = {where: act for each in befall for where, act in each.items()}

    def _check_all_came_about(self) -> None:
        """Refuses a call in which nothing came of what was to befall a rank: its test would show nothing.

        A state that is sent travels beside the call, and may arrive after it.
        """
        missing = {(label, rank) for label, rank, _ in self.due} - self._befallen
        assert {label for label, _ in missing} <= {"send"}, f"this did not happen: {missing}"

    def point_of(self, label: str, process: Process) -> Iterable[float]:
        yield from super().point_of(label, process)
        self.seen[label, process.world.rank] += 1
        act = self.due.pop((label, process.world.rank, self.seen[label, process.world.rank]), None)
        if act is not None:
            self._befallen.add((label, process.world.rank))
        act = act or self.rule(label, process)
        if isinstance(act, Exception):
            raise act
        if act is not None:
            self.kernel.soon(lambda: act(process))
            yield 0.0

    # ------------------------------------------------------------------------------------ calls

    def walk(self, num_steps: int, *befall: Befall, **options: Any) -> list[int]:
        """Trains; returns how many steps each rank has taken in all."""
        self.expect(*befall)
        walked: list[Walked] = self.controller.run(self.walking(num_steps), **options)
        self._check_all_came_about()
        return [each.state.steps for each in walked]

    def walking(self, num_steps: int) -> Call:
        self._num_calls += 1
        args = [(self._num_calls, num_steps)]
        return Call(walk, lambda worlds: args * len(worlds), changes_state=True, keeps_alike=True, resume=walk_on)

    def note(self, number: int, *befall: Befall, **options: Any) -> list[tuple[int, ...]]:
        """A call that changes the state, and can only be begun again; returns all that each rank has noted."""
        self.expect(*befall)
        states: list[State] = self.controller.run(self.noting(number), **options)
        self._check_all_came_about()
        return [each.noted for each in states]

    def noting(self, number: int) -> Call:
        return Call(note, lambda worlds: [(number,)] * len(worlds), changes_state=True, keeps_alike=True)

    def look(self, *befall: Befall, budget: RetryBudget | None = None) -> list[tuple[int, ...]]:
        """A call that changes nothing."""
        self.expect(*befall)
        states: list[State] = self.controller.run(Call(look), budget=budget)
        self._check_all_came_about()
        return [each.noted for each in states]

    # ------------------------------------------------------------------------------------ the cluster

    def lose_node(self, name: str) -> Act:
        return lambda process: self.cluster.lose_node(name)

    def add_node(self, num_slots: int) -> None:
        name = f"n{len(self.cluster.nodes)}"
        self.cluster.nodes[name] = Node(name, num_slots)

    def load_for(self, seconds: float) -> Act:
        """Of a worker that starts, and takes so long."""

        def load(process: Process) -> None:
            process.load(is_endless=False)
            self.kernel.after(seconds, process.thaw)

        return load

    def starting(self, *seconds: float) -> list[Befall]:
        """The next workers that start, one after the other, take so long."""
        return [befalls(self.load_for(each), -1, at="prepare", nth=[nth]) for nth, each in enumerate(seconds, start=1)]

    def lose_but_first(self, process: Process) -> None:
        """Only the process that started first stays, spares die too."""
        for each in self.cluster.processes[1:]:
            die(each)

    def lose(self, *ranks: int) -> Act:
        """These die at the same time."""
        return lambda process: [die(self.group.workers[rank].process) for rank in ranks]  # type: ignore[union-attr]

    def stop(self, process: Process) -> None:
        """Another thread ends the trainer."""
        self.kernel.run_thread(self.controller.stop)
        Future().set()  # now, not when a worker has answered

    # ------------------------------------------------------------------------------------ what is seen

    @property
    def group(self) -> WorkerGroup:
        return self.controller.running

    @property
    def pids(self) -> list[int]:
        """The processes, by rank: they are numbered from 100 as they are started."""
        return [info.pid for info in self.group.infos]

    @property
    def num_started(self) -> int:
        """How many processes there have been."""
        return len(self.cluster.processes)

    @property
    def kinds(self) -> list[str]:
        """What happened after the start."""
        return [event.kind for event in self.controller.history.events if event.kind != "started"]

    @property
    def last_event(self) -> tuple[str, int, int, str]:
        event = self.controller.history.events[-1]
        return event.kind, event.old_size, event.new_size, event.cause
