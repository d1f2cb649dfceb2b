"""The table of a recovery: its states, the events that end them, what is known, commands, and `transition`.

Each state names the one thing that the driver waits for, and each event how the wait ended. `transition` says which
state and commands follow a state, an event and what is known. It is pure, so that tests can walk all its runs.
`interpreter` waits for what a state names and performs the commands, which do not wait for a worker.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar, Literal, TypeAlias

from raysgd.core.engine.policies import choose_source
from raysgd.core.engine.shared.group_events import EventKind
from raysgd.core.engine.shared.types import FailureKind, ReplicaProgress

NUM_COPIES = 4  # how often a state that is lost in transit is copied to the driver

Members: TypeAlias = frozenset[Hashable]
"""Workers of a group. They are not named by rank, because a worker can get another rank in the next group."""

NOBODY: Members = frozenset()


# ------------------------------------------------------------------------------------------------------- plans


class End(Enum):
    """Why a call or a restart ends with an error."""

    INTERRUPTED = auto()  # Ctrl-C, `stop`, or an error in the driver or in user code ended a wait
    RANKS_DIFFER = auto()  # the ranks' values differ
    UNEVEN_STEPS = auto()  # the ranks ran different steps
    USER_ERROR = auto()  # all ranks raised, and are in sync: the group stays
    RAISED_INSIDE = auto()  # user code raised while others were inside the call
    RAISED_APART = auto()  # user code raised while others were elsewhere, so the ranks are out of sync
    NO_RETRY = auto()
    NOT_REPEATABLE = auto()  # the state from before a call that cannot continue is gone
    LOST_COPIES = auto()  # the state was lost in transit again and again
    CUT_OFF = auto()  # Ray was stopped before the state was in the driver
    PROGRAM_ENDS = auto()  # no workers are started any more
    STATE_LOST = auto()  # the state was lost with the workers
    NO_GROUP = auto()  # no attempt to start a group has succeeded
    NO_START = auto()  # no retry of a start is left


@dataclass(frozen=True)
class Raise:
    """Kill the group and raise an error.

    Attributes:
        why: Why.
        event: Kind of the event to record in the history. None to record no event.
        ends_restart: True if the error ends a restart. A half restored group is killed even if its only worker is the
            driver, and an event is recorded even if no group is left.
        error: The error, if it was raised in the driver.
    """

    why: End
    event: Literal["lost", "ended"] | None = "ended"
    ends_restart: bool = False
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class EndEarly:
    """End the call early and return each rank's part of the snapshot: `parts`, once the ranks have copied it."""

    parts: Sequence[Any] = field(default=(), compare=False)


@dataclass(frozen=True)
class Restart:
    """Restore the last snapshot in rebuilt replicas or in new workers.

    Attributes:
        kind: Kind of the event to record in the history.
        reuses: True after a failure in a call: processes of the old group may be reused.
        attempt: Index of the attempt to start a group, from 0.
        is_launched: True if this attempt has started a group.
    """

    kind: EventKind
    reuses: bool = False
    attempt: int = 0
    is_launched: bool = False

    @property
    def next_attempt(self) -> Restart:
        """The plan for another attempt."""
        return replace(self, attempt=self.attempt + 1, is_launched=False)


Plan: TypeAlias = "Raise | EndEarly | Restart"
"""What follows once the driver has the training state, or has given it up."""


class Why(Enum):
    """Why the members of a group change."""

    FAILURE = auto()  # ranks were lost in a call, which then resumes; may cost a retry
    MEMORY = auto()  # survivors ran out of memory in a smaller group; waits for workers without a limit
    SPLIT = auto()  # memory ran out in a step, which all ranks repeat in smaller batches; no rank was lost; free
    DRAIN = auto()  # nodes are being removed; free
    GROW = auto()  # workers are ready to join; free
    EVACUATE = auto()  # only to copy the state to the driver: no worker joins, and one rank is enough
    REUSE = auto()  # the processes stay, their replicas are rebuilt and restore a snapshot


KINDS: dict[Why, EventKind] = {
    Why.FAILURE: "continued",
    Why.MEMORY: "grown",
    Why.SPLIT: "continued",
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
        plan: What follows an evacuation or a rebuild.
        has_regrouped: True if a group was formed, or at least attempted.
        num_copies: Number of copies of the state that the workers in `copied_by` have sent and that were lost.
        copied_by: Workers that sent the last copy.
        joining: Standby workers that are taken to join the next group.
        until: Until when others are awaited, on the engine's clock. None if that was not decided yet.
        parts: Each rank's part of a snapshot from before the change, if workers leave in a call.
    """

    why: Why
    failed: CallFailed | None = None
    expected: Members = NOBODY
    plan: Plan | None = None
    has_regrouped: bool = False
    num_copies: int = 0
    copied_by: Members = NOBODY
    joining: tuple[Any, ...] = ()
    until: float | None = field(default=None, compare=False)
    parts: Sequence[Any] = field(default=(), compare=False)


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
class Settling:
    """Collectives are aborted, ranks are polled, and their calls end."""

    change: Change


@dataclass(frozen=True)
class Forming:
    """A step in which the next group is formed.

    Attributes:
        change: The change of the group.
        members: The workers that stay.
        reports: Each member's progress, in rank order, once the members have left their group.
    """

    change: Change
    members: Members
    reports: tuple[ReplicaProgress, ...] = ()


class TearingDown(Forming):
    """The members leave the group and report their progress."""


class FillingUp(Forming):
    """Standby workers are taken or awaited."""


class Regrouping(Forming):
    """Members and standby workers connect, and the source sends its state to those that lack it."""

    @property
    def source(self) -> ReplicaProgress:
        """The progress of the member whose training state the other ranks copy."""
        source = Progress(self.reports).source
        assert source is not None, "a group without a source is not formed"
        return source


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
    """Members and standby workers connect and build their replicas again, until no more of them are lost meanwhile.

    `is_again`: workers of the group were lost in a restore.
    """

    plan: Restart
    members: Members = NOBODY
    joining: tuple[Any, ...] = ()
    is_again: bool = False


@dataclass(frozen=True)
class Scheduling:
    """The driver looks for free resources, and waits if too few are free."""

    plan: Restart


@dataclass(frozen=True)
class Launching:
    """A new group of `num_workers` workers starts, and some spares."""

    plan: Restart
    num_workers: int
    num_spares: int = 0


@dataclass(frozen=True)
class Restoring:
    """All ranks load the last snapshot and repeat the calls since."""

    plan: Restart


@dataclass(frozen=True)
class Finished:
    """The recovery is over. `plan`: the call ended early or with an error. None if no call is running."""

    plan: Raise | EndEarly | None = None


State: TypeAlias = (
    "Running | Polling | Settling | TearingDown | FillingUp | Regrouping | Capturing | AwaitingSnapshot"
    " | Rebuilding | Scheduling | Launching | Restoring | Finished"
)

# ------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class CallRefused:
    """All ranks have completed the call, but `call.check` raised `error`, so their values do not count."""

    why: Literal[End.RANKS_DIFFER, End.INTERRUPTED]
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Paused:
    """All ranks wait between the same two steps, with `parts` of a snapshot.

    `leaving` are on nodes that are being removed.
    """

    must_end: bool
    leaving: Members = NOBODY
    parts: Sequence[Any] = field(default=(), compare=False)


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
    """All members have left the group, with these `reports` in rank order. `obstacle`: why none can be continued."""

    reports: tuple[ReplicaProgress, ...]
    obstacle: str = field(default="", compare=False)

    @property
    def source(self) -> ReplicaProgress | None:
        """The progress of the member whose state can be continued."""
        source = choose_source(self.reports)
        return None if source is None else self.reports[source]


@dataclass(frozen=True)
class Lost:
    """Workers were lost.

    Attributes:
        members: The workers that are left.
        by_user: True if user code raised an exception.
        obstacle: Why the group cannot be changed in place now.
    """

    members: Members = NOBODY
    by_user: bool = False
    obstacle: str = field(default="", compare=False)


@dataclass(frozen=True)
class Filled:
    """Standby workers were taken, until `until`. `silent` members have stopped to answer in the meantime."""

    joining: tuple[Any, ...]
    silent: Members = NOBODY
    until: float | None = field(default=None, compare=False)
    obstacle: str = field(default="", compare=False)


@dataclass(frozen=True)
class Formed:
    """The next group is connected and has the state. `moves_rank_0`: rank 0 is another worker than before."""

    moves_rank_0: bool = False


@dataclass(frozen=True)
class Captured:
    """All ranks have copied their state, as `parts` of a snapshot. `is_inside`: from inside a call."""

    is_inside: bool
    parts: Sequence[Any] = field(default=(), compare=False)


@dataclass(frozen=True)
class Landed:
    """The snapshot has arrived, or none was in transit. It has the workers' state."""


@dataclass(frozen=True)
class LostInTransit:
    """No snapshot with the workers' state has arrived."""

    obstacle: ClassVar[str] = f"it was lost in transit {NUM_COPIES} times"


@dataclass(frozen=True)
class Polled:
    """All ranks have reported. `are_alike`: they have the same state. `steps`: the most that one has completed."""

    are_alike: bool = True
    steps: int = 0


@dataclass(frozen=True)
class Resources:
    """The driver has looked for free resources, into which so many workers and spares fit, or too few: 0."""

    num_workers: int = 0
    num_spares: int = 0


@dataclass(frozen=True)
class Done:
    """The group was launched, rebuilt or restored."""


@dataclass(frozen=True)
class NotGranted:
    """Another program took the resources."""


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C, `stop`, or an error in the driver or in user code ended the wait.

    Attributes:
        is_loss: True if workers are lost for good.
        is_unsent: True if the error says that the call cannot be sent.
        error: What was raised.
    """

    is_loss: bool = False
    is_unsent: bool = False
    error: BaseException | None = field(default=None, compare=False)


Event: TypeAlias = (
    "CallRefused | Paused | CallFailed | Survivors | Progress | Lost | Filled | Formed | Captured | Landed"
    " | LostInTransit | Polled | Resources | Done | NotGranted | Interrupted"
)

# ------------------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Known:
    """Facts by which a transition is chosen. All values are plain, and are read just before the transition.

    Attributes:
        in_call: True if a call is running.
        was_sent: True if a rank may have received the call.
        members: Workers of the current group. Nobody if the group was killed.
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
    was_sent: bool = True
    members: Members = frozenset({0, 1})
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
    def without_group(self) -> Known:
        """Return the facts after the group was killed."""
        return replace(self, members=NOBODY, only_in_workers=False)

    def obstacle_to_continuing(self, steps: int) -> str | None:
        """Return why the retries do not allow survivors that have completed `steps` steps to continue, if they do not.

        Survivors that completed no step since they last continued cannot continue again, because continuing may have
        broken them.
        """
        if self.continued_at is not None and steps <= self.continued_at:
            return "no step was completed since the survivors went on the last time"
        if not self.num_retries or (self.num_left <= 0 and steps < self.free_from):
            return "no retry is left to pay for going on"
        return None


# ---------------------------------------------------------------------------------------------------- commands


class Do(Enum):
    """An action that the driver takes at once, without waiting for a worker."""

    GIVE_STATE_UP = auto()  # the only state could not be fetched
    DROP_IN_TRANSIT = auto()  # the replicas that send the snapshot are gone
    TAKE_PARTS = auto()  # the ranks' parts become the newest snapshot
    LEAVE_CALL = auto()  # the call will not resume, so a snapshot inside it counts as one after it
    NOTE_ABORTED = auto()  # no snapshot has the state that an aborted call has left
    KILL_JOINING = auto()  # workers that were taken from standby
    KILL_GROUP = auto()
    NOTE_HANG = auto()  # continuing costs a retry
    PAY_TO_CONTINUE = auto()
    PAY_FOR_RESTART = auto()  # and notify the front end
    PAY_FOR_START = auto()


@dataclass(frozen=True)
class Record:
    """Add an event to the history."""

    kind: EventKind


@dataclass(frozen=True)
class Abandon:
    """Do not change the group in place: say why, and kill workers that were to join. `members` are left."""

    change: Change
    members: Members


Command: TypeAlias = "Do | Record | Abandon"


@dataclass(frozen=True)
class Step:
    """The next state, and what to do before it begins, in this order."""

    state: State
    commands: tuple[Command, ...] = field(default=())

    def after(self, *commands: Command) -> Step:
        """Return the step with more commands, which come first."""
        return Step(self.state, (*commands, *self.commands))


# ------------------------------------------------------------------------------------------------------- the table


def transition(state: State, event: Event, known: Known) -> Step:
    """Return what follows when the wait of `state` has ended with `event`.

    Raises:
        AssertionError: A wait of this state cannot end with this event.
    """
    match state, event:
        case _, Interrupted():
            return _interrupted(state, event, known)

        # ---- the call
        case Running(), CallRefused(why, error):
            return Step(AwaitingSnapshot(Raise(why, error=error)))
        case Running(), Paused(must_end=True, parts=parts):
            return Step(AwaitingSnapshot(EndEarly(parts)), (Do.TAKE_PARTS,))
        case Running(), Paused(leaving=leaving, parts=parts):
            return leave_or_grow(leaving, known, parts)
        case Running() | Polling(Poll.RESUME), CallFailed(kind) if known.must_end and known.regroups and kind != "user":
            return Step(Settling(Change(Why.EVACUATE, event, plan=EndEarly())))
        case Running() | Polling(Poll.RESUME), CallFailed():
            return _after_failure(event, known)

        # ---- ranks report their progress
        case Polling(Poll.RESUME), Polled():
            return Step(Running("resume"))
        case Polling(Poll.COMPARE), Polled(are_alike=True):
            return _raise_and_keep(Raise(End.USER_ERROR), known)
        case Polling(Poll.COMPARE), Polled() | CallFailed():
            return Step(AwaitingSnapshot(Raise(End.RAISED_APART)))
        case Polling(Poll.PAY), CallFailed():  # the next attempt fails, too, and pays
            return Step(Running("resume"))
        case Polling(Poll.PAY), Polled(steps=steps):
            if not known.obstacle_to_continuing(steps):
                return Step(Running("resume"), (Do.PAY_TO_CONTINUE,))
            return _give_up(known) if known.is_ending else _restart_after_failure(known)

        # ---- a change in place
        case Settling(change), Survivors(members, has_stuck):
            return _with_survivors(change, members, has_stuck, known)
        case TearingDown(), Progress():
            return _with_progress(state, event, known)
        case TearingDown(change, members), Lost(by_user=True):
            return _cannot_continue(change, members, known)
        case TearingDown(change), Lost(members):
            return _tear_down(change, members, known)
        case FillingUp(change, members, reports), Filled(joining, silent, until):
            change = replace(change, joining=joining, until=until)
            if silent:
                return _tear_down(change, members - silent, known)
            if len(members) + len(joining) < known.min_workers:
                return _cannot_continue(change, members, known)
            if isinstance(change.plan, Restart):
                return Step(Rebuilding(change.plan, members, joining))
            return Step(Regrouping(change, members, reports))
        case Regrouping(), Formed(moves_rank_0):
            return _with_group(state, moves_rank_0, known)
        case Regrouping(change, members), Lost(left, by_user):
            change = replace(change, has_regrouped=True, joining=(), until=None)
            if by_user:
                return _cannot_continue(change, members, known)
            if left == known.members:  # the next attempt would fail, too
                return _cannot_continue(change, members, known, is_failure=True)
            return _tear_down(change, left, known)

        # ---- the state goes to the driver
        case Capturing(Change(plan=EndEarly()) as change), Captured(is_inside=False):
            return _enlarge(change, known)  # a copy from after the call would repeat the call
        case Capturing(change), Captured(parts=parts):
            assert change.plan is not None
            plan = EndEarly(parts) if isinstance(change.plan, EndEarly) else change.plan
            return Step(AwaitingSnapshot(plan, change), (Do.TAKE_PARTS,))
        case Capturing(change), Lost():
            return _copy_again(change, known)
        case AwaitingSnapshot(EndEarly() as plan), Landed():
            return _end_early(plan, known)
        case AwaitingSnapshot(EndEarly(), None), LostInTransit():
            if known.is_cut_off:
                return _without_copy(known)
            if known.num_lost_copies == NUM_COPIES:  # the ranks only wait between two steps
                return _raise_and_keep(Raise(End.LOST_COPIES), known)
            return Step(Polling(Poll.RESUME))
        case AwaitingSnapshot(change=Change() as change), LostInTransit():
            return _copy_again(change, known)
        case AwaitingSnapshot(Restart() as plan, None, is_brief=True), Landed() | LostInTransit():
            return _replace_workers(plan, known)
        case AwaitingSnapshot(Raise() | Restart() as plan), Landed() | LostInTransit():
            return _follow(plan, known)

        # ---- back to the last snapshot
        case Scheduling(plan), Resources(0):
            return _schedule(plan.next_attempt, known)
        case Scheduling(plan), Resources(num_workers, num_spares):
            return Step(Launching(plan, num_workers, num_spares))
        case Launching(plan), Done():
            return Step(Restoring(replace(plan, is_launched=True)))
        case Launching(plan), Lost():
            return _start_again(plan, known)
        case Launching(plan), NotGranted():
            return _schedule(plan.next_attempt, known)
        case Rebuilding(plan), Done():
            return Step(Restoring(plan), (Do.DROP_IN_TRANSIT,))
        case Rebuilding(plan), Lost():
            return _start_others(plan, known)
        case Restoring(plan), Done():
            next_state = Running("resume" if known.is_inside else "start") if known.in_call else Finished()
            return Step(next_state, (Record(plan.kind),))
        case Restoring(plan), Lost():
            return Step(Rebuilding(plan, is_again=True))
    raise AssertionError(f"{state} cannot end with {event}")


def _interrupted(state: State, interrupt: Interrupted, known: Known) -> Step:
    """Ctrl-C, `stop`, or an error in the driver or in user code."""
    plan, why = _plan_of(state), Raise(End.INTERRUPTED, error=interrupt.error)
    if isinstance(state, Running) and (interrupt.is_unsent or not known.was_sent):
        return _raise_and_keep(why, known)
    if isinstance(plan, Raise) and plan.why is End.INTERRUPTED:  # again: the workers with the only state stay
        return _raise_and_keep(why, known)
    if isinstance(state, Regrouping):  # a group that is half formed is killed even if its only worker is the driver
        known = replace(known, is_driver_only=False)
    ends = _end_restart(plan, why, known, is_loss=interrupt.is_loss) if isinstance(plan, Restart) else None
    step = ends or _follow(why, known)
    return step.after(Do.KILL_JOINING) if isinstance(state, (TearingDown, FillingUp)) else step


def _plan_of(state: State) -> Plan | None:
    """Return what was to follow an evacuation or a restart. None if the state is part of neither."""
    match state:
        case Settling(change) | TearingDown(change) | FillingUp(change) | Regrouping(change) | Capturing(change):
            return change.plan
        case AwaitingSnapshot(plan, change, is_brief):
            return plan if change is not None or is_brief else None
        case Scheduling(plan) | Launching(plan) | Rebuilding(plan) | Restoring(plan):
            return plan
    return None


def _raise_and_keep(why: Raise, known: Known) -> Step:
    """Raise an error, and keep the group."""
    return Step(Finished(why), _aborted(known))


def _aborted(known: Known) -> tuple[Command, ...]:
    return (Do.NOTE_ABORTED,) if known.in_call and known.was_sent and not known.is_ending else ()


def _after_failure(failed: CallFailed, known: Known) -> Step:
    """A call has failed that need not end early."""
    is_user = failed.kind == "user"
    if failed.has_diverged:
        return Step(AwaitingSnapshot(Raise(End.UNEVEN_STEPS)))
    if failed.lacks_memory:
        return Step(Settling(Change(Why.MEMORY, failed, known.members)))
    if is_user and not (known.retries_user_errors and known.num_left > 0):
        if not failed.all_answered:
            return _follow(Raise(End.RAISED_INSIDE), known)
        if not known.keeps_alike or known.is_driver_only:
            return _raise_and_keep(Raise(End.USER_ERROR), known)
        return Step(Polling(Poll.COMPARE) if failed.at_one_line else AwaitingSnapshot(Raise(End.RAISED_APART)))
    if failed.kind == "memory" and known.continues and known.can_continue:  # batches of one sample are a user error
        return Step(Settling(Change(Why.SPLIT, failed, known.members)))
    if not is_user and known.continues and known.can_continue and known.num_retries > 0:
        return Step(Settling(Change(Why.FAILURE, failed, known.members)))
    return _restart_after_failure(known)


def leave_or_grow(leaving: Members, known: Known, parts: Sequence[Any] = ()) -> Step:
    """Let workers on nodes that are being removed leave, and others join: between two steps of a call, or two calls."""
    why, staying = Why.DRAIN if leaving else Why.GROW, known.members - leaving
    commands = (Do.TAKE_PARTS,) if known.in_call and not known.runs_on else ()
    if not (known.regroups or known.runs_on):
        return Step(AwaitingSnapshot(Restart(KINDS[why])), commands)
    return Step(TearingDown(Change(why, expected=staying, parts=parts), staying), commands)


def _with_survivors(change: Change, members: Members, has_stuck: bool, known: Known) -> Step:
    if change.why is Why.EVACUATE:
        return _tear_down(change, members, known)
    # If a rank had died, stuck ranks might just be slow.
    is_lost_connection = change.failed is not None and change.failed.kind == "disconnected"
    hangs = (Do.NOTE_HANG,) if change.why is Why.FAILURE and has_stuck and is_lost_connection else ()
    if change.why is Why.REUSE and not known.renews:  # the survivors could not continue, so something may be broken
        members = NOBODY
    return _tear_down(change, members, known).after(*hangs)


def _tear_down(change: Change, members: Members, known: Known) -> Step:
    if members:
        return Step(TearingDown(change, members))
    if change.why is Why.REUSE and known.num_standby:
        return Step(FillingUp(change, NOBODY))
    return _cannot_continue(change, NOBODY, known)


def _with_progress(state: TearingDown, progress: Progress, known: Known) -> Step:
    change, members, source = state.change, state.members, progress.source
    if change.why is Why.REUSE:
        return Step(FillingUp(change, members, progress.reports))
    if source is None or (change.why is Why.FAILURE and known.obstacle_to_continuing(source.progress)):
        return _cannot_continue(change, members, known)
    forming = Regrouping if change.why is Why.EVACUATE else FillingUp
    return Step(forming(change, members, progress.reports))


def _with_group(state: Regrouping, moves_rank_0: bool, known: Known) -> Step:
    change, num_workers = state.change, len(state.members) + len(state.change.joining)
    commands: list[Command] = [Do.DROP_IN_TRANSIT] if moves_rank_0 else []  # rank 0 sends the snapshots
    if change.why is Why.EVACUATE:
        return Step(Capturing(replace(change, has_regrouped=True)), tuple(commands))
    if change.why is Why.FAILURE:
        commands.append(Do.PAY_TO_CONTINUE)
    kind = "continued" if change.expected - state.members else KINDS[change.why]
    if kind != "grown" or num_workers > len(change.expected):  # otherwise, all that joined have died
        commands.append(Record(kind))
    return Step(Running("resume") if known.in_call else Finished(), tuple(commands))


def _cannot_continue(change: Change, members: Members, known: Known, *, is_failure: bool = False) -> Step:
    """The group cannot be changed in place."""
    match change:
        case Change(Why.EVACUATE, failed, plan=EndEarly()):
            assert failed is not None
            step = _restart_after_failure(known) if change.has_regrouped else _after_failure(failed, known)
        case Change(Why.EVACUATE, plan=Raise() | Restart() as plan):
            step = _follow(plan, replace(known, only_in_workers=False)).after(Do.GIVE_STATE_UP)
        case Change(plan=Restart() as plan):
            step = _start_others(plan, known)
        case Change(Why.FAILURE | Why.SPLIT):
            step = _restart_after_failure(known)
        case _:
            plan = Restart("restored" if is_failure or change.expected - members else KINDS[change.why])
            step = Step(AwaitingSnapshot(plan)) if known.in_call else restart(plan, known)
    return step.after(Abandon(change, members))


def _enlarge(change: Change, known: Known) -> Step:
    """A group that was formed only to copy its state has no state from inside the call, so it runs the call."""
    if len(known.members) >= known.min_workers or known.is_ending:
        return Step(Polling(Poll.PAY))
    return Step(TearingDown(Change(Why.FAILURE, None, known.members), known.members))


def _copy_again(change: Change, known: Known) -> Step:
    """A copy of the state was lost: form a group of those that live, and copy again."""
    is_early = isinstance(change.plan, EndEarly)
    if is_early and known.is_cut_off:
        return _without_copy(known)
    num_copies = change.num_copies + 1 if is_early or change.copied_by == known.members else 1
    if num_copies < NUM_COPIES:
        return Step(Settling(replace(change, num_copies=num_copies, copied_by=known.members)))
    return _enlarge(change, known) if is_early else _cannot_continue(change, known.members, known)


def _without_copy(known: Known) -> Step:
    """Ray was stopped before the state was in the driver."""
    return _follow(Raise(End.CUT_OFF), replace(known, only_in_workers=False)).after(Do.GIVE_STATE_UP)


def _end_early(plan: EndEarly, known: Known) -> Step:
    is_too_small = len(known.members) < known.min_workers and not known.is_ending
    ends = (Do.KILL_GROUP, Record("ended")) if is_too_small else ()
    return Step(Finished(plan), (Do.LEAVE_CALL, *ends))


def _follow(plan: Raise | Restart, known: Known) -> Step:
    """Go on with a plan, once the driver has the training state."""
    if isinstance(plan, Restart):
        return restart(plan, known)
    if known.only_in_workers:
        return Step(AwaitingSnapshot(plan) if known.in_transit else Settling(Change(Why.EVACUATE, plan=plan)))
    commands: list[Command] = []
    if plan.ends_restart or not known.is_driver_only:
        commands += [Do.KILL_GROUP] * bool(known.members)
        if plan.event is not None and (known.members or plan.ends_restart):
            commands.append(Record(plan.event))
    return Step(Finished(plan), (*commands, *_aborted(known)))


def _give_up(known: Known) -> Step:
    return _follow(Raise(End.NO_RETRY, "lost"), known)


def _restart_after_failure(known: Known) -> Step:
    if known.num_left <= 0:
        return _give_up(known)
    return restart(Restart("restored", reuses=True), known).after(Do.PAY_FOR_RESTART)


def restart(plan: Restart, known: Known) -> Step:
    """Go back to the last snapshot. First, fetch state that only the workers have."""
    if known.only_in_workers and known.in_transit:
        return Step(AwaitingSnapshot(plan))
    if plan.reuses and known.only_in_workers and not known.can_continue:
        return _follow(Raise(End.NOT_REPEATABLE, "lost"), known)  # the state from before the call is gone
    if known.is_ending:
        return _follow(Raise(End.PROGRAM_ENDS, "ended" if known.in_call else None), known)
    if known.only_in_workers:
        return Step(Settling(Change(Why.EVACUATE, plan=plan)))
    return Step(AwaitingSnapshot(plan, is_brief=True))


def _replace_workers(plan: Restart, known: Known) -> Step:
    """Reuse processes if possible. Otherwise, start others."""
    has_others = known.renews or (known.regroups and not known.uses_local and known.num_standby > 0)
    if plan.reuses and has_others and not known.is_lost and known.has_snapshot:
        return Step(Settling(Change(Why.REUSE, plan=plan)))
    return _start_others(plan, known)


def _start_others(plan: Restart, known: Known) -> Step:
    """Start a group. One that this restart has launched has failed: a further one may cost a retry of the start."""
    kills = (Do.KILL_GROUP,) if known.members else ()
    if plan.is_launched:
        return _start_again(plan, known.without_group).after(*kills)
    if known.is_lost:
        return _end_restart(plan, Raise(End.STATE_LOST), known.without_group).after(*kills)
    return _schedule(plan, known.without_group).after(*kills)


def _schedule(plan: Restart, known: Known) -> Step:
    if known.is_ending or plan.attempt >= known.num_attempts:
        return _end_restart(plan, Raise(End.PROGRAM_ENDS if known.is_ending else End.NO_GROUP), known)
    return Step(Scheduling(plan))


def _start_again(plan: Restart, known: Known) -> Step:
    """A group that was launched has failed."""
    if known.num_starts_left is None:
        return _schedule(plan.next_attempt, known)
    if known.num_starts_left <= 0:
        return _end_restart(plan, Raise(End.NO_START), known)
    return _schedule(replace(plan, is_launched=False), known).after(Do.PAY_FOR_START)


def _end_restart(plan: Restart, why: Raise, known: Known, *, is_loss: bool = True) -> Step:
    """Raise the error that ends a restart."""
    event: Literal["lost", "ended"] = "lost" if is_loss else "ended"
    return _follow(replace(why, event=None if plan.kind == "started" else event, ends_restart=True), known)
