"""Runs calls and recovers from failures: waits for what each state of `machine.transition` names.

`Recovery` is the only place of the engine that waits for a recovery, and handles what interrupts it. What follows what
is decided by the table in `machine`. ADR 9 explains why survivors keep their processes, ADR 11 when they wait for new
workers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.cluster.resources import capacity, explain, impossibility
from raysgd.core.engine import ranks as rank_rules
from raysgd.core.engine.lifecycle import SETTLE_S, Lifecycle
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.policies import (
    Diagnosis,
    FailurePolicy,
    RetryBudget,
    WaitForWorkers,
    are_alike,
    choose_source,
    classify,
    failed_alike,
    is_lack_of_memory,
    takers,
    words,
)
from raysgd.core.engine.recovery import machine, states
from raysgd.core.engine.recovery.incident import Incident
from raysgd.core.engine.recovery.states import (
    NOBODY,
    NUM_COPIES,
    Change,
    Do,
    End,
    Event,
    Facts,
    Members,
    State,
    Step,
    Why,
)
from raysgd.core.engine.shared import replica
from raysgd.core.engine.shared.call import Call, Completed, Left
from raysgd.core.engine.shared.group_events import EventKind
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Answered, GroupReport, HeldAtStep, ReplicaProgress, StateHandover
from raysgd.core.engine.transfers import DividedValue, LostPartError
from raysgd.core.engine.worker import StandbyWorker
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import RanksDifferError, ReservationTimeoutError, UnpicklableError, WorkersLostError

logger = logging.getLogger(__name__)

# Longest time for which survivors wait for new workers; workers that take longer can still join later.
STANDBY_WAIT_S = 30.0
_AWAITED_S = 10.0  # how long to wait for a snapshot that a caller needs, for example to save it to a file
# Timeout for reserving free resources: Ray grants them at once unless another program took them.
_REBUILD_RESERVATION_S = 10.0
_NONE_FAILED = GroupReport(())
_IDLE = Call(replica.nothing)  # stands for the call while none runs


class Recovery:
    """Runs a trainer's calls, and repairs or replaces the worker group after a failure.

    Args:
        lifecycle: Holds the worker group.
        monitor: Watches the group.
        failures: Says which failures are retried.
        start_budget: Retries for workers that die while a group starts. With None, only the `num_attempts` of the
            scaling policy limits how often a start is attempted.

    Attributes:
        state: What the driver waits for. None between calls.
    """

    def __init__(
        self, lifecycle: Lifecycle, monitor: Monitor, failures: FailurePolicy, start_budget: RetryBudget | None
    ) -> None:
        self._lifecycle, self._monitor, self._failures = lifecycle, monitor, failures
        self._spec, self._scaling, self._snapshots = lifecycle.spec, lifecycle.scaling, lifecycle.snapshots
        self._start_budget = start_budget
        self._waits: dict[type[State], Callable[[Any], Event]] = {
            states.Running: self._running,
            states.Polling: self._polling,
            states.Settling: self._settling,
            states.TearingDown: self._tearing_down,
            states.FillingUp: self._filling_up,
            states.Regrouping: self._regrouping,
            states.Capturing: self._capturing,
            states.AwaitingSnapshot: self._awaiting_snapshot,
            states.Rebuilding: self._rebuilding,
            states.Scheduling: self._scheduling,
            states.Launching: self._launching,
            states.Restoring: self._restoring,
        }
        self.state: State | None = None
        # Step at which survivors continued in a smaller group, with more samples per worker, and in which call.
        self._went_on_at: int | None = None
        self._went_on_in: Call | None = None
        self._clear()

    def _clear(self, call: Call = _IDLE, budget: RetryBudget | None = None, reason: str = "") -> None:
        """Forget what belongs to the last call, restart or change."""
        self._call, self._budget = call, budget or RetryBudget(0)
        self._number: CallNumber | None = None
        self._was_sent, self._num_lost_copies = False, 0
        self._raised: BaseException = KeyboardInterrupt()
        self._values: list[Any] = []
        self._parts: Sequence[Capture] = ()
        self._answers = _NONE_FAILED  # of the last step that has formed or rebuilt a group
        self._progress: list[ReplicaProgress] = []  # of the members that have left their group
        self._steps = 0
        self._joining: list[StandbyWorker] = []
        self._obstacle = ""
        self._num_to_launch = self._num_spares = 0
        self._await_until: float | None = None
        self._note(reason)

    def _note(self, reason: str = "", report: GroupReport | None = None) -> Incident:
        """Something has befallen the group. `report` is that of the ranks' call; None if they may still run one."""
        lifecycle = self._lifecycle
        self._incident = Incident(lifecycle.now(), lifecycle.num_workers, lifecycle.group, reason)
        self._report = report
        self._survivors = NOBODY if lifecycle.group is None else frozenset(lifecycle.group.workers)
        self._rank_0 = None if lifecycle.group is None or not lifecycle.group.infos else lifecycle.group.infos[0]
        return self._incident

    # --------------------------------------------------------------------------------------------- what is asked for

    def run(self, call: Call, budget: RetryBudget, number: CallNumber | None) -> Completed | Left:
        """Run a call until all ranks have completed it, it has ended early, or no further attempt is allowed.

        Raises:
            WorkerError: User code raised an exception.
            UnevenStepsError: The ranks ran different steps, so some ranks would have waited for other ranks forever.
            WorkersLostError: The retries are used up, too few workers can be started, or the training state that the
                recovery needs is lost.
        """
        self._clear(call, budget)
        self._number = number
        is_resumed = number is not None and number.is_resumed
        return self._finish(Step(states.Running("resume" if is_resumed else "start")))

    def restart(self, kind: EventKind, cause: str) -> None:
        """Between two calls, start a new group as large as free resources allow, and restore the last snapshot.

        Args:
            kind: Kind of the event in the history.
            cause: Reason for the restart, for the history.

        Raises:
            WorkersLostError: Too few workers could be started, or the state is lost.
            WorkerError: The user's set-up code failed.
        """
        self._lifecycle.check_active()
        self._clear(reason=cause)
        self._finish(machine.restart(states.Restart(kind), self._facts()))

    def move(self, leaving: frozenset[str], cause: str) -> None:
        """Between two calls, remove the workers on nodes that are going away, and add ready standby workers.

        If workers are removed, wait up to `STANDBY_WAIT_S` for their replacements to start. If the group cannot be
        changed in place, restart it.

        Args:
            leaving: IDs of nodes that are being removed.
            cause: Reason for the change, for the history.
        """
        self._clear(reason=cause)
        self._finish(machine.leave_or_grow(self._on_nodes(leaving), self._facts()))

    def abandon_call(self) -> None:
        """End a call that a process before this one has left running, and the group with it."""
        self._clear()
        self._was_sent, interrupt = True, self._raised
        self._follow(machine.transition(states.Running(), states.Interrupted(), self._facts()))
        if self._raised is not interrupt:
            raise self._raised

    def ask_progress(self) -> GroupReport:
        """Ask each rank for its progress, which also shows which ranks are lost."""
        return self._on_all(replica.replica_progress)

    # ----------------------------------------------------------------------------------------------------- the table

    def _finish(self, step: Step) -> Completed | Left:
        finished, error = self._follow(step), self._raised
        ended = Left(list(self._parts)) if finished.how == "left" else Completed(self._values)
        self._clear()
        if finished.error is not None:
            raise error
        return ended

    def _follow(self, step: Step) -> states.Finished:
        """Perform the commands of each step, and wait for what its state names, until the recovery is over."""
        done: State | None = None
        event: Event | None = None
        try:
            while True:
                try:
                    if event is not None:
                        # No row of an answered call needs facts, and reading them may ask Ray about standby workers.
                        facts = Facts() if isinstance(event, states.CallAnswered) else self._facts()
                        done, step, event = step.state, self._next(step.state, event, facts), None
                    self.state = step.state
                    if isinstance(step.state, states.Finished) and step.state.error is not None:
                        self._raised = self._error(step.state.error)
                    for command in step.commands:
                        self._do(command, done, step.state)
                    if isinstance(step.state, states.Finished):
                        return step.state
                    event = self._wait(step.state)
                except BaseException as error:
                    event = self._interrupt(error)
        finally:
            self.state, self._lifecycle.is_fetching = None, False

    def _next(self, state: State, event: Event, facts: Facts) -> Step:
        step = machine.transition(state, event, facts)
        logger.debug("%s, %s -> %s", *(type(each).__name__ for each in (state, event, step.state)))
        return step

    def _interrupt(self, error: BaseException) -> states.Interrupted:
        """An error has ended a wait."""
        if isinstance(self.state, states.Running):
            self._note()
        self._raised, self._report = error, None
        if self._lifecycle.group is not None and not self._lifecycle.group.is_driver_only:
            self._lifecycle.interrupted = None  # the interrupt is handled here, so it must not be raised again
        return states.Interrupted(isinstance(error, WorkersLostError), isinstance(error, UnpicklableError))

    def _error(self, plan: states.Raise) -> BaseException:
        if plan.why in (End.INTERRUPTED, End.RANKS_DIFFER):
            return self._raised
        return self._incident.error(plan.why, self._lifecycle, self._budget, self._start_budget)

    def _facts(self) -> Facts:
        lifecycle, spec, snapshots, call = self._lifecycle, self._spec, self._snapshots, self._call
        budget, starts, group = self._budget, self._start_budget, lifecycle.group
        return Facts(
            in_call=call is not _IDLE,
            was_sent=self._was_sent,
            members=NOBODY if group is None else frozenset(group.workers),
            has_group=group is not None,
            is_driver_only=group is not None and group.is_driver_only,
            min_workers=self._scaling.min_workers,
            regroups=spec.regroups,
            renews=spec.renews,
            runs_on=spec.runs_on,
            uses_local=spec.use_local,
            continues=self._failures.continues,
            retries_user_errors=self._failures.retries_user_errors,
            can_continue=call.can_continue,
            keeps_alike=call.keeps_alike,
            must_end=call.leaves is not None and call.leaves(),
            is_ending=lifecycle.is_ending,
            is_cut_off=lifecycle.is_cut_off(),
            only_in_workers=lifecycle.holds_only_state,
            in_transit=snapshots.is_coming,
            is_lost=snapshots.is_lost,
            has_snapshot=snapshots.has_any,
            is_inside=snapshots.is_inside and not snapshots.calls_since,
            num_standby=0 if group is None else group.standby.num_all,
            num_lost_copies=self._num_lost_copies,
            num_retries=budget.num_restarts,
            num_left=budget.num_restarts - budget.num_spent,
            continued_at=budget.continued_at,
            free_from=budget.free_from,
            num_starts_left=None if starts is None else starts.num_restarts - starts.num_spent,
            num_attempts=self._scaling.num_attempts,
        )

    # ------------------------------------------------------------------------------------------------------ commands

    def _do(self, command: states.Command, done: State | None, state: State) -> None:
        """Perform a command, after the wait of `done` and before that of `state`."""
        lifecycle, snapshots, budget = self._lifecycle, self._snapshots, self._budget
        match command:
            case states.Record(kind):
                self._record(kind, done, state)
            case states.Abandon(change, members):
                self._abandon(change, members)
            case Do.FORGET_CALLS:
                snapshots.forget_calls()
            case Do.GIVE_STATE_UP:
                lifecycle.gives_state_up = True
            case Do.DROP_IN_TRANSIT:
                snapshots.drop_incoming()
            case Do.TAKE_PARTS:
                snapshots.take_from(lifecycle.running, self._parts)
            case Do.LEAVE_CALL:
                snapshots.leave_call()
            case Do.NOTE_ABORTED:
                snapshots.note_broken_off(self._call, has_group=lifecycle.group is not None)
            case Do.KEEP_FACTS if isinstance(done, states.Rebuilding):
                lifecycle.take_answers(self._answers)
            case Do.KEEP_FACTS:
                lifecycle.keep_facts(list(self._answers.values))
            case Do.KILL_OTHERS:
                members = state.members if isinstance(state, states.Forming) else self._survivors
                others = set(range(len(lifecycle.running))) - set(self._ranks(members)) - lifecycle.running.gone
                lifecycle.running.remove_workers(sorted(others))
            case Do.KILL_JOINING:
                self._kill_joining()
            case Do.KILL_GROUP:
                lifecycle.kill_group()
            case Do.SUSPECT_NODES:
                lifecycle.suspect(self._ranks(self._survivors))
            case Do.NOTE_HANG:
                budget.note_hang()
            case Do.PAY_TO_CONTINUE:
                budget.pay_for_continuing(self._steps)
            case Do.PAY_FOR_RESTART:
                budget.pay_for_restart()
            case Do.PAY_FOR_START:
                assert self._start_budget is not None
                self._start_budget.pay_for_restart()
            case Do.NOTE_REFUSED:
                budget.refuse()
            case Do.NOTE_REFUSED_START:
                assert self._start_budget is not None
                self._start_budget.refuse()
            case Do.NOTE_LOST_COPY:
                self._num_lost_copies += 1
            case Do.NOTIFY_CHANGE:
                self._notify_change(done)
            case Do.NOTIFY_FAILURE:
                assert self._incident.diagnosis is not None
                lifecycle.hooks.on_failure(self._incident.diagnosis)

    def _record(self, kind: EventKind, done: State | None, state: State) -> None:
        lifecycle, incident, cause, detail, num_kept = self._lifecycle, self._incident, "", "", 0
        if isinstance(state, states.Finished) and state.error is not None:
            cause = incident.cause_of(state.error.why, self._raised, in_restart=state.error.ends_restart)
        elif isinstance(state, states.Finished) and state.how == "left":
            cause = f"{len(self._survivors)} of at least {self._scaling.min_workers} workers are left"
        elif isinstance(done, states.Regrouping):
            incident.lose(done.change.expected - done.members)
            cause, detail = incident.cause, self._source.words
        else:
            cause, detail = incident.cause, self._snapshots.restored_from()
            num_kept = incident.num_kept(frozenset(lifecycle.running.workers))
        lifecycle.record(kind, incident.size, incident.began, cause, detail, num_kept)
        if isinstance(done, states.Restoring):
            lifecycle.end_replacements()

    def _abandon(self, change: Change, members: Members) -> None:
        self._kill_joining()
        obstacle = self._obstacle or "no worker is left"
        if isinstance(change.plan, states.EndEarly):
            logger.warning("no worker has the state of a completed step: %s", obstacle)
        elif change.why is Why.EVACUATE:
            logger.warning("the state that only workers have cannot be fetched: %s", obstacle)
        elif change.why is Why.REUSE:
            logger.warning("no process can be reused, so new workers are started: %s", obstacle)
        else:
            self._incident.lose(change.expected - members)
            self._incident.obstacles += [self._obstacle] if self._obstacle and members else []

    def _kill_joining(self) -> None:
        joining, self._joining = self._joining, []
        for each in joining:
            self._lifecycle.running.standby.kill(each.worker)

    def _notify_change(self, done: State | None) -> None:
        lifecycle, group = self._lifecycle, self._lifecycle.running
        lifecycle.hooks.on_change(group)
        is_smaller = len(group) < self._scaling.max_workers
        is_failure = isinstance(done, states.Regrouping) and done.change.why is Why.FAILURE
        may_lack_memory = is_failure and is_smaller and lifecycle.resizing.minds_memory
        self._went_on_at, self._went_on_in = self._steps if may_lack_memory else None, self._call
        lifecycle.owe_spares()

    # --------------------------------------------------------------------------------------------------------- waits

    def _wait(self, state: State) -> Event:
        """Wait for what a state names. Return how the wait has ended."""
        self._obstacle = ""
        change: Any = getattr(state, "change", None)
        is_evacuation = change is not None and change.why is Why.EVACUATE
        self._lifecycle.is_fetching = is_evacuation and not isinstance(change.plan, states.EndEarly)
        return self._waits[type(state)](state)

    def _on_all(self, function: Callable[..., Any]) -> GroupReport:
        group = self._lifecycle.running
        return group.on_replica(function, dict.fromkeys(range(len(group)), ()), on_wait=self._monitor.poll)

    def _ranks(self, members: Members) -> list[int]:
        return [rank for rank, worker in enumerate(self._lifecycle.running.workers) if worker in members]

    def _of_ranks(self, ranks: Iterable[int]) -> Members:
        workers = self._lifecycle.running.workers
        return frozenset(workers[rank] for rank in ranks)

    def _on_nodes(self, nodes: frozenset[str]) -> Members:
        return self._of_ranks(rank for rank, info in enumerate(self._lifecycle.running.infos) if info.node_id in nodes)

    # ---- the call

    def _running(self, state: states.Running) -> Event:
        lifecycle, monitor, snapshots, call = self._lifecycle, self._monitor, self._snapshots, self._call
        lifecycle.check_active()
        group = lifecycle.running
        resumes = state.mode == "resume"
        args = call.args_for(group.worlds)
        self._parts = ()
        snapshots.poll()
        began, has_others, captures = lifecycle.now(), not group.is_driver_only, snapshots.is_due_after(call)
        if has_others:
            monitor.watch(call)
        else:
            monitor.is_on = False

        def on_wait() -> None:
            monitor.poll()
            if lifecycle.interrupted is not None:
                lifecycle.check_active()
            if call.on_wait is not None:
                call.on_wait()

        number = None if self._number is None else replace(self._number, is_resumed=resumes)
        self._number = None if number is None else replace(number, attempt=number.attempt + 1)
        self._was_sent = True
        report = group.on_replica(
            call.resume if resumes and call.resume is not None else call.function,
            call.on_its_ranks(args),
            capture=captures,
            landed=snapshots.landed_token,
            number=number,
            on_wait=on_wait if has_others else call.on_wait,
            by_line=call.is_short,
        )
        if not report.ok:
            return self._failed(report)
        values = [answer.value for answer in report.values]
        # If some ranks stopped between two steps, the call is not complete, even if it has ended on other ranks.
        if any(isinstance(value, HeldAtStep) for value in values):
            return self._paused(report, values)
        try:
            call.check(values)
        except BaseException as error:
            self._raised = error
            self._note()
            return states.CallAnswered(End.RANKS_DIFFER if isinstance(error, RanksDifferError) else End.INTERRUPTED)
        self._values = values
        if call.is_kept:
            snapshots.note_call(call, lifecycle.now() - began)
        # A worker that repeats its reply to the last attempt may send a copy even if `captures` is False.
        copies = [answer.capture for answer in report.values if answer.capture is not None]
        if copies and (self._spec.captures or captures):
            snapshots.take_from(group, copies)
            snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return states.CallAnswered()

    def _paused(self, report: GroupReport, values: Sequence[Any]) -> states.Paused:
        """All ranks stopped between two steps: the call must end early, or workers leave or join."""
        lifecycle, monitor, call = self._lifecycle, self._monitor, self._call
        self._note(monitor.reason, report)
        all_stopped = all(isinstance(each, HeldAtStep) for each in values)
        is_planned = monitor.is_leaving or (all_stopped and all(each.is_planned for each in values))
        must_end = all_stopped and (is_planned or (call.leaves is not None and call.leaves()))
        if not must_end:
            lifecycle.check_active()
            monitor.go_on()
        self._parts = () if self._spec.runs_on and not must_end else [each.part for each in values]
        return states.Paused(must_end, self._on_nodes(lifecycle.leaving_nodes_in_use()))

    def _failed(self, report: GroupReport) -> states.CallFailed:
        """A rank was lost, or user code raised."""
        lifecycle, call, diagnosis = self._lifecycle, self._call, classify(report)
        lifecycle.check_active()
        self._monitor.go_on()
        incident = self._note("", report)
        incident.diagnosis = diagnosis
        answers = {
            each.rank: each.value.value if isinstance(each, Answered) else each.failure for each in report.outcomes
        }
        incident.divergence = call.divergence(answers)
        incident.lacks_memory = not incident.divergence and self._lacks_memory(diagnosis)
        if incident.lacks_memory:
            lifecycle.note_short_of_memory()
            self._went_on_at = None
            logger.warning("%s; waiting for new workers", incident.cause)
            lifecycle.start_standby()  # if survivors continued in place before, no new workers were started then
        if diagnosis.kind == "disconnected" and not self._spec.keeps_survivors:
            self._monitor.tell_stuck()
        self._failures.renew_if_due(self._budget, can_continue=call.can_continue)
        continues = self._failures.continues and call.can_continue and self._budget.num_restarts
        if diagnosis.kind == "disconnected" and self._budget.is_spent and not continues:
            # No one looks for the ranks behind the lost connections later, so that the error could name them.
            everyone = range(len(lifecycle.running))
            incident.lost = set(everyone) - set(lifecycle.running.answering(everyone))
        return states.CallFailed(
            diagnosis.kind, bool(incident.divergence), report.all_answered, failed_alike(report), incident.lacks_memory
        )

    def _lacks_memory(self, diagnosis: Diagnosis) -> bool:
        """Return True if survivors ran out of memory in their first step after the group shrank.

        With fewer workers, each worker's part of the global batch is larger.
        """
        went_on_at = self._went_on_at
        if went_on_at is None or self._went_on_in is not self._call or not is_lack_of_memory(diagnosis):
            return False
        signs = self._lifecycle.running.ask_beside(replica.sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= went_on_at for sign in signs.values())

    def _polling(self, state: states.Polling) -> Event:
        report = self.ask_progress()
        if not report.ok:
            return self._failed(report) if state.why is states.Poll.RESUME else states.CallFailed(classify(report).kind)
        found = [answer.value for answer in report.values]
        self._steps = max(each.progress for each in found)
        obstacle = self._facts().obstacle_to_continuing(self._steps) if state.why is states.Poll.PAY else None
        if obstacle:
            self._incident.obstacles.append(obstacle)
        elif state.why is states.Poll.PAY:
            logger.warning("%s; the call is tried again before it ends early", self._incident.cause)
        return states.Polled(are_alike(found), self._steps)

    # ---- a change in place

    def _settling(self, state: states.Settling) -> states.Survivors:
        group, change = self._lifecycle.running, state.change
        self._await_until = None
        if change.why is Why.REUSE and not self._spec.renews:
            # Avoid the nodes of silent ranks, because killing an actor does not end a frozen process.
            living = group.answering([rank for rank in range(len(group)) if rank not in group.gone | group.silent])
        elif change.why is Why.EVACUATE:
            if not change.num_copies and not isinstance(change.plan, states.EndEarly):
                self._monitor.watch()
            settled = self._settled()
            # A stuck rank may still finish a long step. A call that must end early asks it only if no other is left.
            with_stuck = {*settled, *group.stuck}
            ranks = set(settled) if settled and isinstance(change.plan, states.EndEarly) else with_stuck
            answering = group.answering(sorted(ranks - group.gone))
            living = [rank for rank in answering if group.workers[rank] not in self._lifecycle.newcomers]
        else:
            living = self._settled(self._monitor.tell_stuck)
        if change.why is Why.FAILURE:
            self._incident.silent = set(group.silent)
        if change.why is Why.REUSE and not (living and self._spec.renews):
            group.standby.kill_unresponsive()  # spare workers may have died together with the workers
        self._survivors = self._of_ranks(living)
        return states.Survivors(self._survivors, bool(group.stuck))

    def _settled(self, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """End the calls that ranks may still run. Return the ranks that can be used again.

        Args:
            tell_stuck: Called once if a live rank takes long to finish its call.
        """
        group = self._lifecycle.running
        return group.settle_any() if self._report is None else group.settle(self._report, tell_stuck)

    def _tearing_down(self, state: states.TearingDown) -> states.Progress | states.Lost:
        group, change, staying = self._lifecycle.running, state.change, self._ranks(state.members)
        self._survivors = state.members
        report = group.tear_down(staying, self._monitor.poll)
        if not report.ok:
            return self._lost_in_tear_down(change, staying, report)
        stale = self._ranks(state.stale)
        self._progress = [
            # Ignore obstacles to continuing: a replica that cannot continue can still send its state.
            replace(
                found,
                is_whole=found.is_whole and rank not in stale,
                obstacle=None if change.why is Why.EVACUATE else found.obstacle,
            )
            for rank, found in zip(staying, report.values, strict=True)
        ]
        source = choose_source(self._progress)
        if source is None:
            obstacles = [each.obstacle for each in self._progress if each.obstacle]
            obstacle = [*obstacles, "each was in the middle of a step that had begun to change its state"][0]
            self._obstacle = f"the survivors cannot continue by themselves: {obstacle}"
            return states.Progress(False)
        self._steps = self._progress[source].progress
        if change.why is Why.FAILURE:
            self._obstacle = self._facts().obstacle_to_continuing(self._steps) or ""
        return states.Progress(True, self._steps)

    def _lost_in_tear_down(self, change: Change, staying: Sequence[int], report: GroupReport) -> states.Lost:
        failed = {outcome.rank: outcome.failure for outcome in report.outcomes if not outcome.ok}
        if any(failure is not None and failure.kind == "user" for failure in failed.values()):
            self._obstacle = "a surviving worker could not report its progress"
            logger.warning("%s: %s", self._obstacle, words(classify(report)))
            return states.Lost(self._of_ranks(staying), by_user=True)
        # Ranks that have not answered are not in this set, because they may just be slow.
        dead = {rank for rank, failure in failed.items() if failure is not None} or set(failed)
        left = self._of_ranks(rank for rank in staying if rank not in dead)
        if change.why is Why.REUSE and not left:
            self._lifecycle.running.standby.kill_unresponsive()
        return states.Lost(left)

    @property
    def _source(self) -> ReplicaProgress:
        """The progress of the survivor whose training state the other ranks copy."""
        source = choose_source(self._progress)
        assert source is not None, "a group without a source is not formed"
        return self._progress[source]

    def _filling_up(self, state: states.FillingUp) -> states.Filled:
        lifecycle, group, change, members = self._lifecycle, self._lifecycle.running, state.change, state.members
        if not members:
            self._progress = []
        if self._await_until is None:
            wait_s = math.inf if change.why is Why.MEMORY else STANDBY_WAIT_S
            self._await_until = lifecycle.now() + wait_s
        if self._fill_up(change, len(members), max(0.0, self._await_until - lifecycle.now())):
            # Poll the ranks again, because some may have died unnoticed during the wait.
            self._survivors = self._of_ranks(group.answering(self._ranks(members)))
            if self._survivors != members:
                return states.Filled(len(self._joining), members - self._survivors)
        least = self._scaling.min_workers
        # Survivors that continue do not take workers that are still starting, which a restart may need.
        if change.why is Why.REUSE:
            missing = least - len(members) - len(self._joining)
            self._joining += group.standby.take_needed(missing, missing, self._monitor.poll) or []
        num_workers = len(members) + len(self._joining)
        if num_workers < least:
            self._obstacle = f"{num_workers} workers are left, but {least} are needed"
        return states.Filled(len(self._joining))

    def _fill_up(self, change: Change, num_staying: int, wait_s: float) -> bool:
        """Take ready standby workers, and start more of them if the group is not full.

        If the group has too few members, wait up to `wait_s` for workers that are starting. Do nothing if a survivor's
        call does not admit other workers now. Return True if this method had to wait.
        """
        lifecycle, standby = self._lifecycle, self._lifecycle.running.standby
        most, least, avoided = self._scaling.max_workers, self._scaling.min_workers, lifecycle.nodes_to_avoid
        admits = all(each.admits for each in self._progress)
        missing = most - num_staying - len(self._joining) if admits else 0
        if missing <= 0:
            return False
        standby.kill_on(avoided)
        self._joining += standby.take_ready(missing, 0.0)
        num_workers = num_staying + len(self._joining)
        if not lifecycle.is_ending:  # while the program ends, Ray may be unable to report which nodes are alive
            standby.start_more(most - num_workers - standby.num_coming, most, avoided)
        missing = max(self._num_awaited(change), least) - num_workers
        if not wait_s or missing <= 0 or not standby.num_coming:
            return False
        self._joining += standby.take_ready(missing, wait_s, self._monitor.poll)
        return True

    def _num_awaited(self, change: Change) -> int:
        """Return for how many members a change waits, beside `min_workers`."""
        if change.has_regrouped or change.why is Why.GROW:
            return 0
        if change.why in (Why.MEMORY, Why.DRAIN):
            return self._scaling.max_workers
        return 0 if self._lifecycle.is_ending else self._lifecycle.resizing.num_awaited

    def _regrouping(self, state: states.Regrouping) -> states.Formed | states.Lost:
        lifecycle, group, change = self._lifecycle, self._lifecycle.running, state.change
        joining, self._joining, self._await_until = self._joining, [], None
        staying = self._ranks(state.members)
        num_workers = len(staying) + len(joining)
        places = rank_rules.places(staying if self._spec.runs_on else range(len(staying)), num_workers)
        source = self._progress.index(self._source)
        takers_of_state = (*(places[each] for each in takers(self._progress, source)), *places[len(staying) :])
        leaving = self._incident.of_leaving(self._parts, change.expected) if change.why is Why.DRAIN else []
        handover = StateHandover(places[source], takers_of_state, tuple(part.progress for part in leaving))
        newcomers = lifecycle.newcomers
        newcomers.update(each.worker for each in joining)
        report = group.regroup(staying, joining, handover, self._monitor.poll, places)
        newcomers.difference_update(group.workers[outcome.rank] for outcome in report.outcomes if outcome.ok)
        self._report = report
        if report.ok:
            before, self._rank_0, self._answers = self._rank_0, group.infos[0], report
            self._survivors = frozenset(group.workers)
            return states.Formed(moves_rank_0=before != self._rank_0)
        diagnosis = classify(report)
        self._obstacle = f"could not form a new group: {words(diagnosis)}"
        logger.warning("%s", self._obstacle)
        failed = self._of_ranks(outcome.rank for outcome in report.outcomes if not outcome.ok)
        if diagnosis.kind == "user":
            return states.Lost(state.members, failed, by_user=True)
        self._survivors = self._of_ranks(group.settle(report))
        return states.Lost(self._survivors, failed)

    # ---- the state goes to the driver

    def _capturing(self, state: states.Capturing) -> states.Captured | states.Lost:
        self._report = report = self._on_all(replica.capture_here)
        if not report.ok:
            self._obstacle = f"it was lost in transit {NUM_COPIES} times"
            return states.Lost()
        self._parts = [answer.value for answer in report.values]
        return states.Captured(all(part.progress is not None for part in self._parts))

    def _awaiting_snapshot(self, state: states.AwaitingSnapshot) -> states.Landed | states.LostInTransit:
        snapshots = self._snapshots
        self._obstacle = f"it was lost in transit {NUM_COPIES} times"
        if state.is_brief:  # the workers that send it are about to be replaced
            self._lifecycle.check_active()
            self._lifecycle.allow_replacements()
            snapshots.poll(timeout_s=_AWAITED_S if snapshots.is_awaited else SETTLE_S)
            has_landed = not snapshots.is_coming
            snapshots.drop_incoming()
            return states.Landed() if has_landed else states.LostInTransit()
        self._monitor.await_snapshot()
        return states.Landed() if snapshots.shares_current else states.LostInTransit()

    # ---- back to the last snapshot

    def _rebuilding(self, state: states.Rebuilding) -> states.Done | states.Lost:
        lifecycle, group, on_wait = self._lifecycle, self._lifecycle.running, self._monitor.poll
        if state.is_again:
            assert self._report is not None
            report, on_wait = self._report, Monitor(lifecycle, is_of_restore=True).poll
        else:
            joining, self._joining = self._joining, []
            report = group.renew(self._ranks(state.members), joining, on_wait)
        self._answers = report = lifecycle.without_lost(report, group, on_wait)
        if not report.ok:
            what = "restore the state" if state.is_again else "form a new group"
            logger.warning("could not %s: %s", what, words(classify(report)))
        return states.Done() if report.ok else states.Lost()

    def _scheduling(self, state: states.Scheduling) -> states.Resources:
        plan = state.plan
        lifecycle, scaling, spec, cause = self._lifecycle, self._scaling, self._spec, self._incident.cause
        if plan.kind == "restarted" and not plan.attempt:
            lifecycle.make_room()
        view = lifecycle.settled_view()
        decision = scaling.decide(view, spec.resources, plan.attempt)
        if not isinstance(decision, WaitForWorkers):
            spares = min(spec.num_spares, capacity(view, spec.resources) - decision)
            self._num_to_launch, self._num_spares = decision, max(0, spares)
            return states.Resources(True)
        # Not checked after a failure, because the workers may fit once lost nodes come back.
        impossible = None
        if plan.kind == "started":
            impossible = impossibility(spec.resources, scaling.min_workers, view, spec.words.with_cpus)
        if decision.delay_s is None:
            table = impossible or explain(spec.resources, scaling.max_workers, view)
            few = f"Too few workers can be started: {decision.reason}."
            raise WorkersLostError(f"{few}\n{table}\n{spec.words.when_starved}".rstrip())
        if impossible and not plan.attempt:
            logger.warning("%s", impossible)
        logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)

        def sleep(seconds: float) -> None:
            lifecycle.sleep(seconds)
            lifecycle.check_not_ending(cause)

        slots = lifecycle.make_group(spec, scaling.min_workers).slots
        slots.await_room(scaling.min_workers, decision.delay_s, sleep, has_driver=spec.use_local)
        return states.Resources(False)

    def _launching(self, state: states.Launching) -> states.Done | states.Lost | states.NotGranted:
        try:
            has_started = self._lifecycle.try_start(self._num_to_launch, self._num_spares, _REBUILD_RESERVATION_S)
        except ReservationTimeoutError as error:  # another program took the free resources, or their node was lost
            logger.warning("%s", str(error).partition("\n")[0])
            return states.NotGranted()
        return states.Done() if has_started else states.Lost()

    def _restoring(self, state: states.Restoring) -> states.Done | states.Lost:
        """Restore the last snapshot in the current group, then repeat the calls made since that snapshot."""
        group, snapshots = self._lifecycle.running, self._snapshots
        # Also watch the repeated calls, which may hang, too.
        on_wait = Monitor(self._lifecycle, is_of_restore=True).poll
        snapshot = snapshots.landed
        # Choose copies of the shards on live nodes.
        if snapshot is not None and isinstance(snapshot.shared_state, DividedValue):
            parts = snapshot.shared_state.best_on({info.node_id for info in group.infos})
            snapshot = snapshots.landed = replace(snapshot, shared_state=parts)
        if snapshot is not None:
            function: Callable[..., Any] = replica.restore if snapshot.progress is None else replica.restore_inside
            rests, shared = snapshot.for_ranks(len(group)), group.share(snapshot.shared_state)
            args: dict[int, Sequence[Any]] = {rank: (shared[rank], *rest) for rank, rest in enumerate(rests)}
            if snapshot.progress is not None:  # all ranks read it from one stored copy, because it grows with the group
                everyones = group.share([each.for_others() for each in snapshot.progress])
                args = {rank: (*given, everyones[rank]) for rank, given in args.items()}
            if self._has_lost_workers(group.on_replica(function, args, on_wait=on_wait)):
                return states.Lost()
        is_inside = snapshots.is_inside
        if snapshots.calls_since:
            logger.info("repeating the calls that the last snapshot does not cover: %s", snapshots.restored_from())
        for call in snapshots.calls_since:
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            if self._has_lost_workers(group.on_replica(function, args, on_wait=on_wait)):
                return states.Lost()
        return states.Done()

    def _has_lost_workers(self, report: GroupReport) -> bool:
        """Return True if a call failed because workers were lost, and False if it succeeded.

        Args:
            report: The outcomes of the call.

        Raises:
            WorkerError: User code raised an exception.
            WorkersLostError: A shard of the snapshot was lost.
        """
        self._report = report
        if report.ok:
            return False
        diagnosis = classify(report)
        if diagnosis.kind != "user":
            return True
        lost_parts = [fault.error for fault in diagnosis.faults if isinstance(fault.error, LostPartError)]
        if lost_parts:  # no node has this rank's shard of the snapshot
            raise WorkersLostError(f"{lost_parts[0]} {self._snapshots.last_file_in_words}")
        raise worker_error(diagnosis.faults)
