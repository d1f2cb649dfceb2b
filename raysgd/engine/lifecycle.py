"""The life of the group behind a trainer: started, rebuilt from a snapshot, or changed in place.

Nothing is decided here about calls. Whether a loss is worth a retry, and what is run afterwards, is the controller's
business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.engine.call_monitor import CallMonitor
from raysgd.engine.failures import classify, listed, words
from raysgd.engine.group_former import STANDBY_WAIT_S, CannotForm, GroupFormer
from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.history import EventKind, History
from raysgd.engine.policies import (
    GiveUp,
    Resize,
    RetryBudget,
    ScalingPolicy,
    Wait,
    are_alike,
    capacity,
    takers,
)
from raysgd.engine.replica import Capture, Replica
from raysgd.engine.snapshots import SnapshotKeeper
from raysgd.engine.types import ClusterView, GroupReport, Handover, ReplicaProgress
from raysgd.engine.worker import Answer
from raysgd.engine.worker_group import WorkerGroup
from raysgd.exceptions import ReservationTimeoutError, TrainerShutdownError, WorkersLostError, worker_error

if TYPE_CHECKING:
    from raysgd.engine.call import Call

logger = logging.getLogger(__name__)

START_ATTEMPTS = 4
_SETTLE_S = 1.0  # Ray's view of what is free lags behind by some hundred milliseconds
_REBUILD_RESERVATION_S = 10.0  # what the view calls free is granted at once, or somebody else took it
_SUSPICION_S = 60.0


@dataclass(frozen=True)
class Clock:
    """Time as the engine sees it; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


@dataclass(frozen=True)
class ElasticRules:
    """How a group follows what happens in the cluster.

    Attributes:
        resize_check_s: How often a running call looks for room to grow; None: growing waits for the next call.
        leaving_nodes: Asks for the nodes that will go away soon.
    """

    resize_check_s: float | None = None
    leaving_nodes: Callable[[], frozenset[str]] = frozenset


@dataclass(frozen=True)
class _Change:
    """A change of the group in place.

    Attributes:
        kind: What it is called in the history, unless ranks are lost over it.
        cause: Why, given the ranks that are lost.
        staying: Ranks that are to stay.
        began: When it began.
        can_wait: Whether to wait for workers that are still being made ready.
        budget: What pays for it; None for what costs nothing.
        leaving: Ranks that leave in good order.
        orphans: How far those are.
    """

    kind: EventKind
    cause: Callable[[Collection[int]], str]
    staying: Sequence[int]
    began: float
    can_wait: bool
    budget: RetryBudget | None = None
    leaving: frozenset[int] = frozenset()
    orphans: tuple[Any, ...] = ()


class Lifecycle:
    """Owns the group.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        snapshots: The retry point.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        clock: Time; by default a wait ends when the trainer is stopped.
        release_timeout_s: How long to wait until Ray has taken the reservation back.
        rules: How the group follows the cluster.
        start_budget: What pays for workers that die while they are started. None: a start is tried a few times, and
            costs nothing.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        snapshots: SnapshotKeeper[Call],
        make_group: Callable[[GroupSpec, int], WorkerGroup],
        view: Callable[[], ClusterView],
        clock: Clock | None,
        release_timeout_s: float,
        rules: ElasticRules,
        start_budget: RetryBudget | None = None,
    ) -> None:
        self.spec = spec
        self.scaling = scaling
        self._snapshots = snapshots
        self._make_group = make_group
        self._view = view
        self._stopped = threading.Event()
        self._clock = clock or Clock(sleep=self._stopped.wait)
        self.release_timeout_s = release_timeout_s
        self.rules = rules
        self._start_budget = start_budget
        self.history = History()
        self.group: WorkerGroup | None = None
        self._starting: WorkerGroup | None = None
        self.facts: list[Any] = []
        self._suspected: dict[str, float] = {}

    @property
    def num_workers(self) -> int:
        """How many workers there are now; while there is no group, how many the next one is meant to have."""
        return self.group.num_workers if self.group is not None else self.scaling.max_workers

    @property
    def nodes_to_avoid(self) -> frozenset[str]:
        """Nodes that nobody should be placed on."""
        now = self._clock.monotonic()
        return frozenset(node for node, until in self._suspected.items() if until > now) | self.rules.leaving_nodes()

    def now(self) -> float:
        """Seconds on the clock that all waiting goes by."""
        return self._clock.monotonic()

    def leaving_nodes_in_use(self) -> frozenset[str]:
        """Nodes with our workers that will go away soon, unless nobody would be left."""
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        bound = {self.group.infos[0].node_id} if self.spec.use_local else set()  # the driver cannot leave
        leaving = (self.rules.leaving_nodes() & used) - bound
        return leaving if used - leaving else frozenset()

    # ---------------------------------------------------------------------------------------------- start and end

    @property
    def is_stopped(self) -> bool:
        """Whether there are to be no workers any more."""
        return self._stopped.is_set()

    def forbid(self) -> None:
        """From now on no group is started. From any thread."""
        self._stopped.set()

    def abandon(self) -> None:
        """From another thread, after `forbid`: lets the call that is running come to an end, wherever it is."""
        for group in (self._starting, self.group):
            if group is not None:
                try:
                    self.spec.hooks.on_end(group)
                finally:
                    group.abandon()

    def check_active(self) -> None:
        """Raises `TrainerShutdownError` after `forbid`."""
        if self.is_stopped:
            raise TrainerShutdownError(
                "This trainer is not active any more: it was shut down. Create a new one; `save` before `shutdown` "
                "keeps the state."
            )

    def _sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self.check_active()

    def start(self, *, as_fits: bool = False) -> None:
        """Starts the full number of workers, for the first time; with `as_fits`, as many as there is room for.

        A worker that dies while starting is tried again, a few times or as often as it is paid for; an exception in the
        user's set-up is raised at once.

        Raises:
            WorkersLostError: Workers died too often.
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        if as_fits:
            self.rebuild("a new trainer", "started")
            return
        began = self._clock.monotonic()
        budget = self._start_budget or RetryBudget(START_ATTEMPTS - 1)
        while not self._try_start(self.scaling.max_workers, self.spec.num_spares, self.spec.reservation_timeout_s):
            self._pay_for_start(budget)
        self._record("started", 0, began, "a new trainer")

    def _pay_for_start(self, budget: RetryBudget) -> None:
        """After the death of a worker that was being started.

        Raises:
            WorkersLostError: There is nothing to pay with.
        """
        if budget.is_spent:
            budget.refuse()
            raise WorkersLostError(
                f"Worker start-up failed: a worker process died over it, and the {budget.num_restarts} allowed retries "
                "are used up. The log above and Ray's worker logs name the cause; too little memory is a frequent one."
            )
        budget.pay_for_rebuild()

    def give_up(self, unless_local: bool = False) -> None:
        """Ends the processes; the next call starts new ones from the last snapshot.

        A worker that is the driver itself, alone, waits for nobody: it can be kept as it stands.
        """
        if self.group is None or (unless_local and self.group.is_driver_only):
            return
        group, self.group = self.group, None
        self.end_group(group)

    def end_group(self, group: WorkerGroup, *, force: bool = True) -> None:
        """Ends the processes of a group, with `force` at once; the front end's hooks come first."""
        end = group.kill if force else group.stop
        try:
            self.spec.hooks.on_end(group)
            if not force:
                self.spec.hooks.on_stop(group)
        finally:
            end(self.release_timeout_s)

    def end(self, cause: str, kind: EventKind = "ended", *, unless_local: bool = False) -> None:
        """The same where it is the end of the call, and is to be told."""
        began, group = self._clock.monotonic(), self.group
        self.give_up(unless_local)
        if group is not None and self.group is None:
            self._record_end(kind, len(group), began, cause)

    def take_parts(self, parts: Sequence[Capture], *, is_first: bool = False) -> None:
        """Takes over what the ranks copied of their state; what rank 0 kept is fetched."""
        group = self.group
        assert group is not None
        self._snapshots.take(parts, lambda token: group.fetch(0, _fetch, token), is_first=is_first)

    def take_snapshot(self, report: GroupReport, *, is_first: bool = False) -> None:
        """Takes over the copies of the state that came with the answers."""
        answers: list[Answer] = report.values
        captures = [answer.capture for answer in answers if answer.capture is not None]
        if captures:
            self.take_parts(captures, is_first=is_first)

    def _try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        """Starts a group; False when a worker died.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self._make_group(self.spec, num_workers)
        group.num_spares = num_spares
        report = self._start_group(group, timeout_s)
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("could not start %s workers: %s", num_workers, words(diagnosis))
            return False
        self.group = group
        self.facts = [answer.value for answer in report.values]
        if not self._snapshots.has_any:
            self.take_snapshot(report, is_first=True)
        if num_spares:
            group.start_standby(num_spares, num_workers)
        return True

    def _start_group(self, group: WorkerGroup, timeout_s: float) -> GroupReport:
        self._starting = group
        try:
            self.check_active()  # who stops later than this finds the group
            report = group.start(timeout_s)
            failed = self._call_start_hook(group) if report.ok else None
            return report if failed is None else failed
        finally:
            self._starting = None

    def _call_start_hook(self, group: WorkerGroup) -> GroupReport | None:
        """Lets the front end see a new group; returns the report of a failure, after which nothing is left."""
        try:
            failed = self.spec.hooks.on_start(group)
        except BaseException:
            self.end_group(group)
            raise
        if failed is not None:
            self.end_group(group)
        return failed

    # ---------------------------------------------------------------------------------------------- rebuilding

    def rebuild(self, cause: str, kind: EventKind = "rebuilt") -> None:
        """Kills what is left, sizes a new group by what is free, starts it, and restores the last snapshot.

        Raises:
            WorkersLostError: Nothing could be had.
            WorkerError: The user's set-up failed.
        """
        self.check_active()
        began, old_size = self._clock.monotonic(), self.num_workers
        try:
            self._try_rebuild(cause, kind, began, old_size)
        except BaseException as error:  # Ctrl-C too
            if kind != "started":
                is_loss = isinstance(error, WorkersLostError)
                why = "no other group could be had" if is_loss else type(error).__name__
                self._record_end("lost" if is_loss else "ended", old_size, began, f"{cause}; {why}")
            raise

    def _try_rebuild(self, cause: str, kind: EventKind, began: float, old_size: int) -> None:
        self._snapshots.poll(timeout_s=_SETTLE_S)
        self._snapshots.leave_group()
        self.give_up()
        attempt = 0
        while attempt < self.scaling.num_attempts:
            view = self._settled_view()
            decision = self.scaling.decide(view, self.spec.resources, attempt)
            if isinstance(decision, GiveUp):
                raise self._starved(decision, view)
            attempt += 1
            if isinstance(decision, Wait):
                logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)
                self._sleep(decision.delay_s)
                continue
            num_spares = min(self.spec.num_spares, capacity(view, self.spec.resources) - decision.num_workers)
            try:
                is_restarted = self._try_restart(decision.num_workers, max(0, num_spares))
            except ReservationTimeoutError:
                logger.warning("another program took the resources for %s workers", decision.num_workers)
                continue
            if is_restarted:
                self._record(kind, old_size, began, cause, self.restored_from())
                return
            if self._start_budget is not None:
                self._pay_for_start(self._start_budget)
                attempt -= 1  # this one was paid for
        raise WorkersLostError(f"No group could be started in {self.scaling.num_attempts} attempts after: {cause}.")

    def _settled_view(self) -> ClusterView:
        """The cluster, once its view of what is free has caught up with what we just gave back."""
        deadline = self._clock.monotonic() + _SETTLE_S
        while True:
            view = self._view()
            need = self.spec.resources
            wanted = min(self.scaling.max_workers, capacity(view, need, free_only=False))
            if capacity(view, need) >= wanted or self._clock.monotonic() >= deadline:
                return view
            self._sleep(0.05)

    def _try_restart(self, num_workers: int, num_spares: int) -> bool:
        """Starts a group and restores it; False when a worker died over it.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources went to somebody else meanwhile.
        """
        try:
            return self._try_start(num_workers, num_spares, _REBUILD_RESERVATION_S) and self._restore()
        except BaseException:  # Ctrl-C too: nobody may ever use a group that is restored half-way
            self.give_up()
            raise

    def _restore(self) -> bool:
        """Brings the new group to the state of the last snapshot, and on to the last completed call.

        Returns:
            False when a worker died over it.
        """
        group, snapshot = self.group, self._snapshots.landed
        assert group is not None
        # Calls that are run again take long, too. No snapshots: one taken now would seem to cover all of them.
        monitor = CallMonitor(self, can_hold=False, take_inside=lambda parts: False)
        if snapshot is not None:
            function: Callable[..., Any] = _restore if snapshot.progress is None else _restore_inside
            rests = snapshot.for_ranks(len(group))
            shared = group.share(snapshot.shared_state)
            args: dict[int, Sequence[Any]] = {rank: (shared[rank], *rest) for rank, rest in enumerate(rests)}
            if not self._is_fine(group.on_replica(function, args, on_wait=monitor.poll)):
                return False
        is_inside = self._snapshots.is_inside
        for call in self._snapshots.calls_since:
            logger.info("repeating a completed call: its snapshot was lost with a worker")
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            if not self._is_fine(group.on_replica(function, args, on_wait=monitor.poll)):
                return False
        return True

    def restored_from(self) -> str:
        """Which state the next workers go on from, for whoever reads of it."""
        snapshot = self._snapshots.landed
        if snapshot is None or snapshot.progress is None:
            return "from the last completed call"
        return f"from a snapshot inside the call, {snapshot.progress[0]}"

    def _is_fine(self, report: GroupReport) -> bool:
        if report.ok:
            return True
        diagnosis = classify(report)
        self.give_up()
        if diagnosis.kind == "user":
            raise worker_error(diagnosis.faults)
        logger.warning("could not restore the state: %s", words(diagnosis))
        return False

    def _starved(self, decision: GiveUp, view: ClusterView) -> WorkersLostError:
        from raysgd.engine.resources import explain

        table = explain(self.spec.resources, self.scaling.max_workers, view)
        return WorkersLostError(
            f"Too few workers can be had: {decision.reason}.\n{table}\nThe last completed state is kept: it can be "
            "saved, and the next call looks for resources again."
        )

    # ---------------------------------------------------------------------------------------------- in place

    def rejoin(
        self,
        report: GroupReport,
        budget: RetryBudget,
        on_wait: Callable[[], None],
        tell_stuck: Callable[[], None],
    ) -> CannotForm | None:
        """After a loss: lets the survivors form a new group, with spares and new workers as far as there are any.

        Args:
            report: The failed call.
            budget: What pays for it.
            on_wait: Called now and then while it waits.
            tell_stuck: Called if a survivor takes long to come to an end with what it does.

        Returns:
            Why only a rebuild is left; None when it worked.
        """
        began = self._clock.monotonic()
        group = self.group
        assert group is not None
        survivors = group.settle(report, tell_stuck)
        silent = f"; rank {listed(group.silent)} does not answer any more" if group.silent else ""
        self._suspect(survivors)

        def cause(gone: Collection[int]) -> str:
            return words(classify(report), gone) + silent

        can_wait = self.rules.resize_check_s is None
        return self._reform(_Change("rejoined", cause, survivors, began, can_wait, budget), on_wait)

    def change(
        self, leaving: frozenset[str], cause: str, on_wait: Callable[[], None], parts: Sequence[Capture] = ()
    ) -> CannotForm | None:
        """Between two steps or calls: lets the workers on the nodes `leaving` go, and those that are ready step in.

        Args:
            leaving: Nodes that are going away.
            cause: Why.
            on_wait: Called now and then while it waits.
            parts: What each rank copied of its progress when it was held inside a call.

        Returns:
            Why only a rebuild is left; None when it worked.
        """
        began = self._clock.monotonic()
        group = self.group
        assert group is not None
        staying = [rank for rank, info in enumerate(group.infos) if info.node_id not in leaving]
        kind: EventKind = "left" if len(staying) < len(group) else "grown"
        if not self.spec.regroups:
            return CannotForm("", staying, kind=kind, cause=cause)
        change = _Change(
            kind,
            cause=lambda gone: f"lost rank {listed(gone)}; {cause}" if gone else cause,
            staying=staying,
            began=began,
            can_wait=kind == "left",
            leaving=frozenset(range(len(group))) - frozenset(staying),
            orphans=tuple(part.progress for rank, part in enumerate(parts) if rank not in staying),
        )
        return self._reform(change, on_wait)

    def _suspect(self, survivors: Sequence[int]) -> None:
        """Avoids for a while the nodes of ranks that went silent without a report of their death: perhaps all is gone.

        Ray tells of the death of a process at once, of that of a node half a minute later.
        """
        group = self.group
        assert group is not None
        silent = {group.infos[rank].node_id for rank in group.silent}
        until = self._clock.monotonic() + _SUSPICION_S
        self._suspected |= dict.fromkeys(silent - {group.infos[rank].node_id for rank in survivors}, until)

    def _reform(self, change: _Change, on_wait: Callable[[], None]) -> CannotForm | None:
        assert self.group is not None
        ranks = frozenset(range(len(self.group))) - change.leaving
        try:
            self._try_reform(change, ranks, on_wait)
        except CannotForm as failed:
            gone = ranks - frozenset(failed.staying)
            cause = change.cause(gone)
            is_loss = change.kind == "rejoined" or bool(gone) or failed.is_loss
            kind: EventKind = "rebuilt" if is_loss else change.kind
            because = f"{cause}; {failed.reason}" if failed.reason else cause
            return CannotForm(failed.reason, failed.staying, is_loss, kind, because)
        except BaseException as error:  # Ctrl-C too: nobody may ever use a group that is formed half-way
            self.end(type(error).__name__)
            raise
        return None

    def _try_reform(self, change: _Change, ranks: frozenset[int], on_wait: Callable[[], None]) -> None:
        group = self.group
        assert group is not None
        old_size = len(group)
        former = GroupFormer(
            group,
            self.scaling,
            change.budget,
            can_wait=change.can_wait,
            nodes_to_avoid=lambda: self.nodes_to_avoid,
            suspect=self._suspect,
            now=self.now,
            on_wait=on_wait,
        )
        next_group = former.form(change.staying)
        staying, progress_reports, joining = next_group.staying, next_group.progress_reports, next_group.joining
        source = next_group.source
        progress = progress_reports[source].progress
        new_ranks = range(len(staying), len(staying) + len(joining))
        handover = Handover(source, (*takers(progress_reports, source), *new_ranks), change.orphans)
        report = group.regroup(staying, joining, handover, on_wait)
        if not report.ok:
            diagnosis = classify(report)
            logger.warning("could not form a new group: %s", words(diagnosis))
            is_loss = diagnosis.kind != "user"
            raise CannotForm(f"could not form a new group: {words(diagnosis)}", staying, is_loss)
        if staying[0] != 0:
            self._snapshots.leave_group()
        self.facts = list(report.values)
        if change.budget is not None:
            change.budget.pay_for_rejoin(progress)
        gone = ranks - frozenset(staying)
        kind: EventKind = "rejoined" if gone else change.kind
        if kind != "grown" or joining:  # else whoever was to join is dead, and all is as it was
            self._record(kind, old_size, change.began, change.cause(gone), progress_reports[source].words)
        self.start_spares()

    def start_spares(self) -> None:
        """Begins to make as many workers ready as are to wait as spares, and were used up or lost."""
        group = self.group
        if group is None or not self.spec.num_spares:
            return
        missing = self.spec.num_spares - group.standby.num_coming - group.standby.num_ready
        if missing > 0:
            group.start_standby(missing, len(group), self.nodes_to_avoid)

    # ---------------------------------------------------------------------------------------------- growing

    def find_room(self) -> int:
        """How many workers more a new group could have, with all that this one gives back; 0 when none."""
        group = self.group
        assert group is not None
        if len(group) >= self.scaling.max_workers:
            return 0
        decision = self.scaling.grow(self._view(), self.spec.resources, len(group), group.num_slots)
        return decision.num_workers - len(group) if isinstance(decision, Resize) else 0

    def start_growth(self) -> None:
        """Begins to make the workers ready that the group lacks, as far as there is room; does not wait for them."""
        group = self.group
        assert group is not None
        missing = self.scaling.max_workers - len(group) - group.standby.num_coming - group.standby.num_ready
        if missing <= 0:
            return
        missing -= group.start_standby(missing, self.scaling.max_workers, self.nodes_to_avoid)
        num_free = min(missing, capacity(self._view(), self.spec.resources))
        if num_free <= 0:
            return
        try:
            group.reserve(num_free, _SETTLE_S)
        except ReservationTimeoutError:
            logger.info("another program took the resources for %s more workers", num_free)
            return
        group.start_standby(num_free, self.scaling.max_workers, self.nodes_to_avoid)

    def can_change_in_place(self, on_wait: Callable[[], None]) -> bool | None:
        """Between two calls: whether the replicas could go on in another group; None if some of them are lost."""
        group = self.group
        assert group is not None
        report = self._ask_progress(group, on_wait)
        if not report.ok:
            return False if classify(report).kind == "user" else None
        return not any(answer.value.obstacle for answer in report.values)

    def are_replicas_alike(self, on_wait: Callable[[], None]) -> bool:
        """After a call that failed on all of them, which wait for the next one: whether they are in one state."""
        group = self.group
        assert group is not None
        report = self._ask_progress(group, on_wait)
        return report.ok and are_alike([answer.value for answer in report.values])

    def _ask_progress(self, group: WorkerGroup, on_wait: Callable[[], None]) -> GroupReport:
        return group.on_replica(_replica_progress, dict.fromkeys(range(len(group)), ()), on_wait=on_wait)

    def grow_in_place(self, on_wait: Callable[[], None]) -> None:
        """Between two calls: lets as many workers step in as there is room for."""
        group = self.group
        assert group is not None
        self.start_growth()
        deadline = self._clock.monotonic() + STANDBY_WAIT_S
        while group.standby.num_coming and self._clock.monotonic() < deadline:
            self._sleep(0.005)
            on_wait()
        group.standby.kill_unresponsive()
        if not group.standby.num_ready:
            return
        failed = self.change(frozenset(), "there is room for more workers", on_wait)
        if failed is not None:
            self.rebuild(failed.cause, failed.kind)

    def _record_end(self, kind: EventKind, old_size: int, began: float, cause: str) -> None:
        seconds = self._clock.monotonic() - began
        self.history.record(kind, old_size, 0, seconds, cause, "the last completed state is kept")

    def _record(self, kind: EventKind, old_size: int, began: float, cause: str, detail: str = "") -> None:
        now = self._clock.monotonic()
        if kind != "started":
            self.history.last_resize = now
        self.history.record(kind, old_size, self.num_workers, now - began, cause, detail)


def _fetch(replica: Replica, token: int) -> Any:
    return replica.fetch(token)


def _restore(replica: Replica, shared_state: Any, own_state: Any) -> None:
    replica.restore(shared_state, own_state)


def _restore_inside(replica: Any, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
    replica.restore_inside(shared_state, own_state, first, parts)


def _replica_progress(replica: Any) -> ReplicaProgress:
    replica_progress: ReplicaProgress = replica.replica_progress()
    return replica_progress
