"""Recovery: repairs or replaces a worker group after workers have failed.

`GroupRepair.recover` is the entry point. It tries these methods in order:

1. The survivors continue in place: they keep their processes and form a new group, to which standby workers and new
   workers are added if available. ADR 9 explains why. ADR 11 explains when survivors wait for new workers.
2. All ranks restore the last snapshot, either in rebuilt replicas in the remaining processes or in new workers.
3. The failure is raised as an error.

Method 1 is also used when nothing has failed, to let workers leave or join between two training steps or calls.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NoReturn

from raysgd.core.cluster.resources import capacity, explain, impossibility
from raysgd.core.engine import ranks as rank_rules
from raysgd.core.engine.lifecycle import SETTLE_S, Lifecycle, pay_for_start
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.policies import (
    LOOK_AT_RAYS_LOG,
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
from raysgd.core.engine.recovery.machine import KINDS, NUM_COPIES, Why
from raysgd.core.engine.shared import replica
from raysgd.core.engine.shared.call import Call, Left
from raysgd.core.engine.shared.group_events import EventKind
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Answered, GroupReport, ReplicaProgress, StateHandover, WorkerInfo
from raysgd.core.engine.transfers import DividedValue, LostPartError
from raysgd.core.engine.worker import StandbyWorker
from raysgd.core.text.log_lines import named
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import OnFailure, ReservationTimeoutError, UnevenStepsError, WorkersLostError

logger = logging.getLogger(__name__)

# Longest time for which survivors wait for new workers; workers that take longer can still join later.
STANDBY_WAIT_S = 30.0
_AWAITED_S = 10.0  # how long to wait for a snapshot that a caller needs, for example to save it to a file
# Timeout for reserving free resources: Ray grants them at once unless another program took them.
_REBUILD_RESERVATION_S = 10.0


class CannotForm(Exception):
    """The ranks cannot form a new group. Only a restart is left.

    Args:
        reason: Message that says why the group cannot be formed. Empty if no rank is left.
        staying: The ranks that are still usable.
        is_failure: True if this counts as a failure of workers even though `staying` contains all ranks.
    """

    def __init__(self, reason: str, staying: Collection[int], is_failure: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.staying, self.is_failure = reason, staying, is_failure


@dataclass
class NextGroup:
    """The survivors and standby workers that will form the next worker group.

    Attributes:
        staying: The survivors' ranks in the old group.
        progress_reports: Progress of each survivor, in the order of `staying`.
        joining: The standby workers that join.
    """

    staying: list[int]
    progress_reports: list[ReplicaProgress]
    joining: list[StandbyWorker]

    @property
    def num_workers(self) -> int:
        return len(self.staying) + len(self.joining)

    @property
    def source(self) -> int:
        """Index in `staying` of the survivor whose training state the other ranks copy.

        Raises:
            CannotForm: No survivor's state can be continued.
        """
        source = choose_source(self.progress_reports)
        if source is None:
            obstacles = [each.obstacle for each in self.progress_reports if each.obstacle]
            obstacle = [*obstacles, "each was in the middle of a step that had begun to change its state"][0]
            raise CannotForm(f"the survivors cannot continue by themselves: {obstacle}", self.staying)
        return source


@dataclass(frozen=True)
class GroupChange:
    """A request to change the group in place: workers leave or join, and the workers that stay keep their processes.

    Attributes:
        why: Reason for the change.
        cause: Takes the lost ranks and returns a message with the reason for the change.
        staying: Ranks that should stay in the group.
        began: Time at which the change began.
        num_awaited: The change waits for workers that are starting until the group has this many members. With 0, it
            waits only until the group has `min_workers` members.
        budget: The retries of the call, which a `FAILURE` may use. None for other changes.
        leaving: Ranks that leave without having failed.
        orphans: Progress and metrics of the leaving ranks, which other ranks take over.
    """

    why: Why
    cause: Callable[[Collection[int]], str]
    staying: Sequence[int]
    began: float
    num_awaited: int
    budget: RetryBudget | None = None
    leaving: frozenset[int] = frozenset()
    orphans: tuple[Any, ...] = ()

    @property
    def kind(self) -> EventKind:
        """Kind of event to record in the history. If ranks are lost, "continued" is recorded instead."""
        return KINDS[self.why]

    @property
    def wait_s(self) -> float:
        """Longest time to wait for starting workers, in seconds."""
        return math.inf if self.why is Why.MEMORY else STANDBY_WAIT_S


@dataclass(frozen=True)
class NotInPlace:
    """The group cannot be changed without a restart.

    Attributes:
        kind: Kind of event to record for the restart.
        cause: Reason for the restart, for the history.
    """

    kind: EventKind
    cause: str


class Movability(Enum):
    """The answer to the question if the replicas can continue in another group, between two calls."""

    CAN_MOVE = auto()
    CANNOT_MOVE = auto()  # a change of the group needs a restart
    LOST = auto()  # workers were lost: the next call fails, and recovery handles the loss


@dataclass(frozen=True)
class Captured:
    """Copies of the state of all ranks of a group.

    Attributes:
        parts: Each rank's part of the snapshot, by rank.
    """

    parts: list[Capture]

    @property
    def is_inside(self) -> bool:
        """True if all ranks are inside a call, which can resume."""
        return all(part.progress is not None for part in self.parts)


class NotLeft(Enum):
    """Why a call that should end early did not: the driver has no snapshot from inside the call."""

    RUNNABLE = auto()  # a group can run the call: it resumes the call, or starts it over
    FAILED = auto()  # `recover` must handle the failure


class GroupRepair:
    """Repairs or replaces a trainer's worker group after a failure.

    Args:
        lifecycle: Holds the worker group.
        monitor: Watches the group during the recovery.
        failures: Policy that decides whether a failed call continues, restarts or raises.
        start_budget: Retries for workers that die while a group starts. With None, only the `num_attempts` of the
            scaling policy limits how often a start is attempted.
    """

    def __init__(
        self, lifecycle: Lifecycle, monitor: Monitor, failures: FailurePolicy, start_budget: RetryBudget | None
    ) -> None:
        self._lifecycle, self._monitor, self._failures = lifecycle, monitor, failures
        self._spec, self._scaling, self._snapshots = lifecycle.spec, lifecycle.scaling, lifecycle.snapshots
        self._start_budget = start_budget
        # Step at which survivors continued in a smaller group, with more samples per worker.
        self._went_on_at: int | None = None
        self._went_on_in: Call | None = None

    # ------------------------------------------------------------------------------------------- a call failed

    def recover(self, call: Call, report: GroupReport, budget: RetryBudget) -> bool:
        """Repair the worker group after a failed call, or replace the group.

        Returns:
            True if the call can resume where it was interrupted. False if it must start over.

        Raises:
            WorkerError: User code raised an exception.
            UnevenStepsError: The ranks ran different steps, so some ranks would have waited for other ranks forever.
            WorkersLostError: The retries are used up, too few workers can be started, or the training state that the
                recovery needs is lost.
        """
        self._lifecycle.check_active()
        self._monitor.go_on()
        diagnosis = classify(report)
        answers = {
            each.rank: each.value.value if isinstance(each, Answered) else each.failure for each in report.outcomes
        }
        if divergence := call.divergence(answers):
            self._monitor.await_snapshot()  # wait for the previous call's snapshot while its worker can still send it
            raise UnevenStepsError(divergence) from diagnosis.faults[0].error
        if self._went_on_in is call and self._is_short_of_memory(diagnosis):
            return self._is_inside_after(self._wait_for_memory(report, diagnosis))
        decision = self._failures.decide(diagnosis, budget, call.can_continue)
        if decision == "raise error":
            raise worker_error(diagnosis.faults, self._end_if_parted(call, diagnosis, report))
        if decision == "give up":
            behind = set[int]()
            # If only lost connections were reported, find out which ranks do not answer.
            if diagnosis.kind == "disconnected":
                everyone = range(len(self._lifecycle.running))
                behind = set(everyone) - set(self._lifecycle.running.answering(everyone))
            self._give_up(diagnosis, report, budget, self._in_words(diagnosis, behind))
        cause = self._in_words(diagnosis)
        if decision == "continue":
            failed, self._went_on_in = self._continue_in_place(report, budget), call
            if failed is None:
                return True
            cause = failed.cause
        return self._restart_after(call, diagnosis, report, cause, budget)

    def _restart_after(
        self, call: Call, diagnosis: Diagnosis, report: GroupReport, cause: str, budget: RetryBudget
    ) -> bool:
        """Restart the workers after a failed call, because the survivors cannot continue.

        Returns:
            True if the call can resume from inside. False if it must start over.

        Raises:
            WorkersLostError: See `recover`.
        """
        if diagnosis.kind == "disconnected" and not self._spec.keeps_survivors:
            self._monitor.tell_stuck()
        if budget.is_spent:
            self._give_up(diagnosis, report, budget, cause)
        self.await_only_state()
        if self._lifecycle.holds_only_state and not call.can_continue:
            self._refuse_to_repeat(diagnosis, report, cause)
        budget.pay_for_restart()
        self._lifecycle.hooks.on_failure(diagnosis)
        self.restart_workers("restored", cause, after=report)
        return self._is_restored_inside

    def change_held(self, report: GroupReport) -> bool:
        """Let workers leave or join the group while its ranks wait between two steps of a call.

        Return True if the call can resume where it stopped, or False if it must start over.

        Args:
            report: The ranks' answers to the call that has stopped.
        """
        self._lifecycle.check_active()
        reason = self._monitor.reason
        self._monitor.go_on()
        leaving = self._lifecycle.leaving_nodes_in_use()
        parts = [] if self._spec.runs_on else [answer.value.part for answer in report.values]
        if parts:
            self._snapshots.take_from(self._lifecycle.running, parts)
        return self._is_inside_after(self.change(leaving, reason, parts))

    def _is_inside_after(self, failed: NotInPlace | None) -> bool:
        """After an attempt to change the group in place, restart the workers if the attempt failed.

        Return True if the call can resume where it stopped, or False if it must start over.

        Args:
            failed: Why the change needs a restart. None if the change succeeded.
        """
        if failed is None:
            return True
        self._monitor.await_snapshot()
        self.restart_workers(failed.kind, failed.cause)
        return self._is_restored_inside

    @property
    def _is_restored_inside(self) -> bool:
        """True if the snapshot that was just restored was taken inside the running call. The call can then resume."""
        return self._snapshots.is_inside and not self._snapshots.calls_since

    def _in_words(
        self, diagnosis: Diagnosis, gone: Collection[int] = (), infos: Sequence[WorkerInfo] | None = None
    ) -> str:
        """Return a description of why a group failed.

        Args:
            diagnosis: The cause of the failed call.
            gone: Ranks that are known to be lost in addition to the ranks in `diagnosis`.
            infos: Node and process of each rank's worker in the failed group. Default: those of the current group.
        """
        group, lost = self._lifecycle.running, {*gone, *(diagnosis.ranks if diagnosis.kind == "died" else ())}
        return words(diagnosis, gone, group.nodes_of(lost, group.infos if infos is None else infos))

    def _give_up(self, diagnosis: Diagnosis, report: GroupReport, budget: RetryBudget, cause: str) -> NoReturn:
        """Kill the worker group and raise `WorkersLostError`, because no retry is left.

        Before that, fetch training state that exists only in the workers.
        """
        self.fetch_only_state(report)
        self._lifecycle.end_call(cause, "lost")
        budget.refuse()
        hint = (
            f"{LOOK_AT_RAYS_LOG}: too little memory, say, or a collective that the ranks called with different sizes. "
        )
        message = (
            f"{cause}, and the {budget.num_restarts} allowed retries of this call are used up. "
            f"{hint if diagnosis.kind == 'died' else ''}{self._spec.words.when_spent}"
        )
        raise WorkersLostError(message.rstrip()) from diagnosis.faults[0].error

    def _refuse_to_repeat(self, diagnosis: Diagnosis, report: GroupReport, cause: str) -> NoReturn:
        """Kill the worker group and raise `WorkersLostError`, because the state from before the call is lost.

        The survivors may have completed part of the call, so the call can neither continue nor start over.
        """
        self.fetch_only_state(report)
        self._lifecycle.end_call(cause, "lost")
        raise WorkersLostError(
            f"{cause}, in a call that cannot be repeated, because the process with the copy of the state from before "
            "the call was lost, too. The next call continues with the state of the surviving workers."
        ) from diagnosis.faults[0].error

    def _end_if_parted(self, call: Call, diagnosis: Diagnosis, report: GroupReport) -> str:
        """After an exception in user code, kill the group if it cannot run another call.

        This is the case if a rank lost a connection or is still inside the call, or if the ranks may be out of sync.

        Args:
            call: The failed call.
            diagnosis: The cause of the failure.
            report: The outcomes of the call.

        Returns:
            A message for the user about the training state. Empty if the group was not killed, or if there is neither
            a snapshot nor a lost state.
        """
        group = self._lifecycle.running
        if not report.all_answered:  # some ranks are still inside the call; ADR 7 explains why the group cannot be kept
            parted = "others were inside the call"
        elif call.keeps_alike and not group.is_driver_only and not self._has_failed_alike(report):
            parted = "others were elsewhere"
            self._monitor.await_snapshot()  # wait for the previous call's snapshot while its worker can still send it
        else:
            return ""
        self.fetch_only_state(report)
        self._lifecycle.end_call(f"{named(diagnosis.ranks)} raised {diagnosis.faults[0].type_name} while {parted}")
        if self._spec.loses_state and self._snapshots.has_gap:
            lost = "The workers were ended, and their state is lost: `snapshot_every_s=None` switches snapshots off."
            return f"{lost} {self._snapshots.last_file_in_words}"
        if not self._snapshots.has_any:
            return ""
        return (
            "The workers were ended, because they are not in the same state any more. The next call starts new ones, "
            f"{self._snapshots.restored_from()}."
        )

    def _has_failed_alike(self, report: GroupReport) -> bool:
        """Return True if all ranks failed at the same line of user code and still have the same training state."""
        if not failed_alike(report):
            return False
        progress = self.ask_progress()
        return progress.ok and are_alike([answer.value for answer in progress.values])

    # ------------------------------------------------------------------------------ before workers are killed

    def fetch_only_state(self, after: GroupReport | None = None) -> None:
        """Before workers are killed, copy their training state to the driver if the driver has no copy.

        If no worker has a complete state any more, log a warning and give the state up.

        Args:
            after: The report of the failed call. None if ranks may still be running a call.
        """
        lifecycle = self._lifecycle
        self.await_only_state()
        if not lifecycle.holds_only_state:
            return
        lifecycle.is_fetching = True
        try:
            self._monitor.watch()
            group = lifecycle.running
            survivors = group.settle_any() if after is None else group.settle(after)
            formed, num_lost = list[Any](), 0  # the group of the last copy, and how many of its copies were lost
            while lifecycle.holds_only_state:
                if num_lost == NUM_COPIES:
                    raise CannotForm(f"it was lost in transit {NUM_COPIES} times", survivors)
                # Include stuck ranks, which may still finish a long step.
                self._fetch_from({*survivors, *group.stuck} - group.gone)
                survivors = list(range(len(group)))
                formed, num_lost = group.infos, num_lost + 1 if group.infos == formed else 1
            logger.info("fetched the state that only workers had: %s", self._snapshots.restored_from())
        except CannotForm as failed:
            reason = failed.reason or "no worker is left"
            logger.warning("the state that only workers have cannot be fetched: %s", reason)
            lifecycle.gives_state_up = True
        finally:
            lifecycle.is_fetching = False

    def leave_with_survivors(self, call: Call, report: GroupReport, budget: RetryBudget) -> Left | NotLeft:
        """After a failure in a call that should end early, copy the survivors' training state to the driver.

        Args:
            call: The failed call.
            report: The outcomes of the failed call.
            budget: The retries of the call. One is used unless the survivors have a state from inside the call.

        Returns:
            Each survivor's part of a snapshot that was taken inside the call. `NotLeft.FAILED` if the survivors could
            not form a group, their replicas cannot regroup, or user code raised an exception.

        Raises:
            WorkersLostError: See `recover`.
        """
        diagnosis = classify(report)
        if not self._spec.regroups or diagnosis.kind == "user":
            return NotLeft.FAILED
        self._monitor.go_on()
        group = self._lifecycle.running
        infos, captured = group.infos, None
        living: Collection[int] = group.settle(report)
        try:
            for _ in range(NUM_COPIES):
                # A stuck rank may be in a step that takes forever, so only ask it if no other rank has the state.
                captured = self._fetch_from((set(living) or group.stuck) - group.gone, only_inside=True)
                if captured is not None:
                    break
                self._lifecycle.refuse_if_cut_off()
                living = range(len(group))
        except CannotForm as failed:
            logger.warning("no worker has the state of a completed step: %s", failed.reason or "all are lost")
            if group.infos is infos:
                return NotLeft.FAILED
            # The survivors had formed a group, which then failed. The report is of the ranks of the group before.
            self._restart_after(call, diagnosis, GroupReport(()), self._in_words(diagnosis, infos=infos), budget)
            return NotLeft.RUNNABLE
        if captured is None or not captured.is_inside:
            self._enlarge(call, diagnosis, self._in_words(diagnosis, infos=infos), budget)
            return NotLeft.RUNNABLE
        self._snapshots.leave_call()
        return Left(captured.parts)

    def _enlarge(self, call: Call, diagnosis: Diagnosis, cause: str, budget: RetryBudget) -> None:
        """Prepare a group that was formed only to copy its state to run the call, which costs a retry.

        If the group has too few workers to train, add workers. If workers cannot join, restart all workers. If the
        program is about to end, start no workers.

        Args:
            call: The failed call, which the group will run.
            diagnosis: The cause of the failure.
            cause: Description of the failure, for the history.
            budget: The retries of the call.

        Raises:
            WorkersLostError: See `recover`.
        """
        lifecycle, num_workers = self._lifecycle, len(self._lifecycle.running)
        if num_workers >= self._scaling.min_workers or lifecycle.is_ending:
            report = self.ask_progress()
            if not report.ok:
                return  # the next attempt fails, and pays
            progress = max(answer.value.progress for answer in report.values)
            obstacle = budget.obstacle_to_continuing(progress)
            if obstacle is None:
                budget.pay_for_continuing(progress)
                logger.warning("%s; the call is tried again before it ends early", cause)
            elif lifecycle.is_ending:
                self._give_up(diagnosis, GroupReport(()), budget, f"{cause}; {obstacle}")
            else:
                self._restart_after(call, diagnosis, GroupReport(()), f"{cause}; {obstacle}", budget)
            return
        staying, num_awaited = list(range(num_workers)), lifecycle.resizing.num_awaited
        change = GroupChange(Why.FAILURE, lambda gone: cause, staying, lifecycle.now(), num_awaited, budget)
        failed = self._make(change)
        if failed is not None:
            self._restart_after(call, diagnosis, GroupReport(()), failed.cause, budget)

    def await_only_state(self) -> None:
        """If the training state exists only in the workers, but a snapshot is in transit, wait for the snapshot."""
        if self._lifecycle.holds_only_state and self._snapshots.is_coming:
            self._monitor.await_snapshot()

    def _fetch_from(self, living: Collection[int], *, only_inside: bool = False) -> Captured | None:
        """Form a group of the ranks in `living` and copy their training state to the driver.

        Forming a group brings the ranks in sync.

        Args:
            living: The ranks.
            only_inside: True to send nothing to the driver unless the state is from inside a call. A copy from after a
                call that the driver does not count as completed would make a restart repeat that call.

        Returns:
            The copies. None if the snapshot was lost, because a rank was lost meanwhile.

        Raises:
            CannotForm: No rank is left that has the state.
        """
        group, now, newcomers = self._lifecycle.running, self._lifecycle.now(), self._lifecycle.newcomers
        staying = [rank for rank in group.answering(sorted(living)) if group.workers[rank] not in newcomers]
        first = group.infos[0]
        self._try_to_make(GroupChange(Why.EVACUATE, lambda gone: "", staying, now, 0))
        if group.infos[0] != first:  # the previous rank 0, which sends the snapshots, was lost
            self._snapshots.drop_incoming()
        everyone = dict.fromkeys(range(len(group)), ())
        report = group.on_replica(replica.capture_here, everyone, on_wait=self._monitor.poll)
        if not report.ok:
            group.settle(report)
            return None
        captured = Captured([answer.value for answer in report.values])
        if only_inside and not captured.is_inside:
            return captured
        self._snapshots.take_from(group, captured.parts)
        self._monitor.await_snapshot()
        return captured if self._snapshots.shares_current else None

    # --------------------------------------------------------------------------------------- changes in place

    def _continue_in_place(self, report: GroupReport, budget: RetryBudget) -> NotInPlace | None:
        """After a failure, form a new group of the survivors, with spares and new workers if available.

        Args:
            report: The outcomes of the failed call.
            budget: The retries of the call.

        Returns:
            Why the workers must be restarted, or None if the group was formed.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        began = lifecycle.now()
        survivors = self._settled(report, self._monitor.tell_stuck)
        # If only connections were lost, stuck ranks hang; if a rank had died, they might just be slow.
        if group.stuck and classify(report).kind == "disconnected":
            budget.note_hang()
        verb = "does" if len(group.silent) == 1 else "do"
        silent = f"; {named(group.silent)} {verb} not answer any more" if group.silent else ""
        infos = list(group.infos)

        def cause(gone: Collection[int]) -> str:
            nodes = group.nodes_of(gone, infos)
            told = words(classify(report), gone, nodes)
            return told if nodes is not None and nodes.are_dead else told + silent

        num_awaited = 0 if lifecycle.is_ending else lifecycle.resizing.num_awaited
        return self._make(GroupChange(Why.FAILURE, cause, survivors, began, num_awaited, budget))

    def _settled(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """After a failed call, return the ranks that survived. Interrupt survivors that wait for lost ranks.

        Args:
            report: The outcomes of the failed call.
            tell_stuck: Called once if a live rank takes long to finish the failed call.
        """
        survivors = self._lifecycle.running.settle(report, tell_stuck)
        self._lifecycle.suspect(survivors)
        return survivors

    def _is_short_of_memory(self, diagnosis: Diagnosis) -> bool:
        """Return True if survivors ran out of memory in their first step after the group shrank.

        With fewer workers, each worker's part of the global batch is larger.
        """
        if self._went_on_at is None or not is_lack_of_memory(diagnosis):
            return False
        signs = self._lifecycle.running.ask_beside(replica.sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= self._went_on_at for sign in signs.values())

    def _wait_for_memory(self, report: GroupReport, diagnosis: Diagnosis) -> NotInPlace | None:
        """After survivors ran out of memory, wait for new workers and form a group with them.

        The wait lasts as long as any worker is starting.

        Args:
            report: The outcomes of the failed call.
            diagnosis: The cause of the failure.

        Returns:
            Why the workers must be restarted, or None if the group was formed.
        """
        lifecycle, began, num_short = self._lifecycle, self._lifecycle.now(), len(self._lifecycle.running)
        lifecycle.note_short_of_memory()
        self._went_on_at = None

        def cause(gone: Collection[int]) -> str:
            lost = f"lost {named(gone)}; " if gone else ""
            return f"{lost}with {num_short} workers {words(diagnosis)}"

        logger.warning("%s; waiting for new workers", cause(()))
        survivors = self._settled(report, self._monitor.tell_stuck)
        lifecycle.start_standby()  # if survivors continued in place before, no new workers were started then
        return self._make(GroupChange(Why.MEMORY, cause, survivors, began, self._scaling.max_workers))

    def change(self, leaving: frozenset[str], cause: str, parts: Sequence[Capture] = ()) -> NotInPlace | None:
        """Between two steps or calls, remove the workers on nodes that are going away, and add ready standby workers.

        If workers are removed, wait up to `STANDBY_WAIT_S` for their replacements to start.

        Args:
            leaving: IDs of nodes that are being removed.
            cause: Reason for the change, for the history.
            parts: Each rank's part of a snapshot, if the ranks wait between two steps of a call.

        Returns:
            Why the workers must be restarted, or None if the change was made.
        """
        group = self._lifecycle.running
        staying = [rank for rank, info in enumerate(group.infos) if info.node_id not in leaving]
        why = Why.DRAIN if len(staying) < len(group) else Why.GROW
        if not self._spec.regroups and not self._spec.runs_on:
            return NotInPlace(KINDS[why], cause)
        return self._make(
            GroupChange(
                why,
                cause=lambda gone: f"lost {named(gone)}; {cause}" if gone else cause,
                staying=staying,
                began=self._lifecycle.now(),
                num_awaited=self._scaling.max_workers if why is Why.DRAIN else 0,
                leaving=frozenset(range(len(group))) - frozenset(staying),
                orphans=tuple(part.progress for rank, part in enumerate(parts) if rank not in staying),
            )
        )

    def grow(self, num_awaited: int, cause: str) -> NotInPlace | None:
        """Between two calls, add as many workers to the group as the free resources allow.

        Args:
            num_awaited: Wait for workers that are starting until the group can have this many workers. The wait lasts
                at most `STANDBY_WAIT_S`.
            cause: Reason for the change, for the history.

        Returns:
            Why the workers must be restarted. None if the change was made or no worker could join.
        """
        lifecycle, standby = self._lifecycle, self._lifecycle.running.standby
        lifecycle.start_standby()
        deadline = lifecycle.now() + STANDBY_WAIT_S
        num_missing = num_awaited - len(lifecycle.running)
        while standby.num_ready < num_missing and standby.num_coming and lifecycle.now() < deadline:
            lifecycle.sleep(0.005)
            self._monitor.poll()
        standby.kill_unresponsive()
        return self.change(frozenset(), cause) if standby.num_ready else None

    def movability(self) -> Movability:
        """Ask all replicas if they can continue in a new group.

        Call this method between calls, because it polls the replicas with a call.
        """
        if not self._spec.regroups:
            return Movability.CANNOT_MOVE
        report = self.ask_progress()
        if not report.ok:
            return Movability.CANNOT_MOVE if classify(report).kind == "user" else Movability.LOST
        has_obstacle = any(answer.value.obstacle for answer in report.values)
        return Movability.CANNOT_MOVE if has_obstacle else Movability.CAN_MOVE

    def ask_progress(self) -> GroupReport:
        """Ask each rank for its progress, which also shows which ranks are lost."""
        group = self._lifecycle.running
        everyone = dict.fromkeys(range(len(group)), ())
        return group.on_replica(replica.replica_progress, everyone, on_wait=self._monitor.poll)

    def _make(self, change: GroupChange) -> NotInPlace | None:
        """Change the group as requested and record the event in the history. Use a retry if the change costs a retry.

        Returns:
            Why the workers must be restarted, or None if the change was made.
        """
        lifecycle, before = self._lifecycle, list(self._lifecycle.running.infos)

        def gone(staying: Collection[int]) -> set[int]:
            """Return the lost ranks, as they were numbered in the group before the change."""
            infos = lifecycle.running.infos
            kept = {infos[rank] for rank in staying}
            return {rank for rank, info in enumerate(before) if info not in kept} - change.leaving

        def end_unless_unformed(error: BaseException) -> None:
            """If Ctrl-C or an error left the group half formed, kill the group, so that it is never used."""
            if not isinstance(error, CannotForm):
                self.fetch_only_state()
                lifecycle.end_call(type(error).__name__)

        try:
            with OnFailure(with_error=end_unless_unformed):
                formed = self._try_to_make(change)
        except CannotForm as failed:
            lost = gone(failed.staying)
            cause = change.cause(lost)
            is_failure = change.why is Why.FAILURE or bool(lost) or failed.is_failure
            reason = f"{cause}; {failed.reason}" if failed.reason else cause
            return NotInPlace("restored" if is_failure else change.kind, reason)
        group = lifecycle.running
        if group.infos[0] != before[0]:
            self._snapshots.drop_incoming()
        lifecycle.hooks.on_change(group)
        lost, source = gone(range(len(group))), formed.progress_reports[formed.source]
        if change.budget is not None:
            change.budget.pay_for_continuing(source.progress)
        is_smaller = len(group) < self._scaling.max_workers
        may_lack_memory = change.why is Why.FAILURE and is_smaller and lifecycle.resizing.minds_memory
        self._went_on_at = source.progress if may_lack_memory else None
        kind: EventKind = "continued" if lost else change.kind
        # If all joining workers died, the group has not grown, so record nothing.
        if kind != "grown" or len(group) > len(before):
            lifecycle.record(kind, len(before), change.began, change.cause(lost), source.words)
        lifecycle.owe_spares()
        return None

    def _try_to_make(self, change: GroupChange) -> NextGroup:
        """Form the requested group and return its members. If workers are lost meanwhile, try again without them.

        Later attempts wait for new workers only if fewer than `min_workers` remain.

        Raises:
            CannotForm: No group can be formed.
        """
        staying, without_state = change.staying, set[int]()
        while True:
            formed = self.form(change, staying, without_state)
            places = rank_rules.places(
                formed.staying if self._spec.runs_on else range(len(formed.staying)), formed.num_workers
            )
            behind = takers(formed.progress_reports, formed.source)
            takers_of_state = (*(places[index] for index in behind), *places[len(formed.staying) :])
            handover = StateHandover(places[formed.source], takers_of_state, change.orphans)
            group, newcomers = self._lifecycle.running, self._lifecycle.newcomers
            newcomers.update(each.worker for each in formed.joining)
            report = group.regroup(formed.staying, formed.joining, handover, self._monitor.poll, places)
            newcomers.difference_update(group.workers[outcome.rank] for outcome in report.outcomes if outcome.ok)
            if report.ok:
                self._lifecycle.keep_facts(list(report.values))
                return formed
            staying = self._survivors_of(report, places[: len(formed.staying)], formed.num_workers)
            had_state = {
                place for place, rank in zip(places, formed.staying, strict=False) if rank not in without_state
            }
            without_state = {outcome.rank for outcome in report.outcomes if not outcome.ok} - had_state
            change = replace(change, num_awaited=0)

    def _survivors_of(self, report: GroupReport, staying: Sequence[int], num_workers: int) -> list[int]:
        """Return the ranks that survived a failed attempt to form a group.

        Args:
            report: The outcomes of the attempt.
            staying: The ranks of the old group's workers in the group that was to be formed.
            num_workers: Size of that group.

        Raises:
            CannotForm: User code raised an exception, or no worker was lost.
        """
        diagnosis = classify(report)
        reason = f"could not form a new group: {words(diagnosis)}"
        logger.warning("%s", reason)
        survivors = self._settled(report) if diagnosis.kind != "user" else []
        if diagnosis.kind == "user" or len(survivors) == num_workers:
            raise CannotForm(reason, staying, is_failure=diagnosis.kind != "user")
        return survivors

    # -------------------------------------------------------------------------------- members of the next group

    def form(self, change: GroupChange, staying: Sequence[int], without_state: Collection[int] = ()) -> NextGroup:
        """Choose the members of the next group, and make the survivors leave the old group.

        The members are ranks of the old group and standby workers. Workers that die meanwhile are left out.

        Args:
            change: The change for which the group is formed.
            staying: Ranks of the old group that should stay.
            without_state: Ranks in `staying` that did not receive the training state in an earlier, failed attempt.

        Raises:
            CannotForm: Too few workers are left, or the survivors cannot continue.
        """
        standby, min_workers = self._lifecycle.running.standby, self._scaling.min_workers
        formed = self._leave_old_group(change, staying, without_state)
        # Ignore obstacles to continuing: a replica that cannot continue can still send its state.
        if change.why is Why.EVACUATE:
            reports = [replace(each, obstacle=None) for each in formed.progress_reports]
            self._remove_others(formed.staying)
            return replace(formed, progress_reports=reports)

        def kill_new_ones() -> None:
            for each in formed.joining:
                standby.kill(each.worker)

        with OnFailure(kill_new_ones):
            formed = self._fill_up(change, formed, without_state)
            # Survivors that continue do not take workers that are still starting, which a restart may need.
            if change.why is Why.REUSE:
                missing = min_workers - formed.num_workers
                formed.joining += standby.take_needed(missing, missing, self._monitor.poll) or []
            if formed.num_workers < min_workers:
                raise CannotForm(f"{formed.num_workers} workers are left, but {min_workers} are needed", formed.staying)
        return formed

    def _leave_old_group(
        self, change: GroupChange, survivors: Sequence[int], without_state: Collection[int]
    ) -> NextGroup:
        """Make the survivors leave the old group. Return the next group, without survivors that turn out to be dead.

        The returned group has no standby workers yet. It is empty if a restart has only standby workers left.

        Args:
            change: The change for which the next group is formed.
            survivors: Ranks of the old group that should stay.
            without_state: Ranks in `survivors` that did not receive the training state in an earlier, failed attempt.

        Raises:
            CannotForm: No rank is left, and there is no restart in which standby workers could take over. Also if a
                survivor's user code raised an exception.
        """
        group, staying = self._lifecycle.running, list(survivors)
        while staying:
            report = group.tear_down(staying, self._monitor.poll)
            if report.ok:
                pairs = zip(staying, report.values, strict=True)
                return NextGroup(
                    staying, [replace(p, is_whole=False) if rank in without_state else p for rank, p in pairs], []
                )
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a surviving worker could not report its progress: %s", words(classify(report)))
                raise CannotForm("a surviving worker could not report its progress", staying)
            # Ranks that have not answered are not in this set, because they may just be slow.
            dead = {o.rank for o in failed if o.failure is not None}
            staying = [rank for rank in staying if rank not in (dead or {o.rank for o in failed})]
        if change.why is Why.REUSE:
            group.standby.kill_unresponsive()  # spare workers may have died together with the workers
        if change.why is not Why.REUSE or not group.standby.num_all:
            raise CannotForm("", ())
        return NextGroup([], [], [])

    def _remove_others(self, staying: Collection[int]) -> None:
        group = self._lifecycle.running
        group.remove_workers([rank for rank in range(len(group)) if rank not in staying and rank not in group.gone])

    def _fill_up(self, change: GroupChange, formed: NextGroup, without_state: Collection[int]) -> NextGroup:
        """Add standby workers to the next group. If it has too few members, wait for workers that are starting.

        Too few means fewer than `change.num_awaited` or `min_workers`, whichever is larger. Kill the ranks of the old
        group that do not stay.

        Args:
            change: The change for which the next group is formed.
            formed: The members so far.
            without_state: Ranks that did not receive the training state in an earlier, failed attempt.

        Returns:
            The members that are still alive after the wait.

        Raises:
            CannotForm: No staying rank is left, or no retry is left to continue.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        deadline = lifecycle.now() + change.wait_s
        while True:
            if change.why is not Why.REUSE:
                progress = formed.progress_reports[formed.source].progress
                obstacle = change.budget.obstacle_to_continuing(progress) if change.budget is not None else None
                if obstacle is not None:
                    raise CannotForm(obstacle, formed.staying)
            self._remove_others(formed.staying)
            if not self._fill_from_standby(change, formed, max(0.0, deadline - lifecycle.now())):
                return formed
            # Poll the ranks again, because some may have died unnoticed during the wait.
            answering = group.answering(formed.staying)
            if answering == formed.staying:
                return formed
            lifecycle.suspect(answering)
            formed = replace(self._leave_old_group(change, answering, without_state), joining=formed.joining)

    def _fill_from_standby(self, change: GroupChange, formed: NextGroup, wait_s: float) -> bool:
        """Add ready standby workers to the next group, and start more standby workers if the group is not full.

        If the group has too few members (see `_fill_up`), wait up to `wait_s` for workers that are starting. Do nothing
        if a survivor's call does not admit other workers now. Return True if this method had to wait.
        """
        standby, most = self._lifecycle.running.standby, self._scaling.max_workers
        admits = all(each.admits for each in formed.progress_reports)
        missing = most - formed.num_workers if admits else 0
        if missing <= 0:
            return False
        avoided = self._lifecycle.nodes_to_avoid
        standby.kill_on(avoided)
        formed.joining += standby.take_ready(missing, 0.0)
        if not self._lifecycle.is_ending:  # while the program ends, Ray may be unable to report which nodes are alive
            standby.start_more(most - formed.num_workers - standby.num_coming, most, avoided)
        missing = max(change.num_awaited, self._scaling.min_workers) - formed.num_workers
        if not wait_s or missing <= 0 or not standby.num_coming:
            return False
        formed.joining += standby.take_ready(missing, wait_s, self._monitor.poll)
        return True

    # ------------------------------------------------------------------------------- back to the last snapshot

    def restart_workers(self, kind: EventKind, cause: str, after: GroupReport | None = None) -> None:
        """Kill the old group, start a new group as large as free resources allow, and restore the last snapshot.

        Args:
            kind: Kind of the event in the history.
            cause: Reason for the restart, for the history.
            after: The outcomes of a failed call. If given, surviving processes are kept if possible.

        Raises:
            WorkersLostError: Too few workers could be started, or the state is lost.
            WorkerError: The user's set-up code failed.
        """
        lifecycle = self._lifecycle
        lifecycle.check_active()
        lifecycle.check_not_ending(cause)
        began, old_size = lifecycle.now(), lifecycle.num_workers
        lifecycle.allow_replacements()

        def end(error: BaseException) -> None:
            """If Ctrl-C or an error left the group half restored, kill the group, so that it is never used."""
            self.fetch_only_state()  # Ctrl-C may have interrupted the first attempt
            lifecycle.kill_group()
            if kind != "started":
                is_failure = isinstance(error, WorkersLostError)
                why = "no other group could be started" if is_failure else type(error).__name__
                lifecycle.record("lost" if is_failure else "ended", old_size, began, f"{cause}; {why}")

        with OnFailure(with_error=end):
            self.fetch_only_state(after)
            self._snapshots.poll(timeout_s=_AWAITED_S if self._snapshots.is_awaited else SETTLE_S)
            self._snapshots.drop_incoming()
            num_kept = self._try_renew(after) if after is not None else None
            if num_kept is None:
                self._start_others(kind, cause)
            lifecycle.record(kind, old_size, began, cause, self._snapshots.restored_from(), num_kept or 0)
            lifecycle.end_replacements()

    def _try_renew(self, after: GroupReport) -> int | None:
        """Rebuild replicas in existing processes and restore the last snapshot. Standby workers replace lost workers.

        If the survivors could have continued in place but failed to do so, use only standby workers, because something
        in the survivors' processes may be broken.

        Args:
            after: The outcomes of the failed call.

        Returns:
            Number of workers kept from the old group, or None if all processes must be replaced.
        """
        lifecycle, spec, group = self._lifecycle, self._spec, self._lifecycle.running
        is_possible = spec.renews or (spec.regroups and not spec.use_local and group.standby.num_all)
        if not is_possible or self._snapshots.is_lost or not self._snapshots.has_any:
            return None
        before = set(group.infos)
        if spec.renews:
            staying = self._settled(after, self._monitor.tell_stuck)
        else:  # avoid the nodes of silent ranks, because killing an actor does not end a frozen process
            staying = []
            unknown = [rank for rank in range(len(group)) if rank not in group.gone | group.silent]
            lifecycle.suspect(group.answering(unknown))
        num_awaited = lifecycle.resizing.num_awaited
        change = GroupChange(Why.REUSE, lambda gone: "", staying, lifecycle.now(), num_awaited)
        try:
            formed = self.form(change, staying)
        except CannotForm as failed:
            logger.warning(
                "no process can be reused, so new workers are started: %s", failed.reason or "no worker is left"
            )
            return None
        report = group.renew(formed.staying, formed.joining, self._monitor.poll)
        report = lifecycle.without_lost(report, group, self._monitor.poll)
        if not report.ok:
            logger.warning("could not form a new group: %s", words(classify(report)))
            return None
        lifecycle.take_answers(report)
        return len(before & set(lifecycle.running.infos)) if self._restore_those_left() else None

    def _start_others(self, kind: EventKind, cause: str) -> None:
        """Kill the group. Once enough resources are free, start a new group and restore the last snapshot in it."""
        lifecycle, scaling = self._lifecycle, self._scaling
        lifecycle.kill_group()
        self._refuse_if_lost(cause)
        if kind == "restarted":
            lifecycle.make_room()
        attempt, impossible = 0, None
        while attempt < scaling.num_attempts:
            lifecycle.check_not_ending(cause)
            view = lifecycle.settled_view()
            decision = scaling.decide(view, self._spec.resources, attempt)
            attempt += 1
            if isinstance(decision, WaitForWorkers):
                # Not checked after a failure, because the workers may fit once lost nodes come back.
                if kind == "started":
                    need, with_cpus = self._spec.resources, self._spec.words.with_cpus
                    impossible = impossibility(need, scaling.min_workers, view, with_cpus)
                if decision.delay_s is None:
                    table = impossible or explain(self._spec.resources, scaling.max_workers, view)
                    few = f"Too few workers can be started: {decision.reason}."
                    raise WorkersLostError(f"{few}\n{table}\n{self._spec.words.when_starved}".rstrip())
                if impossible and attempt == 1:
                    logger.warning("%s", impossible)
                logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)
                needed, has_driver = scaling.min_workers, self._spec.use_local
                slots = lifecycle.make_group(self._spec, needed).slots

                def sleep(seconds: float) -> None:
                    lifecycle.sleep(seconds)
                    lifecycle.check_not_ending(cause)

                slots.await_room(needed, decision.delay_s, sleep, has_driver=has_driver)
                continue
            num_spares = min(self._spec.num_spares, capacity(view, self._spec.resources) - decision)
            try:
                has_started = lifecycle.try_start(decision, max(0, num_spares), _REBUILD_RESERVATION_S)
                if has_started and self._restore_those_left():
                    return
            except ReservationTimeoutError as error:  # another program took the free resources, or their node was lost
                logger.warning("%s", str(error).partition("\n")[0])
                continue
            if self._start_budget is not None:
                pay_for_start(self._start_budget)
                attempt -= 1  # do not count this attempt, because it used a retry of the start budget
        raise WorkersLostError(f"No group could be started in {scaling.num_attempts} attempts after: {cause}.")

    def _refuse_if_lost(self, cause: str) -> None:
        """Raise `WorkersLostError` if the training state is lost.

        New workers would otherwise silently start from scratch.
        """
        if not self._snapshots.is_lost:
            return
        if not self._spec.loses_state:
            raise WorkersLostError(
                f"{cause}, and the state was lost with the workers, because the process with its copy was lost, too. "
                f"{self._snapshots.last_file_in_words}"
            )
        raise WorkersLostError(
            f"{cause}, and the state was lost with the workers, because `snapshot_every_s=None` switches snapshots "
            f"off. {self._snapshots.last_file_in_words} Without that option, or with `snapshot_every_s=60`, such a "
            "failure costs time only."
        )

    def _restore_those_left(self) -> bool:
        """Restore the last snapshot in the group. If workers die meanwhile, form a group without them and try again.

        If too few workers are left, kill the group and return False.
        """
        lifecycle = self._lifecycle
        while (failed := self._restore()) is not None:
            on_wait = Monitor(lifecycle, is_of_restore=True).poll
            report = lifecycle.without_lost(failed, lifecycle.running, on_wait)
            if not report.ok:
                logger.warning("could not restore the state: %s", words(classify(report)))
                lifecycle.kill_group()
                return False
            self._snapshots.drop_incoming()
            lifecycle.take_answers(report)
        return True

    def _restore(self) -> GroupReport | None:
        """Restore the last snapshot in the current group, then repeat the calls made since that snapshot.

        Returns:
            The report of the call in which workers were lost, or None if no worker was lost.
        """
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
            report = group.on_replica(function, args, on_wait=on_wait)
            if self._has_lost_workers(report):
                return report
        is_inside = snapshots.is_inside
        if snapshots.calls_since:
            logger.info("repeating the calls that the last snapshot does not cover: %s", snapshots.restored_from())
        for call in snapshots.calls_since:
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            report = group.on_replica(function, args, on_wait=on_wait)
            if self._has_lost_workers(report):
                return report
        return None

    def _has_lost_workers(self, report: GroupReport) -> bool:
        """Return True if a call failed because workers were lost, and False if it succeeded.

        Args:
            report: The outcomes of the call.

        Raises:
            WorkerError: User code raised an exception.
            WorkersLostError: A shard of the snapshot was lost.
        """
        if report.ok:
            return False
        diagnosis = classify(report)
        if diagnosis.kind != "user":
            return True
        lost_parts = [fault.error for fault in diagnosis.faults if isinstance(fault.error, LostPartError)]
        if lost_parts:  # no node has this rank's shard of the snapshot
            raise WorkersLostError(f"{lost_parts[0]} {self._snapshots.last_file_in_words}")
        raise worker_error(diagnosis.faults)
