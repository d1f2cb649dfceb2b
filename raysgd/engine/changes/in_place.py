"""Changes of a group whose workers keep their processes: after a loss, or because workers leave or step in.

Why survivors form a new group in place: ADR 9.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd._text.log_lines import listed
from raysgd.engine.changes.group_former import STANDBY_WAIT_S, CannotForm, GroupFormer, NextGroup, renew_without_lost
from raysgd.engine.changes.growth import Growth
from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.decisions.failures import Diagnosis, classify, is_lack_of_memory, words
from raysgd.engine.decisions.group_events import EventKind
from raysgd.engine.decisions.policies import RetryBudget, are_alike, takers
from raysgd.engine.processes import replica_calls
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import GroupReport, StateHandover

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Change:
    """A change of the group in place.

    Attributes:
        kind: What it is called in the history, unless ranks are lost over it.
        cause: Why, given the ranks that are lost.
        staying: Ranks that are to stay.
        began: When it began.
        num_awaited: To wait for workers that are still starting until they are so many.
        budget: What pays for it; None for what costs nothing.
        leaving: Ranks that leave in an orderly way.
        orphans: How far those are.
        wait_s: How long to wait.
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

    def to_rebuild(self, failed: CannotForm, gone: Collection[int]) -> CannotForm:
        """Return what became of it where the ranks cannot form a new group, with the words for the rebuild."""
        cause = self.cause(gone)
        is_loss = self.kind == "rejoined" or bool(gone) or failed.is_loss
        return CannotForm(
            failed.reason,
            failed.staying,
            is_loss,
            kind="rebuilt" if is_loss else self.kind,
            cause=f"{cause}; {failed.reason}" if failed.reason else cause,
        )


class InPlaceChanges:
    """Changes the group of a lifecycle in place."""

    def __init__(self, lifecycle: Lifecycle, growth: Growth, on_wait: Callable[[], None]) -> None:
        self._lifecycle, self._growth, self._on_wait = lifecycle, growth, on_wait
        self._went_on_at: int | None = None  # with larger shares of the joint batch: steps of the call until then

    def rejoin(self, report: GroupReport, budget: RetryBudget, tell_stuck: Callable[[], None]) -> CannotForm | None:
        """After a loss: lets the survivors form a new group, with spares and new workers as far as there are any.

        Returns:
            Why only a rebuild is left; None when it worked.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        began = lifecycle.now()
        survivors = self._settled(report, tell_stuck)
        if group.stuck and classify(report).kind == "disconnected":  # else they are slow, and another one died
            budget.note_hang()
        silent = f"; rank {listed(group.silent)} does not answer any more" if group.silent else ""

        def cause(gone: Collection[int]) -> str:
            return words(classify(report), gone) + silent

        return self._change(_Change("rejoined", cause, survivors, began, lifecycle.resizing.num_awaited, budget))

    def is_short_of_memory(self, diagnosis: Diagnosis) -> bool:
        """Return whether the survivors of a loss went on, and found no memory for their shares in the first step."""
        if self._went_on_at is None or not is_lack_of_memory(diagnosis):
            return False
        ranks = diagnosis.ranks
        signs = self._lifecycle.running.ask_beside("beside", replica_calls.sign_of_life, ranks=ranks)
        return any(sign is not None and sign.step <= self._went_on_at for sign in signs.values())

    def wait_for_memory(self, report: GroupReport, tell_stuck: Callable[[], None]) -> CannotForm | None:
        """Lets survivors that went on wait for new workers after all, as long as any are coming.

        Returns:
            Why only a rebuild is left; None when it worked.
        """
        lifecycle, diagnosis, began = self._lifecycle, classify(report), self._lifecycle.now()
        lifecycle.num_short, self._went_on_at = len(lifecycle.running), None

        def cause(gone: Collection[int]) -> str:
            lost = f"lost rank {listed(gone)}; " if gone else ""
            return f"{lost}with {lifecycle.num_short} workers {words(diagnosis)}"

        logger.warning("%s; waiting for new workers", cause(()))
        survivors, num_awaited = self._settled(report, tell_stuck), lifecycle.scaling.max_workers
        self._growth.start_standby()  # also where no room was reserved
        return self._change(_Change("grown", cause, survivors, began, num_awaited, wait_s=math.inf))

    def renew(self, report: GroupReport, tell_stuck: Callable[[], None]) -> GroupReport | None:
        """After a loss that replicas cannot go on from: keeps processes that are there, with new replicas in all.

        Of replicas that regroup only standby workers are kept: why the survivors could not go on may be in them.

        Returns:
            The replicas' set-up answers; they have no state yet. None where only new workers are left.
        """
        former = self._former(num_awaited=self._lifecycle.resizing.num_awaited, goes_on=False)
        try:
            next_group = former.form(self._to_keep(report, tell_stuck))
        except CannotForm as failed:
            logger.warning("no process is kept: %s", failed.reason or "no worker is left")
            return None
        group = self._lifecycle.running
        renewed = group.renew(next_group.staying, next_group.joining, self._on_wait)
        renewed = renew_without_lost(group, renewed, self._lifecycle.scaling.min_workers, self._on_wait)
        if not renewed.ok:
            logger.warning("could not form a new group: %s", words(classify(renewed)))
            return None
        return renewed

    def _to_keep(self, report: GroupReport, tell_stuck: Callable[[], None]) -> list[int]:
        """The ranks that keep their processes in `renew`. Where none does, those that are frozen are found at least.

        What ends the others does not reach them.
        """
        if self._lifecycle.spec.renews:
            return self._settled(report, tell_stuck)
        group = self._lifecycle.running
        unknown = [rank for rank in range(len(group)) if rank not in group.gone | group.silent]
        self._lifecycle.suspect(group.answering(unknown))
        return []

    @property
    def can_renew(self) -> bool:
        """True if `renew` can keep anything."""
        spec, standby = self._lifecycle.spec, self._lifecycle.running.standby
        has_standby = bool(standby.num_coming + standby.num_ready)
        return spec.renews or (spec.regroups and not spec.use_local and has_standby)

    def lost_behind(self, diagnosis: Diagnosis) -> set[int]:
        """After a loss of which some saw only a connection break, and that nothing follows: who does not answer."""
        if diagnosis.kind != "disconnected":
            return set()
        group = self._lifecycle.running
        return set(range(len(group))) - set(group.answering(range(len(group))))

    def _settled(self, report: GroupReport, tell_stuck: Callable[[], None] = lambda: None) -> list[int]:
        """The survivors of a loss, freed of what they waited for."""
        survivors = self._lifecycle.running.settle(report, tell_stuck)
        self._lifecycle.suspect(survivors)
        return survivors

    def change(self, leaving: frozenset[str], cause: str, parts: Sequence[Capture] = ()) -> CannotForm | None:
        """Between two steps or calls: lets the workers on the nodes `leaving` go, and those that are ready step in.

        Args:
            leaving: Nodes that are going away.
            cause: Why.
            parts: What each rank copied of its progress when it was held inside a call.

        Returns:
            Why only a rebuild is left; None when it worked.
        """
        lifecycle, group = self._lifecycle, self._lifecycle.running
        staying = [rank for rank, info in enumerate(group.infos) if info.node_id not in leaving]
        kind: EventKind = "left" if len(staying) < len(group) else "grown"
        if not lifecycle.spec.regroups and not lifecycle.spec.runs_on:
            return CannotForm("", staying, kind=kind, cause=cause)
        change = _Change(
            kind,
            cause=lambda gone: f"lost rank {listed(gone)}; {cause}" if gone else cause,
            staying=staying,
            began=lifecycle.now(),
            num_awaited=lifecycle.scaling.max_workers if kind == "left" else 0,
            leaving=frozenset(range(len(group))) - frozenset(staying),
            orphans=tuple(part.progress for rank, part in enumerate(parts) if rank not in staying),
        )
        return self._change(change)

    def grow(self, num_awaited: int) -> CannotForm | None:
        """Between two calls: lets as many workers step in as there is room for.

        Args:
            num_awaited: To wait, as long as they are fewer, for those that are still being made ready.

        Returns:
            Why only a rebuild is left; None when it worked, or there was no one to step in.
        """
        lifecycle, standby = self._lifecycle, self._lifecycle.running.standby
        self._growth.start_standby()
        deadline = lifecycle.now() + STANDBY_WAIT_S
        while len(lifecycle.running) < num_awaited and standby.num_coming and lifecycle.now() < deadline:
            lifecycle.sleep(0.005)
            self._on_wait()
        standby.kill_unresponsive()
        return self.change(frozenset(), "there is room for more workers") if standby.num_ready else None

    def are_possible(self) -> bool | None:
        """Between two calls: whether the replicas could go on in another group; None if some of them are lost."""
        report = self._ask_progress()
        if not report.ok:
            return False if classify(report).kind == "user" else None
        return not any(answer.value.obstacle for answer in report.values)

    def are_replicas_alike(self) -> bool:
        """After a call that failed on all of them, which wait for the next one: whether they are in one state."""
        report = self._ask_progress()
        return report.ok and are_alike([answer.value for answer in report.values])

    def _ask_progress(self) -> GroupReport:
        group = self._lifecycle.running
        return group.on_replica(
            replica_calls.replica_progress, dict.fromkeys(range(len(group)), ()), on_wait=self._on_wait
        )

    def _change(self, change: _Change) -> CannotForm | None:
        lifecycle, before = self._lifecycle, list(self._lifecycle.running.infos)

        def gone(staying: Collection[int]) -> set[int]:
            """The ranks that were lost, as they were numbered when it began."""
            infos = lifecycle.running.infos
            kept = {infos[rank] for rank in staying}
            return {rank for rank, info in enumerate(before) if info not in kept} - change.leaving

        try:
            next_group = self._try_change(change)
        except CannotForm as failed:
            return change.to_rebuild(failed, gone(failed.staying))
        except BaseException as error:  # Ctrl-C too: a group that is formed half-way must never be used
            lifecycle.end_call(type(error).__name__)
            raise
        if lifecycle.running.infos[0] != before[0]:
            lifecycle.snapshots.drop_incoming()
        lifecycle.hooks.on_change(lifecycle.running)
        self._note(change, next_group, len(before), gone(range(len(lifecycle.running))))
        return None

    def _former(self, num_awaited: int, budget: RetryBudget | None = None, **options: Any) -> GroupFormer:
        lifecycle = self._lifecycle
        return GroupFormer(
            lifecycle.running,
            lifecycle.scaling,
            budget,
            num_awaited=num_awaited,
            nodes_to_avoid=lambda: lifecycle.nodes_to_avoid,
            suspect=lifecycle.suspect,
            now=lifecycle.now,
            on_wait=self._on_wait,
            **options,
        )

    def _try_change(self, change: _Change) -> NextGroup:
        """Forms the next group; where workers are lost over it, another one without them, which waits for no one new.

        Raises:
            CannotForm: No group can be formed.
        """
        former = self._former(change.num_awaited, change.budget, wait_s=change.wait_s)
        staying, without_state = change.staying, set[int]()
        while True:
            next_group = former.form(staying, without_state)
            report = self._regroup(next_group, change.orphans)
            if report.ok:
                self._lifecycle.facts = list(report.values)
                return next_group
            staying = self._survivors_of(report, next_group)
            places = zip(self._places(next_group), next_group.staying, strict=False)
            had_state = {place for place, rank in places if rank not in without_state}
            without_state = {o.rank for o in report.outcomes if not o.ok} - had_state
            former = replace(former, num_awaited=0)

    def _regroup(self, next_group: NextGroup, orphans: tuple[Any, ...]) -> GroupReport:
        staying, joining, source = next_group.staying, next_group.joining, next_group.source
        behind = takers(next_group.progress_reports, source)
        places = self._places(next_group)
        handover = StateHandover(
            places[source], (*(places[index] for index in behind), *places[len(staying) :]), orphans
        )
        return self._lifecycle.running.regroup(staying, joining, handover, self._on_wait, places)

    def _places(self, next_group: NextGroup) -> list[int]:
        return next_group.places(keeps_ranks=self._lifecycle.spec.runs_on)

    def _survivors_of(self, report: GroupReport, failed: NextGroup) -> list[int]:
        """Return who lives after a group could not be formed.

        Raises:
            CannotForm: It failed for another reason than the loss of workers.
        """
        diagnosis = classify(report)
        reason = f"could not form a new group: {words(diagnosis)}"
        logger.warning("%s", reason)
        survivors = self._settled(report) if diagnosis.kind != "user" else []
        if diagnosis.kind == "user" or len(survivors) == failed.num_workers:
            raise CannotForm(reason, range(len(failed.staying)), is_loss=diagnosis.kind != "user")
        return survivors

    def _note(self, change: _Change, formed: NextGroup, old_size: int, gone: Collection[int]) -> None:
        """Notes a change that was made: in the budget, and in the history."""
        source = formed.progress_reports[formed.source]
        if change.budget is not None:
            change.budget.pay_for_rejoin(source.progress)
        kind: EventKind = "rejoined" if gone else change.kind
        is_smaller = len(self._lifecycle.running) < self._lifecycle.scaling.max_workers
        may_lack_memory = change.kind == "rejoined" and is_smaller and self._lifecycle.resizing.waits_for_memory
        self._went_on_at = source.progress if may_lack_memory else None
        if kind != "grown" or len(self._lifecycle.running) > old_size:  # else nothing has changed: newcomers are dead
            self._lifecycle.record(kind, old_size, change.began, change.cause(gone), source.words)
        self._growth.owe_spares()
