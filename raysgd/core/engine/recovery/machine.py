"""The table of a recovery: `transition` says which state and commands follow a state, an event and what is known.

It is pure, so that tests can walk all its runs. `states` has the states, events and commands. `interpreter` waits for
what a state names and performs the commands, which do not wait for a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from raysgd.core.engine.recovery.states import (
    NO_WORKERS,
    NUM_COPIES,
    Abandon,
    AwaitingBriefly,
    AwaitingCopy,
    AwaitingSnapshot,
    CallFailed,
    CallRefused,
    Captured,
    Capturing,
    Change,
    Command,
    Continue,
    CopyInside,
    Do,
    Done,
    End,
    EndEarly,
    Evacuate,
    Event,
    Filled,
    FillingUp,
    Finished,
    Formed,
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
    Record,
    Regrouping,
    Replacing,
    Restart,
    Restarting,
    Restoring,
    Reuse,
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
)


def transition(state: State, event: Event, known: Known) -> Transition:
    """Return what follows when the wait of `state` has ended with `event`.

    Raises:
        AssertionError: A wait of this state cannot end with this event.
    """
    match state, event:
        case _, Interrupted():
            return _interrupted(state, event, known)

        # ---- the call
        case Running(), CallRefused(why, error):
            return Transition(AwaitingSnapshot(Raise(why, error=error)))
        case Running(), Paused(must_end=True, parts=parts):
            return Transition(AwaitingSnapshot(EndEarly(parts)), (Do.TAKE_PARTS,))
        case Running(), Paused(leaving=leaving, parts=parts):
            return leave_or_grow(leaving, known, parts)
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
        case FillingUp(change, members), Filled(joining, silent, until):
            if silent:
                return _tear_down(TearingDown(change, members - silent, joining, until), known)
            if (num_workers := len(members) + len(joining)) < known.scaling.min_workers:
                few = f"{num_workers} workers are left, but {known.scaling.min_workers} are needed"
                return _cannot_continue(change, members, known, few)
            if isinstance(change, Reuse):
                return Transition(Rebuilding(change.plan, members, joining))
            return Transition(Regrouping(change, members, joining, reports=state.reports))
        case Regrouping(), Formed(moves_rank_0):
            return _with_group(state, moves_rank_0, known)
        case Regrouping(change, members), UserRaised(words):
            return _cannot_continue(_regrouped(change), members, known, words)
        case Regrouping(change, members), Lost(remaining, words):
            if remaining == known.members:  # the next attempt would fail, too
                return _cannot_continue(_regrouped(change), members, known, words, is_failure=True)
            return _tear_down(TearingDown(_regrouped(change), remaining), known, words)

        # ---- the state goes to the driver
        case Capturing(CopyInside() as change), Captured(is_inside=False):
            return _enlarge(change, known)  # a copy from after the call would repeat the call
        case Capturing(change), Captured(parts=parts):
            return Transition(AwaitingCopy(change, parts), (Do.TAKE_PARTS,))
        case Capturing(change) | AwaitingCopy(change), NotDone():
            return _copy_again(change, known)
        case AwaitingCopy(CopyInside(), parts), Done():
            return _end_early(EndEarly(parts), known)
        case AwaitingCopy(Evacuate(plan)), Done():
            return _begin_plan(plan, known)
        case AwaitingSnapshot(EndEarly() as plan), Done():
            return _end_early(plan, known)
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
            return Transition(Restoring(plan), (Do.DROP_IN_TRANSIT,))
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
    if isinstance(state, Running) and (interrupt.is_unsent or not known.was_sent):
        return _raise_and_keep(why, known)
    if isinstance(plan, Raise) and plan.why is End.INTERRUPTED:  # again: the workers with the only state stay
        return _raise_and_keep(why, known)
    if isinstance(state, Regrouping):  # a group that is half formed is killed even if its only worker is the driver
        known = replace(known, is_driver_only=False)
    ends = _end_restart(plan, why, known, is_loss=interrupt.is_loss) if isinstance(plan, Restart) else None
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


def leave_or_grow(leaving: Members, known: Known, parts: Sequence[Any] = ()) -> Transition:
    """Let workers on nodes that are being removed leave, and others join: between two steps of a call, or two calls."""
    why, staying = Trigger.DRAIN if leaving else Trigger.GROW, known.members - leaving
    commands = (Do.TAKE_PARTS,) if known.in_call and not known.spec.runs_on else ()
    if not (known.spec.regroups or known.spec.runs_on):
        return Transition(AwaitingSnapshot(Restart(why.kind)), commands)
    return Transition(TearingDown(Continue(why, staying, parts=parts), staying), commands)


def _tear_down(state: TearingDown, known: Known, words: str = "no worker is left") -> Transition:
    if state.members:
        return Transition(state)
    if isinstance(state.change, Reuse) and known.num_standby:
        return Transition(FillingUp(state.change, NO_WORKERS, state.joining, state.until))
    return _cannot_continue(state.change, NO_WORKERS, known, words)


def _regrouped(change: Change) -> Change:
    """Return the change after it was tried to form a group."""
    return replace(change, has_regrouped=True) if isinstance(change, Continue | CopyInside) else change


def _with_progress(state: TearingDown, progress: Progress, known: Known) -> Transition:
    change, members, source = state.change, state.members, progress.source
    following = FillingUp(change, members, state.joining, state.until, progress.reports)
    if isinstance(change, Reuse):
        return Transition(following)
    if source is None:
        torn = "each was in the middle of a step that had begun to change its state"
        why = next((each.obstacle for each in progress.reports if each.obstacle), torn)
        return _cannot_continue(change, members, known, f"the survivors cannot continue by themselves: {why}")
    if not isinstance(change, Continue):  # to copy the state, no worker joins
        return Transition(Regrouping(change, members, reports=progress.reports))
    if change.why is Trigger.FAILURE and (obstacle := known.obstacle_to_continuing(source.position)):
        return _cannot_continue(change, members, known, obstacle)
    return Transition(following)


def _with_group(state: Regrouping, moves_rank_0: bool, known: Known) -> Transition:
    change, num_workers = _regrouped(state.change), len(state.members) + len(state.joining)
    commands: list[Command] = [Do.DROP_IN_TRANSIT] if moves_rank_0 else []  # rank 0 sends the snapshots
    if isinstance(change, CopyInside):
        change = replace(change, position=state.source.position)
    if isinstance(change, CopyInside | Evacuate):
        return Transition(Capturing(change), tuple(commands))
    assert isinstance(change, Continue), "replicas that are built again form no group before"
    if change.why is Trigger.FAILURE:
        commands.append(Do.PAY_TO_CONTINUE)
    kind = "continued" if change.expected - state.members else change.why.kind
    if kind != "grown" or num_workers > len(change.expected):  # otherwise, all that joined have died
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


def _end_early(plan: EndEarly, known: Known) -> Transition:
    is_too_small = len(known.members) < known.scaling.min_workers and not known.is_ending
    ends = (Do.KILL_GROUP, Record("ended")) if is_too_small else ()
    return Transition(Finished(plan), (Do.LEAVE_CALL, *ends))


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
    return restart(Restart("restored", reuses=True), known).after(Do.PAY_FOR_RESTART)


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
    return Transition(AwaitingBriefly(plan))


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
