"""All runs of the table of a recovery: each ends, none kills the only state, and none spends more than its retries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from raysgd.core.engine.recovery import machine
from raysgd.core.engine.recovery.machine import (
    NO_WORKERS,
    AwaitingBriefly,
    AwaitingCopy,
    AwaitingSnapshot,
    CallFailed,
    CallRefused,
    Captured,
    Capturing,
    Continue,
    Do,
    Done,
    EndEarly,
    Event,
    Filled,
    FillingUp,
    Finished,
    Interrupted,
    Known,
    Launching,
    Lost,
    Members,
    NotDone,
    Paused,
    Poll,
    Polled,
    Polling,
    Progress,
    Raise,
    Rebuilding,
    Regrouping,
    Replacing,
    Restart,
    Restoring,
    Room,
    Running,
    Scheduling,
    Settling,
    State,
    Survivors,
    TearingDown,
    Transition,
    Trigger,
    UserRaised,
    restart,
    transition,
)
from raysgd.core.engine.shared.types import FailureKind, ReplicaProgress
from raysgd.exceptions import UnpicklableError, WorkersLostError
from tests.helpers.facts import known_of, with_facts

NUM_KNOWN, NUM_KNOWN_IN_SOAK = 12, 300
MOST_NODES = 300_000
MOST_INTERRUPTS = 1
BOTH = frozenset({0, 1})
LACKS_OF_MEMORY = (CallFailed("user", needs_refill=True), CallFailed("memory"))  # batches of one sample end these
AWAITING = (AwaitingSnapshot, AwaitingCopy, AwaitingBriefly)
transition_of = transition
LOSS, UNSENT = WorkersLostError(), UnpicklableError()


@dataclass(frozen=True)
class Node:
    """A place in a run. Workers join or leave between two steps only once in it, and Ctrl-C comes once."""

    state: State
    known: Known
    has_paused: bool = False
    num_interrupts: int = 0


def smaller(members: Members) -> list[Members]:
    """Some workers less, down to none."""
    ordered = sorted(members, key=str)
    return [frozenset(ordered[:count]) for count in range(len(ordered))]


def events(node: Node) -> Iterator[Event]:
    """How the wait of a state may end, at its worst: calls never get further than their first step."""
    known, state = node.known, node.state
    if node.num_interrupts < MOST_INTERRUPTS:
        yield from (Interrupted(), Interrupted(LOSS))
        if isinstance(state, Running):
            yield Interrupted(UNSENT)
    match state:
        case Running():
            yield from (CallRefused(), CallFailed("died"), CallFailed("disconnected"))
            yield from (CallFailed("user", at_one_line=True), CallFailed("user", all_answered=False))
            yield from (CallFailed("user"), CallFailed("died", has_diverged=True))
            if known.must_end:
                yield Paused(must_end=True)
            if known.members and not node.has_paused:
                yield from (CallFailed("user", needs_refill=True), CallFailed("memory"), Paused(False))
                if len(known.members) > 1:
                    yield Paused(False, frozenset({0}))
        case Polling(Poll.RESUME):
            yield from (Polled(), CallFailed("died"))
        case Polling():
            yield from (Polled(), Polled(are_alike=False), CallFailed("died"))
        case Settling():
            yield from (Survivors(each) for each in (*smaller(known.members), known.members))
        case TearingDown(_, members):
            yield from (Progress((ReplicaProgress(steps),)) for steps in (0, 1))
            yield from (Progress((ReplicaProgress(can_be_source=False),)), UserRaised())
            yield from map(Lost, smaller(members))
        case FillingUp(_, members):
            yield Filled(0)
            if known.num_standby:
                yield Filled(1)
            yield from (Filled(0, members - each) for each in smaller(members))
        case Regrouping():
            yield from (Done(), UserRaised(), Lost(known.members))
            yield from map(Lost, smaller(known.members))
        case Capturing():
            yield from (Captured(True), Captured(False), NotDone())
        case AwaitingSnapshot() | AwaitingCopy() | AwaitingBriefly():
            yield from (Done(), NotDone())
        case Scheduling():
            yield from (Room(2), Room())
        case Launching():
            yield from (Done(), NotDone(), Room())
        case Rebuilding() | Replacing() if not known.members:
            yield NotDone()
        case Rebuilding() | Replacing() | Restoring():
            yield from (Done(), NotDone())


def faults_of(node: Node, event: Event, step: Transition) -> Iterator[str]:
    """What must not be."""
    known, commands = node.known, step.commands
    has_arrived = isinstance(node.state, AWAITING) and isinstance(event, Done)
    is_safe = not known.only_in_workers or has_arrived or Do.GIVE_STATE_UP in commands
    if Do.KILL_GROUP in commands and not is_safe:
        yield "kills the only state"
    if Do.PAY_FOR_RESTART in commands and known.num_left <= 0:
        yield "more retries than there are"
    if Do.PAY_TO_CONTINUE in commands and not (known.num_left > 0 or known.free_from <= 1):
        yield "more retries than there are"
    if Do.PAY_FOR_START in commands and not known.num_starts_left:
        yield "more starts than there are"
    if isinstance(step.state, Finished) and known.in_call:
        is_aborted = isinstance(step.state.plan, Raise) and not known.is_ending
        if (Do.NOTE_ABORTED in commands) != is_aborted:
            yield "it is not noted that a call broke off"
    if isinstance(step.state, TearingDown) and not step.state.members:
        yield "nobody leaves the group"


def after(node: Node, event: Event) -> tuple[Node, list[str]]:
    """Where an event leads, and what is wrong there."""
    known, state = node.known, node.state
    if isinstance(state, AWAITING) and isinstance(event, Done) and known.in_transit:
        known = replace(known, only_in_workers=False, is_lost=False, has_snapshot=True)
    if isinstance(state, AWAITING) and not isinstance(event, Interrupted):
        known = replace(known, in_transit=False)
    is_rebuilt = isinstance(state, Rebuilding | Replacing) or (isinstance(state, Regrouping) and 0 not in state.members)
    if is_rebuilt and isinstance(event, Done):  # rank 0 is another process
        known = replace(known, in_transit=False)
    if isinstance(event, NotDone) and state == AwaitingSnapshot(EndEarly()):
        known = replace(known, num_lost_copies=known.num_lost_copies + 1)
    step = transition_of(state, event, known)
    wrong = [f"{each}: {type(state).__name__}, {type(event).__name__}" for each in faults_of(node, event, step)]
    commands, following = step.commands, step.state
    if isinstance(event, Paused) or isinstance(following, AwaitingCopy):
        known = replace(known, in_transit=True)
    if Do.GIVE_STATE_UP in commands:
        known = replace(known, only_in_workers=False)
    if Do.KILL_GROUP in commands:
        known = replace(known, members=NO_WORKERS, only_in_workers=False, in_transit=False)
    if Do.PAY_FOR_RESTART in commands:
        known = replace(known, num_left=known.num_left - 1, continued_at=None, free_from=1)
    if isinstance(event, Survivors):  # others may hang
        known = replace(known, free_from=float("inf"))
    if Do.PAY_TO_CONTINUE in commands:
        known = replace(known, num_left=known.num_left - (known.free_from > 1), continued_at=1, free_from=3)
    if Do.PAY_FOR_START in commands:
        known = replace(known, num_starts_left=(known.num_starts_left or 0) - 1)
    if isinstance(state, Restoring) and isinstance(event, NotDone):
        known = replace(known, members=(smaller(known.members) or [NO_WORKERS])[-1])
    if isinstance(following, Regrouping):
        num_joining = event.num_joining if isinstance(event, Filled) else 0
        joining = frozenset(sorted(frozenset(range(4)) - following.members)[:num_joining])
        known = replace(known, members=following.members | joining, num_standby=known.num_standby - num_joining)
    if isinstance(following, Rebuilding):
        members = following.members or frozenset(range(known.num_standby))
        known = replace(known, members=members, num_standby=0)
    if isinstance(state, Launching) and isinstance(event, Done):
        known = replace(known, members=BOTH)
    has_paused = node.has_paused or isinstance(event, Paused) or event in LACKS_OF_MEMORY
    num_interrupts = node.num_interrupts + isinstance(event, Interrupted)
    return Node(following, known, has_paused, num_interrupts), wrong


def walked(first: Node) -> tuple[set[Node], set[str]]:
    """All places of all runs from here on, and what is wrong in them."""
    wrong, open_places, seen = set[str](), {first}, {first}
    stack = [(first, events(first))]
    while stack:
        node, left = stack[-1]
        for event in left:
            following, faults = after(node, event)
            wrong.update(faults)
            if following in open_places:
                wrong.add(f"endless: {type(node.state).__name__}, {type(event).__name__}")
            elif following not in seen:
                assert len(seen) < MOST_NODES, "a set of known has too many places"
                seen.add(following)
                if not isinstance(following.state, Finished):
                    open_places.add(following)
                    stack.append((following, events(following)))
                    break
        else:
            stack.pop()
            open_places.remove(node)
    return seen, wrong


def drawn_known(seed: int) -> Known:
    rng = random.Random(seed)
    regroups, only_in_workers = rng.random() < 0.7, rng.random() < 0.4
    is_driver_only = rng.random() < 0.1
    return known_of(
        in_call=rng.random() < 0.8,
        members=frozenset({0}) if is_driver_only else BOTH,
        is_driver_only=is_driver_only,
        min_workers=1 if is_driver_only else rng.choice([1, 1, 2]),
        regroups=regroups,
        renews=not regroups and rng.random() < 0.6,
        continues=rng.random() < 0.8,
        retries_user_errors=rng.random() < 0.1,
        can_continue=rng.random() < 0.8,
        keeps_alike=rng.random() < 0.8,
        must_end=rng.random() < 0.3,
        is_ending=(is_ending := rng.random() < 0.15),
        is_cut_off=is_ending and rng.random() < 0.5,
        only_in_workers=only_in_workers and not is_driver_only,
        in_transit=rng.random() < 0.3,
        is_lost=only_in_workers,
        has_snapshot=not only_in_workers,
        num_standby=rng.choice([0, 1]),
        num_retries=1,
        num_left=1,
        num_starts_left=rng.choice([None, 1]),
        num_attempts=2,
    )


def first_places(known: Known) -> list[Node]:
    """A call begins; or between two calls, the workers are replaced, or a change of the group begins."""
    if known.in_call:
        return [Node(Running(), known)]
    change = Continue(Trigger.DRAIN, known.members)
    return [
        Node(restart(Restart("restarted"), known).state, known),
        Node(TearingDown(change, known.members), known),
    ]


def wrong_in(seeds: range) -> set[str]:
    return {each for seed in seeds for first in first_places(drawn_known(seed)) for each in walked(first)[1]}


def following_states() -> dict[str, list[str]]:
    """Which states follow each state in some runs, without `Finished`, in the order of the road."""
    known = known_of(num_retries=1, num_left=1, num_attempts=2)
    only_state = replace(known, only_in_workers=True, is_lost=True, has_snapshot=False, can_continue=False)
    places: set[Node] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "NUM_COPIES", 2)  # less to walk
        for each in (known, replace(known, must_end=True), with_facts(known, regroups=False, renews=True), only_state):
            places |= walked(Node(Running(), each, num_interrupts=MOST_INTERRUPTS))[0]
        steps = {(node.state, after(node, event)[0].state) for node in places for event in events(node)}
    names = {(type(state).__name__, type(following).__name__) for state, following in steps}
    in_order = sorted(names, key=lambda each: [str(machine.State).index(name) for name in each])
    arrows = [(state, following) for state, following in in_order if following not in (state, "Finished")]
    return {state: [following for name, following in arrows if name == state] for state, _ in arrows}


@pytest.mark.long
def test_every_run_ends_and_keeps_the_state_and_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NUM_COPIES", 2)  # less to walk
    assert wrong_in(range(NUM_KNOWN)) == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("missing", "fault"),
    [
        (Do.PAY_TO_CONTINUE, "endless"),  # a call that must end early, and loses a connection whenever it begins
        (Do.PAY_FOR_RESTART, "endless"),
        (Do.GIVE_STATE_UP, "kills the only state"),
        (Do.NOTE_ABORTED, "it is not noted that a call broke off"),
    ],
)
def test_a_command_that_is_missing_is_found(missing: Do, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(state: State, event: Event, known: Known) -> Transition:
        step = transition(state, event, known)
        return Transition(step.state, tuple(command for command in step.commands if command is not missing))

    known = known_of(
        num_retries=1, num_left=1, num_attempts=2, must_end=True, renews=True, only_in_workers=True, is_lost=True
    )
    monkeypatch.setattr(machine, "NUM_COPIES", 2)
    monkeypatch.setitem(globals(), "transition_of", without)
    wrong = walked(Node(Running(), known))[1]
    assert any(each.startswith(fault) for each in wrong)


@pytest.mark.soak
def test_every_run_of_many_more_facts_ends_and_keeps_the_state_and_the_retries() -> None:
    assert wrong_in(range(NUM_KNOWN, NUM_KNOWN_IN_SOAK)) == set()


# ------------------------------------------------------------------------------------ what follows a failed call


def decided(kind: FailureKind, num_left: float, **known: Any) -> str:
    """What follows a call that failed: ranks continue, a restart is paid for, or an error is raised."""
    step = transition(Running(), CallFailed(kind), known_of(num_left=num_left, **known))
    match step.state:
        case Settling(Continue(Trigger.FAILURE)):
            return "continue"
        case Finished(Raise(why)) | AwaitingSnapshot(Raise(why)):
            return why.name
    assert Do.PAY_FOR_RESTART in step.commands
    return "restart"


@pytest.mark.parametrize(
    ("kind", "num_left", "expected"),
    [
        ("died", 3, "restart"),
        ("died", 1, "restart"),
        ("died", 0, "NO_RETRY"),
        ("disconnected", 1, "restart"),
        ("disconnected", 0, "NO_RETRY"),
        ("user", 3, "RAISED_APART"),
        ("user", 0, "RAISED_APART"),
    ],
)
@pytest.mark.parametrize(("continues", "can_continue"), [(False, True), (True, False)])
def test_only_losses_are_retried_and_only_within_the_budget(
    kind: FailureKind, num_left: float, expected: str, continues: bool, can_continue: bool
) -> None:
    assert decided(kind, num_left, continues=continues, can_continue=can_continue) == expected


@pytest.mark.parametrize(
    ("kind", "num_retries", "num_left", "expected"),
    [
        ("died", 3, 3, "continue"),
        ("disconnected", 3, 3, "continue"),
        ("died", 3, 0, "continue"),  # it may be free; that is known only when the survivors say how far they are
        ("died", 0, 0, "NO_RETRY"),
        ("user", 3, 3, "RAISED_APART"),
    ],
)
def test_survivors_are_kept_where_they_can_go_on(
    kind: FailureKind, num_retries: float, num_left: float, expected: str
) -> None:
    assert decided(kind, num_left, num_retries=num_retries) == expected


@pytest.mark.parametrize(("num_left", "expected"), [(1, "restart"), (0, "RAISED_APART"), (float("inf"), "restart")])
def test_an_error_in_user_code_is_retried_where_that_is_asked_for(num_left: float, expected: str) -> None:
    assert decided("user", num_left, retries_user_errors=True) == expected
