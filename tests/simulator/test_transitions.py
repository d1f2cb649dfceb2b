"""The table of a recovery: what seldom happens, which rows that visits, and rows that are missing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from types import CodeType
from typing import Any

import pytest

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.policies import FailurePolicy, RetryBudget
from raysgd.core.engine.recovery import machine
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.snapshots import Snapshots, copy_call
from raysgd.core.engine.transfers import LostPartError
from raysgd.exceptions import (
    RanksDifferError,
    RaySGDError,
    ReservationTimeoutError,
    UnevenStepsError,
    UnpicklableError,
    WorkerError,
    WorkersLostError,
)
from tests.simulator import befalling
from tests.simulator.befalling import UserBugError
from tests.simulator.cells import Visit, differs, mutants, mutated, rows, rows_of, visits_of
from tests.simulator.program import Program
from tests.simulator.replica import SimReplica, look, note, walk, walk_on
from tests.simulator.running import Simulation, Verdict, quiet, run
from tests.simulator.schedule import Fault, Op, Schedule, drawn

Act = Callable[[ElasticController, RetryBudget], Any]


def training(**more: Any) -> Call:
    """A call that trains."""
    call = Call(walk, lambda worlds: [(1, None)] * len(worlds), changes_state=True, keeps_alike=True, resume=walk_on)
    return replace(call, **more)


def noting(**more: Any) -> Call:
    """A call that cannot continue in another group."""
    return Call(note, lambda worlds: [(1,)] * len(worlds), changes_state=True, keeps_alike=True, **more)


def raises(error: type[BaseException], call: Call, own_budget: RetryBudget | None = None) -> Act:
    """A call that raises."""

    def act(controller: ElasticController, budget: RetryBudget) -> None:
        with pytest.raises(error):
            controller.run_or_leave(call, budget=own_budget or budget)

    return act


def refuse(values: Any) -> None:
    raise RanksDifferError("they differ")


def interrupt(values: Any) -> None:
    raise KeyboardInterrupt


def start(controller: ElasticController, budget: RetryBudget) -> None:
    with pytest.raises(WorkersLostError):
        controller.start(as_fits=True)


def without_room(act: Act) -> Act:
    """All nodes are gone, and the group with them."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.kill_group()
        view = controller.view
        controller.view = lambda: replace(view().without({"n0", "n1"}), can_grow=False)
        act(controller, budget)
        controller.view = view

    return acted


def copying_first(act: Act) -> Act:
    """A copy of the state is on its way."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.run(copy_call())
        act(controller, budget)

    return acted


def only_in_workers(act: Act) -> Act:
    """The driver has no copy of the state."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.snapshots.clear()
        controller.snapshots.completed(None)
        act(controller, budget)

    return acted


def cluster_of(controller: ElasticController) -> Any:
    """The simulated cluster, whose method the controller asks for a view."""
    return controller.view.__self__  # type: ignore[attr-defined]


def losing_copies(num_copies: int, act: Act, *, dies_between: bool = False) -> Act:
    """The next snapshots are lost on their way to the driver, and perhaps a rank with the first."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
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
            act(controller, budget)

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
    """

    act: Act
    settings: Any = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    changes: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    options: Any = field(default_factory=dict)

    def run(self) -> tuple[Verdict, list[Visit]]:
        settings = {"num_workers": 3, "nodes": (4,), "num_samples": 40, **self.settings}
        schedule = Schedule(1, ops=(Op("act"),), faults=self.faults, **settings)
        with quiet(), pytest.MonkeyPatch.context() as patch:
            simulation = Simulation(schedule, **deepcopy(self.options))

            def act(program: Program, op: Op, budget: RetryBudget) -> None:
                for owner, name, make in self.changes:
                    patch.setattr(owner, name, make(getattr(owner, name)))
                befalling, invariants = simulation.befalling, simulation.invariants
                invariants.may_only_copy = True
                befalling.num_incidents += len(STORIES)  # what costs a retry here is no fault of the schedule
                self.act(simulation.controller, budget)
                befalling.kinds["raise in a call"] = 0

            patch.setattr(Program, "_act", act, raising=False)
            return simulation.run(), simulation.transitions.visited


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

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        take, cluster = Snapshots.take_captures, cluster_of(controller)

        def take_and_end(snapshots: Snapshots, *args: Any, **options: Any) -> None:
            take(snapshots, *args, **options)
            controller.is_ending = cluster.is_head_gone = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Snapshots, "take_captures", take_and_end)
            act(controller, budget)
        cluster.is_head_gone = False

    return acted


def at_end(act: Act) -> Act:
    """The program is about to end."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.is_ending = True
        act(controller, budget)

    return acted


def without_group(act: Act) -> Act:
    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.kill_group()
        act(controller, budget)

    return acted


def any_end(call: Call) -> Act:
    """A call that may raise."""

    def act(controller: ElasticController, budget: RetryBudget) -> None:
        with suppress(RaySGDError, KeyboardInterrupt):
            controller.run_or_leave(call, budget=budget)

    return act


def retrying(act: Act) -> Act:
    """Errors of user code are retried."""

    def acted(controller: ElasticController, budget: RetryBudget) -> None:
        controller.failures = FailurePolicy(True, retries_user_errors=True)
        act(controller, budget)

    return acted


LEAVES = training(leaves=lambda: True)
ENDLESS = tuple(Fault("lose connection", "called", nth) for nth in range(1, 161))
ALL_RAISE = tuple(Fault("raise", "half", nth) for nth in (1, 2, 3))
STORIES = {
    "the ranks' values differ": Story(raises(RanksDifferError, Call(look, check=refuse))),
    "the ranks ran different steps": Story(
        raises(UnevenStepsError, training(divergence=lambda told: "rank 0 ran more")), faults=dies(4)
    ),
    "a call cannot be sent": Story(raises(UnpicklableError, Call(look, lambda worlds: [(threading.Lock(),)] * 3))),
    "a rank dies while the program ends": Story(
        at_end(raises(WorkersLostError, noting())), faults=dies(1, point="note")
    ),
    "no worker starts while the program ends": Story(without_group(at_end(raises(WorkersLostError, noting())))),
    "the snapshot of a paused call is lost": Story(losing_copies(1, any_end(LEAVES))),
    "four snapshots of a paused call are lost": Story(
        losing_copies(4, raises(WorkersLostError, LEAVES)), {"batch_size": 1}
    ),
    "Ray is gone when a paused call is to end": Story(head_gone_with_copies(any_end(LEAVES)), {"is_large": True}),
    "Ray is gone when a call that must end early has failed": Story(
        head_gone_with_copies(any_end(LEAVES)), {"is_large": True}, dies(1)
    ),
    "a connection is lost whenever a call begins that must end early": Story(
        raises(WorkersLostError, LEAVES), {"num_workers": 2, "joins_late": True}, ENDLESS
    ),
    "a connection is lost whenever a call begins that must end early, at the end": Story(
        at_end(raises(WorkersLostError, LEAVES)), {"num_workers": 2, "joins_late": True}, ENDLESS
    ),
    "all ranks raise at one line, in different states": Story(
        raises(WorkerError, training()), {"has_halves": True}, ALL_RAISE
    ),
    "user code raises while it leaves its group": Story(
        any_end(training()), {"renews": True}, dies(4), ((SimReplica, "leave_group", raising(bug)),)
    ),
    "user code raises while it joins another group": Story(
        any_end(training()), {}, dies(4), ((SimReplica, "regroup", raising(bug)),)
    ),
    "user code raises while a group is restored": Story(
        any_end(noting()), {}, dies(1, point="note"), ((SimReplica, "restore", raising(bug)),)
    ),
    "a shard is lost": Story(
        any_end(noting()), {}, dies(1, point="note"), ((SimReplica, "restore", raising(lambda: LostPartError("lost"))),)
    ),
    "user code raises while a group starts": Story(
        any_end(noting()), {"regroups": False}, dies(1, point="note"), ((SimReplica, "setup", raising(bug)),)
    ),
    "the resources of a new group go to another program": Story(
        any_end(noting()),
        {},
        dies(1, point="note"),
        ((Lifecycle, "try_start", raising(lambda: ReservationTimeoutError("gone"))),),
    ),
    "a state of which there is no copy is not repeated": Story(
        only_in_workers(any_end(noting(captures=True))), {}, dies(1, point="note")
    ),
    "the copies of the only state are lost": Story(
        only_in_workers(losing_copies(9, any_end(noting(captures=True)))), {"is_large": True}, dies(1, point="note")
    ),
    "the copies of a call that must end early are lost": Story(
        losing_copies(9, any_end(LEAVES)), {"is_large": True}, dies(1)
    ),
    "two copies of a call that must end early are lost": Story(
        losing_copies(2, any_end(LEAVES)), {"is_large": True}, dies(1)
    ),
    "too few are left of a call that must end early": Story(any_end(LEAVES), {"min_workers": 3}, dies(1)),
    "memory runs out after a loss": Story(
        any_end(training()),
        {"nodes": (2, 1), "resize_interval_s": "auto"},
        (Fault("lose node", "step", 6), Fault("raise", "step", 7)),
        ((befalling, "UserBugError", lambda real: MemoryError),),
    ),
    "a rank dies when a call that must end early is to be tried again": Story(
        any_end(LEAVES),
        {"joins_late": True},
        (Fault("lose connection", "begin", 1),),
        ((SimReplica, "replica_progress", raising(bug, 5)),),
    ),
    "user code raises in a group that was formed to copy its state": Story(
        any_end(LEAVES),
        {"joins_late": True},
        (Fault("lose connection", "begin", 1),),
        ((SimReplica, "replica_progress", raising(bug, 4)),),
    ),
    "a rank fails to copy its state": Story(
        any_end(LEAVES), {}, dies(1), ((SimReplica, "capture_here", raising(bug)),)
    ),
    "Ctrl-C comes while a group is ended": Story(
        raises(KeyboardInterrupt, noting(), RetryBudget(0)),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "kill", raising(KeyboardInterrupt, acts_first=True)),),
    ),
    "Ctrl-C comes while the only state is fetched": Story(
        only_in_workers(raises(KeyboardInterrupt, noting(captures=True))),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "settle", raising(KeyboardInterrupt)),),
    ),
    "Ctrl-C comes again while the only state is fetched": Story(
        only_in_workers(raises(KeyboardInterrupt, noting(captures=True))),
        {},
        dies(1, point="note"),
        ((WorkerGroup, "settle", raising(KeyboardInterrupt, 1, 2)),),
    ),
    "Ctrl-C comes while survivors leave their group": Story(
        raises(KeyboardInterrupt, training()), {}, dies(1), ((WorkerGroup, "tear_down", raising(KeyboardInterrupt)),)
    ),
    "Ctrl-C comes twice while survivors with the only state leave their group": Story(
        only_in_workers(raises(KeyboardInterrupt, training(captures=True))),
        {},
        dies(1),
        (
            (WorkerGroup, "tear_down", raising(KeyboardInterrupt)),
            (WorkerGroup, "settle", raising(KeyboardInterrupt, 2)),
        ),
    ),
    "Ctrl-C comes while the answers of the driver are checked": Story(
        raises(KeyboardInterrupt, Call(look, check=interrupt)), {"num_workers": 1, "use_local": True}
    ),
    "the first group does not fit": Story(without_room(start), {}),
    "the only state is on its way when no retry is left": Story(
        only_in_workers(copying_first(raises(WorkersLostError, noting(captures=True), RetryBudget(0)))),
        {"is_large": True, "copy_s": 1.0},
        dies(1, point="note"),
    ),
    "the copy of the only state is lost, and then a rank": Story(
        only_in_workers(losing_copies(9, any_end(training(captures=True)), dies_between=True)),
        {"is_large": True, "continues": False},
        dies(1),
    ),
    "Ctrl-C comes before other workers are started": Story(
        raises(KeyboardInterrupt, noting()), {}, dies(1, point="note"), ((Snapshots, "poll", interrupting_polls),)
    ),
    "Ctrl-C comes while the only state is on its way": Story(
        only_in_workers(raises(KeyboardInterrupt, noting(captures=True))),
        {"is_large": True, "copy_s": 1.0},
        dies(1, point="note"),
        ((Snapshots, "poll", interrupting_polls),),
    ),
    "each rank raises another error": Story(
        raises(WorkerError, noting()),
        {},
        tuple(Fault("raise", "note", nth) for nth in (1, 2, 3)),
        ((befalling, "UserBugError", other_bugs),),
    ),
    "a node is drained": Story(any_end(training()), {"nodes": (2, 2), "batch_size": 1}, (Fault("drain", "step", 3),)),
    "a node is drained, and replicas cannot move": Story(
        any_end(training()), {"nodes": (2, 2), "batch_size": 1, "regroups": False}, (Fault("drain", "step", 3),)
    ),
    "user code raises in the driver": Story(
        any_end(training()), {"num_workers": 1, "use_local": True}, (Fault("raise", "step", 4),)
    ),
    "too few are left of a call that must end early before it has begun": Story(
        any_end(LEAVES), {"min_workers": 3, "joins_late": True}, dies(1, point="begin")
    ),
    "no attempt to start a group succeeds": Story(
        any_end(noting()),
        {"regroups": False},
        (*dies(1, point="note"), *dies(4, 5, 6, 7, 8, 9, 10, 11, point="prepare")),
        options={"scaling": {"num_attempts": 2}},
    ),
    "user code raises while replicas are built again": Story(
        any_end(noting()),
        {"regroups": False, "renews": True},
        dies(1, point="note"),
        ((SimReplica, "setup", raising(bug)),),
    ),
    "memory runs out in a step": Story(any_end(training()), {}, (Fault("lack", "step", 4),)),
    "memory runs out where replicas cannot continue": Story(
        any_end(training()), {"continues": False}, (Fault("lack", "step", 4),)
    ),
    "errors of user code are retried": Story(retrying(any_end(training())), {}, (Fault("raise", "step", 4),)),
    "a start has no retry left": Story(
        any_end(noting()),
        {"regroups": False},
        (*dies(1, point="note"), *dies(4, 5, 6, 7, 8, point="prepare")),
        options={"start_budget": RetryBudget(1)},
    ),
}
"""Stories by name. The rows that they visit, seeds visit seldom or never."""


SEEDS = (100677, 2079, 3399, 1679, 479, *range(60), *range(19, 1500, 20), *range(3, 400, 8))
"""Many of them let calls end early, or let only workers have the state."""


@pytest.mark.parametrize("name", STORIES)
def test_what_seldom_happens_follows_the_table(name: str) -> None:
    verdict, _ = STORIES[name].run()
    assert verdict.broken is None, "\n".join(verdict.log)


@cache
def sources() -> tuple[tuple[Callable[[], Any], list[Visit]], ...]:
    """Stories and schedules, and the transitions of each."""
    stories = [(lambda story=story: story.run()[0].broken, story.run()[1]) for story in STORIES.values()]
    return (*stories, *((lambda seed=seed: run(drawn(seed)).broken, visits_of(drawn(seed))) for seed in SEEDS))


@pytest.mark.soak
def test_every_row_is_visited() -> None:
    counts = sum((rows_of(visits) for _, visits in sources()), Counter[int]())
    never = [words for line, words in rows().items() if not counts[line]]
    assert never == []


MUTANTS = [*mutants()]
NOT_FOUND = {"leave_or_grow: known.spec.runs_on is False": "functions are simulated in another place"}
"""Mutants that no schedule finds, and why."""


@pytest.mark.soak
@pytest.mark.parametrize(("words", "code"), [each for each in MUTANTS if each[0] not in NOT_FOUND])
def test_a_row_that_is_missing_is_found(words: str, code: CodeType, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = mutated(code)
    able = [broken for broken, visits in sources() if any(differs(functions, visit) for visit in visits)]
    for name, function in functions.items():
        monkeypatch.setattr(machine, name, function)
    assert any(broken() for broken in able), f"not found: {words}, of {len(able)}"
