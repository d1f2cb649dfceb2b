"""The states of a recovery, the events that end them, what is known, and the commands that begin a state.

Each state names the one thing that the driver waits for, and each event how the wait ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal, TypeAlias

from raysgd.core.engine.policies import FailurePolicy, ScalingPolicy, choose_source
from raysgd.core.engine.shared.interface import EventKind, GroupSpec
from raysgd.core.engine.shared.types import FailureKind, ReplicaProgress

NUM_COPIES = 4  # how often a state that is lost in transit is copied to the driver

Members: TypeAlias = frozenset[Hashable]
"""Workers of a group. They are not named by rank, because a worker can get another rank in the next group."""

NO_WORKERS: Members = frozenset()


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
    """What makes the members of a group change while its call goes on."""

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
        parts: Each rank's part of a snapshot from before the change, if workers leave in a call.
    """

    why: Trigger
    expected: Members = NO_WORKERS
    has_regrouped: bool = False
    parts: Sequence[Any] = field(default=(), compare=False)


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
    """Why the driver asks each rank for its progress."""

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
        joining: Standby workers that are taken to join the next group.
        until: Until when others are awaited, on the engine's clock. None if that was not decided yet.
        reports: Each member's progress, in rank order, once the members have left their group.
    """

    change: Change
    members: Members
    joining: tuple[Any, ...] = ()
    until: float | None = field(default=None, compare=False)
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
    """The ranks' copies, with `parts` of a snapshot, are in transit to the driver."""

    change: CopyInside | Evacuate
    parts: Sequence[Any] = field(default=(), compare=False)


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
    joining: tuple[Any, ...] = ()


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

    why: Literal[End.RANKS_DIFFER, End.INTERRUPTED]
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Paused:
    """All ranks wait between the same two steps, with `parts` of a snapshot.

    `leaving` are on nodes that are being removed.
    """

    must_end: bool
    leaving: Members = NO_WORKERS
    parts: Sequence[Any] = field(default=(), compare=False)


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
    """Standby workers were taken, until `until`. `silent` members have stopped to answer in the meantime."""

    joining: tuple[Any, ...]
    silent: Members = NO_WORKERS
    until: float | None = field(default=None, compare=False)


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
    """What the state waits for has happened: a snapshot has arrived, or the group was launched, rebuilt or restored."""


@dataclass(frozen=True)
class NotDone:
    """What the state waits for does not happen, because workers or a snapshot in transit were lost."""


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
    "CallRefused | Paused | CallFailed | Survivors | Progress | Lost | UserRaised | Filled | Formed | Captured"
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
    DROP_IN_TRANSIT = auto()  # the replicas that send the snapshot are gone
    TAKE_PARTS = auto()  # the ranks' parts become the newest snapshot
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
