"""The table of a recovery: `transition` says which state and commands follow a state, an event and what is known.

Each state names the one thing that the driver waits for, and each event how the wait ended. `interpreter` waits, and
performs the commands, which do not wait for a worker. The table is pure, so that tests can walk all its runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, TypeAlias

from raysgd.core.engine.policies import FailurePolicy, ScalingPolicy, choose_source
from raysgd.core.engine.shared.interface import EventKind, GroupSpec
from raysgd.core.engine.shared.types import FailureKind, ReplicaProgress
from raysgd.exceptions import UnpicklableError, WorkersLostError

NUM_COPIES = 4  # how often a state that is lost in transit is copied to the driver

Members: TypeAlias = frozenset[Hashable]
"""Workers of a group. They are not named by rank, because a worker can get another rank in the next group."""

NO_WORKERS: Members = frozenset()


# ------------------------------------------------------------------------------------------------------- plans


class End(Enum):
    """The reason why a call or a restart ends with an error."""

    INTERRUPTED = auto()  # Ctrl-C, `stop`, or an error in the driver or in user code ended a wait
    REFUSED = auto()  # `call.check` has raised, for instance because the ranks' values differ
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
    """End the call early and return each rank's part of the snapshot that they have copied."""


@dataclass(frozen=True)
class Restart:
    """Restore the last snapshot in rebuilt replicas or in new workers.

    Attributes:
        kind: Kind of the event to record in the history.
        reuses: True after a failure in a call: processes of the old group may be reused.
        needs_all: True to start all workers of a new trainer, however long their resources take.
        attempt: Index of the attempt to start a group, from 0.
        is_launched: True if this attempt has started a group.
    """

    kind: EventKind
    reuses: bool = False
    needs_all: bool = False
    attempt: int = 0
    is_launched: bool = False

    @property
    def next_attempt(self) -> Restart:
        """The plan for another attempt."""
        return replace(self, attempt=self.attempt + 1, is_launched=False)


Plan: TypeAlias = "Raise | EndEarly | Restart"
"""What follows once the driver has the training state, or has given it up."""


class Trigger(Enum):
    """A reason why the members of a group change while its call goes on."""

    FAILURE = auto()  # ranks were lost in a call, which then resumes; may cost a retry
    REFILL = auto()  # survivors ran out of memory in a smaller group; waits for workers without a limit
    SPLIT = auto()  # memory ran out in a step, which all ranks repeat in smaller batches; no rank was lost; free
    DRAIN = auto()  # nodes are being removed; free
    GROW = auto()  # workers are ready to join; free

    @property
    def kind(self) -> EventKind:
        """Kind of the event to record in the history."""
        if self is Trigger.DRAIN:
            return "left"
        return "grown" if self in (Trigger.REFILL, Trigger.GROW) else "continued"


@dataclass(frozen=True)
class Continue:
    """Workers leave or join. The call continues in the next group, or the next group waits for a call.

    Attributes:
        why: Reason for the change.
        expected: Workers of the group before the change, without those that leave as planned.
        has_regrouped: True if forming a group was attempted.
    """

    why: Trigger
    expected: Members = NO_WORKERS
    has_regrouped: bool = False


@dataclass(frozen=True)
class CopyInside:
    """Survivors copy their state from inside a failed call, which must end early. No worker joins; one rank is enough.

    Attributes:
        failed: The failure of the call.
        has_regrouped: True if a group was formed, or at least attempted.
        num_copies: Number of copies that were lost.
        position: Position of the survivors in the call, once they have formed a group.
    """

    failed: CallFailed
    has_regrouped: bool = False
    num_copies: int = 0
    position: int = 0


@dataclass(frozen=True)
class Evacuate:
    """Survivors copy the only state to the driver, before `plan` follows. No worker joins; one rank is enough.

    Attributes:
        plan: What follows.
        num_copies: Number of copies that the workers in `copied_by` have sent and that were lost.
        copied_by: Workers that sent the last copy.
    """

    plan: Raise | Restart
    num_copies: int = 0
    copied_by: Members = NO_WORKERS


@dataclass(frozen=True)
class Reuse:
    """Processes stay. Their replicas are rebuilt, and restore a snapshot."""

    plan: Restart


Change: TypeAlias = "Continue | CopyInside | Evacuate | Reuse"
"""A change of the group in place."""


# ------------------------------------------------------------------------------------------------------ states


@dataclass(frozen=True)
class Running:
    """All ranks run the call, from its start or from where it was interrupted."""

    mode: Literal["start", "resume"] = "start"


class Poll(Enum):
    """The reason why the driver asks each rank for its progress."""

    RESUME = auto()  # after the snapshot of a paused call was lost: are all ranks still there?
    COMPARE = auto()  # all ranks failed at the same line: do they have the same state?


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

    change: CopyInside | Evacuate


@dataclass(frozen=True)
class AwaitingSnapshot:
    """A snapshot that was taken before a recovery, or when the call paused, is in transit. `plan` follows."""

    plan: Plan


@dataclass(frozen=True)
class AwaitingCopy:
    """The ranks' copies are in transit to the driver."""

    change: CopyInside | Evacuate


@dataclass(frozen=True)
class Restarting:
    """A step in which the last snapshot is restored."""

    plan: Restart


class AwaitingBriefly(Restarting):
    """Before other workers are started, the driver waits a few seconds for a snapshot in transit."""


@dataclass(frozen=True)
class Rebuilding(Restarting):
    """Members and standby workers connect and build their replicas again, until no more of them are lost meanwhile."""

    members: Members


class Replacing(Restarting):
    """Workers were lost in a restore. The others, and standby workers, connect and build their replicas again."""


class Scheduling(Restarting):
    """The driver looks for free resources, and waits if too few are free."""


@dataclass(frozen=True)
class Launching(Restarting):
    """A new group of `num_workers` workers starts, and some spares."""

    num_workers: int
    num_spares: int = 0


class Restoring(Restarting):
    """All ranks load the last snapshot and repeat the calls since."""


@dataclass(frozen=True)
class Finished:
    """The recovery is over. `plan`: the call ended early or with an error. None if no call is running."""

    plan: Raise | EndEarly | None = None


State: TypeAlias = (
    "Running | Polling | Settling | TearingDown | FillingUp | Regrouping | Capturing | AwaitingSnapshot"
    " | AwaitingCopy | AwaitingBriefly | Rebuilding | Replacing | Scheduling | Launching | Restoring | Finished"
)

# ------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class CallRefused:
    """All ranks have completed the call, but `call.check` raised `error`, so their values do not count."""

    error: BaseException | None = None


@dataclass(frozen=True)
class Paused:
    """All ranks wait between the same two steps. `leaving` are on nodes that are being removed."""

    must_end: bool
    leaving: Members = NO_WORKERS


@dataclass(frozen=True)
class CallFailed:
    """A rank was lost, or user code raised an exception.

    Attributes:
        kind: The kind of failure that counts.
        has_diverged: True if the ranks ran different steps.
        all_answered: False if ranks are still inside the call.
        at_one_line: True if all ranks failed at the same line of user code.
        needs_refill: True if memory ran out in the first step after the group had shrunk.
    """

    kind: FailureKind
    has_diverged: bool = False
    all_answered: bool = True
    at_one_line: bool = False
    needs_refill: bool = False


@dataclass(frozen=True)
class Survivors:
    """The workers that can be used again."""

    members: Members


@dataclass(frozen=True)
class Progress:
    """All members have left the group, with these `reports` in rank order."""

    reports: tuple[ReplicaProgress, ...]

    @property
    def source(self) -> ReplicaProgress | None:
        """The progress of the member whose state can be continued."""
        source = choose_source(self.reports)
        return None if source is None else self.reports[source]


@dataclass(frozen=True)
class Lost:
    """The group was not changed, because workers other than `remaining` were lost. `words` say what happened."""

    remaining: Members
    words: str = field(default="no worker is left", compare=False)


@dataclass(frozen=True)
class UserRaised:
    """The group was not changed, because user code raised an exception. `words` say where."""

    words: str = field(default="", compare=False)


@dataclass(frozen=True)
class Filled:
    """So many standby workers were taken. `silent` members have stopped to answer in the meantime."""

    num_joining: int
    silent: Members = NO_WORKERS


@dataclass(frozen=True)
class Captured:
    """All ranks have copied their state. `is_inside`: from inside a call."""

    is_inside: bool


@dataclass(frozen=True)
class Polled:
    """All ranks have reported. `are_alike`: they have the same state."""

    are_alike: bool = True


@dataclass(frozen=True)
class Room:
    """The driver has looked for free resources, into which so many workers and spares fit.

    0 if too few fit, or if another program took the resources.
    """

    num_workers: int = 0
    num_spares: int = 0


@dataclass(frozen=True)
class Done:
    """What the state waits for has happened: a snapshot has arrived, or the group is formed, launched or restored."""


@dataclass(frozen=True)
class NotDone:
    """What the state waits for does not happen, because workers or a snapshot in transit were lost."""


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C, `stop`, or an error in the driver or in user code, ended the wait. `error` was raised."""

    error: BaseException | None = None


Event: TypeAlias = (
    "CallRefused | Paused | CallFailed | Survivors | Progress | Lost | UserRaised | Filled | Captured"
    " | Polled | Room | Done | NotDone | Interrupted"
)

# ------------------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Known:
    """Facts by which a transition is chosen. All values are frozen, and are read just before the transition.

    Attributes:
        spec: The group's settings.
        scaling: How many workers to run.
        failures: Which failed calls are retried, and how.
        in_call: True if a call is running.
        was_sent: True if a rank may have received the call.
        members: Workers of the current group. Empty if the group was killed.
        is_driver_only: True if the driver is the only worker.
        can_continue: True if the call can continue in another group.
        keeps_alike: True if ranks that fail apart in this call are out of sync.
        must_end: True if the call must end early.
        is_ending: True if the program is about to end.
        is_cut_off: True if, besides, Ray was stopped.
        only_in_workers: True if no snapshot in the driver replaces the workers' state.
        in_transit: True if a snapshot is in transit.
        is_lost: True if the state is lost unless the snapshot in transit arrives.
        has_snapshot: True if a snapshot has arrived.
        num_standby: Number of standby workers that are ready or starting.
        num_lost_copies: Number of snapshots of this call, taken while it was paused, that were lost.
        num_retries: Retries of the call.
        num_left: Retries that are left.
        continued_at: Position in the call at which survivors continued the last time. None if they have not.
        free_from: Continuing is free from this position on.
        num_starts_left: Retries of a start that are left. None if only the scaling's `num_attempts` limits starts.
    """

    spec: GroupSpec = field(hash=False)  # its resources are a dict
    scaling: ScalingPolicy
    failures: FailurePolicy
    in_call: bool
    was_sent: bool
    members: Members
    is_driver_only: bool
    can_continue: bool
    keeps_alike: bool
    must_end: bool
    is_ending: bool
    is_cut_off: bool
    only_in_workers: bool
    in_transit: bool
    is_lost: bool
    has_snapshot: bool
    num_standby: int
    num_lost_copies: int
    num_retries: float
    num_left: float
    continued_at: int | None
    free_from: float
    num_starts_left: float | None

    @property
    def without_group(self) -> Known:
        """Return the facts after the group was killed."""
        return replace(self, members=NO_WORKERS, only_in_workers=False)

    def obstacle_to_continuing(self, position: int) -> str | None:
        """Return why the retries do not allow survivors at this position in the call to continue, if they do not.

        Survivors that completed no step since they last continued cannot continue again, because continuing may have
        broken them.
        """
        if self.continued_at is not None and position <= self.continued_at:
            return "no step was completed since the survivors went on the last time"
        if not self.num_retries or (self.num_left <= 0 and position < self.free_from):
            return "no retry is left to pay for going on"
        return None


# ---------------------------------------------------------------------------------------------------- commands


class Do(Enum):
    """An action that the driver takes at once, without waiting for a worker."""

    GIVE_STATE_UP = auto()  # the only state could not be fetched
    LEAVE_CALL = auto()  # the call will not resume, so a snapshot inside it counts as one after it
    NOTE_ABORTED = auto()  # no snapshot has the state that an aborted call has left
    KILL_JOINING = auto()  # workers that were taken for a group that is not formed, if any
    KILL_GROUP = auto()  # if there is one
    PAY_TO_CONTINUE = auto()
    PAY_FOR_RESTART = auto()  # and notify the front end
    PAY_FOR_START = auto()


@dataclass(frozen=True)
class Record:
    """Add an event to the history."""

    kind: EventKind


@dataclass(frozen=True)
class Abandon:
    """Do not change the group in place: say why. `members` are left."""

    change: Change
    members: Members
    why: str = field(default="no worker is left", compare=False)


Command: TypeAlias = "Do | Record | Abandon"


@dataclass(frozen=True)
class Transition:
    """The next state, and what to do before it begins, in this order."""

    state: State
    commands: tuple[Command, ...] = field(default=())

    def after(self, *commands: Command) -> Transition:
        """Return the transition with more commands, which come first."""
        return Transition(self.state, (*commands, *self.commands))


# --------------------------------------------------------------------------------------------------- the table


def transition(state: State, event: Event, known: Known) -> Transition:
    """Return what follows when the wait of `state` has ended with `event`.

    Raises:
        AssertionError: A wait of this state cannot end with this event.
    """
    match state, event:
        case _, Interrupted():
            return _interrupted(state, event, known)

        # ---- the call
        case Running(), CallRefused(error):
            return Transition(AwaitingSnapshot(Raise(End.REFUSED, error=error)))
        case Running(), Paused(must_end=True):
            return Transition(AwaitingSnapshot(EndEarly()))
        case Running(), Paused(leaving=leaving):
            return leave_or_grow(leaving, known)
        case Running() | Polling(Poll.RESUME), CallFailed(kind):
            if known.must_end and known.spec.regroups and kind != "user":
                return Transition(Settling(CopyInside(event)))
            return _after_failure(event, known)

        # ---- ranks report their progress
        case Polling(Poll.RESUME), Polled():
            return Transition(Running("resume"))
        case Polling(Poll.COMPARE), Polled(are_alike=True):
            return _raise_and_keep(Raise(End.USER_ERROR), known)
        case Polling(Poll.COMPARE), Polled() | CallFailed():
            return Transition(AwaitingSnapshot(Raise(End.RAISED_APART)))

        # ---- a change in place
        case Settling(Reuse() as change), Survivors() if not known.spec.renews:
            # The survivors could not continue, so something may be broken.
            return _tear_down(TearingDown(change, NO_WORKERS), known)
        case Settling(change), Survivors(members):
            return _tear_down(TearingDown(change, members), known)
        case TearingDown(), Progress():
            return _with_progress(state, event, known)
        case TearingDown(change, members), UserRaised(words):
            return _cannot_continue(change, members, known, words)
        case TearingDown(), Lost(remaining):
            return _tear_down(replace(state, members=remaining), known)
        case FillingUp(change, members), Filled(num_joining, silent):
            if silent:
                return _tear_down(TearingDown(change, members - silent), known)
            if (num_workers := len(members) + num_joining) < known.scaling.min_workers:
                few = f"{num_workers} workers are left, but {known.scaling.min_workers} are needed"
                return _cannot_continue(change, members, known, few)
            if isinstance(change, Reuse):
                return Transition(Rebuilding(change.plan, members))
            return Transition(Regrouping(change, members, state.reports))
        case Regrouping(), Done():
            return _with_group(state, known)
        case Regrouping(change, members), UserRaised(words):
            return _cannot_continue(_regrouped(change), members, known, words)
        case Regrouping(change, members), Lost(remaining, words):
            if remaining == known.members:  # the next attempt would fail, too
                return _cannot_continue(_regrouped(change), members, known, words, is_failure=True)
            return _tear_down(TearingDown(_regrouped(change), remaining), known, words)

        # ---- the state goes to the driver
        case Capturing(CopyInside() as change), Captured(is_inside=False):
            return _enlarge(change, known)  # a copy from after the call would repeat the call
        case Capturing(change), Captured():
            return Transition(AwaitingCopy(change))
        case Capturing(change) | AwaitingCopy(change), NotDone():
            return _copy_again(change, known)
        case AwaitingCopy(Evacuate(plan)), Done():
            return _begin_plan(plan, known)
        case AwaitingSnapshot(EndEarly()) | AwaitingCopy(CopyInside()), Done():
            return _end_early(known)
        case AwaitingSnapshot(EndEarly()), NotDone():
            if known.is_cut_off:
                return _without_copy(known)
            if known.num_lost_copies == NUM_COPIES:  # the ranks only wait between two steps
                return _raise_and_keep(Raise(End.LOST_COPIES), known)
            return Transition(Polling(Poll.RESUME))
        case AwaitingBriefly(plan), Done() | NotDone():
            return _replace_workers(plan, known)
        case AwaitingSnapshot(Raise() | Restart() as plan), Done() | NotDone():
            return _begin_plan(plan, known)

        # ---- back to the last snapshot
        case Scheduling(plan) | Launching(plan), Room(0):
            return _schedule(plan.next_attempt, known)
        case Scheduling(plan), Room(num_workers, num_spares):
            return Transition(Launching(plan, num_workers, num_spares))
        case Launching(Restart("started")), Done():
            return Transition(Finished(), (Record("started"),))
        case Launching(plan), Done():
            return Transition(Restoring(replace(plan, is_launched=True)))
        case Launching(plan), NotDone():
            return _start_again(plan, known)
        case Rebuilding(plan) | Replacing(plan), Done():
            return Transition(Restoring(plan))
        case Rebuilding(plan) | Replacing(plan), NotDone():
            return _start_others(plan, known)
        case Restoring(plan), Done():
            # Ranks that do not know the call begin it.
            next_state = Running("resume") if known.in_call else Finished()
            return Transition(next_state, (Record(plan.kind),))
        case Restoring(plan), NotDone():
            return Transition(Replacing(plan))
    raise AssertionError(f"{state} cannot end with {event}")


def _interrupted(state: State, interrupt: Interrupted, known: Known) -> Transition:
    """Ctrl-C, `stop`, or an error in the driver or in user code."""
    plan, why = _plan_of(state), Raise(End.INTERRUPTED, error=interrupt.error)
    if isinstance(state, Running) and (isinstance(interrupt.error, UnpicklableError) or not known.was_sent):
        return _raise_and_keep(why, known)
    if isinstance(plan, Raise) and plan.why is End.INTERRUPTED:  # again: the workers with the only state stay
        return _raise_and_keep(why, known)
    if isinstance(state, Regrouping):  # a group that is half formed is killed even if its only worker is the driver
        known = replace(known, is_driver_only=False)
    is_loss = isinstance(interrupt.error, WorkersLostError)
    ends = _end_restart(plan, why, known, is_loss=is_loss) if isinstance(plan, Restart) else None
    return (ends or _begin_plan(why, known)).after(Do.KILL_JOINING)


def _plan_of(state: State) -> Raise | Restart | None:
    """Return what was to follow an evacuation or a restart. None if the state is part of neither."""
    match state:
        case Settling(change) | TearingDown(change) | FillingUp(change) | Regrouping(change):
            return change.plan if isinstance(change, Evacuate | Reuse) else None
        case Capturing(Evacuate(plan)) | AwaitingCopy(Evacuate(plan)) | Restarting(plan):
            return plan
    return None


def _raise_and_keep(why: Raise, known: Known) -> Transition:
    """Raise an error, and keep the group."""
    return Transition(Finished(why), _aborted(known))


def _aborted(known: Known) -> tuple[Command, ...]:
    return (Do.NOTE_ABORTED,) if known.in_call and known.was_sent and not known.is_ending else ()


def _after_failure(failed: CallFailed, known: Known) -> Transition:
    """A call has failed that need not end early."""
    is_user = failed.kind == "user"
    if failed.has_diverged:
        return Transition(AwaitingSnapshot(Raise(End.UNEVEN_STEPS)))
    if failed.needs_refill:
        return Transition(Settling(Continue(Trigger.REFILL, known.members)))
    if is_user and not (known.failures.retries_user_errors and known.num_left > 0):
        if not failed.all_answered:
            return _begin_plan(Raise(End.RAISED_INSIDE), known)
        if not known.keeps_alike or known.is_driver_only:
            return _raise_and_keep(Raise(End.USER_ERROR), known)
        return Transition(Polling(Poll.COMPARE) if failed.at_one_line else AwaitingSnapshot(Raise(End.RAISED_APART)))
    continues = known.failures.continues and known.can_continue
    if failed.kind == "memory" and continues:  # batches of one sample are a user error
        return Transition(Settling(Continue(Trigger.SPLIT, known.members)))
    if not is_user and continues and known.num_retries > 0:
        return Transition(Settling(Continue(Trigger.FAILURE, known.members)))
    return _restart_after_failure(known)


def leave_or_grow(leaving: Members, known: Known) -> Transition:
    """Let workers on nodes that are being removed leave, and others join: between two steps of a call, or two calls."""
    why, staying = Trigger.DRAIN if leaving else Trigger.GROW, known.members - leaving
    if not (known.spec.regroups or known.spec.runs_on):
        return Transition(AwaitingSnapshot(Restart(why.kind)))
    return Transition(TearingDown(Continue(why, staying), staying))


def _tear_down(state: TearingDown, known: Known, words: str = "no worker is left") -> Transition:
    if state.members:
        return Transition(state)
    if isinstance(state.change, Reuse) and known.num_standby:
        return Transition(FillingUp(state.change, NO_WORKERS))
    return _cannot_continue(state.change, NO_WORKERS, known, words)


def _regrouped(change: Change) -> Change:
    """Return the change after it was tried to form a group."""
    return replace(change, has_regrouped=True) if isinstance(change, Continue | CopyInside) else change


def _with_progress(state: TearingDown, progress: Progress, known: Known) -> Transition:
    change, members, source = state.change, state.members, progress.source
    following = FillingUp(change, members, progress.reports)
    if isinstance(change, Reuse):
        return Transition(following)
    if source is None:
        torn = "each was in the middle of a step that had begun to change its state"
        why = next((each.obstacle for each in progress.reports if each.obstacle), torn)
        return _cannot_continue(change, members, known, f"the survivors cannot continue by themselves: {why}")
    if not isinstance(change, Continue):  # to copy the state, no worker joins
        return Transition(Regrouping(change, members, progress.reports))
    if change.why is Trigger.FAILURE and (obstacle := known.obstacle_to_continuing(source.position)):
        return _cannot_continue(change, members, known, obstacle)
    return Transition(following)


def _with_group(state: Regrouping, known: Known) -> Transition:
    change = _regrouped(state.change)
    commands: list[Command] = []
    if isinstance(change, CopyInside):
        change = replace(change, position=state.source.position)
    if isinstance(change, CopyInside | Evacuate):
        return Transition(Capturing(change))
    assert isinstance(change, Continue), "replicas that are built again form no group before"
    if change.why is Trigger.FAILURE:
        commands.append(Do.PAY_TO_CONTINUE)
    kind = "continued" if change.expected - state.members else change.why.kind
    if kind != "grown" or len(known.members) > len(change.expected):  # otherwise, all that joined have died
        commands.append(Record(kind))
    return Transition(Running("resume") if known.in_call else Finished(), tuple(commands))


def _cannot_continue(
    change: Change, members: Members, known: Known, reason: str, *, is_failure: bool = False
) -> Transition:
    """The group cannot be changed in place."""
    match change:
        case CopyInside(failed, has_regrouped):
            result = _restart_after_failure(known) if has_regrouped else _after_failure(failed, known)
        case Evacuate(plan):
            result = _begin_plan(plan, replace(known, only_in_workers=False)).after(Do.GIVE_STATE_UP)
        case Reuse(plan):
            result = _start_others(plan, known)
        case Continue(Trigger.FAILURE | Trigger.SPLIT):
            result = _restart_after_failure(known)
        case Continue(why, expected):
            plan = Restart("restored" if is_failure or expected - members else why.kind)
            result = Transition(AwaitingSnapshot(plan)) if known.in_call else restart(plan, known)
    return result.after(Abandon(change, members, reason), Do.KILL_JOINING)


def _enlarge(change: CopyInside, known: Known) -> Transition:
    """A group that was formed only to copy its state has no state from inside the call, so it runs the call."""
    if len(known.members) < known.scaling.min_workers and not known.is_ending:
        return Transition(TearingDown(Continue(Trigger.FAILURE, known.members), known.members))
    obstacle = known.obstacle_to_continuing(change.position)
    if obstacle is None:
        return Transition(Running("resume"), (Do.PAY_TO_CONTINUE,))
    result = _give_up(known) if known.is_ending else _restart_after_failure(known)
    return result.after(Abandon(Continue(Trigger.FAILURE), known.members, obstacle))


def _copy_again(change: CopyInside | Evacuate, known: Known) -> Transition:
    """A copy of the state was lost: form a group of those that live, and copy again."""
    num_copies = change.num_copies + 1
    if isinstance(change, CopyInside):
        if known.is_cut_off:
            return _without_copy(known)
        again = Transition(Settling(replace(change, num_copies=num_copies)))
        return again if num_copies < NUM_COPIES else _enlarge(change, known)
    num_copies = num_copies if change.copied_by == known.members else 1
    if num_copies < NUM_COPIES:
        return Transition(Settling(Evacuate(change.plan, num_copies, known.members)))
    return _cannot_continue(change, known.members, known, f"it was lost in transit {NUM_COPIES} times")


def _without_copy(known: Known) -> Transition:
    """Ray was stopped before the state was in the driver."""
    return _begin_plan(Raise(End.CUT_OFF), replace(known, only_in_workers=False)).after(Do.GIVE_STATE_UP)


def _end_early(known: Known) -> Transition:
    is_too_small = len(known.members) < known.scaling.min_workers and not known.is_ending
    ends = (Do.KILL_GROUP, Record("ended")) if is_too_small else ()
    return Transition(Finished(EndEarly()), (Do.LEAVE_CALL, *ends))


def _begin_plan(plan: Raise | Restart, known: Known) -> Transition:
    """Go on with a plan, once the driver has the training state."""
    if isinstance(plan, Restart):
        return restart(plan, known)
    if known.only_in_workers:
        return Transition(AwaitingSnapshot(plan) if known.in_transit else Settling(Evacuate(plan)))
    commands: list[Command] = []
    if plan.ends_restart or not known.is_driver_only:
        commands.append(Do.KILL_GROUP)
        if plan.event is not None and (known.members or plan.ends_restart):
            commands.append(Record(plan.event))
    return Transition(Finished(plan), (*commands, *_aborted(known)))


def _give_up(known: Known) -> Transition:
    return _begin_plan(Raise(End.NO_RETRY, "lost"), known)


def _restart_after_failure(known: Known) -> Transition:
    if known.num_left <= 0:
        return _give_up(known)
    return restart(Restart("restored", reuses=True), known)


def restart(plan: Restart, known: Known) -> Transition:
    """Go back to the last snapshot. First, fetch state that only the workers have."""
    if known.only_in_workers and known.in_transit:
        return Transition(AwaitingSnapshot(plan))
    if plan.reuses and known.only_in_workers and not known.can_continue:
        return _begin_plan(Raise(End.NOT_REPEATABLE, "lost"), known)  # the state from before the call is gone
    if known.is_ending:
        return _begin_plan(Raise(End.PROGRAM_ENDS), known)
    if known.only_in_workers:
        return Transition(Settling(Evacuate(plan)))
    return Transition(AwaitingBriefly(plan), (Do.PAY_FOR_RESTART,) if plan.reuses else ())


def _replace_workers(plan: Restart, known: Known) -> Transition:
    """Reuse processes if possible. Otherwise, start others."""
    has_others = known.spec.renews or (known.spec.regroups and not known.spec.use_local and known.num_standby > 0)
    if plan.reuses and has_others and not known.is_lost and known.has_snapshot:
        return Transition(Settling(Reuse(plan)))
    return _start_others(plan, known)


def _start_others(plan: Restart, known: Known) -> Transition:
    """Start a group. One that this restart has launched has failed: a further one may cost a retry of the start."""
    known = known.without_group
    if plan.is_launched:
        result = _start_again(plan, known)
    elif known.is_lost:
        result = _end_restart(plan, Raise(End.STATE_LOST), known)
    else:
        result = _schedule(plan, known)
    return result.after(Do.KILL_GROUP)


def _schedule(plan: Restart, known: Known) -> Transition:
    if known.is_ending or plan.attempt >= known.scaling.num_attempts:
        return _end_restart(plan, Raise(End.PROGRAM_ENDS if known.is_ending else End.NO_GROUP), known)
    return Transition(Scheduling(plan))


def _start_again(plan: Restart, known: Known) -> Transition:
    """A group that was launched has failed."""
    if known.num_starts_left is None:
        return _schedule(plan.next_attempt, known)
    if known.num_starts_left <= 0:
        return _end_restart(plan, Raise(End.NO_START), known)
    return _schedule(replace(plan, is_launched=False), known).after(Do.PAY_FOR_START)


def _end_restart(plan: Restart, why: Raise, known: Known, *, is_loss: bool = True) -> Transition:
    """Raise the error that ends a restart."""
    event: Literal["lost", "ended"] = "lost" if is_loss else "ended"
    return _begin_plan(replace(why, event=None if plan.kind == "started" else event, ends_restart=True), known)
