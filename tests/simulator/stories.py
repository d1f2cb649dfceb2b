"""Stories by name: what seeds draw seldom or never, and how it ends."""

# ruff: noqa: E501 (an ending is a line)

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import pytest

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.policies import FailurePolicy, RetryBudget
from raysgd.core.engine.recovery.interpreter import Interpreter
from raysgd.core.engine.shared.interface import Call, Completed, GroupEvent, Left
from raysgd.core.engine.snapshots import Snapshots, copy_call
from raysgd.core.engine.transfers import LostPartError
from raysgd.exceptions import (
    RanksDifferError,
    RaySGDError,
    ReservationTimeoutError,
)
from tests.simulator import befalling
from tests.simulator.befalling import UserBugError
from tests.simulator.cells import Visit
from tests.simulator.program import Program
from tests.simulator.replica import SimReplica, Walked, look, note, walk, walk_on
from tests.simulator.running import Simulation, Verdict, quiet
from tests.simulator.schedule import Fault, Op, Schedule

Act = Callable[[ElasticController, RetryBudget], Any]


def training(**more: Any) -> Call:
    """A call that trains."""
    call = Call(walk, lambda worlds: [(1, None)] * len(worlds), changes_state=True, keeps_alike=True, resume=walk_on)
    return replace(call, **more)


def noting(**more: Any) -> Call:
    """A call that cannot continue in another group."""
    return Call(note, lambda worlds: [(1,)] * len(worlds), changes_state=True, keeps_alike=True, **more)


def calling(*calls: Call) -> Act:
    """One call after the other."""

    def act(controller: ElasticController, budget: RetryBudget) -> Any:
        return [controller.run_or_leave(call, budget=budget) for call in calls][-1]

    return act


def leaving_after_two(controller: ElasticController, budget: RetryBudget) -> Any:
    """A call that must end early once two processes have died."""
    cluster = cluster_of(controller)
    call = training(leaves=lambda: len(cluster.processes) - len(cluster.live) > 1)
    return controller.run_or_leave(call, budget=budget)


def refuse(values: Any) -> None:
    raise RanksDifferError("they differ")


def interrupt(values: Any) -> None:
    raise KeyboardInterrupt


def start(controller: ElasticController, budget: RetryBudget) -> None:
    controller.start(as_fits=True)


def without_room(act: Act) -> Act:
    """All nodes are gone, and the group with them."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.kill_group()
        view = controller.view
        controller.view = lambda: replace(view().without({"n0", "n1"}), can_grow=False)
        try:
            return act(controller, budget)
        finally:
            controller.view = view

    return acted


def copying_first(act: Act) -> Act:
    """A copy of the state is on its way."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.run(copy_call())
        return act(controller, budget)

    return acted


def only_in_workers(act: Act) -> Act:
    """The driver has no copy of the state."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.snapshots.clear()
        controller.snapshots.completed(None)
        return act(controller, budget)

    return acted


def meanwhile(owner: Any, name: str, happens: Callable[[ElasticController], None], act: Act, *places: int) -> Act:
    """At these places, counted from 1, something happens when a method is called."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        numbers, real = count(1), getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            if next(numbers) in (places or (1,)):
                happens(controller)
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, method)
            return act(controller, budget)

    return acted


def one_dies(controller: ElasticController) -> None:
    cluster_of(controller).live[0].die(0.0)


def all_die(controller: ElasticController) -> None:
    for each in cluster_of(controller).live:
        each.die(0.0)


def room_comes(controller: ElasticController) -> None:
    for node in cluster_of(controller).nodes.values():
        node.is_alive = True


def program_ends(controller: ElasticController) -> None:
    controller.is_ending = True


def after_rest(first: Call, then: Call) -> Act:
    """Two calls, and time before each."""

    def act(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.sleep(3.0)
        controller.run(first, budget=budget)
        controller.sleep(3.0)
        return controller.run_or_leave(then, budget=budget)

    return act


def cluster_of(controller: ElasticController) -> Any:
    """The simulated cluster, whose method the controller asks for a view."""
    return controller.view.__self__  # type: ignore[attr-defined]


def losing_copies(num_copies: int, act: Act, *, dies_between: bool = False) -> Act:
    """The next snapshots are lost on their way to the driver, and perhaps a rank with the first."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        left, take = [num_copies], Snapshots.take_captures

        def take_and_lose(snapshots: Snapshots, *args: Any, **options: Any) -> None:
            take(snapshots, *args, **options)
            if left[0]:
                left[0] -= 1
                snapshots._lose_coming()
                snapshots.touch()  # one that came with the answer is lost, too
                if dies_between and left[0] == num_copies - 1:
                    cluster_of(controller).live[-1].die(0.01)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Snapshots, "take_captures", take_and_lose)
            return act(controller, budget)

    return acted


def raising(raised: Callable[[], BaseException], *places: int, acts_first: bool = False) -> Callable[[Any], Any]:
    """At these places, counted from 1, a method raises."""

    def make(real: Any) -> Any:
        numbers = count(1)

        def method(*args: Any, **options: Any) -> Any:
            is_place = next(numbers) in (places or (1,))
            if not is_place or acts_first:
                found = real(*args, **options)
            if is_place:
                raise raised()
            return found

        return method

    return make


@dataclass(frozen=True)
class Story:
    """Something that seeds draw seldom or never.

    Attributes:
        act: What the program does.
        settings: Of the schedule.
        faults: What befalls it.
        changes: What another process, or user code, does otherwise: owners, names there, and what makes the other way.
        options: Of the simulation.
        retries: Of its calls together.
        ends: How it ends, as the user sees it: see `_ending`.
    """

    act: Act
    settings: Any = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    changes: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    options: Any = field(default_factory=dict)
    retries: int = 3
    ends: str = ""

    def run(self) -> Told:
        settings = {"num_workers": 3, "nodes": (4,), "num_samples": 40, **self.settings}
        schedule = Schedule(1, ops=(Op("act", None, self.retries),), faults=self.faults, **settings)
        endings: list[str] = []
        with quiet(), pytest.MonkeyPatch.context() as patch:
            simulation = Simulation(schedule, **deepcopy(self.options))

            def act(program: Program, op: Op, budget: RetryBudget) -> None:
                befalling, invariants = simulation.befalling, simulation.invariants
                invariants.may_only_copy = True
                befalling.num_incidents += 100  # what costs a retry here is no fault of the schedule
                endings.append(self._ending(simulation, budget))
                befalling.kinds["raise in a call"] = 0

            patch.setattr(Program, "_act", act, raising=False)
            verdict = simulation.run()
        return Told(verdict, simulation.transitions.visited, "".join(endings))

    def is_broken(self) -> bool:
        told = self.run()
        return told.verdict.broken is not None or told.ending != self.ends

    def _ending(self, simulation: Simulation, budget: RetryBudget) -> str:
        """How the calls end; the history; what it has cost; who is left; their state; what a restart goes back to."""
        controller, cluster = simulation.controller, simulation.cluster
        workers, events = list(controller.running.workers), controller.history.events
        num_events, num_processes = len(events), len(cluster.processes)
        with pytest.MonkeyPatch.context() as changed:
            for owner, name, make in self.changes:
                changed.setattr(owner, name, make(getattr(owner, name)))
            try:
                parts = [_words(self.act(controller, budget))]
            except (RaySGDError, KeyboardInterrupt) as error:
                parts = [_words_of(error)]
        parts += map(_event, events[num_events:])
        starts = controller.start_budget
        parts.append(f"spent {budget.num_spent}" + (f" and {starts.num_spent}" if starts else ""))
        num_kept = 0 if controller.group is None else len({*workers} & {*controller.group.workers})
        parts.append(f"kept {num_kept}, made {len(cluster.processes) - num_processes}")
        simulation.befalling.end()
        controller.is_ending = False
        is_inside = ", from inside" if controller.snapshots.is_inside else ""
        state = self._state_of(simulation)
        controller.kill_group()
        restored = self._state_of(simulation)
        parts.append((state if state == restored else f"{state}, restored: {restored}") + is_inside)
        return f"{'; '.join(parts)}; ran {simulation.befalling.num_run}"

    def _state_of(self, simulation: Simulation) -> str:
        """The state in which the workers are, which is also that of a snapshot."""
        controller = simulation.controller
        try:
            [state, *_] = controller.run(Call(look))
            saved = controller.snapshot().shared_state
        except RaySGDError as error:
            return _words_of(error)
        simulation.invariants.require(saved == state, f"a snapshot has {saved}, the workers {state}")
        return f"{state.steps} steps and {len(state.noted)} notes"


class Told(NamedTuple):
    """What came of a story."""

    verdict: Verdict
    visited: list[Visit]
    ending: str


def _words(ended: Any) -> str:
    if isinstance(ended, Left):
        return f"left after {ended.parts[0].progress.steps}"
    value = ended.values[0] if isinstance(ended, Completed) else None
    return f"walked {value.num_steps}" if isinstance(value, Walked) else "done"


def _words_of(error: BaseException) -> str:
    said = [each for each in SAID if each in str(error)]
    return f"{type(error).__name__} ({', '.join(said)})" if said else type(error).__name__


def _event(event: GroupEvent) -> str:
    said = [each for each in SAID if each in event.cause]
    return f"{event.kind} {event.old_size}-{event.new_size}" + (f" ({', '.join(said)})" if said else "")


SAID = (
    "used up",
    "about to end",
    "cannot be repeated",
    "lost with the workers",
    "lost on its way",
    "Ray was stopped",
    "No group could",
    "start-up failed",
    "no other group",
    "workers were ended",
    "others were inside",
    "others were elsewhere",
)
"""What errors and events say, in part."""


def dies(*places: int, point: str = "step") -> tuple[Fault, ...]:
    return tuple(Fault("die", point, place) for place in places)


def interrupting_polls(real: Any) -> Any:
    """Ctrl-C comes when a snapshot is waited for."""
    errors = [KeyboardInterrupt()]

    def poll(snapshots: Snapshots, timeout_s: float | None = 0.0) -> None:
        if timeout_s and errors:
            raise errors.pop()
        real(snapshots, timeout_s)

    return poll


def other_bugs(real: Any) -> Any:
    """Each rank raises an error of another class."""
    kinds = iter((KeyError, ValueError, IndexError))
    return lambda text: next(kinds, real)(text)


def bug() -> BaseException:
    return UserBugError("a bug")


def head_gone_with_copies(act: Act) -> Act:
    """When the next snapshot is taken, the program is about to end, and Ray is gone."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        take, cluster = Snapshots.take_captures, cluster_of(controller)

        def take_and_end(snapshots: Snapshots, *args: Any, **options: Any) -> None:
            take(snapshots, *args, **options)
            controller.is_ending = cluster.is_head_gone = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Snapshots, "take_captures", take_and_end)
            try:
                return act(controller, budget)
            finally:
                cluster.is_head_gone = False

    return acted


def at_end(act: Act) -> Act:
    """The program is about to end."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.is_ending = True
        return act(controller, budget)

    return acted


def without_group(act: Act) -> Act:
    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.kill_group()
        return act(controller, budget)

    return acted


def retrying(act: Act) -> Act:
    """Errors of user code are retried."""

    def acted(controller: ElasticController, budget: RetryBudget) -> Any:
        controller.failures = FailurePolicy(True, retries_user_errors=True)
        return act(controller, budget)

    return acted


LEAVES = training(leaves=lambda: True)
ENDLESS = tuple(Fault("lose connection", "called", nth) for nth in range(1, 161))
ALL_RAISE = tuple(Fault("raise", "half", nth) for nth in (1, 2, 3))
STORIES = {
    "the ranks' values differ": Story(
        calling(Call(look, check=refuse)),
        ends="RanksDifferError; ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 0",
    ),
    "the ranks ran different steps": Story(
        calling(training(divergence=lambda told: "rank 0 ran more")),
        faults=dies(4),
        ends="UnevenStepsError; ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 6",
    ),
    "a call cannot be sent": Story(
        calling(Call(look, lambda worlds: [(threading.Lock(),)] * 3)),
        ends="UnpicklableError; spent 0; kept 3, made 0; 0 steps and 0 notes; ran 0",
    ),
    "a rank dies while the program ends": Story(
        at_end(calling(noting())),
        faults=dies(1, point="note"),
        ends="WorkersLostError (about to end); ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "no worker starts while the program ends": Story(
        without_group(at_end(calling(noting()))),
        ends="WorkersLostError (about to end); spent 0; kept 0, made 0; 0 steps and 0 notes; ran 0",
    ),
    "the snapshot of a paused call is lost": Story(
        losing_copies(1, calling(LEAVES)), ends="left after 4; spent 0; kept 3, made 0; 4 steps and 0 notes; ran 12"
    ),
    "four snapshots of a paused call are lost": Story(
        losing_copies(4, calling(LEAVES)),
        {"batch_size": 1},
        ends="WorkersLostError (lost on its way); spent 0; kept 3, made 0; 9 steps and 0 notes; ran 27",
    ),
    "Ray is gone when a paused call is to end": Story(
        head_gone_with_copies(calling(LEAVES)),
        {"is_large": True},
        ends="WorkersLostError (Ray was stopped); ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 6",
    ),
    "Ray is gone when a call that must end early has failed": Story(
        head_gone_with_copies(calling(LEAVES)),
        {"is_large": True},
        dies(1),
        ends="WorkersLostError (Ray was stopped); ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "a connection is lost whenever a call begins that must end early": Story(
        calling(LEAVES),
        {"num_workers": 2, "joins_late": True},
        ENDLESS,
        ends="WorkersLostError (used up); restored 2-2; lost 2-0; spent 3; kept 0, made 2; 0 steps and 0 notes; ran 0",
    ),
    "a connection is lost whenever a call begins that must end early, at the end": Story(
        at_end(calling(LEAVES)),
        {"num_workers": 2, "joins_late": True},
        ENDLESS,
        ends="WorkersLostError (used up); lost 2-0; spent 1; kept 0, made 0; 0 steps and 0 notes; ran 0",
    ),
    "all ranks raise at one line, in different states": Story(
        calling(training()),
        {"has_halves": True},
        ALL_RAISE,
        ends="WorkerError(UserBugError) (workers were ended); ended 3-0 (others were elsewhere); spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "user code raises while it leaves its group": Story(
        calling(training()),
        {"renews": True},
        dies(4),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="walked 14; restored 3-3; spent 1; kept 2, made 1; 14 steps and 0 notes; ran 48",
    ),
    "user code raises while it joins another group": Story(
        calling(training()),
        {},
        dies(4),
        ((SimReplica, "regroup", raising(bug)),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 4; 14 steps and 0 notes; ran 48",
    ),
    "user code raises while a group is restored": Story(
        calling(noting()),
        {},
        dies(1, point="note"),
        ((SimReplica, "restore", raising(bug)),),
        ends="WorkerError(UserBugError); ended 3-0; spent 1; kept 0, made 3; 0 steps and 0 notes; ran 3",
    ),
    "a shard is lost": Story(
        calling(noting()),
        {},
        dies(1, point="note"),
        ((SimReplica, "restore", raising(lambda: LostPartError("lost"))),),
        ends="WorkersLostError; lost 3-0 (no other group); spent 1; kept 0, made 3; 0 steps and 0 notes; ran 3",
    ),
    "user code raises while a group starts": Story(
        calling(noting()),
        {"regroups": False},
        dies(1, point="note"),
        ((SimReplica, "setup", raising(bug)),),
        ends="WorkerError(UserBugError); ended 3-0; spent 1; kept 0, made 3; 0 steps and 0 notes; ran 3",
    ),
    "the resources of a new group go to another program": Story(
        calling(noting()),
        {},
        dies(1, point="note"),
        ((Lifecycle, "try_start", raising(lambda: ReservationTimeoutError("gone"))),),
        ends="done; restored 3-3; spent 1; kept 0, made 3; 0 steps and 1 notes; ran 6",
    ),
    "a state of which there is no copy is not repeated": Story(
        only_in_workers(calling(noting(captures=True))),
        {},
        dies(1, point="note"),
        ends="WorkersLostError (cannot be repeated); lost 3-0; spent 0; kept 0, made 0; 0 steps and 1 notes; ran 3",
    ),
    "the copies of the only state are lost": Story(
        only_in_workers(losing_copies(9, calling(noting(captures=True)))),
        {"is_large": True},
        dies(1, point="note"),
        ends="WorkersLostError (cannot be repeated); lost 3-0; spent 0; kept 0, made 0; WorkersLostError (lost with the workers); ran 3",
    ),
    "the copies of a call that must end early are lost": Story(
        losing_copies(9, calling(LEAVES)),
        {"is_large": True},
        dies(1),
        ends="WorkersLostError (lost on its way); spent 1; kept 2, made 0; 8 steps and 0 notes; ran 19",
    ),
    "a rank dies, and another one when the call must end early, whose copies are lost": Story(
        losing_copies(9, leaving_after_two),
        {"is_large": True},
        dies(4, 16),
        ends="walked 11; continued 3-3; spent 0; kept 1, made 1; 11 steps and 0 notes; ran 32",
    ),
    "two copies of a call that must end early are lost": Story(
        losing_copies(2, calling(LEAVES)),
        {"is_large": True},
        dies(1),
        ends="left after 0; spent 0; kept 2, made 0; 0 steps and 0 notes; ran 3",
    ),
    "too few are left of a call that must end early": Story(
        calling(LEAVES),
        {"min_workers": 3},
        dies(1),
        ends="left after 0; ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "memory runs out after a loss": Story(
        calling(training()),
        {"nodes": (2, 1), "resize_interval_s": "auto"},
        (Fault("lose node", "step", 6), Fault("raise", "step", 7)),
        ((befalling, "UserBugError", lambda real: MemoryError),),
        ends="walked 11; continued 3-2; spent 0; kept 2, made 0; 11 steps and 0 notes; ran 28",
    ),
    "a connection is lost once when a call begins that must end early": Story(
        calling(LEAVES),
        {"joins_late": True},
        (Fault("lose connection", "begin", 1),),
        ends="left after 2; spent 1; kept 3, made 0; 2 steps and 0 notes; ran 6",
    ),
    "user code raises in a group that was formed to copy its state": Story(
        calling(LEAVES),
        {"joins_late": True},
        (Fault("lose connection", "begin", 1),),
        ((SimReplica, "replica_progress", raising(bug, 4)),),
        ends="left after 2; restored 3-3; spent 1; kept 0, made 3; 2 steps and 0 notes; ran 6",
    ),
    "a rank fails to copy its state": Story(
        calling(LEAVES),
        {},
        dies(1),
        ((SimReplica, "capture_here", raising(bug)),),
        ends="left after 0; spent 0; kept 2, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes while a group is ended": Story(
        calling(noting()),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "kill", raising(KeyboardInterrupt, acts_first=True)),),
        retries=0,
        ends="KeyboardInterrupt; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes while the only state is fetched": Story(
        only_in_workers(calling(noting(captures=True))),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "settle", raising(KeyboardInterrupt)),),
        ends="KeyboardInterrupt; ended 3-0; spent 0; kept 0, made 0; 0 steps and 1 notes; ran 3",
    ),
    "Ctrl-C comes again while the only state is fetched": Story(
        only_in_workers(calling(noting(captures=True))),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "settle", raising(KeyboardInterrupt, 1, 2)),),
        ends="KeyboardInterrupt; spent 0; kept 3, made 0; 0 steps and 1 notes; ran 3",
    ),
    "Ctrl-C comes while survivors leave their group": Story(
        calling(training()),
        {},
        dies(1),
        ((WorkerGroup, "tear_down", raising(KeyboardInterrupt)),),
        ends="KeyboardInterrupt; ended 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes twice while survivors with the only state leave their group": Story(
        only_in_workers(calling(training(captures=True))),
        {},
        dies(1),
        (
            (WorkerGroup, "tear_down", raising(KeyboardInterrupt)),
            (WorkerGroup, "settle", raising(KeyboardInterrupt, 2)),
        ),
        ends="KeyboardInterrupt; spent 0; kept 3, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes while the answers of the driver are checked": Story(
        calling(Call(look, check=interrupt)),
        {"num_workers": 1, "use_local": True},
        ends="KeyboardInterrupt; spent 0; kept 1, made 0; 0 steps and 0 notes; ran 0",
    ),
    "the first group does not fit": Story(
        without_room(start), {}, ends="WorkersLostError; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 0"
    ),
    "the only state is on its way when no retry is left": Story(
        only_in_workers(copying_first(calling(noting(captures=True)))),
        {"is_large": True, "copy_s": 1.0},
        dies(1, point="note"),
        retries=0,
        ends="WorkersLostError (used up); lost 3-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "the copy of the only state is lost, and then a rank": Story(
        only_in_workers(losing_copies(9, calling(training(captures=True)), dies_between=True)),
        {"is_large": True, "continues": False},
        dies(1),
        ends="WorkersLostError (lost with the workers); lost 3-0 (no other group); spent 1; kept 0, made 0; WorkersLostError (lost with the workers); ran 3",
    ),
    "Ctrl-C comes before other workers are started": Story(
        calling(noting()),
        {},
        dies(1, point="note"),
        ((Snapshots, "poll", interrupting_polls),),
        ends="KeyboardInterrupt; ended 3-0; spent 1; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes while the only state is on its way": Story(
        only_in_workers(calling(noting(captures=True))),
        {"is_large": True, "copy_s": 1.0},
        dies(1, point="note"),
        ((Snapshots, "poll", interrupting_polls),),
        ends="KeyboardInterrupt; ended 3-0; spent 0; kept 0, made 0; 0 steps and 1 notes; ran 3",
    ),
    "each rank raises another error": Story(
        calling(noting()),
        {},
        tuple(Fault("raise", "note", nth) for nth in (1, 2, 3)),
        ((befalling, "UserBugError", other_bugs),),
        ends="WorkerError(IndexError) (workers were ended); ended 3-0 (others were elsewhere); spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "a node is drained": Story(
        calling(training()),
        {"nodes": (2, 2), "batch_size": 1},
        (Fault("drain", "step", 3),),
        ends="walked 16; left 3-1; spent 0; kept 1, made 0; 16 steps and 0 notes; ran 40",
    ),
    "a node is drained, and replicas cannot move": Story(
        calling(training()),
        {"nodes": (2, 2), "batch_size": 1, "regroups": False},
        (Fault("drain", "step", 3),),
        ends="walked 14; left 3-2; spent 0; kept 0, made 2; 14 steps and 0 notes; ran 40",
    ),
    "user code raises in the driver": Story(
        calling(training()),
        {"num_workers": 1, "use_local": True},
        (Fault("raise", "step", 4),),
        ends="WorkerError(UserBugError); spent 0; kept 1, made 0; 3 steps and 0 notes; ran 4",
    ),
    "too few are left of a call that must end early before it has begun": Story(
        calling(LEAVES),
        {"min_workers": 3, "joins_late": True},
        dies(1, point="begin"),
        ends="left after 2; continued 3-3; spent 1; kept 2, made 1; 2 steps and 0 notes; ran 6",
    ),
    "no attempt to start a group succeeds": Story(
        calling(noting()),
        {"regroups": False},
        (*dies(1, point="note"), *dies(4, 5, 6, 7, 8, 9, 10, 11, point="prepare")),
        options={"scaling": {"num_attempts": 2}},
        ends="WorkersLostError (No group could); lost 3-0 (no other group); spent 1; kept 0, made 6; 0 steps and 0 notes; ran 3",
    ),
    "user code raises while replicas are built again": Story(
        calling(noting()),
        {"regroups": False, "renews": True},
        dies(1, point="note"),
        ((SimReplica, "setup", raising(bug)),),
        ends="done; restored 3-3; spent 1; kept 0, made 4; 0 steps and 1 notes; ran 6",
    ),
    "memory runs out in a step": Story(
        calling(training()),
        {},
        (Fault("lack", "step", 1),),
        ends="walked 14; continued 3-3; spent 0; kept 3, made 0; 14 steps and 0 notes; ran 45",
    ),
    "memory runs out where replicas cannot continue": Story(
        calling(training()),
        {"continues": False},
        (Fault("lack", "step", 4),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 47",
    ),
    "errors of user code are retried": Story(
        retrying(calling(training())),
        {},
        (Fault("raise", "step", 4),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 48",
    ),
    "a start has no retry left": Story(
        calling(noting()),
        {"regroups": False},
        (*dies(1, point="note"), *dies(4, 5, 6, 7, 8, point="prepare")),
        options={"start_budget": RetryBudget(1)},
        ends="WorkersLostError (used up, start-up failed); lost 3-0 (no other group); spent 1 and 1; kept 0, made 6; 0 steps and 0 notes; ran 3",
    ),
    "all ranks raise at one line, in one state": Story(
        calling(training()),
        {},
        tuple(Fault("raise", "step", nth) for nth in (1, 2, 3)),
        ends="WorkerError(UserBugError); spent 0; kept 3, made 0; 0 steps and 0 notes; ran 3",
    ),
    "user code raises on one rank": Story(
        calling(training()),
        {},
        (Fault("raise", "step", 4),),
        ends="WorkerError(UserBugError) (workers were ended); ended 3-0 (others were inside); spent 0; kept 0, made 0; 0 steps and 0 notes; ran 6",
    ),
    "a survivor dies while another worker is awaited": Story(
        meanwhile(Interpreter, "_fill_up", one_dies, calling(training())),
        {"min_workers": 3},
        dies(4),
        ends="walked 14; continued 3-3; spent 0; kept 1, made 2; 14 steps and 0 notes; ran 45",
    ),
    "Ctrl-C comes after a survivor died while another worker was awaited": Story(
        meanwhile(Interpreter, "_fill_up", one_dies, calling(training())),
        {"min_workers": 3},
        dies(4),
        ((WorkerGroup, "tear_down", raising(KeyboardInterrupt, 2)),),
        ends="KeyboardInterrupt; ended 3-0; spent 0; kept 0, made 1; 0 steps and 0 notes; ran 6",
    ),
    "a connection is lost while another group is formed": Story(
        calling(training()),
        {},
        (*dies(4), Fault("lose connection", "regroup", 1)),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 4; 14 steps and 0 notes; ran 48",
    ),
    "a rank dies while another group is formed": Story(
        calling(training()),
        {},
        (*dies(4), Fault("die", "regroup", 1)),
        ends="walked 11; continued 3-2; spent 0; kept 1, made 2; 11 steps and 0 notes; ran 26",
    ),
    "Ctrl-C comes while the driver alone repeats a step": Story(
        calling(training()),
        {"num_workers": 1, "use_local": True},
        (Fault("lack", "step", 2),),
        ((WorkerGroup, "tear_down", raising(KeyboardInterrupt)),),
        ends="KeyboardInterrupt; spent 0; kept 1, made 0; 1 steps and 0 notes; ran 2",
    ),
    "Ctrl-C comes while the driver forms a group of its own": Story(
        calling(training()),
        {"num_workers": 2, "use_local": True, "nodes": (1, 1), "batch_size": 2},
        (Fault("lose node", "step", 3), Fault("lose node", "step", 4)),
        ((WorkerGroup, "regroup", raising(KeyboardInterrupt, acts_first=True)),),
        ends="KeyboardInterrupt; ended 2-0; spent 0; kept 0, made 0; 0 steps and 0 notes; ran 3",
    ),
    "Ctrl-C comes again while the only state is copied": Story(
        only_in_workers(calling(noting(captures=True))),
        {},
        dies(1, point="note"),
        (
            (WorkerGroup, "settle", raising(KeyboardInterrupt)),
            (Interpreter, "_on_all", raising(KeyboardInterrupt)),
        ),
        ends="KeyboardInterrupt; spent 0; kept 2, made 0; 0 steps and 1 notes; ran 3",
    ),
    "another worker joins": Story(
        calling(training()),
        {"nodes": (2, 1), "batch_size": 1, "resize_interval_s": 0.5},
        (Fault("lose node", "step", 6), Fault("room comes", "step", 14)),
        ends="walked 19; continued 3-2; grown 2-3; spent 0; kept 2, made 1; 19 steps and 0 notes; ran 45",
    ),
    "spares take over from replicas that cannot continue": Story(
        calling(training()),
        {"num_spares": 2, "nodes": (5,)},
        dies(4),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 1; 14 steps and 0 notes; ran 47",
    ),
    "a rank hangs": Story(
        calling(training()),
        {},
        (Fault("slow", "step", 10),),
        retries=1,
        ends="walked 14; continued 3-3; spent 1; kept 2, made 1; 14 steps and 0 notes; ran 45",
    ),
    "all ranks die in a step": Story(
        calling(training()),
        {},
        dies(4, 5, 6),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 48",
    ),
    "no survivor has a whole state": Story(
        calling(training()),
        {"has_halves": True},
        (Fault("die", "half", 4),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 48",
    ),
    "survivors break whatever group they form": Story(
        calling(training()),
        {},
        (Fault("poison", "step", 2), *dies(4)),
        retries=2,
        ends="walked 14; continued 3-3; restored 3-3; spent 1; kept 0, made 4; 14 steps and 0 notes; ran 51",
    ),
    "the only state is on its way when a rank dies, and then all die": Story(
        only_in_workers(calling(training())),
        {"is_large": True, "batch_size": 1},
        (
            Fault("slow", "on its way", 1),
            *dies(9),
            Fault("die but one", "step", 29),
            Fault("die", "step", 30),
        ),
        ends="walked 14; continued 3-3; continued 3-3; restored 3-3; spent 1; kept 0, made 6; 14 steps and 0 notes; ran 74",
    ),
    "a rank dies while others leave their node": Story(
        calling(training()),
        {"num_workers": 4, "nodes": (2, 2), "batch_size": 1},
        (Fault("drain", "step", 3), Fault("die", "leave", 1)),
        ends="walked 10; continued 4-2; spent 0; kept 1, made 1; 10 steps and 0 notes; ran 40",
    ),
    "a node is drained between two calls": Story(
        after_rest(noting(), training()),
        {"nodes": (2, 2)},
        (Fault("drain", "noted", 3),),
        ends="walked 10; left 3-1; grown 1-2; spent 0; kept 1, made 1; 10 steps and 1 notes; ran 23",
    ),
    "user code raises while ranks leave a node": Story(
        calling(training()),
        {"nodes": (2, 2), "batch_size": 1, "is_large": True},
        (Fault("drain", "step", 3), Fault("slow", "on its way", 2)),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="walked 14; left 3-2; spent 0; kept 0, made 2; 14 steps and 0 notes, from inside; ran 40",
    ),
    "user code raises while ranks leave a node between two calls": Story(
        after_rest(noting(), training()),
        {"nodes": (2, 2), "is_large": True},
        (Fault("drain", "noted", 3), Fault("slow", "on its way", 2)),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="walked 10; left 3-2; spent 0; kept 0, made 2; 10 steps and 1 notes; ran 25",
    ),
    "a connection is lost while ranks leave a node": Story(
        calling(training()),
        {"num_workers": 4, "nodes": (2, 2), "batch_size": 1},
        (Fault("drain", "step", 3), Fault("lose connection", "regroup", 1)),
        ends="walked 10; restored 4-2; spent 0; kept 0, made 2; 10 steps and 0 notes; ran 40",
    ),
    "two copies of the only state are lost": Story(
        only_in_workers(losing_copies(2, calling(training(captures=True)))),
        {"is_large": True, "continues": False},
        dies(1),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes, from inside; ran 45",
    ),
    "four copies of the only state are lost, and a rank after the first": Story(
        only_in_workers(losing_copies(4, calling(training(captures=True)), dies_between=True)),
        {"is_large": True, "continues": False},
        dies(1),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes, from inside; ran 45",
    ),
    "Ray is gone when the only state is to be fetched": Story(
        only_in_workers(head_gone_with_copies(calling(LEAVES))),
        {"is_large": True},
        ends="WorkersLostError (Ray was stopped); ended 3-0; spent 0; kept 0, made 0; WorkersLostError (lost with the workers); ran 9",
    ),
    "the only state is on its way when a rank dies": Story(
        only_in_workers(copying_first(calling(noting(captures=True)))),
        {"is_large": True, "copy_s": 1.0},
        dies(1, point="note"),
        ends="done; restored 3-3; spent 1; kept 0, made 3; 0 steps and 1 notes; ran 6",
    ),
    "all workers die whenever they are restored": Story(
        meanwhile(Snapshots, "restore", all_die, calling(noting()), *range(1, 20)),
        {"regroups": False},
        dies(1, point="note"),
        options={"start_budget": RetryBudget(1)},
        ends="WorkersLostError (used up, start-up failed); lost 3-0 (no other group); spent 1 and 1; kept 0, made 6; 0 steps and 0 notes; ran 3",
    ),
    "the program ends while workers start": Story(
        meanwhile(Lifecycle, "try_start", program_ends, calling(noting())),
        {"regroups": False},
        (*dies(1, point="note"), *dies(4, 5, 6, 7, 8, point="prepare")),
        ends="WorkersLostError (about to end); lost 3-0 (no other group); spent 1; kept 0, made 3; 0 steps and 0 notes; ran 3",
    ),
    "a rank is lost while a call is repeated, and replicas are built again": Story(
        calling(noting(), noting()),
        {"is_large": True},
        dies(4, 5, 6, 7, point="note"),
        ends="done; restored 3-2; spent 1; kept 0, made 4; 0 steps and 2 notes; ran 13",
    ),
    "too few are left, and room comes later": Story(
        meanwhile(Lifecycle, "find_resources", room_comes, calling(training()), 2),
        {"num_workers": 2, "min_workers": 2, "nodes": (1, 1)},
        (Fault("lose node", "step", 3),),
        ends="walked 10; restored 2-2; spent 1; kept 0, made 2; 10 steps and 0 notes; ran 24",
    ),
    "all ranks die whose replicas could be built again": Story(
        calling(training()),
        {"regroups": False, "renews": True},
        dies(4, 5, 6),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 48",
    ),
    "rank 0 dies after a call of which it has sent a copy": Story(
        calling(noting(), training()),
        {"is_large": True},
        dies(5),
        ends="walked 14; continued 3-3; spent 0; kept 2, made 1; 14 steps and 1 notes; ran 48",
    ),
    "a survivor dies while a worker is awaited that is not needed": Story(
        meanwhile(Interpreter, "_fill_up", one_dies, calling(training())),
        {"min_workers": 2},
        dies(4),
        ends="walked 14; continued 3-3; spent 0; kept 1, made 2; 14 steps and 0 notes; ran 45",
    ),
    "user code raises in a call that leaves the state": Story(
        calling(Call(look)),
        {},
        (Fault("raise", "look", 1),),
        ends="WorkerError(UserBugError); spent 0; kept 3, made 0; 0 steps and 0 notes; ran 0",
    ),
    "spares die when they are to take over": Story(
        meanwhile(Interpreter, "_fill_up", all_die, calling(training())),
        {"num_spares": 2, "nodes": (5,)},
        dies(4),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 3; 14 steps and 0 notes; ran 47",
    ),
    "a spare steps in, and too few are left": Story(
        calling(training()),
        {"min_workers": 3, "num_spares": 1, "nodes": (2, 1, 1)},
        (Fault("lose node", "step", 4), Fault("room comes", "wait", 20)),
        ends="walked 14; restored 3-3; spent 1; kept 0, made 4; 14 steps and 0 notes; ran 46",
    ),
    "user code raises when a call that must end early is to be copied": Story(
        calling(LEAVES),
        {},
        dies(1),
        ((SimReplica, "leave_group", raising(bug)),),
        ends="left after 2; continued 3-3; spent 1; kept 2, made 1; 2 steps and 0 notes; ran 9",
    ),
    "a rank dies while the program ends, and a snapshot from inside the call is there": Story(
        at_end(calling(training())),
        {"snapshot_every": 1, "continues": False},
        dies(20),
        ends="WorkersLostError (about to end); ended 3-0; spent 0; kept 0, made 0; 5 steps and 0 notes, from inside; ran 20",
    ),
}
"""Stories by name. The rows that they visit, seeds visit seldom or never."""
