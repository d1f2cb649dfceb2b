"""The table of a recovery: `transition` takes a state, an event and the facts, and returns the next state and commands.

Each state names the one thing that the driver then waits for, and each event how the wait ended. Commands do not wait
for a worker. `transition` is pure, so that tests can walk all its runs.

The modules `controller` and `repair` still take these steps in their methods, and share only constants with the table.
It is what the engine is checked against: in `tests/simulator`, each schedule follows the table beside the engine and
fails where they differ.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, TypeAlias

from raysgd.core.engine.shared.group_events import EventKind
from raysgd.core.engine.shared.types import FailureKind
from raysgd.exceptions import RanksDifferError, UnevenStepsError, UnpicklableError, WorkerError, WorkersLostError

NUM_COPIES = 4  # how often a state that is lost in transit is copied to the driver

Members: TypeAlias = frozenset[Hashable]
"""Workers of a group. They are not named by rank, because a worker can get another rank in the next group."""
Error: TypeAlias = type[BaseException]

NOBODY: Members = frozenset()


# ------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Raise:
    """Kill the group and raise an error.

    Attributes:
        error: Class of the error.
        event: Kind of the event to record in the history. None to record no event.
        is_refused: True if the error says that no retry is left.
        keeps_driver: True if a group whose only worker is the driver survives.
        ends_restart: True if the error ends a restart, which records an event even if no group is left.
        num_tries: The number of further attempts to fetch the only state after Ctrl-C has interrupted an attempt.
    """

    error: Error
    event: Literal["lost", "ended"] | None = "ended"
    is_refused: bool = False
    keeps_driver: bool = False
    ends_restart: bool = False
    num_tries: int = 1


@dataclass(frozen=True)
class EndEarly:
    """End the call early and return each rank's part of the snapshot."""


@dataclass(frozen=True)
class Restart:
    """Restore the last snapshot in rebuilt replicas or in new workers.

    Attributes:
        kind: Kind of the event to record in the history.
        then: "resume": the call resumes from wherever the restored replicas are. "call": it resumes if the snapshot was
            taken inside the call, otherwise it starts over. "idle": no call is running.
        reuses: True if processes of the old group may be reused.
        costs: True if the restart has not been paid for yet.
        attempt: Index of the attempt to start a group, from 0.
        is_launched: True if this attempt has started a group.
    """

    kind: EventKind
    then: Literal["resume", "call", "idle"] = "call"
    reuses: bool = False
    costs: bool = False
    attempt: int = 0
    is_launched: bool = False

    @property
    def next_attempt(self) -> Restart:
        return replace(self, attempt=self.attempt + 1, is_launched=False)


Plan: TypeAlias = "Raise | EndEarly | Restart"
"""What follows once the driver has the training state, or has given it up."""


class Why(Enum):
    """Why the members of a group change."""

    FAILURE = auto()  # ranks were lost in a call, which then resumes; may cost a retry
    MEMORY = auto()  # survivors ran out of memory in a smaller group; waits for workers without a limit
    DRAIN = auto()  # nodes are being removed; free
    GROW = auto()  # workers are ready to join; free
    EVACUATE = auto()  # only to copy the state to the driver: no worker joins, and one rank is enough
    REUSE = auto()  # the processes stay, their replicas are rebuilt and restore a snapshot


KINDS: dict[Why, EventKind] = {
    Why.FAILURE: "continued",
    Why.MEMORY: "grown",
    Why.DRAIN: "left",
    Why.GROW: "grown",
    Why.EVACUATE: "ended",
    Why.REUSE: "restored",
}


@dataclass(frozen=True)
class Change:
    """A change of the group in place.

    Attributes:
        why: Reason for the change.
        failed: The failure that caused the change, if any.
        expected: Workers of the group before the change, without those that leave as planned.
        size: Number of workers before the change.
        plan: What follows an evacuation or a rebuild.
        has_regrouped: True if a group was formed, or at least attempted.
        num_copies: Number of copies of the state that the workers in `copied_by` have sent and that were lost.
        copied_by: Workers that sent the last copy.
    """

    why: Why
    failed: CallFailed | None = None
    expected: Members = NOBODY
    size: int = 0
    plan: Plan | None = None
    has_regrouped: bool = False
    num_copies: int = 0
    copied_by: Members = NOBODY


# ------------------------------------------------------------------------------------------------------ states


@dataclass(frozen=True)
class Running:
    """All ranks run the call, from its start or from where it was interrupted."""

    mode: Literal["start", "resume"] = "start"


class Poll(Enum):
    """Why the driver asks each rank for its progress."""

    RESUME = auto()  # after the snapshot of a paused call was lost: are all ranks still there?
    COMPARE = auto()  # all ranks failed at the same line: do they have the same state?
    PAY = auto()  # no snapshot from inside a call that must end early: how much progress has the group made?


@dataclass(frozen=True)
class Polling:
    """Each rank reports its progress."""

    why: Poll


@dataclass(frozen=True)
class Aborting:
    """Collectives are aborted, ranks are polled, and their calls end."""

    change: Change


@dataclass(frozen=True)
class TearingDown:
    """The members leave the group and report their progress. `stale` joined without receiving the state."""

    change: Change
    members: Members
    stale: Members = NOBODY


@dataclass(frozen=True)
class AwaitingQuorum:
    """Standby workers are taken or awaited."""

    change: Change
    members: Members
    stale: Members = NOBODY


@dataclass(frozen=True)
class Rendezvous:
    """Members and standby workers connect, and the source sends its state to those that lack it."""

    change: Change
    members: Members
    stale: Members = NOBODY
    num_joining: int = 0


@dataclass(frozen=True)
class Capturing:
    """Each rank copies its state."""

    change: Change


@dataclass(frozen=True)
class AwaitingSnapshot:
    """A snapshot is in transit to the driver.

    Attributes:
        plan: What follows.
        change: The evacuation that copied the state, if any.
        is_brief: True if the driver waits only for seconds, before it starts other workers.
    """

    plan: Plan
    change: Change | None = None
    is_brief: bool = False


@dataclass(frozen=True)
class Rebuilding:
    """Members and standby workers connect and build their replicas again. `has_begun`: after a failed restore."""

    plan: Restart
    members: Members
    has_begun: bool = False


@dataclass(frozen=True)
class Scheduling:
    """The driver looks for free resources, and waits if too few are free."""

    plan: Restart


@dataclass(frozen=True)
class Launching:
    """A new group starts."""

    plan: Restart


@dataclass(frozen=True)
class Restoring:
    """All ranks load the last snapshot and repeat the calls since."""

    plan: Restart


@dataclass(frozen=True)
class Finished:
    """The recovery is over. `how`: all ranks completed the call, it ended early, no call is running, or it raised."""

    how: Literal["completed", "left", "idle", "raised"]
    error: Error | None = None


State: TypeAlias = (
    "Running | Polling | Aborting | TearingDown | AwaitingQuorum | Rendezvous | Capturing | AwaitingSnapshot"
    " | Rebuilding | Scheduling | Launching | Restoring | Finished"
)

# ------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class Answered:
    """All ranks have completed the call. `refused`: class of the error that `call.check` raised, if any."""

    refused: Error | None = None


@dataclass(frozen=True)
class Paused:
    """All ranks wait between the same two steps. `leaving` are on nodes that are being removed."""

    must_end: bool
    leaving: Members = NOBODY


@dataclass(frozen=True)
class CallFailed:
    """A rank was lost, or user code raised an exception.

    Attributes:
        kind: The kind of failure that counts.
        has_diverged: True if the ranks ran different steps.
        all_answered: False if ranks are still inside the call.
        at_one_line: True if all ranks failed at the same line of user code.
        lacks_memory: True if memory ran out in the first step after the group had shrunk.
    """

    kind: FailureKind
    has_diverged: bool = False
    all_answered: bool = True
    at_one_line: bool = False
    lacks_memory: bool = False


@dataclass(frozen=True)
class Survivors:
    """The workers that can be used again. `has_stuck`: others are alive but did not finish the call."""

    members: Members
    has_stuck: bool = False


@dataclass(frozen=True)
class Progress:
    """All members have left the group. `has_source`: the state of one of them can be continued, from step `steps`."""

    has_source: bool
    steps: int = 0


@dataclass(frozen=True)
class Lost:
    """Workers were lost.

    Attributes:
        members: The workers that are left.
        failed: Workers that did not complete the step, dead or alive.
        by_user: True if user code raised an exception.
        is_part: True if a shard of the snapshot is lost.
    """

    members: Members = NOBODY
    failed: Members = NOBODY
    by_user: bool = False
    is_part: bool = False


@dataclass(frozen=True)
class Quorum:
    """Standby workers were taken. `silent` members have stopped to answer in the meantime."""

    num_joining: int
    silent: Members = NOBODY


@dataclass(frozen=True)
class TooFew:
    """The members and the standby workers are too few to rebuild a group."""


@dataclass(frozen=True)
class Formed:
    """The next group is connected and has the state. `moves_rank_0`: rank 0 is another worker than before."""

    moves_rank_0: bool = False


@dataclass(frozen=True)
class Captured:
    """All ranks have copied their state. `is_inside`: the state is from inside a call."""

    is_inside: bool


@dataclass(frozen=True)
class Landed:
    """The snapshot has arrived, or none was in transit. It has the workers' state."""


@dataclass(frozen=True)
class LostInTransit:
    """No snapshot with the workers' state has arrived."""


@dataclass(frozen=True)
class Polled:
    """All ranks have reported. `are_alike`: they have the same state. `steps`: the most that one has completed."""

    are_alike: bool = True
    steps: int = 0


@dataclass(frozen=True)
class Resources:
    """`has_room`: enough workers fit into the free resources. `is_hopeless`: waiting does not help."""

    has_room: bool
    is_hopeless: bool = False


@dataclass(frozen=True)
class Done:
    """The group was launched, rebuilt or restored."""


@dataclass(frozen=True)
class NotGranted:
    """Another program took the resources."""


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C, `stop` or an error in the driver ended the wait."""

    error: Error


Event: TypeAlias = (
    "Answered | Paused | CallFailed | Survivors | Progress | Lost | Quorum | TooFew | Formed | Captured | Landed"
    " | LostInTransit | Polled | Resources | Done | NotGranted | Interrupted"
)

# ------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Facts:
    """The facts on which a transition depends. All values are plain, and are read just before the transition.

    Attributes:
        in_call: True if a call is running.
        members: Workers of the current group.
        has_group: False if the group was killed.
        is_driver_only: True if the driver is the only worker.
        min_workers: Smallest number of workers.
        regroups: True if replicas can continue in another group.
        renews: True if replicas can be rebuilt in their processes.
        runs_on: True if replicas run a function that keeps running between calls.
        uses_local: True if rank 0 is the driver.
        continues: True if survivors continue a failed call.
        retries_user_errors: True if exceptions in user code are retried.
        can_continue: True if the call can continue in another group.
        keeps_alike: True if ranks that fail apart in this call are out of sync.
        must_end: True if the call must end early.
        is_ending: True if the program is about to end.
        is_cut_off: True if, besides, Ray was stopped.
        only_in_workers: True if no snapshot in the driver replaces the workers' state.
        in_transit: True if a snapshot is in transit.
        is_lost: True if the state is lost unless the snapshot in transit arrives.
        has_snapshot: True if a snapshot has arrived.
        is_inside: True if that snapshot is from inside the running call.
        num_standby: Number of standby workers that are ready or starting.
        num_lost_copies: Number of snapshots of this call, taken while it was paused, that were lost.
        num_retries: Retries of the call.
        num_left: Retries that are left.
        continued_at: Step at which survivors continued the last time. None if they have not.
        free_from: Continuing is free from this step on.
        num_starts_left: Retries of a start that are left. None if only `num_attempts` limits starts.
        num_attempts: Number of attempts to start a group.
    """

    in_call: bool = True
    members: Members = frozenset({0, 1})
    has_group: bool = True
    is_driver_only: bool = False
    min_workers: int = 1
    regroups: bool = True
    renews: bool = False
    runs_on: bool = False
    uses_local: bool = False
    continues: bool = True
    retries_user_errors: bool = False
    can_continue: bool = True
    keeps_alike: bool = True
    must_end: bool = False
    is_ending: bool = False
    is_cut_off: bool = False
    only_in_workers: bool = False
    in_transit: bool = False
    is_lost: bool = False
    has_snapshot: bool = True
    is_inside: bool = False
    num_standby: int = 0
    num_lost_copies: int = 0
    num_retries: float = 3
    num_left: float = 3
    continued_at: int | None = None
    free_from: float = 1
    num_starts_left: float | None = None
    num_attempts: int = 10

    @property
    def without_group(self) -> Facts:
        """The facts after the group was killed."""
        return replace(self, has_group=False, only_in_workers=False)

    def can_pay(self, steps: int) -> bool:
        """Return True if the retries allow survivors that have completed `steps` steps to continue."""
        is_stuck = self.continued_at is not None and steps <= self.continued_at
        return not is_stuck and self.num_retries > 0 and (self.num_left > 0 or steps >= self.free_from)


# ---------------------------------------------------------------------------------------------------- commands


class Do(Enum):
    """An action that the driver takes at once, without waiting for a worker."""

    FORGET_CALLS = auto()  # a restart repeats no call
    GIVE_STATE_UP = auto()  # the only state could not be fetched
    DROP_IN_TRANSIT = auto()  # the replicas that send the snapshot are gone
    TAKE_PARTS = auto()  # the ranks' parts become the newest snapshot
    LEAVE_CALL = auto()  # the call will not resume, so a snapshot inside it counts as one after it
    NOTE_ABORTED = auto()  # no snapshot has the state that an aborted call has left
    KEEP_FACTS = auto()  # what the replicas of the new group have returned
    KILL_OTHERS = auto()  # workers that are not members
    KILL_GROUP = auto()
    SUSPECT_NODES = auto()  # no new workers on the nodes of silent ranks for a while
    START_STANDBY = auto()
    OWE_SPARES = auto()
    NOTE_HANG = auto()  # continuing costs a retry
    PAY_TO_CONTINUE = auto()
    PAY_FOR_RESTART = auto()
    PAY_FOR_START = auto()
    NOTE_REFUSED = auto()  # no retry was left
    NOTE_LOST_COPY = auto()
    NOTIFY_CHANGE = auto()
    NOTIFY_FAILURE = auto()


@dataclass(frozen=True)
class Record:
    """Add an event to the history."""

    kind: EventKind


Command: TypeAlias = "Do | Record"


@dataclass(frozen=True)
class Step:
    """The next state, and what to do before it begins, in this order."""

    state: State
    commands: tuple[Command, ...] = field(default=())

    def after(self, *commands: Command) -> Step:
        """Return the step with more commands, which come first."""
        return Step(self.state, (*commands, *self.commands))


# --------------------------------------------------------------------------------------------------- the table


def transition(state: State, event: Event, facts: Facts) -> Step:
    """Return what follows when the wait of `state` has ended with `event`.

    Raises:
        AssertionError: A wait of this state cannot end with this event.
    """
    match state, event:
        case _, Interrupted(error):
            return _interrupted(state, error, facts)

        # ---- the call
        case Running(), Answered(refused=error):
            if error is None:
                return Step(Finished("completed"))
            return Step(AwaitingSnapshot(Raise(error, keeps_driver=True, num_tries=0)))
        case Running(), Paused(must_end=True):
            return Step(AwaitingSnapshot(EndEarly()), (Do.TAKE_PARTS,))
        case Running(), Paused(leaving=leaving):
            return _leave_or_grow(leaving, facts)
        case Running() | Polling(Poll.RESUME), CallFailed(kind) if facts.must_end and facts.regroups and kind != "user":
            return Step(Aborting(Change(Why.EVACUATE, event, plan=EndEarly())))
        case Running() | Polling(Poll.RESUME), CallFailed():
            return _after_failure(event, facts)

        # ---- ranks report their progress
        case Polling(Poll.RESUME), Polled():
            return Step(Running("resume"))
        case Polling(Poll.COMPARE), Polled(are_alike=True):
            return Step(Finished("raised", WorkerError), _aborted(facts))
        case Polling(Poll.COMPARE), Polled() | CallFailed():
            return Step(AwaitingSnapshot(Raise(WorkerError)))
        case Polling(Poll.PAY), CallFailed():  # the next attempt fails, too, and pays
            return Step(Running("resume"))
        case Polling(Poll.PAY), Polled(steps=steps):
            if facts.can_pay(steps):
                return Step(Running("resume"), (Do.PAY_TO_CONTINUE,))
            return _give_up(facts) if facts.is_ending else _restart_after_failure(facts, "resume")

        # ---- a change in place
        case Aborting(change), Survivors(members, has_stuck):
            return _with_survivors(change, members, has_stuck, facts)
        case TearingDown(change, members, stale), Progress(has_source, steps):
            return _with_progress(state, has_source, steps, facts)
        case TearingDown(change, members), Lost(by_user=True):
            return _cannot_continue(change, members, facts)
        case TearingDown(change, _, stale), Lost(members):
            return _tear_down(change, members, stale, facts)
        case AwaitingQuorum(change, members, stale), Quorum(num_joining, silent):
            if silent:
                return _tear_down(change, members - silent, stale, facts).after(Do.SUSPECT_NODES)
            if len(members) + num_joining < facts.min_workers:
                return _cannot_continue(change, members, facts)
            if isinstance(change.plan, Restart):
                return Step(Rebuilding(change.plan, members))
            return Step(Rendezvous(change, members, stale, num_joining))
        case Rendezvous(change, members, _, num_joining), Formed(moves_rank_0):
            return _with_group(change, members, num_joining, moves_rank_0, facts)
        case Rendezvous(change, members, stale), Lost(left, failed, by_user):
            change = replace(change, has_regrouped=True)
            if by_user:
                return _cannot_continue(change, members, facts)
            if left == facts.members:  # the next attempt would fail, too
                return _cannot_continue(change, members, facts, is_failure=True).after(Do.SUSPECT_NODES)
            # Whoever joined and failed may not have the state. Those that had it still do.
            without_state = failed - (members - stale)
            return _tear_down(change, left, without_state, facts).after(Do.SUSPECT_NODES)

        # ---- the state goes to the driver
        case Capturing(Change(plan=EndEarly()) as change), Captured(is_inside=False):
            return _enlarge(change, facts)  # a copy from after the call would repeat the call
        case Capturing(change), Captured():
            assert change.plan is not None
            return Step(AwaitingSnapshot(change.plan, change), (Do.TAKE_PARTS,))
        case Capturing(change), Lost():
            return _copy_again(change, facts)
        case AwaitingSnapshot(EndEarly()), Landed():
            return _end_early(facts)
        case AwaitingSnapshot(EndEarly(), None), LostInTransit():
            if facts.is_cut_off:
                return _without_copy(facts)
            if facts.num_lost_copies + 1 == NUM_COPIES:  # the ranks only wait between two steps
                return Step(Finished("raised", WorkersLostError), _aborted(facts))
            return Step(Polling(Poll.RESUME), (Do.NOTE_LOST_COPY,))
        case AwaitingSnapshot(change=Change() as change), LostInTransit():
            return _copy_again(change, facts)
        case AwaitingSnapshot(Restart() as plan, None, is_brief=True), Landed() | LostInTransit():
            return _replace_workers(plan, facts)
        case AwaitingSnapshot(Raise() | Restart() as plan), Landed() | LostInTransit():
            return _follow(plan, facts)

        # ---- back to the last snapshot
        case Scheduling(plan), Resources(has_room, is_hopeless):
            if is_hopeless:
                return _end_restart(plan, WorkersLostError, facts)
            return Step(Launching(plan)) if has_room else _schedule(plan.next_attempt, facts)
        case Launching(plan), Done():
            return Step(Restoring(replace(plan, is_launched=True)))
        case Launching(plan), Lost(by_user=True):
            return _end_restart(plan, WorkerError, facts)
        case Launching(plan), Lost():
            return _start_again(plan, facts)
        case Launching(plan), NotGranted():
            return _schedule(plan.next_attempt, facts)
        case Rebuilding(plan, _, has_begun), Done():
            return Step(Restoring(plan), (*((Do.DROP_IN_TRANSIT,) if has_begun else ()), Do.KEEP_FACTS))
        case Restoring(plan), Done():
            resumes = plan.then == "resume" or facts.is_inside
            next_state = Finished("idle") if plan.then == "idle" else Running("resume" if resumes else "start")
            return Step(next_state, (Record(plan.kind),))
        case Restoring(plan), Lost(by_user=True, is_part=is_part):
            return _end_restart(plan, WorkersLostError if is_part else WorkerError, facts)
        case Rebuilding() | Restoring(), Lost() | TooFew():
            return _rebuild_again(state, event, facts)
    raise AssertionError(f"{state} cannot end with {event}")


def _interrupted(state: State, error: Error, facts: Facts) -> Step:
    """Ctrl-C, `stop` or an error in the driver."""
    plan = _plan_of(state)
    if isinstance(state, Running) and error is UnpicklableError:  # no rank has received the call
        return Step(Finished("raised", error), _aborted(facts))
    if isinstance(plan, Restart):
        return _end_restart(plan, error, facts)
    if isinstance(plan, Raise):
        if not plan.num_tries:  # the workers with the only state stay
            return Step(Finished("raised", error), _aborted(facts))
        return _follow(Raise(error, num_tries=plan.num_tries - 1), facts)
    if plan is None and isinstance(state, (TearingDown, AwaitingQuorum, Rendezvous)):
        return _follow(Raise(error, num_tries=int(facts.in_call)), facts)
    return _follow(Raise(error, keeps_driver=True, num_tries=0), facts)


def _plan_of(state: State) -> Plan | None:
    """Return what was to follow an evacuation or a restart. None if the state is part of neither."""
    match state:
        case Aborting(change) | TearingDown(change) | AwaitingQuorum(change) | Rendezvous(change) | Capturing(change):
            return change.plan
        case AwaitingSnapshot(plan, change, is_brief):
            return plan if change is not None or is_brief else None
        case Scheduling(plan) | Launching(plan) | Rebuilding(plan) | Restoring(plan):
            return plan
    return None


def _aborted(facts: Facts) -> tuple[Command, ...]:
    return (Do.NOTE_ABORTED,) if facts.in_call and not facts.is_ending else ()


def _after_failure(failed: CallFailed, facts: Facts) -> Step:
    """A call has failed that need not end early."""
    is_user = failed.kind == "user"
    if failed.has_diverged:
        return Step(AwaitingSnapshot(Raise(UnevenStepsError, keeps_driver=True, num_tries=0)))
    if failed.lacks_memory:
        return Step(Aborting(Change(Why.MEMORY, failed, facts.members, len(facts.members))))
    if is_user and not (facts.retries_user_errors and facts.num_left > 0):
        if not failed.all_answered:  # others are still inside the call
            return _follow(Raise(WorkerError), facts)
        if not facts.keeps_alike or facts.is_driver_only:
            return Step(Finished("raised", WorkerError), _aborted(facts))
        return Step(Polling(Poll.COMPARE) if failed.at_one_line else AwaitingSnapshot(Raise(WorkerError)))
    if not is_user and facts.continues and facts.can_continue and facts.num_retries > 0:
        return Step(Aborting(Change(Why.FAILURE, failed, facts.members, len(facts.members))))
    return _restart_after_failure(facts)


def _leave_or_grow(leaving: Members, facts: Facts) -> Step:
    """The ranks wait between two steps, so that workers can leave or join."""
    why = Why.DRAIN if leaving else Why.GROW
    commands = () if facts.runs_on else (Do.TAKE_PARTS,)
    if not (facts.regroups or facts.runs_on):
        return Step(AwaitingSnapshot(Restart(KINDS[why])), commands)
    return leave_or_grow(leaving, facts).after(*commands)


def leave_or_grow(leaving: Members, facts: Facts) -> Step:
    """Let workers on nodes that are being removed leave, and others join."""
    staying = facts.members - leaving
    change = Change(Why.DRAIN if leaving else Why.GROW, expected=staying, size=len(facts.members))
    return Step(TearingDown(change, staying))


def _with_survivors(change: Change, members: Members, has_stuck: bool, facts: Facts) -> Step:
    if change.why is Why.EVACUATE:
        return _tear_down(change, members, NOBODY, facts)
    commands: list[Command] = [Do.SUSPECT_NODES]
    # If a rank had died, stuck ranks might just be slow.
    if change.why is Why.FAILURE and has_stuck and change.failed is not None and change.failed.kind == "disconnected":
        commands.append(Do.NOTE_HANG)
    if change.why is Why.MEMORY:
        commands.append(Do.START_STANDBY)
    if change.why is Why.REUSE and not facts.renews:  # the survivors could not continue, so something may be broken
        members = NOBODY
    return _tear_down(change, members, NOBODY, facts).after(*commands)


def _tear_down(change: Change, members: Members, stale: Members, facts: Facts) -> Step:
    if members:
        return Step(TearingDown(change, members, stale & members))
    if change.why is Why.REUSE and facts.num_standby:
        return Step(AwaitingQuorum(change, NOBODY), (Do.KILL_OTHERS,))
    return _cannot_continue(change, NOBODY, facts)


def _with_progress(state: TearingDown, has_source: bool, steps: int, facts: Facts) -> Step:
    change = state.change
    if change.why is Why.EVACUATE:
        if not has_source:
            return _cannot_continue(change, state.members, facts).after(Do.KILL_OTHERS)
        return Step(Rendezvous(change, state.members, state.stale), (Do.KILL_OTHERS,))
    is_refused = change.why is Why.FAILURE and not facts.can_pay(steps)
    if change.why is not Why.REUSE and (not has_source or is_refused):
        return _cannot_continue(change, state.members, facts)
    return Step(AwaitingQuorum(change, state.members, state.stale), (Do.KILL_OTHERS,))


def _with_group(change: Change, members: Members, num_joining: int, moves_rank_0: bool, facts: Facts) -> Step:
    commands: list[Command] = [Do.KEEP_FACTS]
    if moves_rank_0:  # rank 0 sends the snapshots
        commands.append(Do.DROP_IN_TRANSIT)
    if change.why is Why.EVACUATE:
        return Step(Capturing(replace(change, has_regrouped=True)), tuple(commands))
    commands.append(Do.NOTIFY_CHANGE)
    if change.why is Why.FAILURE:
        commands.append(Do.PAY_TO_CONTINUE)
    kind = "continued" if change.expected - members else KINDS[change.why]
    if kind != "grown" or len(members) + num_joining > change.size:  # otherwise, all that joined have died
        commands.append(Record(kind))
    return Step(Running("resume") if facts.in_call else Finished("idle"), (*commands, Do.OWE_SPARES))


def _cannot_continue(change: Change, members: Members, facts: Facts, *, is_failure: bool = False) -> Step:
    """The group cannot be changed in place."""
    match change:
        case Change(Why.EVACUATE, failed, plan=EndEarly()):
            assert failed is not None
            return _restart_after_failure(facts, "resume") if change.has_regrouped else _after_failure(failed, facts)
        case Change(Why.EVACUATE, plan=Raise() | Restart() as plan):
            return _follow(plan, replace(facts, only_in_workers=False)).after(Do.GIVE_STATE_UP)
        case Change(plan=Restart() as plan):
            return _start_others(plan, facts)
        case Change(Why.FAILURE):
            return _restart_after_failure(facts, "call")
    kind = "restored" if is_failure or change.expected - members else KINDS[change.why]
    return Step(AwaitingSnapshot(Restart(kind))) if facts.in_call else restart(Restart(kind, "idle"), facts)


def _enlarge(change: Change, facts: Facts) -> Step:
    """A group that was formed only to copy its state has no state from inside the call, so it runs the call."""
    if len(facts.members) >= facts.min_workers or facts.is_ending:
        return Step(Polling(Poll.PAY))
    return Step(TearingDown(Change(Why.FAILURE, None, facts.members, len(facts.members)), facts.members))


def _copy_again(change: Change, facts: Facts) -> Step:
    """A copy of the state was lost: form a group of those that live, and copy again."""
    is_early = isinstance(change.plan, EndEarly)
    if is_early and facts.is_cut_off:
        return _without_copy(facts)
    num_copies = change.num_copies + 1 if is_early or change.copied_by == facts.members else 1
    if num_copies < NUM_COPIES:
        return Step(Aborting(replace(change, num_copies=num_copies, copied_by=facts.members)))
    return _enlarge(change, facts) if is_early else _cannot_continue(change, facts.members, facts)


def _without_copy(facts: Facts) -> Step:
    """Ray was stopped before the state was in the driver."""
    plan = Raise(WorkersLostError, keeps_driver=True, num_tries=0)
    return _follow(plan, replace(facts, only_in_workers=False)).after(Do.GIVE_STATE_UP)


def _end_early(facts: Facts) -> Step:
    is_too_small = len(facts.members) < facts.min_workers and not facts.is_ending
    ends = (Do.KILL_GROUP, Record("ended")) if is_too_small else ()
    return Step(Finished("left"), (Do.LEAVE_CALL, *ends))


def _follow(plan: Raise | Restart, facts: Facts) -> Step:
    """Go on with a plan, once the driver has the training state."""
    if isinstance(plan, Restart):
        return restart(plan, facts)
    if facts.only_in_workers:
        return Step(AwaitingSnapshot(plan) if facts.in_transit else Aborting(Change(Why.EVACUATE, plan=plan)))
    commands: list[Command] = []
    if not (plan.keeps_driver and facts.is_driver_only):
        commands += [Do.KILL_GROUP] * facts.has_group
        if plan.event is not None and (facts.has_group or plan.ends_restart):
            commands.append(Record(plan.event))
    commands += [Do.NOTE_REFUSED] * plan.is_refused + [Do.FORGET_CALLS] * (plan.error is RanksDifferError)
    return Step(Finished("raised", plan.error), (*commands, *_aborted(facts)))


def _give_up(facts: Facts) -> Step:
    return _follow(Raise(WorkersLostError, "lost", is_refused=True), facts)


def _restart_after_failure(facts: Facts, then: Literal["resume", "call"] = "call") -> Step:
    if facts.num_left <= 0:
        return _give_up(facts)
    return restart(Restart("restored", then, reuses=True, costs=True), facts)


def restart(plan: Restart, facts: Facts) -> Step:
    """Go back to the last snapshot. First, fetch state that only the workers have."""
    if facts.only_in_workers and facts.in_transit:
        return Step(AwaitingSnapshot(plan))
    commands: tuple[Command, ...] = ()
    if plan.costs:
        if facts.only_in_workers and not facts.can_continue:  # the state from before the call is gone: never repeat it
            return _follow(Raise(WorkersLostError, "lost"), facts)
        commands, plan = (Do.PAY_FOR_RESTART, Do.NOTIFY_FAILURE), replace(plan, costs=False)
    if facts.is_ending:
        if not facts.in_call:
            return Step(Finished("raised", WorkersLostError), commands)
        return _follow(Raise(WorkersLostError, keeps_driver=True, num_tries=0), facts).after(*commands)
    if facts.only_in_workers:
        return Step(Aborting(Change(Why.EVACUATE, plan=plan)), commands)
    return Step(AwaitingSnapshot(plan, is_brief=True), commands)


def _replace_workers(plan: Restart, facts: Facts) -> Step:
    """Reuse processes if possible. Otherwise, start others."""
    has_others = facts.renews or (facts.regroups and not facts.uses_local and facts.num_standby > 0)
    if plan.reuses and has_others and not facts.is_lost and facts.has_snapshot:
        return Step(Aborting(Change(Why.REUSE, plan=plan)), (Do.DROP_IN_TRANSIT,))
    return _start_others(plan, facts).after(Do.DROP_IN_TRANSIT)


def _start_others(plan: Restart, facts: Facts) -> Step:
    kills = (Do.KILL_GROUP,) if facts.has_group else ()
    if facts.is_lost:
        return _end_restart(plan, WorkersLostError, facts.without_group).after(*kills)
    return _schedule(plan, facts.without_group).after(*kills)


def _schedule(plan: Restart, facts: Facts) -> Step:
    if facts.is_ending or plan.attempt >= facts.num_attempts:
        return _end_restart(plan, WorkersLostError, facts)
    return Step(Scheduling(plan))


def _start_again(plan: Restart, facts: Facts) -> Step:
    """A group that was launched has failed."""
    if facts.num_starts_left is None:
        return _schedule(plan.next_attempt, facts)
    if facts.num_starts_left <= 0:
        return _end_restart(plan, WorkersLostError, facts).after(Do.NOTE_REFUSED)
    return _schedule(replace(plan, is_launched=False), facts).after(Do.PAY_FOR_START)


def _rebuild_again(state: Rebuilding | Restoring, event: Lost | TooFew, facts: Facts) -> Step:
    """Workers were lost while replicas were built or restored. Form a group without them, or start others."""
    can_stay = facts.regroups or facts.renews
    if isinstance(event, Lost) and can_stay and not event.by_user and event.members != facts.members:
        has_begun = isinstance(state, Restoring) or state.has_begun
        return Step(Rebuilding(state.plan, event.members, has_begun), (Do.KILL_OTHERS,))
    if state.plan.is_launched:
        return _start_again(state.plan, facts.without_group).after(Do.KILL_GROUP)
    return _start_others(state.plan, facts)


def _end_restart(plan: Restart, error: Error, facts: Facts) -> Step:
    """Raise the error that ends a restart."""
    event: Literal["lost", "ended"] = "lost" if issubclass(error, WorkersLostError) else "ended"
    is_first = plan.kind == "started"
    return _follow(Raise(error, None if is_first else event, ends_restart=True, num_tries=int(facts.in_call)), facts)
