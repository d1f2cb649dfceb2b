"""The table of a recovery: `transition` takes a state, an event and the facts, and returns the next state and commands.

`interpreter` waits for what a state names and performs the commands. `transition` is pure, so that tests can walk all
its runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from raysgd.core.engine.recovery.states import (
    KINDS,
    NOBODY,
    NUM_COPIES,
    Abandon,
    AwaitingSnapshot,
    CallAnswered,
    CallFailed,
    Captured,
    Capturing,
    Change,
    Command,
    Do,
    Done,
    End,
    EndEarly,
    Event,
    Facts,
    Filled,
    FillingUp,
    Finished,
    Formed,
    Interrupted,
    Landed,
    Launching,
    Lost,
    LostInTransit,
    Members,
    NotGranted,
    Paused,
    Plan,
    Poll,
    Polled,
    Polling,
    Progress,
    Raise,
    Rebuilding,
    Record,
    Regrouping,
    Resources,
    Restart,
    Restoring,
    Running,
    Scheduling,
    Settling,
    State,
    Step,
    Survivors,
    TearingDown,
    Why,
)


def transition(state: State, event: Event, facts: Facts) -> Step:
    """Return what follows when the wait of `state` has ended with `event`.

    Raises:
        AssertionError: A wait of this state cannot end with this event.
    """
    match state, event:
        case _, Interrupted(is_loss, is_unsent):
            return _interrupted(state, is_loss, is_unsent, facts)

        # ---- the call
        case Running(), CallAnswered(None):
            return Step(Finished("completed"))
        case Running(), CallAnswered(why):
            assert why is not None
            return Step(AwaitingSnapshot(Raise(why)))
        case Running(), Paused(must_end=True):
            return Step(AwaitingSnapshot(EndEarly()), (Do.TAKE_PARTS,))
        case Running(), Paused(leaving=leaving):
            return leave_or_grow(leaving, facts)
        case Running() | Polling(Poll.RESUME), CallFailed(kind) if facts.must_end and facts.regroups and kind != "user":
            return Step(Settling(Change(Why.EVACUATE, event, plan=EndEarly())))
        case Running() | Polling(Poll.RESUME), CallFailed():
            return _after_failure(event, facts)

        # ---- ranks report their progress
        case Polling(Poll.RESUME), Polled():
            return Step(Running("resume"))
        case Polling(Poll.COMPARE), Polled(are_alike=True):
            return _raise_and_keep(End.USER_ERROR, facts)
        case Polling(Poll.COMPARE), Polled() | CallFailed():
            return Step(AwaitingSnapshot(Raise(End.RAISED_APART)))
        case Polling(Poll.PAY), CallFailed():  # the next attempt fails, too, and pays
            return Step(Running("resume"))
        case Polling(Poll.PAY), Polled(steps=steps):
            if not facts.obstacle_to_continuing(steps):
                return Step(Running("resume"), (Do.PAY_TO_CONTINUE,))
            return _give_up(facts) if facts.is_ending else _restart_after_failure(facts)

        # ---- a change in place
        case Settling(change), Survivors(members, has_stuck):
            return _with_survivors(change, members, has_stuck, facts)
        case TearingDown(change, members, stale), Progress(has_source, steps):
            return _with_progress(state, has_source, steps, facts)
        case TearingDown(change, members), Lost(by_user=True):
            return _cannot_continue(change, members, facts)
        case TearingDown(change, _, stale), Lost(members):
            return _tear_down(change, members, stale, facts)
        case FillingUp(change, members, stale), Filled(num_joining, silent):
            if silent:
                return _tear_down(change, members - silent, stale, facts).after(Do.SUSPECT_NODES)
            if len(members) + num_joining < facts.min_workers:
                return _cannot_continue(change, members, facts)
            if isinstance(change.plan, Restart):
                return Step(Rebuilding(change.plan, members))
            return Step(Regrouping(change, members, stale, num_joining))
        case Regrouping(change, members, _, num_joining), Formed(moves_rank_0):
            return _with_group(change, members, num_joining, moves_rank_0, facts)
        case Regrouping(change, members, stale), Lost(left, failed, by_user):
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
                return _raise_and_keep(End.LOST_COPIES, facts)
            return Step(Polling(Poll.RESUME), (Do.NOTE_LOST_COPY,))
        case AwaitingSnapshot(change=Change() as change), LostInTransit():
            return _copy_again(change, facts)
        case AwaitingSnapshot(Restart() as plan, None, is_brief=True), Landed() | LostInTransit():
            return _replace_workers(plan, facts)
        case AwaitingSnapshot(Raise() | Restart() as plan), Landed() | LostInTransit():
            return _follow(plan, facts)

        # ---- back to the last snapshot
        case Scheduling(plan), Resources(has_room):
            return Step(Launching(plan)) if has_room else _schedule(plan.next_attempt, facts)
        case Launching(plan), Done():
            return Step(Restoring(replace(plan, is_launched=True)))
        case Launching(plan), Lost():
            return _start_again(plan, facts)
        case Launching(plan), NotGranted():
            return _schedule(plan.next_attempt, facts)
        case Rebuilding(plan), Done():
            return Step(Restoring(plan), (Do.DROP_IN_TRANSIT, Do.KEEP_FACTS))
        case Rebuilding(plan), Lost():
            return _start_others(plan, facts)
        case Restoring(plan), Done():
            next_state = Running("resume" if facts.is_inside else "start") if facts.in_call else Finished("idle")
            return Step(next_state, (Record(plan.kind),))
        case Restoring(plan), Lost():
            return Step(Rebuilding(plan, is_again=True))
    raise AssertionError(f"{state} cannot end with {event}")


def _interrupted(state: State, is_loss: bool, is_unsent: bool, facts: Facts) -> Step:
    """Ctrl-C, `stop`, or an error in the driver or in user code."""
    plan = _plan_of(state)
    if isinstance(state, Running) and (is_unsent or not facts.was_sent):
        return _raise_and_keep(End.INTERRUPTED, facts)
    if isinstance(plan, Raise) and plan.why is End.INTERRUPTED:  # again: the workers with the only state stay
        return _raise_and_keep(End.INTERRUPTED, facts)
    ends = _end_restart(plan, End.INTERRUPTED, facts, is_loss=is_loss) if isinstance(plan, Restart) else None
    step = ends or _follow(Raise(End.INTERRUPTED), facts)
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


def _raise_and_keep(why: End, facts: Facts) -> Step:
    """Raise an error, and keep the group."""
    return Step(Finished("raised", Raise(why)), _aborted(facts))


def _aborted(facts: Facts) -> tuple[Command, ...]:
    return (Do.NOTE_ABORTED,) if facts.in_call and facts.was_sent and not facts.is_ending else ()


def _after_failure(failed: CallFailed, facts: Facts) -> Step:
    """A call has failed that need not end early."""
    is_user = failed.kind == "user"
    if failed.has_diverged:
        return Step(AwaitingSnapshot(Raise(End.UNEVEN_STEPS)))
    if failed.lacks_memory:
        return Step(Settling(_change(Why.MEMORY, failed, facts)))
    if is_user and not (facts.retries_user_errors and facts.num_left > 0):
        if not failed.all_answered:
            return _follow(Raise(End.RAISED_INSIDE), facts)
        if not facts.keeps_alike or facts.is_driver_only:
            return _raise_and_keep(End.USER_ERROR, facts)
        return Step(Polling(Poll.COMPARE) if failed.at_one_line else AwaitingSnapshot(Raise(End.RAISED_APART)))
    if not is_user and facts.continues and facts.can_continue and facts.num_retries > 0:
        return Step(Settling(_change(Why.FAILURE, failed, facts)))
    return _restart_after_failure(facts)


def _change(why: Why, failed: CallFailed | None, facts: Facts) -> Change:
    """A change of which all workers of the group are expected to be a part."""
    return Change(why, failed, facts.members, len(facts.members))


def leave_or_grow(leaving: Members, facts: Facts) -> Step:
    """Let workers on nodes that are being removed leave, and others join: between two steps of a call, or two calls."""
    why, staying = Why.DRAIN if leaving else Why.GROW, facts.members - leaving
    commands = (Do.TAKE_PARTS,) if facts.in_call and not facts.runs_on else ()
    if not (facts.regroups or facts.runs_on):
        return Step(AwaitingSnapshot(Restart(KINDS[why])), commands)
    return Step(TearingDown(Change(why, expected=staying, size=len(facts.members)), staying), commands)


def _with_survivors(change: Change, members: Members, has_stuck: bool, facts: Facts) -> Step:
    if change.why is Why.EVACUATE:
        return _tear_down(change, members, NOBODY, facts)
    commands: list[Command] = [Do.SUSPECT_NODES]
    # If a rank had died, stuck ranks might just be slow.
    if change.why is Why.FAILURE and has_stuck and change.failed is not None and change.failed.kind == "disconnected":
        commands.append(Do.NOTE_HANG)
    if change.why is Why.REUSE and not facts.renews:  # the survivors could not continue, so something may be broken
        members = NOBODY
    return _tear_down(change, members, NOBODY, facts).after(*commands)


def _tear_down(change: Change, members: Members, stale: Members, facts: Facts) -> Step:
    if members:
        return Step(TearingDown(change, members, stale & members))
    if change.why is Why.REUSE and facts.num_standby:
        return Step(FillingUp(change, NOBODY), (Do.KILL_OTHERS,))
    return _cannot_continue(change, NOBODY, facts)


def _with_progress(state: TearingDown, has_source: bool, steps: int, facts: Facts) -> Step:
    change = state.change
    if change.why is Why.EVACUATE:
        if not has_source:
            return _cannot_continue(change, state.members, facts).after(Do.KILL_OTHERS)
        return Step(Regrouping(change, state.members, state.stale), (Do.KILL_OTHERS,))
    is_refused = change.why is Why.FAILURE and bool(facts.obstacle_to_continuing(steps))
    if change.why is not Why.REUSE and (not has_source or is_refused):
        return _cannot_continue(change, state.members, facts)
    return Step(FillingUp(change, state.members, state.stale), (Do.KILL_OTHERS,))


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
    return Step(Running("resume") if facts.in_call else Finished("idle"), tuple(commands))


def _cannot_continue(change: Change, members: Members, facts: Facts, *, is_failure: bool = False) -> Step:
    """The group cannot be changed in place."""
    match change:
        case Change(Why.EVACUATE, failed, plan=EndEarly()):
            assert failed is not None
            step = _restart_after_failure(facts) if change.has_regrouped else _after_failure(failed, facts)
        case Change(Why.EVACUATE, plan=Raise() | Restart() as plan):
            step = _follow(plan, replace(facts, only_in_workers=False)).after(Do.GIVE_STATE_UP)
        case Change(plan=Restart() as plan):
            step = _start_others(plan, facts)
        case Change(Why.FAILURE):
            step = _restart_after_failure(facts)
        case _:
            plan = Restart("restored" if is_failure or change.expected - members else KINDS[change.why])
            step = Step(AwaitingSnapshot(plan)) if facts.in_call else restart(plan, facts)
    return step.after(Abandon(change, members))


def _enlarge(change: Change, facts: Facts) -> Step:
    """A group that was formed only to copy its state has no state from inside the call, so it runs the call."""
    if len(facts.members) >= facts.min_workers or facts.is_ending:
        return Step(Polling(Poll.PAY))
    return Step(TearingDown(_change(Why.FAILURE, None, facts), facts.members))


def _copy_again(change: Change, facts: Facts) -> Step:
    """A copy of the state was lost: form a group of those that live, and copy again."""
    is_early = isinstance(change.plan, EndEarly)
    if is_early and facts.is_cut_off:
        return _without_copy(facts)
    num_copies = change.num_copies + 1 if is_early or change.copied_by == facts.members else 1
    if num_copies < NUM_COPIES:
        return Step(Settling(replace(change, num_copies=num_copies, copied_by=facts.members)))
    return _enlarge(change, facts) if is_early else _cannot_continue(change, facts.members, facts)


def _without_copy(facts: Facts) -> Step:
    """Ray was stopped before the state was in the driver."""
    return _follow(Raise(End.CUT_OFF), replace(facts, only_in_workers=False)).after(Do.GIVE_STATE_UP)


def _end_early(facts: Facts) -> Step:
    is_too_small = len(facts.members) < facts.min_workers and not facts.is_ending
    ends = (Do.KILL_GROUP, Record("ended")) if is_too_small else ()
    return Step(Finished("left"), (Do.LEAVE_CALL, *ends))


def _follow(plan: Raise | Restart, facts: Facts) -> Step:
    """Go on with a plan, once the driver has the training state."""
    if isinstance(plan, Restart):
        return restart(plan, facts)
    if facts.only_in_workers:
        return Step(AwaitingSnapshot(plan) if facts.in_transit else Settling(Change(Why.EVACUATE, plan=plan)))
    commands: list[Command] = []
    if plan.ends_restart or not facts.is_driver_only:
        commands += [Do.KILL_GROUP] * facts.has_group
        if plan.event is not None and (facts.has_group or plan.ends_restart):
            commands.append(Record(plan.event))
    commands += [Do.NOTE_REFUSED] * (plan.why is End.NO_RETRY)
    commands += [Do.FORGET_CALLS] * (plan.why is End.RANKS_DIFFER)
    return Step(Finished("raised", plan), (*commands, *_aborted(facts)))


def _give_up(facts: Facts) -> Step:
    return _follow(Raise(End.NO_RETRY, "lost"), facts)


def _restart_after_failure(facts: Facts) -> Step:
    if facts.num_left <= 0:
        return _give_up(facts)
    return restart(Restart("restored", reuses=True), facts).after(Do.PAY_FOR_RESTART, Do.NOTIFY_FAILURE)


def restart(plan: Restart, facts: Facts) -> Step:
    """Go back to the last snapshot. First, fetch state that only the workers have."""
    if facts.only_in_workers and facts.in_transit:
        return Step(AwaitingSnapshot(plan))
    if plan.reuses and facts.only_in_workers and not facts.can_continue:
        return _follow(Raise(End.NOT_REPEATABLE, "lost"), facts)  # the state from before the call is gone
    if facts.is_ending:
        return _follow(Raise(End.PROGRAM_ENDS, "ended" if facts.in_call else None), facts)
    if facts.only_in_workers:
        return Step(Settling(Change(Why.EVACUATE, plan=plan)))
    return Step(AwaitingSnapshot(plan, is_brief=True))


def _replace_workers(plan: Restart, facts: Facts) -> Step:
    """Reuse processes if possible. Otherwise, start others."""
    has_others = facts.renews or (facts.regroups and not facts.uses_local and facts.num_standby > 0)
    if plan.reuses and has_others and not facts.is_lost and facts.has_snapshot:
        return Step(Settling(Change(Why.REUSE, plan=plan)))
    return _start_others(plan, facts)


def _start_others(plan: Restart, facts: Facts) -> Step:
    """Start a group. One that this restart has launched has failed: a further one may cost a retry of the start."""
    kills = (Do.KILL_GROUP,) if facts.has_group else ()
    if plan.is_launched:
        return _start_again(plan, facts.without_group).after(*kills)
    if facts.is_lost:
        return _end_restart(plan, End.STATE_LOST, facts.without_group).after(*kills)
    return _schedule(plan, facts.without_group).after(*kills)


def _schedule(plan: Restart, facts: Facts) -> Step:
    if facts.is_ending or plan.attempt >= facts.num_attempts:
        return _end_restart(plan, End.PROGRAM_ENDS if facts.is_ending else End.NO_GROUP, facts)
    return Step(Scheduling(plan))


def _start_again(plan: Restart, facts: Facts) -> Step:
    """A group that was launched has failed."""
    if facts.num_starts_left is None:
        return _schedule(plan.next_attempt, facts)
    if facts.num_starts_left <= 0:
        return _end_restart(plan, End.NO_START, facts).after(Do.NOTE_REFUSED_START)
    return _schedule(replace(plan, is_launched=False), facts).after(Do.PAY_FOR_START)


def _end_restart(plan: Restart, why: End, facts: Facts, *, is_loss: bool = True) -> Step:
    """Raise the error that ends a restart."""
    event: Literal["lost", "ended"] = "lost" if is_loss else "ended"
    return _follow(Raise(why, None if plan.kind == "started" else event, ends_restart=True), facts)
