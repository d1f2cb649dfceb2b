"""Starts groups: the first one, and after a loss another one that continues from the last snapshot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raysgd.engine.changes.call_monitor import CallMonitor
from raysgd.engine.changes.group_former import renew_without_lost
from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.group import WorkerGroup
from raysgd.engine.keeper import keeper
from raysgd.engine.placement import explain, session
from raysgd.engine.policies import Diagnosis, RetryBudget, WaitForWorkers, capacity, classify, words
from raysgd.engine.shared import replica
from raysgd.engine.shared.group_events import EventKind
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import ClusterView, GroupReport
from raysgd.engine.snapshots import Snapshot
from raysgd.engine.startup import Replacements
from raysgd.engine.transfers import DividedValue, LostPartError
from raysgd.exceptions import ReservationTimeoutError, WorkersLostError, worker_error

logger = logging.getLogger(__name__)

START_ATTEMPTS = 4
_REPLACEMENTS = START_ATTEMPTS - 1  # of each worker that dies while a group starts: as many as there are retries
_AWAITED_S = 10.0  # for a state that a file is to be written of
_SETTLE_S = 1.0  # Ray's view of what is free lags behind by some hundred milliseconds
_RETURN_S = 10.0  # and on a busy machine by seconds, until what a removed placement group held is free
_REBUILD_RESERVATION_S = 10.0  # what the view calls free is granted at once, or another program took it
_IN_THE_WAY_S = 5.0  # for room that the program itself holds, which it will hardly give back while it waits


class GroupStarter:
    """Starts the group of a lifecycle, or another one instead.

    Args:
        lifecycle: Holds the group.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        start_budget: What pays for workers that die while they are started. None: a start is tried a few times, and
            costs nothing.
        make_room: Where `has_room` says no, lets the program itself give some back; returns who holds it still.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        make_group: Callable[[GroupSpec, int], WorkerGroup],
        view: Callable[[], ClusterView],
        start_budget: RetryBudget | None = None,
        make_room: Callable[[], str] = str,
    ) -> None:
        self._lifecycle, self._spec, self._scaling = lifecycle, lifecycle.spec, lifecycle.scaling
        self._snapshots = lifecycle.snapshots
        self.make_group = make_group
        self._view = view
        self._start_budget = start_budget
        self._make_room = make_room
        self._replacements = Replacements()

    def start(self, *, as_fits: bool = False) -> None:
        """Starts the full number of workers, for the first time; with `as_fits`, as many as there is room for.

        A worker that dies while starting is tried again, a few times or as often as it is paid for; where groups can
        change, in its slot, beside the others. An exception in the user's set-up is raised at once.

        Raises:
            WorkersLostError: Workers died too often.
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        if self._take_over():
            return
        if as_fits:
            self.rebuild("a new trainer", "started")
            return
        began = self._lifecycle.now()
        budget = self._start_budget or RetryBudget(START_ATTEMPTS - 1)
        self._allow_replacements()
        in_the_way, timeout_s = self._make_room(), self._spec.reservation_timeout_s
        if in_the_way and timeout_s == GroupSpec.reservation_timeout_s:  # else the user has said how long to wait
            timeout_s = _IN_THE_WAY_S
        try:
            while not self._try_start(self._scaling.max_workers, self._spec.num_spares, timeout_s):
                _pay_for_start(budget)
        except ReservationTimeoutError as error:
            if not in_the_way:
                raise
            raise ReservationTimeoutError(
                f"This program holds the room itself: call `shutdown()` of {in_the_way} first.\n{error}"
            ) from None
        self._replacements.num_left = 0
        self._lifecycle.record("started", 0, began, "a new trainer")

    def _take_over(self) -> bool:
        """Goes on with the workers that have outlived another process; False where there are none."""
        kept_by = keeper()
        kept = kept_by.find() if kept_by is not None else None
        if kept_by is None or kept is None:
            return False
        group = self.make_group(self._spec, len(kept.workers))
        group.take_over(kept)
        self._lifecycle.session = session()
        self._lifecycle.group = group
        self._lifecycle.facts = list(kept.facts)
        self._snapshots.completed(None)  # their state is nowhere else yet
        self._settle_last_hold(group)
        numbers = [number for number in group.ask_beside("last_call").values() if number is not None]
        kept_by.found = max(numbers, key=lambda number: (number.call, number.attempt), default=None)
        logger.info("found %s workers again", len(kept.workers))
        return True

    def _settle_last_hold(self, group: WorkerGroup) -> None:
        """Settles the stop that a process that was killed may have left open: ranks wait for that without limit.

        A rank that was told to stop does, so all have to.
        """
        told = filter(None, group.ask_beside("beside", replica.last_hold).values())
        self._lifecycle.num_holds, is_agreed = max(told, default=(0, False))
        if self._lifecycle.num_holds:
            group.ask_beside("beside", replica.settle_hold, self._lifecycle.num_holds, is_agreed)

    def rebuild(
        self, cause: str, kind: EventKind = "rebuilt", renew: Callable[[], GroupReport | None] | None = None
    ) -> None:
        """Kills what is left, sizes a new group by what is free, starts it, and restores the last snapshot.

        Args:
            cause: Why.
            kind: What it is called in the history.
            renew: Is tried first where it is given: keeps the processes that are left, and makes new replicas in them.
                Returns the set-up answers of these; None where that cannot be done.

        Raises:
            WorkersLostError: Too few workers could be had.
            WorkerError: The user's set-up failed.
        """
        self._lifecycle.check_active()
        began, old_size = self._lifecycle.now(), self._lifecycle.num_workers
        self._allow_replacements()
        try:
            self._try_rebuild(cause, kind, began, old_size, renew)
            self._replacements.num_left = 0
        except BaseException as error:  # Ctrl-C too: a group that is restored half-way must never be used
            self._lifecycle.kill_group()
            if kind != "started":
                is_loss = isinstance(error, WorkersLostError)
                why = "no other group could be had" if is_loss else type(error).__name__
                self._lifecycle.record_end("lost" if is_loss else "ended", old_size, began, f"{cause}; {why}")
            raise

    def has_room(self) -> bool:
        """Return whether there is room for all workers; also where they can never fit, so no one is to give way."""
        needs_none = self._spec.use_local and self._scaling.max_workers == 1
        if needs_none or self._spec.within not in ("default", None):  # it waits for no one
            return True
        view, need = self._settled_view(), self._spec.resources
        wanted = self._scaling.max_workers + self._spec.num_spares
        return capacity(view, need) >= wanted or capacity(view, need, free_only=False) < wanted

    def _allow_replacements(self) -> None:
        """Allows so many for all attempts of a start together: what dies again and again is not started without end."""
        num_allowed = _REPLACEMENTS * self._scaling.max_workers
        self._replacements.num_left = num_allowed if self._spec.keeps_processes else 0

    def _try_rebuild(
        self, cause: str, kind: EventKind, began: float, old_size: int, renew: Callable[[], GroupReport | None] | None
    ) -> None:
        self._snapshots.poll(timeout_s=_AWAITED_S if self._snapshots.is_awaited else _SETTLE_S)
        self._snapshots.drop_incoming()
        num_kept = self._try_renew(renew) if renew is not None else None
        if num_kept is not None:
            self._lifecycle.record(kind, old_size, began, cause, self._snapshots.restored_from(), num_kept)
            return
        self._lifecycle.kill_group()
        self._refuse_if_lost(cause)
        if kind == "restarted":
            self._make_room()
        attempt = 0
        while attempt < self._scaling.num_attempts:
            view = self._settled_view()
            decision = self._scaling.decide(view, self._spec.resources, attempt)
            attempt += 1
            if isinstance(decision, WaitForWorkers):
                if decision.delay_s is None:
                    raise self._starved(decision.reason, view)
                logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)
                needed, has_driver = self._scaling.min_workers, self._spec.use_local
                slots = self.make_group(self._spec, needed).slots
                slots.await_room(needed, decision.delay_s, self._lifecycle.sleep, has_driver=has_driver)
                continue
            num_spares = min(self._spec.num_spares, capacity(view, self._spec.resources) - decision)
            try:
                is_restarted = self._try_restart(decision, max(0, num_spares))
            except ReservationTimeoutError as error:  # another program took them, or the node is lost by now
                logger.warning("%s", str(error).partition("\n")[0])
                continue
            if is_restarted:
                self._lifecycle.record(kind, old_size, began, cause, self._snapshots.restored_from())
                return
            if self._start_budget is not None:
                _pay_for_start(self._start_budget)
                attempt -= 1  # this one was paid for
        label, num_attempts = self._spec.words.label, self._scaling.num_attempts
        raise WorkersLostError(f"{label}No group could be started in {num_attempts} attempts after: {cause}.")

    def _try_renew(self, renew: Callable[[], GroupReport | None]) -> int | None:
        """Restores the last snapshot in the processes that are there; None where all have to be new.

        Returns:
            How many ranks were in the group before.
        """
        if self._snapshots.is_lost or not self._snapshots.has_any:
            return None
        before = set(self._lifecycle.running.infos)
        report = renew()
        if report is None:
            return None
        self._take_answers(report)
        if not self._restore_those_left():
            return None
        return len(before & set(self._lifecycle.running.infos))

    def _refuse_if_lost(self, cause: str) -> None:
        """Raises where no state is left to go on from: new workers would begin from the start, unnoticed."""
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
            "loss costs time only."
        )

    def _settled_view(self) -> ClusterView:
        """The cluster, once its view of what is free has caught up with what we just gave back."""
        lifecycle, need = self._lifecycle, self._spec.resources
        began = lifecycle.now()
        while True:
            view = self._view()
            wanted = min(self._scaling.max_workers, capacity(view, need, free_only=False))
            patience_s = _RETURN_S if self._is_settling(view) else _SETTLE_S
            if capacity(view, need) >= wanted or lifecycle.now() >= began + patience_s:
                return view
            lifecycle.sleep(0.05)

    def _is_settling(self, view: ClusterView) -> bool:
        """Return whether more will be free in a moment, nodes aside that are probably lost."""
        settling = {node.node_id for node in view.nodes if node.is_settling}
        return bool(settling and settling - self._lifecycle.nodes_to_avoid)

    def _try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        """Starts a group, of those who live through it where that are enough; False when too few do.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self.make_group(self._spec, num_workers)
        group.num_spares = num_spares
        report = self._start_group(group, timeout_s)
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("could not start %s workers: %s", num_workers, words(diagnosis))
            return False
        if len(group) < num_workers:
            logger.warning("started %s of %s workers; the others step in later", len(group), num_workers)
        self._lifecycle.group = group
        self._take_answers(report)
        if not self._snapshots.has_any:
            copies = [answer.capture for answer in report.values if answer.capture is not None]
            if copies:
                self._snapshots.take_from(group, copies, is_first=True)
        if num_spares and not self._spec.runs_on:  # else they are told what runs when it does
            group.standby.start(num_spares, num_workers)
        return True

    def _take_answers(self, report: GroupReport) -> None:
        """Takes over what new replicas say of themselves; asks for the workers that the group lacks."""
        self._lifecycle.facts = [answer.value for answer in report.values]
        group = self._lifecycle.running
        group.slots.ask_up_to(self._scaling.max_workers, len(group))

    def _start_group(self, group: WorkerGroup, timeout_s: float) -> GroupReport:
        self._lifecycle.starting = group
        group.standby.replacements = self._replacements
        try:
            self._lifecycle.check_active()  # a stop that comes later than this finds the group
            report = group.start(timeout_s, self._num_needed)
            if self._scaling.max_workers > self._spec.use_local:
                self._lifecycle.session = session()
            report = self._without_lost(report, group, captures=self._spec.captures_after_calls)
            if report.ok:
                return self._call_start_hook(group) or report
            group.kill()
            return report
        except BaseException:
            group.kill()
            raise
        finally:
            self._lifecycle.starting = None

    @property
    def _num_needed(self) -> int | None:
        """The number of workers that have to live through a start; None for all, where a group cannot change."""
        return self._scaling.min_workers if self._spec.keeps_processes else None

    def _without_lost(
        self,
        report: GroupReport,
        group: WorkerGroup,
        on_wait: Callable[[], None] | None = None,
        captures: bool = False,
    ) -> GroupReport:
        if not self._spec.keeps_processes:
            return report
        return renew_without_lost(group, report, self._scaling.min_workers, on_wait, captures=captures)

    def _monitor(self) -> CallMonitor:
        """Monitors a restore. It takes no snapshots: one taken now would seem to cover all calls that are repeated."""
        return CallMonitor(self._lifecycle, take_inside=lambda parts: False)

    def _call_start_hook(self, group: WorkerGroup) -> GroupReport | None:
        """Lets the front end see a new group; returns the report of a failure, after which nothing is left."""
        try:
            failed = self._lifecycle.hooks.on_start(group)
        except BaseException:
            self._lifecycle.end_group(group)
            raise
        if failed is not None:
            self._lifecycle.end_group(group)
        return failed

    def _try_restart(self, num_workers: int, num_spares: int) -> bool:
        """Starts a group and restores it; False when a worker died over it.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: Another program took the resources meanwhile.
        """
        return self._try_start(num_workers, num_spares, _REBUILD_RESERVATION_S) and self._restore_those_left()

    def _restore_those_left(self) -> bool:
        """Restores the state in all who live through it; False when too few do."""
        while (failed := self._restore()) is not None:
            report = self._without_lost(failed, self._lifecycle.running, self._monitor().poll)
            if not report.ok:
                logger.warning("could not restore the state: %s", words(classify(report)))
                self._lifecycle.kill_group()
                return False
            self._snapshots.drop_incoming()
            self._take_answers(report)
        return True

    def _restore(self) -> GroupReport | None:
        """Brings the new group to the state of the last snapshot, and on to the last completed call.

        Returns:
            What failed, when a worker died over it.
        """
        group, snapshot = self._lifecycle.running, self._reachable_snapshot()
        monitor = self._monitor()  # calls that are repeated take long, too
        if snapshot is not None:
            function: Callable[..., Any] = replica.restore if snapshot.progress is None else replica.restore_inside
            rests = snapshot.for_ranks(len(group))
            shared = group.share(snapshot.shared_state)
            args: dict[int, Sequence[Any]] = {rank: (shared[rank], *rest) for rank, rest in enumerate(rests)}
            report = group.on_replica(function, args, on_wait=monitor.poll)
            if self._has_lost_workers(report):
                return report
        is_inside = self._snapshots.is_inside
        if self._snapshots.calls_since:
            logger.info("running again what the last snapshot does not cover: %s", self._snapshots.restored_from())
        for call in self._snapshots.calls_since:
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            report = group.on_replica(function, args, on_wait=monitor.poll)
            if self._has_lost_workers(report):
                return report
        return None

    def _reachable_snapshot(self) -> Snapshot | None:
        """The last snapshot; where it is in parts, they are read from the nodes that the new group is on."""
        landed = self._snapshots.landed
        if landed is not None and isinstance(landed.shared_state, DividedValue):
            nodes = {info.node_id for info in self._lifecycle.running.infos}
            landed = self._snapshots.landed = replace(landed, shared_state=landed.shared_state.best_on(nodes))
        return landed

    def _has_lost_workers(self, report: GroupReport) -> bool:
        """Return whether a call failed for the loss of workers; raises where it failed for another reason."""
        if report.ok:
            return False
        diagnosis = classify(report)
        if diagnosis.kind == "user":
            raise self._lost_snapshot(diagnosis) or worker_error(diagnosis.faults)
        return True

    def _lost_snapshot(self, diagnosis: Diagnosis) -> WorkersLostError | None:
        """Return what to raise where a rank did not find its part of the snapshot."""
        found = [fault.error for fault in diagnosis.faults if isinstance(fault.error, LostPartError)]
        return WorkersLostError(f"{found[0]} {self._snapshots.last_file_in_words}") if found else None

    def _starved(self, reason: str, view: ClusterView) -> WorkersLostError:
        table = explain(self._spec.resources, self._scaling.max_workers, view)
        label, advice = self._spec.words.label, self._spec.words.when_starved
        return WorkersLostError(f"{label}Too few workers can be had: {reason}.\n{table}\n{advice}".rstrip())


def _pay_for_start(budget: RetryBudget) -> None:
    """After the death of a worker that was being started.

    Raises:
        WorkersLostError: There is nothing to pay with.
    """
    if budget.is_spent:
        budget.refuse()
        raise WorkersLostError(
            f"Worker start-up failed: a worker process died, and the {budget.num_restarts} allowed retries "
            "are used up. The log above and Ray's worker logs name the cause; too little memory is a frequent one."
        )
    budget.pay_for_rebuild()
