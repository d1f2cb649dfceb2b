"""The way on after a failure of workers: who is left, how they go on, and what is done where they cannot.

`Recovery.recover` comes first. The survivors form a new group in place, with standby workers and new ones as far as
there are any (ADR 9 says why, ADR 11 when they wait for a new worker). Where that cannot be done, other replicas
restore the last snapshot: new ones in the processes that are left, or all in new workers. Where nothing is left to try,
the failure is raised. The same changes let workers leave and step in between two steps or calls.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from raysgd._text.log_lines import named
from raysgd.engine import ranks as rank_rules
from raysgd.engine.lifecycle import SETTLE_S, Lifecycle, pay_for_start
from raysgd.engine.monitor import Monitor
from raysgd.engine.placement import explain, impossibility
from raysgd.engine.policies import (
    LOOK_AT_RAYS_LOG,
    Diagnosis,
    FailurePolicy,
    RetryBudget,
    WaitForWorkers,
    are_alike,
    capacity,
    choose_source,
    classify,
    failed_alike,
    is_lack_of_memory,
    takers,
    words,
)
from raysgd.engine.shared import replica
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_events import EventKind
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import GroupReport, ReplicaProgress, StateHandover
from raysgd.engine.startup import StandbyWorker
from raysgd.engine.transfers import DividedValue, LostPartError
from raysgd.exceptions import OnFailure, ReservationTimeoutError, UnevenStepsError, WorkersLostError, worker_error

logger = logging.getLogger(__name__)

STANDBY_WAIT_S = 30.0  # survivors do not wait longer for somebody new; who is late steps in later
_AWAITED_S = 10.0  # for a state that a file is to be written of
_REBUILD_RESERVATION_S = 10.0  # what the view calls free is granted at once, or another program took it


class CannotForm(Exception):
    """The ranks cannot form a new group: only a restart is left.

    Args:
        reason: Why; empty where that is plain, because no one is left.
        staying: Who is left.
        is_failure: Whether a worker was lost that is not counted among those who are gone.
    """

    def __init__(self, reason: str, staying: Collection[int], is_failure: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.staying, self.is_failure = reason, staying, is_failure


@dataclass
class NextGroup:
    """The workers that are to form the next group."""

    staying: list[int]
    progress_reports: list[ReplicaProgress]
    joining: list[StandbyWorker]

    @property
    def num_workers(self) -> int:
        return len(self.staying) + len(self.joining)

    @property
    def source(self) -> int:
        """Index of the one that all others go on from."""
        source = choose_source(self.progress_reports)
        if source is None:
            obstacles = [each.obstacle for each in self.progress_reports if each.obstacle]
            obstacle = [*obstacles, "each was in the middle of a step that had begun to change its state"][0]
            raise CannotForm(f"the survivors cannot continue by themselves: {obstacle}", self.staying)
        return source


@dataclass(frozen=True)
class Change:
    """A change of the group in place.

    Attributes:
        kind: What it is called in the history, unless ranks are lost over it.
        cause: Why, given the ranks that are lost.
        staying: Ranks that are to stay.
        began: When it began.
        num_awaited: To wait for workers that are still starting until they are so many; 0: for those needed.
        budget: What pays for it; None for what costs nothing.
        leaving: Ranks that leave in an orderly way.
        orphans: How far those are.
        wait_s: How long to wait.
        goes_on: Whether those who stay go on from the state that they have.
        only_copies: Whether their state is all that is wanted: no one joins, and however few there are are enough.
    """

    kind: EventKind
    cause: Callable[[Collection[int]], str]
    staying: Sequence[int]
    began: float
    num_awaited: int
    budget: RetryBudget | None = None
    leaving: frozenset[int] = frozenset()
    orphans: tuple[Any, ...] = ()
    wait_s: float = STANDBY_WAIT_S
    goes_on: bool = True
    only_copies: bool = False


Failed = tuple[EventKind, str]
"""A change that cannot be made in place: what the restart is called in the history, and what led to it."""


class Recovery:
    """Mends the group of a trainer after a failure, or replaces it.

    Args:
        lifecycle: Holds the group.
        monitor: Watches it meanwhile.
        failures: Decides what follows a failed call.
        start_budget: What pays for workers that die while they are started. None: a start is tried a few times, and
            costs nothing.
    """

    def __init__(
        self, lifecycle: Lifecycle, monitor: Monitor, failures: FailurePolicy, start_budget: RetryBudget | None
    ) -> None:
        self._lifecycle, self._monitor, self._failures = lifecycle, monitor, failures
        self._spec, self._scaling, self._snapshots = lifecycle.spec, lifecycle.scaling, lifecycle.snapshots
        self._start_budget = start_budget
        self._went_on_at: int | None = None  # with larger shares of the global batch: steps of the call until then
        self._went_on_in: Call | None = None

    # ------------------------------------------------------------------------------------------- a call failed

    def recover(self, call: Call, report: GroupReport, budget: RetryBudget) -> bool:
        """Mend or replaces the group after a failed call.

        Returns:
            Whether the replicas are inside the call, so that it can continue.

        Raises:
            WorkerError: An exception in user code.
            WorkersLostError: When the retries are spent or too few workers can be had.
        """
        self._lifecycle.check_active()
        self._monitor.go_on()
        diagnosis = classify(report)
        told = {each.rank: each.value.value if each.ok else each.failure for each in report.outcomes}
        if parted := call.parted(told):
            self._monitor.await_snapshot()  # of the call before, while a worker is there that can send it
            raise UnevenStepsError(parted) from diagnosis.faults[0].error
        if self._went_on_in is call and self._is_short_of_memory(diagnosis):
            return self._is_inside_after(self._wait_for_memory(report, diagnosis))
        decision = self._failures.decide(diagnosis, budget, call.can_continue)
        if decision == "raise error":
            raise worker_error(diagnosis.faults, self._end_if_parted(call, diagnosis, report))
        if decision == "give up":
            behind = set[int]()
            if diagnosis.kind == "disconnected":  # some saw only a connection break: who does not answer?
                everyone = range(len(self._lifecycle.running))
                behind = set(everyone) - set(self._lifecycle.running.answering(everyone))
            self._give_up(diagnosis, report, budget, self._in_words(diagnosis, behind))
        cause = self._in_words(diagnosis)
        if decision == "continue":
            failed, self._went_on_in = self._continue_in_place(report, budget), call
            if failed is None:
                return True
            _, cause = failed
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
        """Change the group whose ranks were held at a step boundary; return what `recover` does."""
        self._lifecycle.check_active()
        reason = self._monitor.reason
        self._monitor.go_on()
        leaving = self._lifecycle.leaving_nodes_in_use()
        parts = [] if self._spec.runs_on else [answer.value.part for answer in report.values]
        if parts:
            self._snapshots.take_from(self._lifecycle.running, parts)
        return self._is_inside_after(self.change(leaving, reason, parts))

    def _is_inside_after(self, failed: Failed | None) -> bool:
        """After a change that costs no retry: rebuilds where only that is left, and returns what `recover` does."""
        if failed is None:
            return True
        self._monitor.await_snapshot()
        self.restart_workers(*failed)
        return self._is_restored_inside

    @property
    def _is_restored_inside(self) -> bool:
        """True if the snapshot that was just restored was taken inside the running call."""
        return self._snapshots.is_inside and not self._snapshots.calls_since

    def _in_words(self, diagnosis: Diagnosis, gone: Collection[int] = ()) -> str:
        """The cause of a failure of the group as it is; `gone` are ranks that are lost, as far as that is known."""
        group, lost = self._lifecycle.running, {*gone, *(diagnosis.ranks if diagnosis.kind == "died" else ())}
        return words(diagnosis, gone, group.nodes_of(lost, group.infos))

    def _give_up(self, diagnosis: Diagnosis, report: GroupReport, budget: RetryBudget, cause: str) -> NoReturn:
        """Raise a failure for good."""
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
        """Raise where the state from before a call is lost, and what survivors have may hold half of what it does."""
        self.fetch_only_state(report)
        self._lifecycle.end_call(cause, "lost")
        raise WorkersLostError(
            f"{cause}, in a call that cannot be repeated: a copy of the state from before it was with the process that "
            "was lost shortly before. The next call continues with the state of the workers that were left."
        ) from diagnosis.faults[0].error

    def _end_if_parted(self, call: Call, diagnosis: Diagnosis, report: GroupReport) -> str:
        """After an exception in user code: kills a group whose ranks are not at the same place, and says so.

        It is kept only if every rank lives, is connected, and is where the others are.
        """
        group = self._lifecycle.running
        if not report.all_answered:  # why these cannot be kept: ADR 7
            parted = "others were inside the call"
        elif call.keeps_alike and not group.is_driver_only and not self._has_failed_alike(report):
            parted = "others were elsewhere"
            self._monitor.await_snapshot()  # of the call before, while a worker is there that can send it
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
        """Return whether all ranks failed at one place, and wait for the next call in one state."""
        if not failed_alike(report):
            return False
        progress = self._ask_progress()
        return progress.ok and are_alike([answer.value for answer in progress.values])

    # ------------------------------------------------------------------------------ before workers are ended

    def fetch_only_state(self, after: GroupReport | None = None) -> None:
        """Fetch the state that only workers have, also from the middle of a call. Called before any of them is ended.

        Where no worker is left that has it whole, the log says so, and it is given up.

        Args:
            after: What is known of the call that failed; None where the ranks may be anywhere.
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
            while lifecycle.holds_only_state:
                self._fetch_from({*survivors, *group.stuck} - group.gone)  # a long step is waited for
                survivors = list(range(len(group)))
            logger.info("fetched the state that only workers had: %s", self._snapshots.restored_from())
        except CannotForm as failed:
            reason = failed.reason or "no worker is left"
            logger.warning("the state that only workers have cannot be fetched: %s", reason)
            lifecycle.gives_state_up = True
        finally:
            lifecycle.is_fetching = False

    def leave_with_survivors(self, report: GroupReport) -> list[Capture] | None:
        """After a failure in a call that is to be left: bring the state of those who live to the driver.

        Returns:
            What each of them captured; nothing where they form a group that is not inside the call, which can go on
            with it. None where they cannot do that, or where user code has failed.
        """
        if not self._spec.regroups or classify(report).kind == "user":
            return None
        self._monitor.go_on()
        group, captures = self._lifecycle.running, list[Capture]()
        living: Collection[int] = group.settle(report)
        try:
            while not captures:
                captures = self._fetch_from({*living, *group.stuck} - group.gone)
                living = range(len(group))
        except CannotForm as failed:
            logger.warning("no worker has the state of a completed step: %s", failed.reason or "all are lost")
            return None
        if any(each.progress is None for each in captures):
            return []
        self._snapshots.leave_call()
        return captures

    def await_only_state(self) -> None:
        """Wait for a copy of the state that only workers have, if one is on its way."""
        if self._lifecycle.holds_only_state and self._snapshots.is_coming:
            self._monitor.await_snapshot()

    def _fetch_from(self, living: Collection[int]) -> list[Capture]:
        """Let those who live form a group of their own, which has one state, and fetch that.

        Returns:
            What each of them captured; nothing where one of them was lost over it.

        Raises:
            CannotForm: No one is left who has it.
        """
        group, now, newcomers = self._lifecycle.running, self._lifecycle.now(), self._lifecycle.newcomers
        staying = [rank for rank in group.answering(sorted(living)) if group.workers[rank] not in newcomers]
        first = group.infos[0]
        self._try_to_make(Change("ended", lambda gone: "", staying, now, 0, only_copies=True))
        if group.infos[0] != first:  # what that one was sending will not come
            self._snapshots.drop_incoming()
        everyone = dict.fromkeys(range(len(group)), ())
        report = group.on_replica(replica.capture_here, everyone, on_wait=self._monitor.poll)
        if not report.ok:
            group.settle(report)
            return []
        captures: list[Capture] = [answer.value for answer in report.values]
        self._snapshots.take_from(group, captures)
        self._monitor.await_snapshot()
        return captures

    # --------------------------------------------------------------------------------------- changes in place

    def _continue_in_place(self, report: GroupReport, budget: RetryBudget) -> Failed | None:
        """After a failure: lets the survivors form a new group, with spares and new workers as far as there are any.

        Returns:
            Why only a restart is left; None when it worked.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        began = lifecycle.now()
        survivors = self._settled(report, self._monitor.tell_stuck)
        if group.stuck and classify(report).kind == "disconnected":  # else they are slow, and another one died
            budget.note_hang()
        verb = "does" if len(group.silent) == 1 else "do"
        silent = f"; {named(group.silent)} {verb} not answer any more" if group.silent else ""
        infos = list(group.infos)

        def cause(gone: Collection[int]) -> str:
            nodes = group.nodes_of(gone, infos)
            told = words(classify(report), gone, nodes)
            return told if nodes is not None and nodes.are_dead else told + silent

        return self._make(Change("continued", cause, survivors, began, lifecycle.resizing.num_awaited, budget))

    def _settled(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """The survivors of a failure, freed of what they waited for."""
        survivors = self._lifecycle.running.settle(report, tell_stuck)
        self._lifecycle.suspect(survivors)
        return survivors

    def _is_short_of_memory(self, diagnosis: Diagnosis) -> bool:
        """Return whether the survivors of a failure went on, and found no memory for their shares in the first step."""
        if self._went_on_at is None or not is_lack_of_memory(diagnosis):
            return False
        signs = self._lifecycle.running.ask_beside("beside", replica.sign_of_life, ranks=diagnosis.ranks)
        return any(sign is not None and sign.step <= self._went_on_at for sign in signs.values())

    def _wait_for_memory(self, report: GroupReport, diagnosis: Diagnosis) -> Failed | None:
        """Let survivors that went on wait for new workers after all, as long as any are coming."""
        lifecycle, began, num_short = self._lifecycle, self._lifecycle.now(), len(self._lifecycle.running)
        lifecycle.note_short_of_memory()
        self._went_on_at = None

        def cause(gone: Collection[int]) -> str:
            lost = f"lost {named(gone)}; " if gone else ""
            return f"{lost}with {num_short} workers {words(diagnosis)}"

        logger.warning("%s; waiting for new workers", cause(()))
        survivors = self._settled(report, self._monitor.tell_stuck)
        lifecycle.start_standby()  # also where no room was reserved
        return self._make(Change("grown", cause, survivors, began, self._scaling.max_workers, wait_s=math.inf))

    def change(self, leaving: frozenset[str], cause: str, parts: Sequence[Capture] = ()) -> Failed | None:
        """Between two steps or calls: lets the workers on the nodes `leaving` go, and those that are ready step in.

        Args:
            leaving: Nodes that are going away.
            cause: Why.
            parts: What each rank copied of its progress when it was held inside a call.

        Returns:
            Why only a restart is left; None when it worked.
        """
        group = self._lifecycle.running
        staying = [rank for rank, info in enumerate(group.infos) if info.node_id not in leaving]
        kind: EventKind = "left" if len(staying) < len(group) else "grown"
        if not self._spec.regroups and not self._spec.runs_on:
            return kind, cause
        return self._make(
            Change(
                kind,
                cause=lambda gone: f"lost {named(gone)}; {cause}" if gone else cause,
                staying=staying,
                began=self._lifecycle.now(),
                num_awaited=self._scaling.max_workers if kind == "left" else 0,
                leaving=frozenset(range(len(group))) - frozenset(staying),
                orphans=tuple(part.progress for rank, part in enumerate(parts) if rank not in staying),
            )
        )

    def grow(self, num_awaited: int, cause: str) -> Failed | None:
        """Between two calls: lets as many workers step in as there is room for.

        Args:
            num_awaited: To wait, as long as they are fewer, for those that are still being made ready.
            cause: Why.

        Returns:
            Why only a restart is left; None when it worked, or there was no one to step in.
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

    def can_change(self) -> bool | None:
        """Between two calls: whether the replicas could go on in another group; None if some of them are lost."""
        if not self._spec.regroups:
            return False
        report = self._ask_progress()
        if not report.ok:
            return False if classify(report).kind == "user" else None
        return not any(answer.value.obstacle for answer in report.values)

    def _ask_progress(self) -> GroupReport:
        group = self._lifecycle.running
        everyone = dict.fromkeys(range(len(group)), ())
        return group.on_replica(replica.replica_progress, everyone, on_wait=self._monitor.poll)

    def _make(self, change: Change) -> Failed | None:
        """Make a change, and note it in the budget and in the history."""
        lifecycle, before = self._lifecycle, list(self._lifecycle.running.infos)

        def gone(staying: Collection[int]) -> set[int]:
            """The ranks that were lost, as they were numbered when it began."""
            infos = lifecycle.running.infos
            kept = {infos[rank] for rank in staying}
            return {rank for rank, info in enumerate(before) if info not in kept} - change.leaving

        def end_unless_unformed(error: BaseException) -> None:
            """A group that is formed half-way must never be used, also after Ctrl-C."""
            if not isinstance(error, CannotForm):
                self.fetch_only_state()
                lifecycle.end_call(type(error).__name__)

        try:
            with OnFailure(told=end_unless_unformed):
                formed = self._try_to_make(change)
        except CannotForm as failed:
            lost = gone(failed.staying)
            cause = change.cause(lost)
            is_failure = change.kind == "continued" or bool(lost) or failed.is_failure
            reason = f"{cause}; {failed.reason}" if failed.reason else cause
            return "restored" if is_failure else change.kind, reason
        group = lifecycle.running
        if group.infos[0] != before[0]:
            self._snapshots.drop_incoming()
        lifecycle.hooks.on_change(group)
        lost, source = gone(range(len(group))), formed.progress_reports[formed.source]
        if change.budget is not None:
            change.budget.pay_for_continuing(source.progress)
        is_smaller = len(group) < self._scaling.max_workers
        may_lack_memory = change.kind == "continued" and is_smaller and lifecycle.resizing.minds_memory
        self._went_on_at = source.progress if may_lack_memory else None
        kind: EventKind = "continued" if lost else change.kind
        if kind != "grown" or len(group) > len(before):  # else nothing has changed: newcomers are dead
            lifecycle.record(kind, len(before), change.began, change.cause(lost), source.words)
        lifecycle.owe_spares()
        return None

    def _try_to_make(self, change: Change) -> NextGroup:
        """Form the next group; where workers are lost over it, another one without them, which waits for no one new.

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
            newcomers.difference_update(group.workers[found.rank] for found in report.outcomes if found.ok)
            if report.ok:
                self._lifecycle.keep_facts(list(report.values))
                return formed
            staying = self._survivors_of(report, formed)
            had_state = {
                place for place, rank in zip(places, formed.staying, strict=False) if rank not in without_state
            }
            without_state = {found.rank for found in report.outcomes if not found.ok} - had_state
            change = replace(change, num_awaited=0)

    def _survivors_of(self, report: GroupReport, failed: NextGroup) -> list[int]:
        """Return who lives after a group could not be formed.

        Raises:
            CannotForm: It failed for another reason than the failure of workers.
        """
        diagnosis = classify(report)
        reason = f"could not form a new group: {words(diagnosis)}"
        logger.warning("%s", reason)
        survivors = self._settled(report) if diagnosis.kind != "user" else []
        if diagnosis.kind == "user" or len(survivors) == failed.num_workers:
            raise CannotForm(reason, range(len(failed.staying)), is_failure=diagnosis.kind != "user")
        return survivors

    # ----------------------------------------------------------------------------------- who forms the next group

    def form(self, change: Change, staying: Sequence[int], without_state: Collection[int] = ()) -> NextGroup:
        """Let those who stay leave the old group, and find others to fill it up. Workers that die are left out.

        Args:
            change: What it is for.
            staying: Ranks of the old group.
            without_state: Those of them that were to take over a state and did not.

        Raises:
            CannotForm: That makes no group.
        """
        standby, min_workers = self._lifecycle.running.standby, self._scaling.min_workers
        formed = self._leave_old_group(change, staying, without_state)
        if change.only_copies:  # what keeps a replica from continuing keeps no one from copying its state
            reports = [replace(each, obstacle=None) for each in formed.progress_reports]
            self._remove_others(formed.staying)
            return replace(formed, progress_reports=reports)

        def kill_new_ones() -> None:
            for each in formed.joining:
                standby.kill(each.worker)

        with OnFailure(kill_new_ones):
            formed = self._fill_up(change, formed, without_state)
            if not change.goes_on:  # else those would be given up, too, who are still coming
                missing = min_workers - formed.num_workers
                formed.joining += standby.take_needed(missing, missing, self._monitor.poll) or []
            if formed.num_workers < min_workers:
                raise CannotForm(f"{formed.num_workers} of at least {min_workers} workers are left", formed.staying)
        return formed

    def _leave_old_group(self, change: Change, survivors: Sequence[int], without_state: Collection[int]) -> NextGroup:
        """Let the survivors leave the group; those that turn out to be dead are no survivors.

        Raises:
            CannotForm: None is left that another group could be formed of, or one of them failed.
        """
        group, staying = self._lifecycle.running, list(survivors)
        while staying:
            report = group.leave_group(staying, self._monitor.poll)
            if report.ok:
                pairs = zip(staying, report.values, strict=True)
                return NextGroup(
                    staying, [replace(p, is_whole=False) if rank in without_state else p for rank, p in pairs], []
                )
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a surviving worker could not report its progress: %s", words(classify(report)))
                raise CannotForm("a surviving worker could not report its progress", staying)
            dead = {o.rank for o in failed if o.failure is not None}  # others just come later than the word of a death
            staying = [rank for rank in staying if rank not in (dead or {o.rank for o in failed})]
        if not change.goes_on:
            group.standby.kill_unresponsive()  # spares may have died with the workers
        if change.goes_on or not group.standby.num_all:
            raise CannotForm("", ())
        return NextGroup([], [], [])

    def _remove_others(self, staying: Collection[int]) -> None:
        group = self._lifecycle.running
        group.remove_workers([rank for rank in range(len(group)) if rank not in staying and rank not in group.gone])

    def _fill_up(self, change: Change, formed: NextGroup, without_state: Collection[int]) -> NextGroup:
        """Let others join, and wait for them: until they are `num_awaited`, and for those that are needed.

        Returns who is still there then.

        Raises:
            CannotForm: None of those who stay is left, or nothing pays for going on.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        deadline = lifecycle.now() + change.wait_s
        while True:
            if change.goes_on:
                progress = formed.progress_reports[formed.source].progress
                obstacle = change.budget.obstacle_to_continuing(progress) if change.budget is not None else None
                if obstacle is not None:
                    raise CannotForm(obstacle, formed.staying)
            self._remove_others(formed.staying)
            if not self._fill_from_standby(change, formed, max(0.0, deadline - lifecycle.now())):
                return formed
            answering = group.answering(formed.staying)  # they were not polled while they waited
            if answering == formed.staying:
                return formed
            lifecycle.suspect(answering)
            formed = replace(self._leave_old_group(change, answering, without_state), joining=formed.joining)

    def _fill_from_standby(self, change: Change, formed: NextGroup, wait_s: float) -> bool:
        """Let those join who are ready; and new ones, if there is room and time to wait. Return whether it waited."""
        standby, most = self._lifecycle.running.standby, self._scaling.max_workers
        admits = all(each.admits for each in formed.progress_reports)
        missing = most - formed.num_workers if admits else 0
        if missing <= 0:
            return False
        avoided = self._lifecycle.nodes_to_avoid
        standby.kill_on(avoided)
        formed.joining += standby.take_ready(missing, 0.0)
        standby.start_more(most - formed.num_workers - standby.num_coming, most, avoided)
        missing = max(change.num_awaited, self._scaling.min_workers) - formed.num_workers
        if not wait_s or missing <= 0 or not standby.num_coming:
            return False
        formed.joining += standby.take_ready(missing, wait_s, self._monitor.poll)
        return True

    # ------------------------------------------------------------------------------- back to the last snapshot

    def restart_workers(self, kind: EventKind, cause: str, after: GroupReport | None = None) -> None:
        """Kill what is left, size a new group by what is free, start it, and restore the last snapshot.

        Args:
            kind: What it is called in the history.
            cause: Why.
            after: What is known of a failed call; then processes that are left are kept where that can be done.

        Raises:
            WorkersLostError: Too few workers could be had.
            WorkerError: The user's set-up failed.
        """
        lifecycle = self._lifecycle
        lifecycle.check_active()
        if lifecycle.is_ending:
            raise WorkersLostError(f"{cause}, and the program is about to end, so no other workers are started.")
        began, old_size = lifecycle.now(), lifecycle.num_workers
        lifecycle.allow_replacements()

        def end(error: BaseException) -> None:
            """A group that is restored half-way must never be used, also after Ctrl-C."""
            lifecycle.kill_group()
            if kind != "started":
                is_failure = isinstance(error, WorkersLostError)
                why = "no other group could be had" if is_failure else type(error).__name__
                lifecycle.record("lost" if is_failure else "ended", old_size, began, f"{cause}; {why}")

        with OnFailure(told=end):
            self.fetch_only_state(after)
            self._snapshots.poll(timeout_s=_AWAITED_S if self._snapshots.is_awaited else SETTLE_S)
            self._snapshots.drop_incoming()
            num_kept = self._try_renew(after) if after is not None else None
            if num_kept is None:
                self._start_others(kind, cause)
            lifecycle.record(kind, old_size, began, cause, self._snapshots.restored_from(), num_kept or 0)
            lifecycle.end_replacements()

    def _try_renew(self, after: GroupReport) -> int | None:
        """Restore the last snapshot in the processes that are there; None where all have to be new.

        Of replicas that regroup only standby workers are kept: why the survivors could not go on may be in them.

        Returns:
            How many ranks were in the group before.
        """
        lifecycle, spec, group = self._lifecycle, self._spec, self._lifecycle.running
        is_possible = spec.renews or (spec.regroups and not spec.use_local and group.standby.num_all)
        if not is_possible or self._snapshots.is_lost or not self._snapshots.has_any:
            return None
        before = set(group.infos)
        if spec.renews:
            staying = self._settled(after, self._monitor.tell_stuck)
        else:  # what ends the others does not reach those that are frozen
            staying = []
            unknown = [rank for rank in range(len(group)) if rank not in group.gone | group.silent]
            lifecycle.suspect(group.answering(unknown))
        num_awaited = lifecycle.resizing.num_awaited
        change = Change("restored", lambda gone: "", staying, lifecycle.now(), num_awaited, goes_on=False)
        try:
            formed = self.form(change, staying)
        except CannotForm as failed:
            logger.warning("no process is kept: %s", failed.reason or "no worker is left")
            return None
        report = group.renew(formed.staying, formed.joining, self._monitor.poll)
        report = lifecycle.without_lost(report, group, self._monitor.poll)
        if not report.ok:
            logger.warning("could not form a new group: %s", words(classify(report)))
            return None
        lifecycle.take_answers(report)
        return len(before & set(lifecycle.running.infos)) if self._restore_those_left() else None

    def _start_others(self, kind: EventKind, cause: str) -> None:
        """Start another group, as soon as it finds room, and restore the last snapshot in it."""
        lifecycle, scaling = self._lifecycle, self._scaling
        lifecycle.kill_group()
        self._refuse_if_lost(cause)
        if kind == "restarted":
            lifecycle.make_room()
        attempt, impossible = 0, None
        while attempt < scaling.num_attempts:
            view = lifecycle.settled_view()
            decision = scaling.decide(view, self._spec.resources, attempt)
            attempt += 1
            if isinstance(decision, WaitForWorkers):
                if kind == "started":  # nodes that were there may come back
                    impossible = impossibility(self._spec.resources, scaling.min_workers, view, self._spec.words)
                if decision.delay_s is None:
                    table = impossible or explain(self._spec.resources, scaling.max_workers, view)
                    few = f"Too few workers can be had: {decision.reason}."
                    raise WorkersLostError(f"{few}\n{table}\n{self._spec.words.when_starved}".rstrip())
                if impossible and attempt == 1:
                    logger.warning("%s", impossible)
                logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)
                needed, has_driver = scaling.min_workers, self._spec.use_local
                slots = lifecycle.make_group(self._spec, needed).slots
                slots.await_room(needed, decision.delay_s, lifecycle.sleep, has_driver=has_driver)
                continue
            num_spares = min(self._spec.num_spares, capacity(view, self._spec.resources) - decision)
            try:
                has_started = lifecycle.try_start(decision, max(0, num_spares), _REBUILD_RESERVATION_S)
                if has_started and self._restore_those_left():
                    return
            except ReservationTimeoutError as error:  # another program took them, or the node is lost by now
                logger.warning("%s", str(error).partition("\n")[0])
                continue
            if self._start_budget is not None:
                pay_for_start(self._start_budget)
                attempt -= 1  # this one was paid for
        raise WorkersLostError(f"No group could be started in {scaling.num_attempts} attempts after: {cause}.")

    def _refuse_if_lost(self, cause: str) -> None:
        """Raise where no state is left to go on from: new workers would begin from the start, unnoticed."""
        if not self._snapshots.is_lost:
            return
        if not self._spec.loses_state:
            raise WorkersLostError(
                f"{cause}, and with the workers their state is lost: the process that had its copy was lost shortly "
                f"before. {self._snapshots.last_file_in_words}"
            )
        raise WorkersLostError(
            f"{cause}, and with the workers their state is lost, because `snapshot_every_s=None` switches snapshots "
            f"off. {self._snapshots.last_file_in_words} Without that option, or with `snapshot_every_s=60`, such a "
            "failure costs time only."
        )

    def _restore_those_left(self) -> bool:
        """Restore the state in all who live through it; False when too few do."""
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
        """Bring the new group to the state of the last snapshot, and on to the last completed call.

        Returns:
            What failed, when a worker died over it.
        """
        group, snapshots = self._lifecycle.running, self._snapshots
        on_wait = Monitor(self._lifecycle, is_of_restore=True).poll  # calls that are repeated take long, too
        snapshot = snapshots.landed
        if snapshot is not None and isinstance(snapshot.shared_state, DividedValue):  # read from nodes that are there
            parts = snapshot.shared_state.best_on({info.node_id for info in group.infos})
            snapshot = snapshots.landed = replace(snapshot, shared_state=parts)
        if snapshot is not None:
            function: Callable[..., Any] = replica.restore if snapshot.progress is None else replica.restore_inside
            rests, shared = snapshot.for_ranks(len(group)), group.share(snapshot.shared_state)
            args: dict[int, Sequence[Any]] = {rank: (shared[rank], *rest) for rank, rest in enumerate(rests)}
            report = group.on_replica(function, args, on_wait=on_wait)
            if self._has_lost_workers(report):
                return report
        is_inside = snapshots.is_inside
        if snapshots.calls_since:
            logger.info("running again what the last snapshot does not cover: %s", snapshots.restored_from())
        for call in snapshots.calls_since:
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            report = group.on_replica(function, args, on_wait=on_wait)
            if self._has_lost_workers(report):
                return report
        return None

    def _has_lost_workers(self, report: GroupReport) -> bool:
        """Return whether a call failed for the failure of workers; raises where it failed for another reason."""
        if report.ok:
            return False
        diagnosis = classify(report)
        if diagnosis.kind != "user":
            return True
        lost_parts = [fault.error for fault in diagnosis.faults if isinstance(fault.error, LostPartError)]
        if lost_parts:  # a rank did not find its part of the snapshot
            raise WorkersLostError(f"{lost_parts[0]} {self._snapshots.last_file_in_words}")
        raise worker_error(diagnosis.faults)
