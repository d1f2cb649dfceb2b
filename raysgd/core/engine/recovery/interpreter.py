"""Runs calls and recovers from their failures: waits for what each state of `machine.transition` names.

A call that nothing befalls goes by the same table: `Running`, then `Finished`. `Interpreter` is the only place of the
engine that waits for a recovery, and handles what interrupts it. The table in `machine` decides what follows what. ADR
9 explains why survivors keep their processes, ADR 11 when they wait for new workers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.engine.lifecycle import SETTLE_S, START_ATTEMPTS, Lifecycle
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.platform import RemoteWorker
from raysgd.core.engine.policies import (
    Diagnosis,
    RetryBudget,
    are_alike,
    classify,
    failed_alike,
    is_lack_of_memory,
    next_ranks,
    takers,
    words,
)
from raysgd.core.engine.recovery import machine
from raysgd.core.engine.recovery.incident import Incident
from raysgd.core.engine.recovery.machine import Continue, CopyInside, Do, End, Evacuate, Reuse, Trigger
from raysgd.core.engine.shared.interface import (
    Call,
    Capture,
    Completed,
    EventKind,
    GroupSpec,
    Left,
    RegroupingReplica,
    method_of,
    nothing,
    sign_of_life,
)
from raysgd.core.engine.shared.types import Answered, Failed, GroupReport, HeldAtStep, StateHandover
from raysgd.core.engine.transfers import LostPartError
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import (
    RanksDifferError,
    ReservationTimeoutError,
    WorkersLostError,
)

logger = logging.getLogger(__name__)

# Longest time for which survivors wait for new workers; workers that take longer can still join later.
STANDBY_WAIT_S = 30.0
_RESERVATION_S = 10.0  # how long to wait for resources that were free a moment ago
_IN_THE_WAY_S = 5.0  # if this program's other trainers hold the resources: they rarely release them
# Replacements per worker while a group starts, shared by all workers. A start has the same number of retries.
_REPLACEMENTS = START_ATTEMPTS - 1
_NO_CALL = Call(nothing)
_AWAITED_S = 10.0  # how long to wait for a snapshot that a caller needs, for example to save it to a file


class Interpreter:
    """Runs a trainer's calls, and repairs or replaces the worker group after a failure.

    Args:
        lifecycle: Holds the worker group.
        monitor: Watches the group.

    Attributes:
        state: What the driver waits for. None between calls.
    """

    def __init__(self, lifecycle: Lifecycle, monitor: Monitor) -> None:
        self._lifecycle, self._monitor = lifecycle, monitor
        self._spec, self._scaling, self._snapshots = lifecycle.spec, lifecycle.scaling, lifecycle.snapshots
        self._waits: dict[type[machine.State], Callable[[Any], machine.Event | Completed]] = {
            machine.Running: self._running,
            machine.Polling: self._polling,
            machine.Settling: self._settling,
            machine.TearingDown: self._tearing_down,
            machine.FillingUp: self._filling_up,
            machine.Regrouping: self._regrouping,
            machine.Capturing: self._capturing,
            machine.AwaitingSnapshot: self._awaiting_snapshot,
            machine.AwaitingCopy: self._awaiting_snapshot,
            machine.AwaitingBriefly: self._awaiting_briefly,
            machine.Rebuilding: self._rebuilding,
            machine.Replacing: self._replacing,
            machine.Scheduling: self._scheduling,
            machine.Launching: self._launching,
            machine.Restoring: self._restoring,
        }
        self.state: machine.State | None = None
        self._begin()

    def _begin(
        self,
        reason: str = "",
        call: Call = _NO_CALL,
        budget: RetryBudget | None = None,
        number: CallNumber | None = None,
    ) -> None:
        """Begin a call, or a change of the group between two calls, which happens for a `reason`."""
        self._call, self._budget, self._number = call, budget or RetryBudget(0), number
        self._starts = self._lifecycle.start_budget  # retries of a start, if they are limited
        self._was_sent = False  # True if a rank may have received the call
        self._num_lost_copies = 0  # snapshots of the paused call that were lost
        # Position in the call at which survivors continued in a smaller group, with more samples per worker.
        self._shrank_at: int | None = None
        self._error: BaseException | None = None  # with which the call ends, if it fails
        self._joining: list[RemoteWorker] = []  # standby workers that were taken for the next group
        self._until: float | None = None  # until when others are awaited for it, on the engine's clock
        self._note(reason)

    def _note(self, reason: str = "", report: GroupReport | None = None) -> Incident:
        """Record that something has befallen the group. `report` is of the ranks' call; None if it may still run."""
        self._incident, self._report = Incident(self._lifecycle, reason), report
        self._parts: list[Capture] = []  # of the snapshot that the ranks have copied since
        return self._incident

    @property
    def doing(self) -> str:
        """Name of the state of the running recovery. Empty if no recovery runs."""
        return "" if isinstance(self.state, machine.Running | None) else type(self.state).__name__

    @property
    def is_fetching(self) -> bool:
        """True while training state that exists only in the workers is being fetched."""
        return isinstance(getattr(self.state, "change", None), Evacuate)

    # --------------------------------------------------------------------------------------------- what is asked for

    def run(self, call: Call, budget: RetryBudget, number: CallNumber | None) -> Completed | Left:
        """Run a call until all ranks have completed it, it has ended early, or no further attempt is allowed.

        Raises:
            WorkerError: User code raised an exception.
            UnevenStepsError: The ranks ran different steps, so some ranks would have waited for other ranks forever.
            WorkersLostError: The retries are used up, too few workers can be started, or the training state that the
                recovery needs is lost.
        """
        self._begin("", call, budget, number)
        is_resumed = number is not None and number.is_resumed
        ended = self._follow(machine.Transition(machine.Running("resume" if is_resumed else "start")))
        assert ended is not None, "a call that runs ends"
        return ended

    def restart(self, kind: EventKind, cause: str, *, needs_all: bool = False) -> None:
        """Between two calls, start a new group as large as free resources allow, and restore the last snapshot.

        Args:
            kind: Kind of the event in the history.
            cause: Reason for the restart, for the history.
            needs_all: True to start all workers, and to wait until their resources are granted.

        Raises:
            WorkersLostError: Too few workers could be started, or the state is lost.
            WorkerError: The user's set-up code failed.
            ReservationTimeoutError: With `needs_all`, the resources were not granted in time.
        """
        self._lifecycle.check_active()
        self._begin(cause)
        if needs_all and self._starts is None:
            self._starts = RetryBudget(START_ATTEMPTS - 1)
        self._follow(machine.restart(machine.Restart(kind, needs_all=needs_all), self._known()))

    def move(self, leaving: frozenset[str], cause: str) -> None:
        """Between two calls, remove the workers on nodes that are going away, and add ready standby workers.

        If workers are removed, wait up to `STANDBY_WAIT_S` for their replacements to start. If the group cannot be
        changed in place, restart it.

        Args:
            leaving: IDs of nodes that are being removed.
            cause: Reason for the change, for the history.
        """
        self._begin(cause)
        self._follow(machine.leave_or_grow(self._on_nodes(leaving), self._known()))

    def abandon_call(self) -> None:
        """End a call that a process before this one has left running, and the group with it."""
        self._begin()
        self._was_sent, interrupt = True, KeyboardInterrupt()
        try:
            event = machine.Interrupted(error=interrupt)
            self._follow(machine.transition(machine.Running(), event, self._known()))
        except KeyboardInterrupt as error:
            if error is not interrupt:
                raise

    def ask_progress(self) -> GroupReport:
        """Ask each rank for its progress, which also shows which ranks are lost."""
        return self._on_all(method_of(RegroupingReplica.replica_progress))

    # ----------------------------------------------------------------------------------------------------- the table

    def _follow(self, transition: machine.Transition) -> Completed | Left | None:
        """Perform the commands of each transition, and wait for what its state names, until the recovery is over.

        Return how the call has ended. None if none runs.
        """
        done: machine.State | None = None
        event: machine.Event | None = None
        try:
            while True:
                try:
                    if event is not None:
                        done, transition = transition.state, self._next(transition.state, event, self._known())
                    self.state = state = transition.state
                    plan = state.plan if isinstance(state, machine.Finished) else None
                    self._error = self._raised(plan) if isinstance(plan, machine.Raise) else None
                    for command in transition.commands:
                        self._do(command, done, state)
                    if isinstance(state, machine.Finished):
                        break
                    ended = self._waits[type(state)](state)
                    if isinstance(ended, Completed):
                        return ended
                    event = ended
                except BaseException as interrupt:
                    event = self._interrupt(interrupt)
            error, parts = self._error, self._parts
        finally:
            self.state, self._monitor.is_on = None, False
            self._begin()
        if error is not None:
            raise error
        return Left(parts) if isinstance(plan, machine.EndEarly) else None

    def _next(self, state: machine.State, event: machine.Event, known: machine.Known) -> machine.Transition:
        transition = machine.transition(state, event, known)
        logger.debug("%s, %s -> %s", *(type(each).__name__ for each in (state, event, transition.state)))
        return transition

    def _known(self) -> machine.Known:
        """Return what is known now, for the next transition."""
        lifecycle, call, budget, starts = self._lifecycle, self._call, self._budget, self._starts
        snapshots, group = self._snapshots, lifecycle.group
        return machine.Known(
            spec=lifecycle.spec,
            scaling=lifecycle.scaling,
            failures=lifecycle.failures,
            in_call=call is not _NO_CALL,
            was_sent=self._was_sent,
            members=machine.NO_WORKERS if group is None else frozenset(group.workers),
            is_driver_only=group is not None and group.is_driver_only,
            can_continue=call.can_continue,
            keeps_alike=call.keeps_alike,
            must_end=call.leaves is not None and call.leaves(),
            is_ending=lifecycle.is_ending,
            is_cut_off=lifecycle.is_cut_off(),
            only_in_workers=lifecycle.holds_only_state,
            in_transit=snapshots.is_coming,
            is_lost=snapshots.is_lost,
            has_snapshot=snapshots.has_any,
            num_standby=0 if group is None else group.standby.num_all,
            num_lost_copies=self._num_lost_copies,
            num_retries=budget.num_retries,
            num_left=budget.num_retries - budget.num_spent,
            continued_at=budget.continued_at,
            free_from=budget.free_from,
            num_starts_left=None if starts is None else starts.num_retries - starts.num_spent,
        )

    def _interrupt(self, error: BaseException) -> machine.Interrupted:
        """An error has ended a wait."""
        if isinstance(self.state, machine.Running):
            self._note()
        self._report = None
        if self._lifecycle.group is not None and not self._lifecycle.group.is_driver_only:
            self._lifecycle.interrupted = None  # the interrupt is handled here, so it must not be raised again
        return machine.Interrupted(error)

    # ------------------------------------------------------------------------------------------------------ commands

    def _do(self, command: machine.Command, done: machine.State | None, state: machine.State) -> None:
        """Perform a command, after the wait of `done` and before that of `state`."""
        lifecycle, snapshots = self._lifecycle, self._snapshots
        match command, done:
            case machine.Record(kind), _:
                self._record(kind, done, state)
            case machine.Abandon(), _:
                self._abandon(command)
            case Do.GIVE_STATE_UP, _:
                lifecycle.gives_state_up = True
            case Do.LEAVE_CALL, _:
                snapshots.leave_call()
            case Do.NOTE_ABORTED, _:
                snapshots.note_broken_off(self._call, has_group=lifecycle.group is not None)
            case Do.KILL_JOINING, _:
                for each in self._taken():
                    lifecycle.running.standby.kill(each)
            case Do.KILL_GROUP, _:
                lifecycle.kill_group()
            case Do.PAY_TO_CONTINUE, machine.Regrouping():
                self._budget.pay_for_continuing(done.source.position)
            case Do.PAY_TO_CONTINUE, machine.Capturing(change) | machine.AwaitingCopy(change):
                assert isinstance(change, CopyInside), "only a call that must end early is tried again"
                logger.warning("%s; the call is tried again before it ends early", self._incident.cause)
                self._budget.pay_for_continuing(change.position)
            case Do.PAY_FOR_RESTART, _ if self._incident.diagnosis is not None:
                self._budget.pay_for_restart()
                lifecycle.hooks.on_failure(self._incident.diagnosis)
            case Do.PAY_FOR_START, _ if self._starts is not None:
                self._starts.pay_for_restart()
            case _:
                raise AssertionError(f"{command} cannot follow {done}")

    def _raised(self, plan: machine.Raise) -> BaseException:
        """Return the error with which a call or a restart ends, and count a failure for which no retry was left."""
        if plan.why is End.NO_RETRY:
            self._budget.refuse()
        elif plan.why is End.NO_START and self._starts is not None:
            self._starts.refuse()
        return plan.error or self._incident.error(plan.why, self._budget, self._starts)

    def _record(self, kind: EventKind, done: machine.State | None, state: machine.State) -> None:
        """Record an event in the history, after the wait of `done` and before that of `state`."""
        lifecycle, incident, num_kept = self._lifecycle, self._incident, 0
        cause, detail = incident.cause, ""
        match done, state:
            case _, machine.Finished(machine.Raise() as plan):
                cause = incident.cause_of(plan.why, self._error, in_restart=plan.ends_restart)
            case _, machine.Finished(machine.EndEarly()):
                cause = f"{len(self._parts)} of at least {lifecycle.scaling.min_workers} workers are left"
            case machine.Regrouping(machine.Continue(expected=expected), members), _:
                incident.lose(expected - members)
                cause, detail = incident.cause, done.source.words
            case _ if kind != "started":
                detail = self._snapshots.restored_from()
                num_kept = len(set(lifecycle.running.workers).intersection(incident.workers))
        lifecycle.record(kind, 0 if kind == "started" else incident.size, incident.began, cause, detail, num_kept)
        if isinstance(done, machine.Launching | machine.Restoring):
            lifecycle.replacements.num_left = 0

    def _abandon(self, abandon: machine.Abandon) -> None:
        """Note that the group is not changed in place, and why."""
        match abandon.change:
            case machine.CopyInside():
                logger.warning("no worker has the state of a completed step: %s", abandon.why)
            case machine.Evacuate():
                logger.warning("the state that only workers have cannot be fetched: %s", abandon.why)
            case machine.Reuse():
                logger.warning("no process can be reused, so new workers are started: %s", abandon.why)
            case machine.Continue(expected=expected):
                self._incident.lose(expected - abandon.members)
                self._incident.obstacles += [abandon.why] if abandon.members else []

    # --------------------------------------------------------------------------------------------------------- waits

    def _on_all(self, function: Callable[..., Any]) -> GroupReport:
        group = self._lifecycle.running
        return group.on_replica(function, dict.fromkeys(range(len(group)), ()), on_wait=self._monitor.poll)

    def _running(self, state: machine.Running) -> Completed | machine.Paused | machine.CallFailed | machine.CallRefused:
        """Run the call from its start, or from where it was interrupted."""
        lifecycle, monitor, snapshots, call = self._lifecycle, self._monitor, self._snapshots, self._call
        resumes = state.mode == "resume"
        lifecycle.check_active()
        group = lifecycle.running
        args = call.args_for(group.worlds)
        snapshots.poll()
        began, has_others, captures = lifecycle.now(), not group.is_driver_only, snapshots.is_due_after(call)
        monitor.watch(call)
        monitor.is_on = has_others

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
        values = report.values
        # If some ranks stopped between two steps, the call is not complete, even if it has ended on other ranks.
        if any(isinstance(value, HeldAtStep) for value in values):
            return self._paused(report, values)
        try:
            call.check(values)
        except BaseException as error:
            self._note()
            if isinstance(error, RanksDifferError):
                snapshots.forget_calls()  # a restart repeats no call
            return machine.CallRefused(error)
        if call.is_kept:
            snapshots.note_call(call, lifecycle.now() - began)
        # A worker that repeats its reply to the last attempt may send a copy even if `captures` is False.
        copies = report.captures
        if copies and (lifecycle.spec.captures or captures):
            snapshots.take_captures(copies, group)
            snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return Completed(values)

    def _paused(self, report: GroupReport, values: Sequence[Any]) -> machine.Paused:
        """Say why all ranks stopped between two steps: the call must end early, or workers leave or join."""
        lifecycle, monitor, call = self._lifecycle, self._monitor, self._call
        self._note(monitor.reason, report)
        all_stopped = all(isinstance(each, HeldAtStep) for each in values)
        is_planned = monitor.is_leaving or (all_stopped and all(each.is_planned for each in values))
        must_end = all_stopped and (is_planned or (call.leaves is not None and call.leaves()))
        if not must_end:
            lifecycle.check_active()
            monitor.go_on()
        if must_end or not lifecycle.spec.runs_on:
            self._take([each.part for each in values])
        return machine.Paused(must_end, self._on_nodes(lifecycle.leaving_nodes_in_use()))

    def _take(self, parts: list[Capture]) -> None:
        """Let what the ranks have copied become the newest snapshot."""
        self._parts = parts
        self._snapshots.take_captures(parts, self._lifecycle.running)

    def _on_nodes(self, nodes: frozenset[str]) -> machine.Members:
        """Return the workers on these nodes."""
        group = self._lifecycle.running
        return group.of_ranks(rank for rank, info in enumerate(group.infos) if info.node_id in nodes)

    def _failed(self, report: GroupReport) -> machine.CallFailed:
        """Look into a failure: a rank was lost, or user code raised."""
        lifecycle, call, diagnosis = self._lifecycle, self._call, classify(report)
        lifecycle.check_active()
        self._monitor.go_on()
        incident = self._note("", report)
        incident.diagnosis = diagnosis
        answers = {each.rank: each.value if isinstance(each, Answered) else each.failure for each in report.outcomes}
        incident.divergence = call.divergence(answers)
        workers, failed = lifecycle.running.workers, [each for each in report.outcomes if isinstance(each, Failed)]
        sizes = {workers[o.rank]: o.failure.largest_batch for o in failed if o.failure.largest_batch is not None}
        if sizes and call.split is not None:
            call.split(sizes)
        incident.needs_refill = not incident.divergence and self._needs_refill(diagnosis)
        if incident.needs_refill:
            lifecycle.num_short = max(lifecycle.num_short, len(lifecycle.running))
            self._shrank_at = None
            logger.warning("%s; waiting for new workers", incident.cause)
            lifecycle.start_standby()  # if survivors continued in place before, no new workers were started then
        if diagnosis.kind == "disconnected" and not lifecycle.spec.keeps_survivors:
            self._monitor.tell_stuck()
        lifecycle.failures.renew_if_due(self._budget, can_continue=call.can_continue)
        continues = lifecycle.failures.continues and call.can_continue and self._budget.num_retries
        if diagnosis.kind == "disconnected" and self._budget.is_spent and not continues:
            # No one looks for the ranks behind the lost connections later, so that the error could name them.
            everyone = range(len(lifecycle.running))
            incident.lost = set(everyone) - set(lifecycle.running.answering(everyone))
        return machine.CallFailed(
            diagnosis.kind, bool(incident.divergence), report.all_answered, failed_alike(report), incident.needs_refill
        )

    def _needs_refill(self, diagnosis: Diagnosis) -> bool:
        """Return True if survivors ran out of memory in their first step after the group shrank.

        With fewer workers, each worker's part of the global batch is larger.
        """
        shrank_at = self._shrank_at
        if shrank_at is None or not is_lack_of_memory(diagnosis):
            return False
        signs = self._lifecycle.running.ask_beside(sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= shrank_at for sign in signs.values())

    def _polling(self, state: machine.Polling) -> machine.Event:
        report = self.ask_progress()
        if not report.ok:
            is_resumed = state.why is machine.Poll.RESUME
            return self._failed(report) if is_resumed else machine.CallFailed(classify(report).kind)
        return machine.Polled(are_alike(report.values))

    # ---- a change in place

    def _settling(self, state: machine.Settling) -> machine.Survivors:
        group, change = self._lifecycle.running, state.change
        if isinstance(change, Reuse) and not self._spec.renews:
            # Avoid the nodes of silent ranks, because killing an actor does not end a frozen process.
            living = group.answering([rank for rank in range(len(group)) if rank not in group.gone | group.silent])
        elif isinstance(change, CopyInside | Evacuate):
            if isinstance(change, Evacuate) and not change.num_copies:
                self._monitor.watch()
            settled = group.settle(self._report)
            # A stuck rank may still finish a long step. A call that must end early asks it only if no other is left.
            with_stuck = {*settled, *group.stuck}
            ranks = set(settled) if settled and isinstance(change, CopyInside) else with_stuck
            answering = group.answering(sorted(ranks - group.gone))
            living = [rank for rank in answering if group.workers[rank] not in self._lifecycle.newcomers]
        else:
            living = group.settle(self._report, self._monitor.tell_stuck)
        if isinstance(change, Continue) and change.why is Trigger.FAILURE:
            incident = self._incident
            incident.silent = set(group.silent)
            # If a rank had died, stuck ranks might just be slow.
            if group.stuck and incident.diagnosis is not None and incident.diagnosis.kind == "disconnected":
                self._budget.note_hang()
        if isinstance(change, Reuse) and not (living and self._spec.renews):
            group.standby.kill_unresponsive()  # spare workers may have died together with the workers
        if isinstance(change, Continue | Reuse):
            self._lifecycle.suspect(living)
        return machine.Survivors(group.of_ranks(living))

    def _tearing_down(self, state: machine.TearingDown) -> machine.Progress | machine.Lost | machine.UserRaised:
        group, change = self._lifecycle.running, state.change
        staying, newcomers = group.ranks_of(state.members), group.ranks_of(self._lifecycle.newcomers)
        report = group.tear_down(staying)
        if not report.ok:
            return self._lost_in_tear_down(change, staying, report)
        # Ignore obstacles to continuing: a replica that cannot continue can still send its state.
        changes = {"obstacle": None} if isinstance(change, CopyInside | Evacuate) else {}
        newcomer = {"can_be_source": False}
        found = zip(staying, report.values, strict=True)
        return machine.Progress(
            tuple(replace(each, **changes, **(newcomer if rank in newcomers else {})) for rank, each in found)
        )

    def _lost_in_tear_down(
        self, change: machine.Change, staying: Sequence[int], report: GroupReport
    ) -> machine.Lost | machine.UserRaised:
        group = self._lifecycle.running
        failed = {outcome.rank: outcome.failure for outcome in report.outcomes if not outcome.ok}
        if any(failure is not None and failure.kind == "user" for failure in failed.values()):
            what = "a surviving worker could not report its progress"
            logger.warning("%s: %s", what, words(classify(report)))
            return machine.UserRaised(what)
        # Ranks that have not answered are not in this set, because they may just be slow.
        dead = {rank for rank, failure in failed.items() if failure is not None} or set(failed)
        remaining = group.of_ranks(rank for rank in staying if rank not in dead)
        if isinstance(change, Reuse) and not remaining:
            group.standby.kill_unresponsive()
        return machine.Lost(remaining)

    def _keep_only(self, members: machine.Members) -> None:
        """Kill the workers that are not members, and free their slots."""
        group = self._lifecycle.running
        others = set(range(len(group))) - set(group.ranks_of(members)) - group.gone
        group.remove_workers(sorted(others))

    def _taken(self) -> list[RemoteWorker]:
        """Return the standby workers that were taken for a group, which is formed or given up now."""
        joining, self._joining, self._until = self._joining, [], None
        return joining

    def _filling_up(self, state: machine.FillingUp) -> machine.Filled:
        lifecycle, group, change, members = self._lifecycle, self._lifecycle.running, state.change, state.members
        self._keep_only(members)
        if self._until is None:
            is_refill = isinstance(change, Continue) and change.why is Trigger.REFILL
            self._until = lifecycle.now() + (math.inf if is_refill else STANDBY_WAIT_S)
        if self._fill_up(state, max(0.0, self._until - lifecycle.now())):
            # Poll the ranks again, because some may have died unnoticed during the wait.
            living = group.answering(group.ranks_of(members))
            if len(living) < len(members):
                lifecycle.suspect(living)
                return machine.Filled(len(self._joining), members - group.of_ranks(living))
        # Survivors that continue do not take workers that are still starting, which a restart may need.
        if isinstance(change, Reuse):
            missing = self._scaling.min_workers - len(members) - len(self._joining)
            self._joining += group.standby.take_needed(missing, missing, self._monitor.poll) or []
        return machine.Filled(len(self._joining))

    def _fill_up(self, state: machine.FillingUp, wait_s: float) -> bool:
        """Take ready standby workers, and start more of them if the group is not full.

        If the group has too few members, wait up to `wait_s` for workers that are starting. Do nothing if a survivor's
        call does not admit other workers now. Return True if this method had to wait.
        """
        lifecycle, standby = self._lifecycle, self._lifecycle.running.standby
        most, least, avoided = self._scaling.max_workers, self._scaling.min_workers, lifecycle.nodes_to_avoid
        num_staying, admits = len(state.members), all(each.admits for each in state.reports)
        missing = most - num_staying - len(self._joining) if admits else 0
        if missing <= 0:
            return False
        standby.kill_on(avoided)
        self._joining += standby.take_ready(missing, 0.0)
        num_workers = num_staying + len(self._joining)
        if not lifecycle.is_ending:  # while the program ends, Ray may be unable to report which nodes are alive
            standby.start_more(most - num_workers - standby.num_coming, most, avoided)
        missing = max(self._num_awaited(state.change), least) - num_workers
        if not wait_s or missing <= 0 or not standby.num_coming:
            return False
        self._joining += standby.take_ready(missing, wait_s, self._monitor.poll)
        return True

    def _num_awaited(self, change: machine.Change) -> int:
        """Return for how many members a change waits, beside `min_workers`."""
        match change:
            case Continue(has_regrouped=True) | Continue(Trigger.GROW | Trigger.SPLIT):
                return 0
            case Continue(Trigger.REFILL | Trigger.DRAIN):
                return self._scaling.max_workers
        return 0 if self._lifecycle.is_ending else self._lifecycle.resizing.num_awaited

    def _regrouping(self, state: machine.Regrouping) -> machine.Done | machine.Lost | machine.UserRaised:
        lifecycle, group = self._lifecycle, self._lifecycle.running
        change, reports, source = state.change, state.reports, state.reports.index(state.source)
        if isinstance(change, CopyInside | Evacuate):
            self._keep_only(state.members)
        staying, joining = group.ranks_of(state.members), self._taken()
        num_workers = len(staying) + len(joining)
        places = next_ranks(staying if self._spec.runs_on else range(len(staying)), num_workers)
        takers_of_state = (*(places[each] for each in takers(reports, source)), *places[len(staying) :])
        handover = StateHandover(places[source], takers_of_state)
        if isinstance(change, Continue) and change.why is Trigger.DRAIN:
            parts = zip(self._parts, self._incident.workers, strict=False)
            orphans = tuple(part.progress for part, worker in parts if worker not in change.expected)
            handover = replace(handover, orphans=orphans)
        newcomers = lifecycle.newcomers
        newcomers.update(joining)
        self._report = report = group.regroup(staying, joining, handover, places)
        newcomers.difference_update(group.workers[outcome.rank] for outcome in report.outcomes if outcome.ok)
        if report.ok:
            lifecycle.keep_facts(list(report.values))
            if isinstance(change, Continue):
                lifecycle.hooks.on_change(group)
                is_smaller = change.why is Trigger.FAILURE and len(group) < self._scaling.max_workers
                if change.why is not Trigger.SPLIT:  # even batches of one sample may lack memory in the smaller group
                    minds_memory = is_smaller and lifecycle.resizing.minds_memory
                    self._shrank_at = state.source.position if minds_memory else None
                lifecycle.owes_spares = True
            if self._incident.infos[:1] != group.infos[:1]:
                self._snapshots.drop_incoming()  # rank 0, which sent the snapshot in transit, is gone
            return machine.Done()
        diagnosis = classify(report)
        what = f"could not form a new group: {words(diagnosis)}"
        logger.warning("%s", what)
        if diagnosis.kind == "user":
            return machine.UserRaised(what)
        settled = group.settle(report)
        lifecycle.suspect(settled)
        return machine.Lost(group.of_ranks(settled), what)

    # ---- the state goes to the driver

    def _capturing(self, state: machine.Capturing) -> machine.Captured | machine.NotDone:
        self._report = report = self._on_all(method_of(RegroupingReplica.capture_here))
        if not report.ok:
            return machine.NotDone()
        parts = report.values
        is_inside = all(part.progress is not None for part in parts)
        if is_inside or isinstance(state.change, Evacuate):
            self._take(parts)
        return machine.Captured(is_inside)

    def _awaiting_snapshot(self, state: machine.AwaitingSnapshot | machine.AwaitingCopy) -> machine.Event:
        snapshots = self._snapshots
        self._monitor.await_snapshot()
        if snapshots.shares_current:
            return machine.Done()
        is_paused = isinstance(state, machine.AwaitingSnapshot) and isinstance(state.plan, machine.EndEarly)
        self._num_lost_copies += is_paused
        return machine.NotDone()

    def _awaiting_briefly(self, state: machine.AwaitingBriefly) -> machine.Event:
        snapshots = self._snapshots
        self._lifecycle.check_active()
        self._lifecycle.replacements.num_left = (
            _REPLACEMENTS * self._scaling.max_workers if self._spec.keeps_processes else 0
        )
        snapshots.poll(timeout_s=_AWAITED_S if snapshots.is_awaited else SETTLE_S)
        has_landed = not snapshots.is_coming
        snapshots.drop_incoming()
        return machine.Done() if has_landed else machine.NotDone()

    # ---- back to the last snapshot

    def _rebuilding(self, state: machine.Rebuilding) -> machine.Done | machine.NotDone:
        group = self._lifecycle.running
        report = group.renew(group.ranks_of(state.members), self._taken())
        return self._rebuilt(report, "form a new group")

    def _replacing(self, state: machine.Replacing) -> machine.Done | machine.NotDone:
        assert self._report is not None, "a restore has failed"
        self._monitor.watch(is_of_restore=True)
        return self._rebuilt(self._report, "restore the state")

    def _rebuilt(self, report: GroupReport, what: str) -> machine.Done | machine.NotDone:
        report = self._lifecycle.running.without_lost(report, self._scaling.min_workers)
        if report.ok:
            self._lifecycle.take_answers(report)
            self._snapshots.drop_incoming()  # the replicas that sent it are gone
            return machine.Done()
        logger.warning("could not %s: %s", what, words(classify(report)))
        return machine.NotDone()

    def _scheduling(self, state: machine.Scheduling) -> machine.Room:
        if state.plan.needs_all:
            return machine.Room(self._scaling.max_workers, self._spec.num_spares)
        found = self._lifecycle.find_resources(state.plan.kind, state.plan.attempt, self._incident.cause)
        return machine.Room(*found)

    def _launching(self, state: machine.Launching) -> machine.Done | machine.NotDone | machine.Room:
        lifecycle, needs_all, timeout_s = self._lifecycle, state.plan.needs_all, _RESERVATION_S
        in_the_way = lifecycle.make_room() if needs_all else ""
        if needs_all:
            timeout_s = self._spec.reservation_timeout_s
            if in_the_way and timeout_s == GroupSpec.reservation_timeout_s:  # any other was chosen by the user
                timeout_s = _IN_THE_WAY_S
        try:
            has_started = lifecycle.try_start(state.num_workers, state.num_spares, timeout_s)
        except ReservationTimeoutError as error:  # another program took the free resources, or their node was lost
            if in_the_way:
                blocked = f"This program holds the room itself: call `shutdown()` of {in_the_way} first."
                raise ReservationTimeoutError(f"{blocked}\n{error}") from None
            if needs_all:
                raise
            logger.warning("%s", str(error).partition("\n")[0])
            return machine.Room()
        return machine.Done() if has_started else machine.NotDone()

    def _restoring(self, state: machine.Restoring) -> machine.Done | machine.NotDone:
        # Also watch the repeated calls, which may hang, too.
        self._monitor.watch(is_of_restore=True)
        self._report = report = self._snapshots.restore(self._lifecycle.running, self._monitor.poll)
        if report.ok:
            self._lifecycle.newcomers.clear()
            return machine.Done()
        diagnosis = classify(report)
        if diagnosis.kind != "user":
            return machine.NotDone()
        lost_parts = [fault.error for fault in diagnosis.faults if isinstance(fault.error, LostPartError)]
        if lost_parts:  # no node has this rank's shard of the snapshot
            raise WorkersLostError(f"{lost_parts[0]} {self._snapshots.last_file_in_words}")
        raise worker_error(diagnosis.faults)
