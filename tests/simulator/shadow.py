"""The engine as it is, and the table of `raysgd.core.engine.recovery.machine` beside it.

What the engine waits for is the state that the table gives, what comes of it is an event, and all that the engine does
in between are the table's commands, in their order. The first difference ends the run like a broken invariant.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raysgd.core.cluster.resources import ClusterView
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.policies import RetryBudget, ScalingPolicy, are_alike, choose_source, classify, failed_alike
from raysgd.core.engine.recovery import machine
from raysgd.core.engine.recovery.machine import Command, Do, Event, Facts, Members, State, Step
from raysgd.core.engine.repair import CannotForm, GroupChange, GroupRepair, NextGroup
from raysgd.core.engine.shared.call import Call, Completed, Left
from raysgd.core.engine.shared.types import GroupReport, ReplicaProgress
from raysgd.exceptions import (
    RanksDifferError,
    ReservationTimeoutError,
    UnevenStepsError,
    WorkerError,
    WorkersLostError,
)
from tests.simulator.kernel import Stopped

if TYPE_CHECKING:
    from tests.simulator.platform import Cluster
    from tests.simulator.running import Simulation

_OUTCOMES = (WorkerError, WorkersLostError, UnevenStepsError, RanksDifferError, ReservationTimeoutError, CannotForm)
"""Errors with which the engine ends a step. Others come from outside."""
_NONE = RetryBudget(0)


class Shadow:
    """Follows the table beside the engine.

    Attributes:
        state: What the table waits for. None while the engine is in no step of a recovery.
        visited: All transitions so far.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.state: State | None = None
        self.visited: list[tuple[State, Event, Facts]] = []
        self._call: Call | None = None
        self._budget: RetryBudget = _NONE
        self._due: list[Command] = []  # what the table wants done
        self._seen: list[Command] = []  # what the engine has done
        self._depths: Counter[int] = Counter()  # by thread: one may end a group beside a call
        self._thread = 0
        self._pending: tuple[machine.CallFailed, Facts] | None = None
        self._noticed: BaseException | None = None
        self._num_lost_copies = 0
        self.survivors: Members = machine.NOBODY
        self.answering: Members = machine.NOBODY
        self.has_stuck = self.awaits_survivors = False
        self.rank_0: Any = None
        self.torn_down: list[tuple[Members, GroupReport]] = []
        self.joining: list[Any] = []

    # ------------------------------------------------------------------------------------ a recovery

    @property
    def is_on(self) -> bool:
        """Whether this thread of the driver is in a recovery, and not inside a step of it."""
        return self.state is not None and not self.depth and threading.get_ident() == self._thread

    @property
    def cluster(self) -> Cluster:
        return self._simulation.cluster

    @property
    def depth(self) -> int:
        """How deep inside a step this thread of the driver is."""
        return self._depths[threading.get_ident()]

    def open(self, step: Step | State, call: Call | None = None, budget: RetryBudget = _NONE) -> None:
        step = step if isinstance(step, Step) else Step(step)
        self.state, self._due, self._seen = step.state, list(step.commands), []
        self._call, self._budget, self._num_lost_copies = call, budget, 0
        self._thread = threading.get_ident()
        self._noticed = self._pending = None

    def close(self, how: str) -> None:
        """The engine is done."""
        self._flush()
        self._check_done()
        self._expect(self.state == machine.Finished(how), f"the engine has {how}")  # type: ignore[arg-type]
        self.state = None

    def close_with(self, error: BaseException) -> None:
        """The engine raises an error."""
        if isinstance(error, Stopped) or self.state is None:
            return
        self.notice(error)
        self._flush()
        self._check_done()
        state = self.state
        is_right = isinstance(state, machine.Finished) and state.error is not None and isinstance(error, state.error)
        self._expect(is_right, f"the engine raises {error!r}")
        self.state = None

    def leave(self, *, is_caught: bool) -> None:
        """Between two waits, where the table has no state, the engine notices that the trainer was stopped."""
        if self.state is not None:
            self.state = machine.Running() if is_caught and self._call is not None else None

    def begin(self, *kinds: type[State], **fields: Any) -> None:
        """The engine begins to wait for something."""
        self.notice(sys.exc_info()[1])
        self._flush()
        wanted = {name: getattr(self.state, name, None) for name in fields}
        is_right = isinstance(self.state, kinds) and wanted == fields
        self._expect(is_right, f"the engine waits for {' or '.join(kind.__name__ for kind in kinds)} {fields or ''}")
        self._check_done()

    def observe(self, command: Command) -> None:
        """The engine does something."""
        if self.is_on:
            self.notice(sys.exc_info()[1])
            self._flush()
            self._seen.append(command)

    def feed(self, event: Event, facts: Facts | None = None) -> None:
        """What came of a wait."""
        assert self.state is not None
        facts = facts or self.facts()
        self.visited.append((self.state, event, facts))
        try:
            step = machine.transition(self.state, event, facts)
        except AssertionError as error:
            self._expect(False, str(error))
            raise
        self._simulation.tell(f"TABLE {event} -> {step.state} {[_short(each) for each in step.commands]}")
        self.state = step.state
        self._due += [self._as_paid(command) for command in step.commands if command is not Do.NOTE_LOST_COPY]
        self._num_lost_copies += Do.NOTE_LOST_COPY in step.commands

    def _as_paid(self, command: Command) -> Command:
        """A call that is paid for out of the budget for starts has one budget for both."""
        is_one = self._budget is self._simulation.controller.recovery._start_budget
        return Do.PAY_FOR_RESTART if command is Do.PAY_FOR_START and is_one else command

    def pend(self, failed: machine.CallFailed) -> None:
        """A call has failed, and the engine may still look whether it was for lack of memory."""
        self._pending = failed, self.facts()

    def note_lack_of_memory(self) -> None:
        assert self._pending is not None
        self._pending = replace(self._pending[0], lacks_memory=True), self._pending[1]

    def notice(self, error: BaseException | None) -> None:
        """The engine handles an error, perhaps Ctrl-C or another one from outside."""
        if error is None or error is self._noticed or isinstance(error, (*_OUTCOMES, Stopped)) or self.state is None:
            return
        self.interrupt(error)

    def interrupt(self, error: BaseException) -> None:
        """An error comes from outside, whatever its class."""
        self._noticed, self._pending, self.awaits_survivors = error, None, False
        self._expect(self._seen == self._due[: len(self._seen)], f"the engine was interrupted after {self._words}")
        self._due, self._seen = [], []
        self.feed(machine.Interrupted(type(error)))

    def refuse(self, error: BaseException | None) -> None:
        """The answers of a call differ."""
        assert error is not None
        self._noticed = error
        self.feed(machine.Answered(type(error)))

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside a step, what is none."""
        self._depths[threading.get_ident()] -= 1
        try:
            yield
        finally:
            self._depths[threading.get_ident()] += 1

    @contextmanager
    def effect(self) -> Iterator[None]:
        """What the engine does inside is one step."""
        self._depths[threading.get_ident()] += 1
        try:
            yield
        finally:
            self._depths[threading.get_ident()] -= 1

    def _flush(self) -> None:
        if self._pending is not None:
            event, facts = self._pending
            self._pending = None
            self.feed(event, facts)

    def _check_done(self) -> None:
        self._expect(self._seen == self._due, f"the engine has done {self._words}")
        self._due, self._seen = [], []

    @property
    def _words(self) -> str:
        return f"{[_short(each) for each in self._seen]}, and the table wants {[_short(each) for each in self._due]}"

    def _expect(self, holds: bool, otherwise: str) -> None:
        before = f", after {self.visited[-1][:2]}" if self.visited else ""
        if not holds:
            self._simulation.invariants.fail(f"{otherwise}; the table is in {self.state}{before}")
            self.state = None
            raise Stopped

    # ------------------------------------------------------------------------------------ facts

    @property
    def members(self) -> Members:
        group = self._simulation.controller.group
        return machine.NOBODY if group is None else self.members_of(range(len(group)))

    def members_of(self, ranks: Iterable[int]) -> Members:
        processes = self._simulation.controller.group.processes
        return frozenset(processes[rank].pid for rank in ranks)

    def facts(self) -> Facts:
        controller, call, budget = self._simulation.controller, self._call, self._budget
        spec, snapshots, group, failures = (
            controller.spec,
            controller.snapshots,
            controller.group,
            controller.recovery._failures,
        )
        comes_from_driver = snapshots._coming is not None and snapshots._coming.token is None
        has_landed = snapshots.landed is not None or comes_from_driver
        continued_at, starts = budget._continued_at, controller.recovery._start_budget
        return Facts(
            in_call=call is not None,
            members=self.members,
            has_group=group is not None,
            is_driver_only=group is not None and group.is_driver_only,
            min_workers=controller.scaling.min_workers,
            regroups=spec.regroups,
            renews=spec.renews,
            runs_on=spec.runs_on,
            uses_local=spec.use_local,
            continues=failures.continues,
            retries_user_errors=failures.retries_user_errors,
            can_continue=call is not None and call.can_continue,
            keeps_alike=call is not None and call.keeps_alike,
            must_end=call is not None and call.leaves is not None and call.leaves(),
            is_ending=controller.is_ending,
            is_cut_off=controller._is_cut_off(),
            only_in_workers=controller.holds_only_state,
            in_transit=snapshots.is_coming,
            is_lost=snapshots.has_gap and (spec.loses_state or (spec.captures and not has_landed)),
            has_snapshot=has_landed,
            is_inside=snapshots.is_inside and not snapshots.calls_since,
            num_standby=0 if group is None else group.standby.num_all,
            num_lost_copies=self._num_lost_copies,
            num_retries=budget.num_restarts,
            num_left=budget.num_restarts - budget.num_spent,
            continued_at=continued_at,
            free_from=float("inf") if budget._has_hung else 1 if continued_at is None else continued_at + 2,
            num_starts_left=None if starts is None else starts.num_restarts - starts.num_spent,
            num_attempts=controller.scaling.num_attempts,
        )

    def failure(self, report: GroupReport) -> machine.CallFailed:
        answers = {each.rank: each.value.value if each.ok else each.failure for each in report.outcomes}
        assert self._call is not None
        return machine.CallFailed(
            classify(report).kind,
            bool(self._call.divergence(answers)),
            report.all_answered,
            failed_alike(report),
        )

    def lose(self, report: GroupReport) -> None:
        """Workers were lost while replicas were built or restored. Where some may stay, the engine looks who did."""
        spec, is_by_user = self._simulation.controller.spec, classify(report).kind == "user"
        if is_by_user or not spec.keeps_processes or self._simulation.controller.running.is_ended:
            self.feed(machine.Lost(self.members, by_user=is_by_user))
        else:
            self.awaits_survivors = True

    def note_settled(self, ranks: Iterable[int], has_stuck: bool) -> None:
        """The engine knows who survived."""
        self.survivors, self.has_stuck = self.members_of(ranks), has_stuck
        if self.awaits_survivors:
            self.awaits_survivors = False
            self.feed(machine.Lost(self.survivors))


def _short(command: Command) -> str:
    return command.name if isinstance(command, Do) else f"Record({command.kind})"


def _doing(shadow: Shadow, owner: Any, name: str, command: Command) -> None:
    """From now on, a method of an object counts as a command."""
    real = getattr(type(owner), name)

    def observed(*args: Any, **options: Any) -> Any:
        shadow.observe(command)
        with shadow.effect():
            return real(owner, *args, **options)

    setattr(owner, name, observed)


class ShadowedScaling(ScalingPolicy):
    """Says when it is looked for room."""

    def decide(self, view: Any, need: Any, attempt: int) -> Any:
        decision, shadow = super().decide(view, need, attempt), self.__dict__.get("shadow")
        if shadow is not None and shadow.is_on:
            shadow.begin(machine.Scheduling)
            shadow._expect(shadow.state.plan.attempt == attempt, f"the engine makes attempt {attempt} to start a group")
            has_room = isinstance(decision, int)
            shadow.feed(machine.Resources(has_room, not has_room and decision.delay_s is None))
        return decision


class ShadowedController(ElasticController):
    """Says what it waits for, what comes of it, and what it does."""

    shadow: Shadow

    def follow(self, shadow: Shadow) -> None:
        """Begins to say so."""
        self.shadow = shadow
        recovery = self.recovery
        self.recovery: Any = ShadowedRepair(self, self._monitor, recovery._failures, recovery._start_budget)
        self.scaling.__dict__["shadow"] = shadow
        for owner, name, command in (
            (self.snapshots, "take_from", Do.TAKE_PARTS),
            (self.snapshots, "drop_incoming", Do.DROP_IN_TRANSIT),
            (self.snapshots, "leave_call", Do.LEAVE_CALL),
            (self.snapshots, "note_broken_off", Do.NOTE_ABORTED),
            (self.snapshots, "forget_calls", Do.FORGET_CALLS),
            (self, "suspect", Do.SUSPECT_NODES),
            (self, "keep_facts", Do.KEEP_FACTS),
            (self, "owe_spares", Do.OWE_SPARES),
            (self, "start_standby", Do.START_STANDBY),
            (self.hooks, "on_change", Do.NOTIFY_CHANGE),
            (self.hooks, "on_failure", Do.NOTIFY_FAILURE),
        ):
            _doing(shadow, owner, name, command)
        if self._start_budget is not None:
            _doing(shadow, self._start_budget, "pay_for_restart", Do.PAY_FOR_START)
            _doing(shadow, self._start_budget, "refuse", Do.NOTE_REFUSED)
        await_snapshot = partial(type(self._monitor).await_snapshot, self._monitor)

        def poll(timeout_s: float | None) -> None:
            type(self.snapshots).poll(self.snapshots, timeout_s)

        def polled(timeout_s: float | None = 0.0) -> None:
            is_step = shadow.is_on and bool(timeout_s)
            if not is_step:
                return poll(timeout_s)
            shadow.begin(machine.AwaitingSnapshot, is_brief=True)
            with shadow.effect():
                poll(timeout_s)
            shadow.feed(machine.Landed())

        def awaited() -> None:
            if isinstance(shadow.state, machine.Running) and shadow.depth == 1:  # the answers of the call differ
                with shadow.outside():
                    shadow.refuse(sys.exc_info()[1])
                    return awaited()
            if not shadow.is_on:
                return await_snapshot()
            shadow.begin(machine.AwaitingSnapshot, is_brief=False)
            with shadow.effect():
                await_snapshot()
            shadow.feed(machine.Landed() if self.snapshots.shares_current else machine.LostInTransit())

        self.snapshots.poll, self._monitor.await_snapshot = polled, awaited  # type: ignore[method-assign]

    @property
    def gives_state_up(self) -> bool:
        return bool(self.__dict__.get("_gives_state_up"))

    @gives_state_up.setter
    def gives_state_up(self, value: bool) -> None:
        if value:
            self.shadow.observe(Do.GIVE_STATE_UP)
        self.__dict__["_gives_state_up"] = value

    def _run(self, call: Call, budget: RetryBudget) -> Completed | Left:
        shadow = self.shadow
        shadow._call, shadow._budget = call, budget
        for name, command in (
            ("pay_for_continuing", Do.PAY_TO_CONTINUE),
            ("pay_for_restart", Do.PAY_FOR_RESTART),
            ("note_hang", Do.NOTE_HANG),
            ("refuse", Do.NOTE_REFUSED),
        ):
            _doing(shadow, budget, name, command)
        self._next: tuple[Call, RetryBudget] | None = (call, budget)
        try:
            ended = super()._run(call, budget)
        except BaseException as error:
            shadow.close_with(error)
            raise
        finally:
            self._next = None
        shadow.close("left" if isinstance(ended, Left) else "completed")
        return ended

    def ensure_group(self) -> Any:
        try:
            self.check_active()
        except BaseException:
            if self.shadow.is_on:
                self.shadow.leave(is_caught=False)
            raise
        return super().ensure_group()

    def _attempt(self, group: Any, call: Call, function: Any, args: Any, number: Any) -> Any:
        shadow = self.shadow
        if self._next is not None:
            shadow.open(machine.Running(), *self._next)
            self._next = None
        shadow.begin(machine.Running)
        resumes = call.resume is not None and function is call.resume
        if call.resume is not None:
            shadow._expect(
                shadow.state == machine.Running("resume" if resumes else "start"), f"the call resumes: {resumes}"
            )
        try:
            with shadow.effect():
                report, values = super()._attempt(group, call, function, args, number)
        except WorkersLostError as error:  # Ray is gone, and no worker answers
            shadow.interrupt(error)
            raise
        if values is not None:
            shadow.feed(machine.Answered())
        elif not report.ok:
            shadow.pend(shadow.failure(report))
        else:
            leaving = self.leaving_nodes_in_use()
            ranks = [rank for rank, info in enumerate(group.infos) if info.node_id in leaving]
            shadow.feed(machine.Paused(self._is_left(call, report), shadow.members_of(ranks)))
        return report, values

    def try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        shadow = self.shadow
        if not shadow.is_on:
            return super().try_start(num_workers, num_spares, timeout_s)
        shadow.begin(machine.Launching)
        try:
            with shadow.effect():
                has_started = super().try_start(num_workers, num_spares, timeout_s)
        except ReservationTimeoutError:
            shadow.feed(machine.NotGranted())
            raise
        except WorkerError:
            shadow.feed(machine.Lost(by_user=True))
            raise
        shadow.feed(machine.Done() if has_started else machine.Lost())
        return has_started

    def settled_view(self) -> ClusterView:
        try:
            return super().settled_view()
        except WorkersLostError:  # Ray is gone, and the program ends
            if self.shadow.is_on:
                self.shadow.begin(machine.Scheduling)
                self.shadow.feed(machine.Resources(False, True))
            raise

    def kill_group(self) -> None:
        if self.group is not None:
            self.shadow.observe(Do.KILL_GROUP)
        with self.shadow.effect():
            super().kill_group()

    def record(self, kind: Any, *args: Any, **options: Any) -> None:
        if kind != "hung":
            self.shadow.observe(machine.Record(kind))
        super().record(kind, *args, **options)


class ShadowedRepair(GroupRepair):
    """Says how a group is changed or replaced."""

    @property
    def _shadow(self) -> Shadow:
        shadow: Shadow = self._lifecycle.shadow  # type: ignore[attr-defined]
        return shadow

    @contextmanager
    def _own(self, step: Callable[[], Step]) -> Iterator[bool]:
        """A recovery of its own, unless it is part of one. Yields whether it is."""
        shadow = self._shadow
        is_own = shadow.state is None or not shadow.facts().in_call
        if shadow.state is None:
            shadow._call, shadow._budget = None, _NONE
            shadow.open(step())
        try:
            yield is_own
        except BaseException as error:
            if is_own:
                shadow.close_with(error)
            raise

    def restart_workers(self, kind: Any, cause: str, after: GroupReport | None = None) -> None:
        try:
            self._lifecycle.check_active()
        except BaseException:
            self._shadow.leave(is_caught=True)
            raise
        with self._own(lambda: machine.restart(machine.Restart(kind, "idle"), self._shadow.facts())) as is_own:
            super().restart_workers(kind, cause, after)
        if is_own:
            self._shadow.close("idle")

    def _make(self, change: GroupChange) -> Any:
        shadow = self._shadow

        def step() -> Step:
            return machine.leave_or_grow(shadow.members_of(change.leaving), shadow.facts())

        shadow.rank_0 = self._lifecycle.running.infos[0]
        with self._own(step) as is_own:
            failed = super()._make(change)
        if is_own and failed is None:
            shadow.close("idle")
        return failed

    def fetch_only_state(self, after: GroupReport | None = None) -> None:
        self._shadow.notice(sys.exc_info()[1])
        super().fetch_only_state(after)

    def _is_short_of_memory(self, diagnosis: Any) -> bool:
        is_short = super()._is_short_of_memory(diagnosis)
        if is_short:
            self._shadow.note_lack_of_memory()
        return is_short

    def ask_progress(self) -> GroupReport:
        shadow = self._shadow
        if not shadow.is_on:
            return super().ask_progress()
        shadow.begin(machine.Polling)
        with shadow.effect():
            report = super().ask_progress()
        if report.ok:
            found = [answer.value for answer in report.values]
            shadow.feed(machine.Polled(are_alike(found), max(each.progress for each in found)))
        elif shadow.state == machine.Polling(machine.Poll.RESUME):
            shadow.pend(shadow.failure(report))
        else:
            shadow.feed(shadow.failure(report))
        return report

    def _leave_old_group(
        self, change: GroupChange, survivors: Sequence[int], without_state: Collection[int]
    ) -> NextGroup:
        shadow = self._shadow
        shadow.notice(sys.exc_info()[1])
        shadow._flush()
        shadow.torn_down = []
        members = shadow.members_of(survivors)
        stale = shadow.members_of(set(survivors).intersection(without_state))
        try:
            formed = super()._leave_old_group(change, survivors, without_state)
        except Stopped:
            raise
        except BaseException:
            self._tell_torn_down(change, members, stale)
            raise
        self._tell_torn_down(change, members, stale)
        return formed

    def _tell_torn_down(self, change: GroupChange, members: Members, stale: Members) -> None:
        shadow = self._shadow
        if isinstance(shadow.state, machine.Aborting):
            is_polled = change.why is machine.Why.REUSE and not self._spec.renews  # and whoever survived is not used
            shadow.feed(machine.Survivors(shadow.answering if is_polled else members, shadow.has_stuck))
        elif isinstance(shadow.state, machine.AwaitingQuorum):
            shadow.feed(machine.Quorum(len(shadow.joining), shadow.state.members - members))
        for asked, report in shadow.torn_down:
            state = shadow.state
            is_right = isinstance(state, machine.TearingDown) and (state.members, state.stale) == (asked, stale & asked)
            shadow._expect(is_right, f"{asked} leave, {stale} without the state")
            if report.ok:
                found = [
                    _as_source(each.value, change, shadow.members_of([each.rank]) <= stale) for each in report.outcomes
                ]
                index = choose_source(found)
                shadow.feed(machine.Progress(index is not None, 0 if index is None else found[index].progress))
                continue
            failed = {each.rank: each.failure for each in report.outcomes if not each.ok}
            if any(each is not None and each.kind == "user" for each in failed.values()):
                shadow.feed(machine.Lost(asked, by_user=True))
                continue
            dead = {rank for rank, failure in failed.items() if failure is not None} or set(failed)
            shadow.feed(machine.Lost(asked - shadow.members_of(dead)))

    def _fill_from_standby(self, change: GroupChange, formed: NextGroup, wait_s: float) -> bool:
        shadow = self._shadow
        shadow.joining = formed.joining
        shadow.begin(machine.AwaitingQuorum, members=shadow.members_of(formed.staying))
        with shadow.effect():
            return super()._fill_from_standby(change, formed, wait_s)

    def form(self, change: GroupChange, staying: Sequence[int], without_state: Collection[int] = ()) -> NextGroup:
        try:
            formed = super().form(change, staying, without_state)
        except CannotForm:
            self._tell_quorum()
            raise
        self._tell_quorum()
        return formed

    def _tell_quorum(self) -> None:
        if isinstance(self._shadow.state, machine.AwaitingQuorum):
            self._shadow.feed(machine.Quorum(len(self._shadow.joining)))

    def _survivors_of(self, report: GroupReport, staying: Sequence[int], num_workers: int) -> list[int]:
        shadow = self._shadow
        failed = shadow.members_of(outcome.rank for outcome in report.outcomes if not outcome.ok)
        is_by_user = classify(report).kind == "user"
        try:
            survivors = super()._survivors_of(report, staying, num_workers)
        except CannotForm:
            left = machine.NOBODY if is_by_user else shadow.survivors
            shadow.feed(machine.Lost(left, failed, by_user=is_by_user))
            raise
        shadow.feed(machine.Lost(shadow.survivors, failed))
        return survivors

    def _fetch_from(self, living: Collection[int], *, only_inside: bool = False) -> Any:
        self._shadow.rank_0 = self._lifecycle.running.infos[0]
        return super()._fetch_from(living, only_inside=only_inside)

    def _restore(self) -> GroupReport | None:
        shadow = self._shadow
        shadow.begin(machine.Restoring)
        try:
            with shadow.effect():
                report = super()._restore()
        except (WorkerError, WorkersLostError) as error:
            shadow.feed(machine.Lost(by_user=True, is_part=isinstance(error, WorkersLostError)))
            raise
        if report is None:
            shadow.feed(machine.Done())
        else:
            shadow.lose(report)
        return report


def _as_source(progress: ReplicaProgress, change: GroupChange, is_stale: bool) -> ReplicaProgress:
    """What the engine makes of a report: a replica that cannot continue can still send its state."""
    obstacle = None if change.why is machine.Why.EVACUATE else progress.obstacle
    return replace(progress, obstacle=obstacle, is_whole=progress.is_whole and not is_stale)
