"""Runs a call on all ranks, one attempt after the other, and says how an attempt has ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.policies import Diagnosis, FailurePolicy, RetryBudget, classify, failed_alike, is_lack_of_memory
from raysgd.core.engine.recovery.incident import Incident
from raysgd.core.engine.recovery.states import CallFailed, CallRefused, End, Members, Paused
from raysgd.core.engine.shared import replica
from raysgd.core.engine.shared.call import Call, Completed
from raysgd.core.engine.shared.types import Answered, Failed, GroupReport, HeldAtStep
from raysgd.exceptions import RanksDifferError

logger = logging.getLogger(__name__)

_NO_CALL = Call(replica.nothing)


class RunningCall:
    """A call that runs, or a change of the group between two calls, and what has last befallen the group in it.

    Args:
        lifecycle: Holds the worker group.
        monitor: Watches the group.
        failures: Says which failures are retried.
        reason: Why the group changes, if no call runs.
        call: The call, if one runs.
        budget: The call's retries.
        number: The call's number, if workers outlive this process.

    Attributes:
        was_sent: True if a rank may have received the call.
        num_lost_copies: Number of snapshots of the paused call that were lost.
        shrank_at: Step at which survivors continued in a smaller group, with more samples per worker.
        incident: What has last befallen the group.
        report: The report of the ranks' last call. None if they may still run it.
        error: The error with which the call ends, if it fails.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        monitor: Monitor,
        failures: FailurePolicy,
        reason: str = "",
        call: Call = _NO_CALL,
        budget: RetryBudget | None = None,
        number: CallNumber | None = None,
    ) -> None:
        self._lifecycle, self._monitor, self._failures = lifecycle, monitor, failures
        self.call, self.budget, self._number = call, budget or RetryBudget(0), number
        self.was_sent, self.num_lost_copies = False, 0
        self.shrank_at: int | None = None
        self.error: BaseException | None = None
        self.note(reason)

    @property
    def is_call(self) -> bool:
        return self.call is not _NO_CALL

    def note(self, reason: str = "", report: GroupReport | None = None) -> Incident:
        """Record that something has befallen the group. `report` is of the ranks' call; None if it may still run."""
        lifecycle = self._lifecycle
        self.incident = Incident(lifecycle.now(), lifecycle.num_workers, lifecycle.group, reason)
        self.report = report
        return self.incident

    def attempt(self, *, resumes: bool) -> Completed | Paused | CallFailed | CallRefused:
        """Run the call from its start, or from where it was interrupted."""
        lifecycle, monitor, snapshots, call = self._lifecycle, self._monitor, self._lifecycle.snapshots, self.call
        lifecycle.check_active()
        group = lifecycle.running
        args = call.args_for(group.worlds)
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
                return CallRefused(End.INTERRUPTED, error)
            snapshots.forget_calls()  # a restart repeats no call
            return CallRefused(End.RANKS_DIFFER, error)
        if call.is_kept:
            snapshots.note_call(call, lifecycle.now() - began)
        # A worker that repeats its reply to the last attempt may send a copy even if `captures` is False.
        copies = [answer.capture for answer in report.values if answer.capture is not None]
        if copies and (lifecycle.spec.captures or captures):
            snapshots.take_from(group, copies)
            snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return Completed(values)

    def _paused(self, report: GroupReport, values: Sequence[Any]) -> Paused:
        """Say why all ranks stopped between two steps: the call must end early, or workers leave or join."""
        lifecycle, monitor, call = self._lifecycle, self._monitor, self.call
        self.note(monitor.reason, report)
        all_stopped = all(isinstance(each, HeldAtStep) for each in values)
        is_planned = monitor.is_leaving or (all_stopped and all(each.is_planned for each in values))
        must_end = all_stopped and (is_planned or (call.leaves is not None and call.leaves()))
        if not must_end:
            lifecycle.check_active()
            monitor.go_on()
        parts = [] if lifecycle.spec.runs_on and not must_end else [each.part for each in values]
        return Paused(must_end, self.on_nodes(lifecycle.leaving_nodes_in_use()), parts)

    def on_nodes(self, nodes: frozenset[str]) -> Members:
        """Return the workers on these nodes."""
        group = self._lifecycle.running
        return group.of_ranks(rank for rank, info in enumerate(group.infos) if info.node_id in nodes)

    def failed(self, report: GroupReport) -> CallFailed:
        """Look into a failure: a rank was lost, or user code raised."""
        lifecycle, call, diagnosis = self._lifecycle, self.call, classify(report)
        lifecycle.check_active()
        self._monitor.go_on()
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
        incident.lacks_memory = not incident.divergence and self._lacks_memory(diagnosis)
        if incident.lacks_memory:
            lifecycle.note_short_of_memory()
            self.shrank_at = None
            logger.warning("%s; waiting for new workers", incident.cause)
            lifecycle.start_standby()  # if survivors continued in place before, no new workers were started then
        if diagnosis.kind == "disconnected" and not lifecycle.spec.keeps_survivors:
            self._monitor.tell_stuck()
        self._failures.renew_if_due(self.budget, can_continue=call.can_continue)
        continues = self._failures.continues and call.can_continue and self.budget.num_restarts
        if diagnosis.kind == "disconnected" and self.budget.is_spent and not continues:
            # No one looks for the ranks behind the lost connections later, so that the error could name them.
            everyone = range(len(lifecycle.running))
            incident.lost = set(everyone) - set(lifecycle.running.answering(everyone))
        return CallFailed(
            diagnosis.kind, bool(incident.divergence), report.all_answered, failed_alike(report), incident.lacks_memory
        )

    def _lacks_memory(self, diagnosis: Diagnosis) -> bool:
        """Return True if survivors ran out of memory in their first step after the group shrank.

        With fewer workers, each worker's part of the global batch is larger.
        """
        shrank_at = self.shrank_at
        if shrank_at is None or not is_lack_of_memory(diagnosis):
            return False
        signs = self._lifecycle.running.ask_beside(replica.sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= shrank_at for sign in signs.values())
