"""Runs a call on all ranks, one attempt after the other, and says what has befallen the group in it, also in words."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.policies import (
    LOOK_AT_RAYS_LOG,
    Diagnosis,
    RetryBudget,
    classify,
    failed_alike,
    is_lack_of_memory,
    words,
)
from raysgd.core.engine.recovery import states
from raysgd.core.engine.recovery.states import NUM_COPIES, End
from raysgd.core.engine.shared.interface import Call, Completed, EventKind, nothing, sign_of_life
from raysgd.core.engine.shared.types import Answered, Failed, GroupReport, HeldAtStep, WorkerInfo
from raysgd.core.text.log_lines import named
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import RanksDifferError, UnevenStepsError, WorkersLostError

logger = logging.getLogger(__name__)

_NO_CALL = Call(nothing)
LOST_ON_ITS_WAY = (
    f"The state was lost on its way to the driver {NUM_COPIES} times. The log above names the cause; "
    "too little memory in Ray's object store is a frequent one."
)
_WHERE = {End.RAISED_INSIDE: "others were inside the call", End.RAISED_APART: "others were elsewhere"}


@dataclass
class Incident:
    """Why a group is changed, replaced or ended.

    Attributes:
        began: When the driver noticed, on the engine's clock.
        size: Number of workers before.
        group: The group, if there was one. `workers` and `infos` are its members then.
        reason: Why, if no call has failed.
        diagnosis: The cause of the failed call, if one has failed.
        divergence: How the steps of the ranks differ, if they do.
        needs_refill: True if memory ran out after the group had shrunk.
        lost: Ranks that are known to be lost.
        silent: Ranks that stopped to answer.
        obstacles: Why the survivors do not continue.
    """

    began: float
    size: int
    group: WorkerGroup | None
    reason: str = ""
    diagnosis: Diagnosis | None = None
    divergence: str = ""
    needs_refill: bool = False
    lost: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers: Sequence[Any] = [] if self.group is None else list(self.group.workers)
        self.infos: Sequence[WorkerInfo] = [] if self.group is None else list(self.group.infos)

    def lose(self, members: states.Members) -> None:
        """Note that these workers are lost."""
        self.lost |= {rank for rank, worker in enumerate(self.workers) if worker in members}

    @property
    def cause(self) -> str:
        """The cause of the event, for the history."""
        return "; ".join([self._happened, *self.obstacles])

    @property
    def _happened(self) -> str:
        diagnosis = self.diagnosis
        if diagnosis is None or self.needs_refill:
            lost = f"lost {named(self.lost)}; " if self.lost else ""
            return lost + (self.reason if diagnosis is None else f"with {self.size} workers {words(diagnosis)}")
        known = {*self.lost, *(diagnosis.ranks if diagnosis.kind == "died" else ())}
        nodes = None if self.group is None else self.group.nodes_of(known, self.infos)
        told = words(diagnosis, self.lost, nodes)
        if not self.silent or (nodes is not None and nodes.are_dead):
            return told
        return f"{told}; {named(self.silent)} {'does' if len(self.silent) == 1 else 'do'} not answer any more"

    def cause_of(self, why: End, error: BaseException | None, *, in_restart: bool) -> str:
        """Return what ends the group, for the history."""
        if in_restart:
            is_loss = isinstance(error, WorkersLostError)
            return f"{self.cause}; {'no other group could be started' if is_loss else type(error).__name__}"
        if why in _WHERE and self.diagnosis is not None:
            return f"{named(self.diagnosis.ranks)} raised {self.diagnosis.faults[0].type_name} while {_WHERE[why]}"
        return self.cause if why in (End.NO_RETRY, End.NOT_REPEATABLE) else type(error).__name__


@dataclass
class RunningCall:
    """A call that runs, or a change of the group between two calls, and what has last befallen the group in it.

    Args:
        lifecycle: Holds the worker group.
        monitor: Watches the group.
        reason: Why the group changes, if no call runs.
        call: The call, if one runs.
        budget: The call's retries.
        number: The call's number, if workers outlive this process.

    Attributes:
        starts: Retries of a start, if they are limited.
        was_sent: True if a rank may have received the call.
        num_lost_copies: Number of snapshots of the paused call that were lost.
        shrank_at: Position in the call at which survivors continued in a smaller group, with more samples per worker.
        incident: What has last befallen the group.
        report: The report of the ranks' last call. None if they may still run it.
        error: The error with which the call ends, if it fails.
    """

    lifecycle: Lifecycle
    monitor: Monitor
    reason: InitVar[str] = ""
    call: Call = _NO_CALL
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(0))
    number: CallNumber | None = None

    def __post_init__(self, reason: str) -> None:
        self.starts, self.was_sent, self.num_lost_copies = self.lifecycle.start_budget, False, 0
        self.shrank_at: int | None = None
        self.error: BaseException | None = None
        self.note(reason)

    def note(self, reason: str = "", report: GroupReport | None = None) -> Incident:
        """Record that something has befallen the group. `report` is of the ranks' call; None if it may still run."""
        lifecycle = self.lifecycle
        self.incident = Incident(lifecycle.now(), lifecycle.num_workers, lifecycle.group, reason)
        self.report = report
        return self.incident

    def attempt(self, *, resumes: bool) -> Completed | states.Paused | states.CallFailed | states.CallRefused:
        """Run the call from its start, or from where it was interrupted."""
        lifecycle, monitor, snapshots, call = self.lifecycle, self.monitor, self.lifecycle.snapshots, self.call
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

        number = None if self.number is None else replace(self.number, is_resumed=resumes)
        self.number = None if number is None else replace(number, attempt=number.attempt + 1)
        self.was_sent = True
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
            return self.failed(report)
        values = [answer.value for answer in report.values]
        # If some ranks stopped between two steps, the call is not complete, even if it has ended on other ranks.
        if any(isinstance(value, HeldAtStep) for value in values):
            return self._paused(report, values)
        try:
            call.check(values)
        except BaseException as error:
            self.note()
            if not isinstance(error, RanksDifferError):
                return states.CallRefused(End.INTERRUPTED, error)
            snapshots.forget_calls()  # a restart repeats no call
            return states.CallRefused(End.RANKS_DIFFER, error)
        if call.is_kept:
            snapshots.note_call(call, lifecycle.now() - began)
        # A worker that repeats its reply to the last attempt may send a copy even if `captures` is False.
        copies = [answer.capture for answer in report.values if answer.capture is not None]
        if copies and (lifecycle.spec.captures or captures):
            snapshots.take_captures(copies, group)
            snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return Completed(values)

    def _paused(self, report: GroupReport, values: Sequence[Any]) -> states.Paused:
        """Say why all ranks stopped between two steps: the call must end early, or workers leave or join."""
        lifecycle, monitor, call = self.lifecycle, self.monitor, self.call
        self.note(monitor.reason, report)
        all_stopped = all(isinstance(each, HeldAtStep) for each in values)
        is_planned = monitor.is_leaving or (all_stopped and all(each.is_planned for each in values))
        must_end = all_stopped and (is_planned or (call.leaves is not None and call.leaves()))
        if not must_end:
            lifecycle.check_active()
            monitor.go_on()
        parts = [] if lifecycle.spec.runs_on and not must_end else [each.part for each in values]
        return states.Paused(must_end, self.on_nodes(lifecycle.leaving_nodes_in_use()), parts)

    def on_nodes(self, nodes: frozenset[str]) -> states.Members:
        """Return the workers on these nodes."""
        group = self.lifecycle.running
        return group.of_ranks(rank for rank, info in enumerate(group.infos) if info.node_id in nodes)

    def failed(self, report: GroupReport) -> states.CallFailed:
        """Look into a failure: a rank was lost, or user code raised."""
        lifecycle, call, diagnosis = self.lifecycle, self.call, classify(report)
        lifecycle.check_active()
        self.monitor.go_on()
        incident = self.note("", report)
        incident.diagnosis = diagnosis
        answers = {
            each.rank: each.value.value if isinstance(each, Answered) else each.failure for each in report.outcomes
        }
        incident.divergence = call.divergence(answers)
        workers, failed = lifecycle.running.workers, [each for each in report.outcomes if isinstance(each, Failed)]
        sizes = {workers[o.rank]: o.failure.largest_batch for o in failed if o.failure.largest_batch is not None}
        if sizes and call.split is not None:
            call.split(sizes)
        incident.needs_refill = not incident.divergence and self._needs_refill(diagnosis)
        if incident.needs_refill:
            lifecycle.num_short = max(lifecycle.num_short, len(lifecycle.running))
            self.shrank_at = None
            logger.warning("%s; waiting for new workers", incident.cause)
            lifecycle.start_standby()  # if survivors continued in place before, no new workers were started then
        if diagnosis.kind == "disconnected" and not lifecycle.spec.keeps_survivors:
            self.monitor.tell_stuck()
        lifecycle.failures.renew_if_due(self.budget, can_continue=call.can_continue)
        continues = lifecycle.failures.continues and call.can_continue and self.budget.num_retries
        if diagnosis.kind == "disconnected" and self.budget.is_spent and not continues:
            # No one looks for the ranks behind the lost connections later, so that the error could name them.
            everyone = range(len(lifecycle.running))
            incident.lost = set(everyone) - set(lifecycle.running.answering(everyone))
        return states.CallFailed(
            diagnosis.kind, bool(incident.divergence), report.all_answered, failed_alike(report), incident.needs_refill
        )

    def known(self) -> states.Known:
        """Return what is known now, for the next transition."""
        lifecycle, call, budget, starts = self.lifecycle, self.call, self.budget, self.starts
        snapshots, group = lifecycle.snapshots, lifecycle.group
        return states.Known(
            spec=lifecycle.spec,
            scaling=lifecycle.scaling,
            failures=lifecycle.failures,
            in_call=call is not _NO_CALL,
            was_sent=self.was_sent,
            members=states.NO_WORKERS if group is None else frozenset(group.workers),
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
            num_lost_copies=self.num_lost_copies,
            num_retries=budget.num_retries,
            num_left=budget.num_retries - budget.num_spent,
            continued_at=budget.continued_at,
            free_from=budget.free_from,
            num_starts_left=None if starts is None else starts.num_retries - starts.num_spent,
        )

    def raised(self, plan: states.Raise) -> BaseException:
        """Return the error with which a call or a restart ends, and count a failure for which no retry was left."""
        if plan.why is End.NO_RETRY:
            self.budget.refuse()
        elif plan.why is End.NO_START and self.starts is not None:
            self.starts.refuse()
        return plan.error or self._error(plan.why)

    def _error(self, why: End) -> BaseException:
        diagnosis = self.incident.diagnosis
        if diagnosis is not None and why in (End.USER_ERROR, *_WHERE):
            return worker_error(diagnosis.faults, "" if why is End.USER_ERROR else self._after_end)
        if why is End.NO_START and self.starts is not None:
            return WorkersLostError(
                f"Worker start-up failed: a worker process died, and the {self.starts.num_retries} allowed retries "
                "are used up. The log above and Ray's worker logs name the cause; too little memory is a frequent one."
            )
        is_uneven = why is End.UNEVEN_STEPS
        error = UnevenStepsError(self.incident.divergence) if is_uneven else WorkersLostError(self._message(why))
        error.__cause__ = None if diagnosis is None else diagnosis.faults[0].error
        return error

    def _message(self, why: End) -> str:
        lifecycle, cause, diagnosis = self.lifecycle, self.incident.cause, self.incident.diagnosis
        spec, last_file = lifecycle.spec, lifecycle.snapshots.last_file_in_words
        match why:
            case End.LOST_COPIES:
                return LOST_ON_ITS_WAY
            case End.CUT_OFF:
                return "Ray was stopped before the state of the last step was in the driver."
            case End.PROGRAM_ENDS:
                return f"{cause}, and the program is about to end, so no other workers are started."
            case End.NO_GROUP:
                return f"No group could be started in {lifecycle.scaling.num_attempts} attempts after: {cause}."
            case End.NOT_REPEATABLE:
                return (
                    f"{cause}, in a call that cannot be repeated, because the process with the copy of the state from "
                    "before the call was lost, too. The next call continues with the state of the surviving workers."
                )
            case End.STATE_LOST if not spec.loses_state:
                return (
                    f"{cause}, and the state was lost with the workers, because the process with its copy was lost, "
                    f"too. {last_file}"
                )
            case End.STATE_LOST:
                return (
                    f"{cause}, and the state was lost with the workers, because `snapshot_every_s=None` switches "
                    f"snapshots off. {last_file} Without that option, or with `snapshot_every_s=60`, such a failure "
                    "costs time only."
                )
        hint = (
            f"{LOOK_AT_RAYS_LOG}: too little memory, say, or a collective that the ranks called with different sizes. "
            if diagnosis is not None and diagnosis.kind == "died"
            else ""
        )
        spent = f"the {self.budget.num_retries} allowed retries of this call are used up"
        return f"{cause}, and {spent}. {hint}{spec.words.when_spent}".rstrip()

    @property
    def _after_end(self) -> str:
        """What became of the state, for users, after workers that were out of sync were ended."""
        snapshots = self.lifecycle.snapshots
        if self.lifecycle.spec.loses_state and snapshots.has_gap:
            lost = "The workers were ended, and their state is lost: `snapshot_every_s=None` switches snapshots off."
            return f"{lost} {snapshots.last_file_in_words}"
        if not snapshots.has_any:
            return ""
        return (
            "The workers were ended, because they are not in the same state any more. The next call starts new ones, "
            f"{snapshots.restored_from()}."
        )

    def record(self, kind: EventKind, done: states.State | None, state: states.State) -> None:
        """Record an event in the history, after the wait of `done` and before that of `state`."""
        lifecycle, incident, num_kept = self.lifecycle, self.incident, 0
        cause, detail = incident.cause, ""
        match done, state:
            case _, states.Finished(states.Raise() as plan):
                cause = incident.cause_of(plan.why, self.error, in_restart=plan.ends_restart)
            case _, states.Finished(states.EndEarly(parts)):
                cause = f"{len(parts)} of at least {lifecycle.scaling.min_workers} workers are left"
            case states.Regrouping(states.Continue(expected=expected), members), _:
                incident.lose(expected - members)
                cause, detail = incident.cause, done.source.words
            case _ if kind != "started":
                detail = lifecycle.snapshots.restored_from()
                num_kept = len(set(lifecycle.running.workers).intersection(incident.workers))
        lifecycle.record(kind, 0 if kind == "started" else incident.size, incident.began, cause, detail, num_kept)
        if isinstance(done, states.Launching | states.Restoring):
            lifecycle.end_replacements()

    def abandon(self, abandon: states.Abandon) -> None:
        """Note that the group is not changed in place, and why."""
        match abandon.change:
            case states.CopyInside():
                logger.warning("no worker has the state of a completed step: %s", abandon.why)
            case states.Evacuate():
                logger.warning("the state that only workers have cannot be fetched: %s", abandon.why)
            case states.Reuse():
                logger.warning("no process can be reused, so new workers are started: %s", abandon.why)
            case states.Continue(expected=expected):
                self.incident.lose(expected - abandon.members)
                self.incident.obstacles += [abandon.why] if abandon.members else []

    def _needs_refill(self, diagnosis: Diagnosis) -> bool:
        """Return True if survivors ran out of memory in their first step after the group shrank.

        With fewer workers, each worker's part of the global batch is larger.
        """
        shrank_at = self.shrank_at
        if shrank_at is None or not is_lack_of_memory(diagnosis):
            return False
        signs = self.lifecycle.running.ask_beside(sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= shrank_at for sign in signs.values())
