"""Keeps the workers alive. The only place in raysgd where a call is retried or a group is resized.

It runs in the driver and is synchronous: `run` blocks until every rank has answered or nothing more can be tried.

Why survivors go on instead of starting over: ADR 9. When a snapshot is taken: ADR 4.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from raysgd._text.log_lines import listed
from raysgd.engine.changes.call_monitor import CallMonitor, ask_heartbeats
from raysgd.engine.changes.group_former import CannotForm
from raysgd.engine.changes.group_starter import GroupStarter
from raysgd.engine.changes.growth import Growth
from raysgd.engine.changes.in_place import InPlaceChanges
from raysgd.engine.changes.lifecycle import Clock, ElasticRules, Lifecycle
from raysgd.engine.changes.monitoring import Monitoring, tell_stuck
from raysgd.engine.changes.snapshotting import Snapshotting, copy_call
from raysgd.engine.changes.turns import PlaceInLine, Turns
from raysgd.engine.decisions.failures import Diagnosis, classify, failed_alike, words
from raysgd.engine.decisions.group_events import GroupHistory
from raysgd.engine.decisions.policies import FailurePolicy, RaiseError, Rejoin, RetryBudget, ScalingPolicy
from raysgd.engine.decisions.silence import quiet_s
from raysgd.engine.group.group_hooks import GroupHooks
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.loans import Loan
from raysgd.engine.group.worker_group import WorkerGroup
from raysgd.engine.processes.outliving import CallNumber, keeper
from raysgd.engine.processes.resources import cluster_view
from raysgd.engine.processes.snapshots import NewestSnapshot, Snapshot, SnapshotKeeper
from raysgd.engine.processes.transfers import DividedValue
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import ClusterView, GroupReport, Heartbeat, HeldAtStep
from raysgd.engine.status import TrainerStatus, compose
from raysgd.exceptions import UnpicklableError, WorkerError, WorkersLostError, worker_error

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_NODES_S = 2.0
_SPARE_POLL_S = 0.1

_OF_THIS_PROGRAM: WeakSet[ElasticController] = WeakSet()


class ElasticController:
    """Runs calls on a group of replicas and replaces or mends the group when workers are lost.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        failures: Decides what follows a failed call.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        clock: Time.
        release_timeout_s: How long to wait until Ray has taken the reservation back.
        rules: How the group follows the cluster.
        start_budget: What pays for workers that die while they are started. None: a start is tried a few times, and
            costs nothing.
        hooks: What the front end does when a group starts and ends.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        failures: FailurePolicy | None = None,
        make_group: Callable[[GroupSpec, int], WorkerGroup] = WorkerGroup,
        view: Callable[[], ClusterView] = cluster_view,
        clock: Clock | None = None,
        release_timeout_s: float = 100.0,
        rules: ElasticRules | None = None,
        start_budget: RetryBudget | None = None,
        hooks: GroupHooks | None = None,
    ) -> None:
        self._spec = spec
        self._failures = failures or FailurePolicy()
        self.snapshots: SnapshotKeeper[Call] = SnapshotKeeper()
        self._lifecycle = Lifecycle(
            spec, scaling, self.snapshots, clock, release_timeout_s, rules or ElasticRules(), hooks or GroupHooks()
        )
        self._view = view
        _OF_THIS_PROGRAM.add(self)
        self.starter = GroupStarter(self._lifecycle, make_group, view, start_budget, self._make_room)
        self._growth = Growth(self._lifecycle, view)
        self._monitoring = Monitoring(self._lifecycle, self._growth)
        self._changes = InPlaceChanges(self._lifecycle, self._growth, self._monitoring.poll)
        self._turns = Turns(self._lifecycle)
        self._copies = Snapshotting(self._lifecycle, self._monitoring)
        self._nodes_due = float("-inf")

    @property
    def num_workers(self) -> int:
        """The number of workers now; while there is no group, that which the next one is meant to have."""
        return self._lifecycle.num_workers

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self._lifecycle.is_stopped

    @property
    def has_session_ended(self) -> bool:
        """True if the workers ended with their Ray session, and `stop` was not called."""
        return self._lifecycle.has_session_ended and not self.is_stopped

    @property
    def facts(self) -> list[Any]:
        """The facts that the replicas told of themselves when they were set up, by rank."""
        return self._lifecycle.facts

    def take_facts(self, facts: list[Any]) -> None:
        """Notes what new replicas say of themselves."""
        self._lifecycle.facts = facts

    @property
    def history(self) -> GroupHistory:
        """The events of the workers so far."""
        return self._lifecycle.history

    @property
    def monitor(self) -> CallMonitor | None:
        """Watches the call that is running; None between calls."""
        return self._monitoring.monitor

    def observe_with(self, observer: Callable[[], None]) -> None:
        """Calls `observer` about once a second while a call runs, and when one failed for good."""
        self._monitoring.observer = observer

    @property
    def group(self) -> WorkerGroup | None:
        """The running group; None where the last one was killed and no call has started another one yet.

        Raises:
            TrainerShutdownError: After `stop`.
        """
        self._lifecycle.check_active()
        return self._lifecycle.group

    def ensure_group(self) -> WorkerGroup:
        """Starts a group from the last snapshot if there is none. Returns the running group.

        Raises:
            WorkersLostError: Too few workers could be had.
            TrainerShutdownError: After `stop`.
        """
        group = self.group
        if group is not None:
            return group
        with self._turns.take():
            if self._lifecycle.group is None:  # it may be there by now, if another thread was first
                self.starter.rebuild("the last workers were stopped", "restarted")
            return self._lifecycle.running

    def stand_by(self) -> None:
        """Begins to start spares, and the workers that the group lacks as far as there is room for them."""
        with self._turns.take():
            self._growth.start_spares()
            self._growth.start_standby()

    def admits_others(self) -> bool:
        """Return whether all replicas would let others join where they are. Asks them, beside their work."""
        return self._lifecycle.group is not None and self._growth.admits_others()

    def start(self, *, as_fits: bool = False) -> None:
        """Starts the workers for the first time: the full number, or with `as_fits` as many as there is room for."""
        with self._turns.take():
            self.starter.start(as_fits=as_fits)

    def kill_group(self) -> None:
        """Kills the workers, whatever they are doing; the next call starts new ones."""
        self._lifecycle.kill_group()

    def stop(self, force: bool = False) -> None:
        """Stops everything, from any thread; a call that is running then raises. A second time it does nothing.

        Args:
            force: Kill the processes at once instead of letting them close first; always so in the middle of a call.
        """
        self._turns.stop(force)

    def _make_room(self) -> str:
        """Where room is missing, frees trainers that nothing refers to any more, and lets idle ones give way.

        Returns:
            The trainers of this program that still hold what is missing, in words; empty if there are none.
        """
        if not self._others() or self.starter.has_room():
            return ""
        gc.collect()
        while not self.starter.has_room():
            if not any(other.give_way() for other in self._others()):
                return ", ".join(dict.fromkeys(other._spec.words.name for other in self._others()))
        return ""

    def _others(self) -> list[ElasticController]:
        """The other trainers of this program that have workers in the same cluster."""
        return [
            each
            for each in tuple(_OF_THIS_PROGRAM)
            if each._view is self._view
            and each._spec.make_replica is not self._spec.make_replica  # not this very trainer, which may have two
            and each._holds_room
        ]

    @property
    def _holds_room(self) -> bool:
        group = self._lifecycle.group
        return group is not None and not group.is_driver_only and not self._lifecycle.has_session_ended

    def give_way(self) -> bool:
        """Stops the workers after a snapshot, if they are idle; the next call starts them again from it.

        Returns:
            Whether they are stopped. Not where something would be lost, or the snapshot is in parts on the nodes.
        """
        spec = self._spec
        if not spec.captures or spec.use_local or spec.num_spares or keeper() is not None:
            return False
        with self._turns.take_if_free() as is_free:
            if not is_free:
                return False
            try:
                if isinstance(self.snapshot().shared_state, DividedValue):
                    return False
            except Exception as error:  # its own next call says what is wrong
                logger.debug("no snapshot of an idle trainer: %r", error)
                return False
            cause = f"{spec.words.name} is idle, and another trainer of this program needs the room"
            self._lifecycle.end_call(f"{cause}; the next call starts its workers again")
            return True

    def run(self, call: Call, *, max_retries: int = _DEFAULT_RETRIES, budget: RetryBudget | None = None) -> list[Any]:
        """Runs `call` on every rank and returns the values in rank order.

        Args:
            call: What to run.
            max_retries: How many times to start again after a loss of workers.
            budget: Instead of `max_retries`, for work that is made of several calls: what they may use up together.

        Raises:
            WorkerError: An exception in user code; of its class too. Retried only where the failure policy says so.
            WorkersLostError: When the retries are spent or too few workers can be had.
            TrainerShutdownError: After `stop`, or when another thread calls that meanwhile.
        """
        with self._turns.take():
            try:
                self._adapt(call)
                values = self._run_to_end(call, budget or RetryBudget(max_retries))
                self._growth.start_owed_spares()
                return values
            except BaseException:
                self._monitoring.observe()
                raise
            finally:
                self._monitoring.end()

    def lend_spare(self) -> Loan | None:
        """A spare for `run_on_spare`, which steps in all the same when it is needed; None where none is ready."""
        with self._turns.take():
            loan = self.ensure_group().standby.lend()
            if loan is None:
                self._growth.start_spares()
            return loan

    @property
    def has_spares(self) -> bool:
        """True if there is a spare, or will be: also one that is lent."""
        standby = self._lifecycle.running.standby
        return bool(standby.num_coming + standby.num_ready)

    def run_on_spare(
        self,
        loan: Loan | None,
        function: Callable[..., Any],
        make_args: Callable[[], Sequence[Any]],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Any:
        """Runs a call on one spare, outside all turns. Where the spare is lost or steps in, another one runs it again.

        Args:
            loan: The spare, if one was ready.
            function: Gets the replica, the number of the loan, and the arguments; returns None if it gave up.
            make_args: Makes the arguments of each attempt.
            on_wait: Called now and then.

        Returns:
            The value.

        Raises:
            WorkerError: An exception in user code.
            WorkersLostError: One spare after the other has died, or none is left.
            TrainerShutdownError: After `stop`.
        """
        num_died = 0
        while True:
            found = None if loan is None else loan.run(function, make_args, on_wait)
            if found is not None and found.failure is not None:
                raise worker_error((found.failure.fault,))
            if found is not None:
                return found.value.value
            on_wait()
            if loan is not None:
                num_died += loan.has_died
                logger.warning("a spare %s its call, which is run again", "died in" if loan.has_died else "left")
            if num_died > _DEFAULT_RETRIES:
                raise WorkersLostError(
                    f"{num_died} spares have died in this call, one after the other. Ray's log of the worker "
                    "(`worker-*.err`) may name the cause; too little memory is a frequent one."
                )
            with self._turns.take(self._turns.reserve()):
                loan = self.lend_spare()
                if loan is None and not self.has_spares:
                    raise WorkersLostError(
                        "The spare that ran this call was lost, or has replaced a lost worker, and no other is left."
                    )
            if loan is None:
                self._lifecycle.sleep(_SPARE_POLL_S)

    def turn(self, place: PlaceInLine | None = None) -> AbstractContextManager[None]:
        """A block in which no call of another thread comes between those of this one.

        Args:
            place: What `reserve_turn` returned, for this thread.

        Raises:
            TrainerShutdownError: After `stop`, or when another thread calls that meanwhile.
            KeyboardInterrupt: After `interrupt` for this place.
        """
        return self._turns.take(place)

    def reserve_turn(self) -> PlaceInLine:
        """A place in the line of calls for another thread: calls that are made from now on come after its own."""
        return self._turns.reserve()

    def interrupt(self, place: PlaceInLine) -> None:
        """From another thread: ends the call at this place as Ctrl-C inside it would, whether it runs or waits."""
        self._turns.interrupt(place)

    def interrupt_running(self) -> None:
        """From another thread: does the same with the call that is running, if one is."""
        self._turns.interrupt_running()

    def snapshot(self) -> Snapshot:
        """The state as it is now, held by the driver; copied from the workers if the last call was not covered."""
        with self._turns.take():
            try:
                return self._copies.current(self.run)
            finally:
                self._monitoring.end()

    def newest_snapshot(self) -> NewestSnapshot:
        """The same as soon as it is copied: it may be on its way to the driver."""
        with self._turns.take():
            try:
                return self._copies.newest(self.run)
            finally:
                self._monitoring.end()

    def landed_snapshot(self) -> Snapshot | None:
        """The snapshot that the driver holds already, or is about to, if no call changed the shared state since."""
        with self._turns.take():
            try:
                self._monitoring.await_snapshot()
            finally:
                self._monitoring.end()
            return self.snapshots.landed if self.snapshots.shares_current else None

    def status(self, samples_per_s: float | None) -> TrainerStatus:
        """Return how the workers are doing. Asks them.

        Args:
            samples_per_s: Throughput of the last training call, for when none is running.
        """
        group = None if self.has_session_ended else self.group
        asked = ask_heartbeats(group, quiet_s(self._spec.heartbeat_s)) if group is not None else {}
        return self._status(asked, samples_per_s)

    def glance(self, last_heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        """The same without asking the workers.

        Args:
            last_heartbeats: What the ranks said at the end of the last training call.
            samples_per_s: As for `status`.
        """
        heartbeats = self.monitor.heartbeats if self.monitor is not None else {}
        is_training = any(heartbeat.is_training for heartbeat in heartbeats.values())
        return self._status(heartbeats if is_training else last_heartbeats, samples_per_s)

    def _status(self, heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        group, monitor = self._lifecycle.group, self.monitor
        if self.has_session_ended:
            group = None
        present = monitor.samples_per_s if monitor is not None else None
        return compose(
            infos=group.infos if group is not None else (),
            heartbeats=heartbeats,
            num_wanted=self._lifecycle.scaling.max_workers,
            num_spares=group.standby.num_ready if group is not None else 0,
            samples_per_s=samples_per_s if present is None else present,
            history=self.history,
            snapshots=self.snapshots,
            pace=self._copies.pace if self._spec.captures else None,
            has_session_ended=self.has_session_ended,
        )

    def _run_to_end(self, call: Call, budget: RetryBudget) -> list[Any]:
        """Runs the call, and takes a snapshot behind it if that took much longer than expected.

        Where only workers have the state, it is copied first, unless those that survive a loss could continue the call.
        """
        if not call.can_rejoin and self._lifecycle.group is not None and self.starter.has_only_workers_state:
            self._run(copy_call(), budget)
        values = self._run(call, budget)
        if self._copies.is_overdue:
            self._run(copy_call(), budget)
        return values

    def _run(self, call: Call, budget: RetryBudget) -> list[Any]:
        kept_by = keeper()
        number = kept_by.number(call) if kept_by is not None else None
        is_inside = number is not None and number.is_resumed
        while True:
            function = call.resume if is_inside and call.resume is not None else call.function
            group = self.ensure_group()
            args = call.args_for(group.worlds)
            try:
                report = self._attempt(group, call, function, args, number)
            except UnpicklableError:  # nothing was sent: the group is kept
                self._copies.note_broken_off(call)
                raise
            except BaseException as error:  # Ctrl-C, or one in the driver: the ranks are somewhere inside the call
                self._lifecycle.end_call(type(error).__name__, unless_local=True)
                self._copies.note_broken_off(call)
                raise
            if report.ok and not _is_held(report):
                return [answer.value for answer in report.values]
            try:
                is_inside = self._go_on(call, report, budget)
            except WorkerError:  # the group is kept where all its ranks are at the same place
                self._copies.note_broken_off(call)
                raise
            except BaseException as error:  # Ctrl-C, or one in the driver: some ranks may have completed the call
                self._lifecycle.end_call(type(error).__name__, unless_local=True)
                self._copies.note_broken_off(call)
                raise
            if number is not None:
                number = replace(number, attempt=number.attempt + 1, is_resumed=is_inside)

    def _attempt(
        self,
        group: WorkerGroup,
        call: Call,
        function: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        number: CallNumber | None,
    ) -> GroupReport:
        """Runs the call once; when it changed the state, notes so and takes the snapshot that came with the answers."""
        self.snapshots.poll()
        began = self._lifecycle.now()
        if group.remote_ranks:
            self._monitoring.begin_call(can_hold=call.resume is not None)
        else:
            self._monitoring.end()
        report = group.on_replica(
            function,
            call.on_its_ranks(args),
            capture=self._copies.is_due_after(call),
            landed=self.snapshots.landed_token,
            number=number,
            on_wait=self._waiting_for(call),
            by_line=call.is_short,
        )
        if report.ok and not _is_held(report):
            self._check(call, report)
            self._copies.note(call, report, self._lifecycle.now() - began)
        return report

    def _check(self, call: Call, report: GroupReport) -> None:
        try:
            call.check([answer.value for answer in report.values])
        except Exception:
            self._monitoring.await_snapshot()  # of the call before, while a worker is there that can send it
            raise

    def _go_on(self, call: Call, report: GroupReport, budget: RetryBudget) -> bool:
        """Mends or replaces the group after a loss, or changes it where it was held for that.

        Returns:
            Whether the replicas are inside the call, so that it can continue.
        """
        self._lifecycle.check_active()
        if report.ok:
            return self._change_held(report)
        tell = partial(tell_stuck, self._monitoring.renew())
        diagnosis = classify(report)
        if call.can_rejoin and self._changes.is_short_of_memory(diagnosis):
            return self._is_inside_after(self._changes.wait_for_memory(report, tell))
        decision = self._failures.decide(diagnosis, budget, call.can_rejoin)
        if isinstance(decision, RaiseError):
            cause = words(diagnosis, self._changes.lost_behind(diagnosis))
            self._raise(call, diagnosis, report, decision, budget, cause)
        cause = words(diagnosis)
        if isinstance(decision, Rejoin):
            failed = self._changes.rejoin(report, budget, tell)
            if failed is None:
                return True
            cause = failed.cause
        if diagnosis.kind == "disconnected" and not self._spec.keeps_survivors:
            tell()
        if budget.is_spent:
            self._raise(call, diagnosis, report, RaiseError(lost=True), budget, cause)
        budget.pay_for_rebuild()
        self._lifecycle.hooks.on_failure(diagnosis)
        renew = partial(self._changes.renew, report, tell) if self._changes.can_renew else None
        self.starter.rebuild(cause, renew=renew)
        return self._is_restored_inside

    def _change_held(self, report: GroupReport) -> bool:
        """Changes the group whose ranks were held at a step boundary; returns what `_go_on` does."""
        monitor = self._monitoring.renew()
        assert monitor is not None, "nothing else asks the ranks to stop"
        leaving = self._lifecycle.leaving_nodes_in_use()
        parts = [] if self._spec.runs_on else [answer.value.part for answer in report.values]
        if parts:
            self._lifecycle.take_parts(parts)
        return self._is_inside_after(self._changes.change(leaving, monitor.reason, parts))

    def _is_inside_after(self, failed: CannotForm | None) -> bool:
        """After a change that costs no retry: rebuilds where only that is left, and returns what `_go_on` does."""
        if failed is None:
            return True
        self._monitoring.await_snapshot()
        self.starter.rebuild(failed.cause, failed.kind)
        return self._is_restored_inside

    @property
    def _is_restored_inside(self) -> bool:
        """True if the snapshot that was just restored was taken inside the running call."""
        return self.snapshots.is_inside and not self.snapshots.calls_since

    def _raise(
        self,
        call: Call,
        diagnosis: Diagnosis,
        report: GroupReport,
        decision: RaiseError,
        budget: RetryBudget,
        cause: str,
    ) -> None:
        """Raises for good. The group is kept only if every rank lives, is connected, and is where the others are."""
        if not decision.lost:
            raise worker_error(diagnosis.faults, self._end_if_parted(call, diagnosis, report))
        self._lifecycle.end_call(cause, "lost")
        budget.refuse()
        hint = (
            "Ray's log of the worker (`worker-*.err`) may name the cause: too little memory, say, or a collective that "
            "the ranks called with different sizes. "
        )
        message = (
            f"{self._spec.words.label}{cause}, and the {budget.num_restarts} allowed retries of this call are used up. "
            f"{hint if diagnosis.kind == 'died' else ''}{self._spec.words.when_spent}"
        )
        raise WorkersLostError(message.rstrip()) from diagnosis.faults[0].error

    def _end_if_parted(self, call: Call, diagnosis: Diagnosis, report: GroupReport) -> str:
        """After an exception in user code: kills a group whose ranks are not at the same place, and says so."""
        group = self._lifecycle.running
        if not report.all_answered:  # why these cannot be kept: ADR 7
            parted = "others were inside the call"
        elif call.keeps_alike and not group.is_driver_only and not self._has_failed_alike(report):
            parted = "others were elsewhere"
            self._monitoring.await_snapshot()  # of the call before, while a worker is there that can send it
        else:
            return ""
        self._lifecycle.end_call(
            f"rank {listed(diagnosis.ranks)} raised {diagnosis.faults[0].type_name} while {parted}"
        )
        if self._spec.loses_state and self.snapshots.has_gap:
            words = "The workers were ended, and their state is lost: `snapshot_every_s=None` switches snapshots off."
            return f"{words} {self.snapshots.last_file_in_words}"
        if not self.snapshots.has_any:
            return ""
        return (
            "The workers were ended, because they are not in the same state any more. The next call starts new ones, "
            f"{self._lifecycle.restored_from()}."
        )

    def _has_failed_alike(self, report: GroupReport) -> bool:
        return failed_alike(report) and self._changes.are_replicas_alike()

    def _waiting_for(self, call: Call) -> Callable[[], None] | None:
        if self.monitor is None:
            return call.on_wait

        def on_wait() -> None:
            self._monitoring.poll()
            if call.on_wait is not None:
                call.on_wait()

        return on_wait

    def _adapt(self, call: Call) -> None:
        """Before a call: leaves nodes that are going away, and grows when something is free. Spends no retry.

        The ranks that another process has left may be inside the call already: they are stopped there.
        """
        kept_by = keeper()
        if kept_by is not None and kept_by.found is not None:
            return
        now = self._lifecycle.now()
        if now >= self._nodes_due:
            self._nodes_due = now + _NODES_S
            if self._lifecycle.leaving_nodes_in_use():
                self._leave_nodes()
        if call.changes_state:
            self._grow_if_possible(call)

    def _leave_nodes(self) -> None:
        """Moves to other nodes, in place if that can be done."""
        self._monitoring.begin()
        reason = "a node is going away"
        in_place = self._spec.regroups and self._changes.are_possible()
        if in_place is None:  # a loss, which the call will come upon
            return
        if not in_place:
            self.snapshot()
            self.starter.rebuild(reason, "left")
            return
        failed = self._changes.change(self._lifecycle.leaving_nodes_in_use(), reason)
        if failed is not None:
            self.starter.rebuild(failed.cause, failed.kind)

    def _grow_if_possible(self, call: Call) -> None:
        """Lets more workers step in, or starts a larger group, when something is free for it."""
        group, most = self.ensure_group(), self._lifecycle.scaling.max_workers
        self._growth.start_spares()
        if len(group) >= most:
            return
        self._monitoring.begin()
        in_place = self._spec.regroups and self._changes.are_possible()
        if in_place is None:  # a loss, which the call will come upon: it is told and counted as one there
            return
        if in_place:
            num_awaited = most if call.resume is None else self._lifecycle.resizing.num_awaited_by_call
            failed = self._changes.grow(num_awaited)
            if failed is not None:
                self.starter.rebuild(failed.cause, failed.kind)
            return
        num_more = self._growth.find_room()
        if not num_more:
            return
        target = len(group) + num_more
        self.snapshot()
        if self.num_workers < target:  # else a loss came between, and what is free was used already
            self.starter.rebuild(f"resources for {target} workers are free", "grown")


def _is_held(report: GroupReport) -> bool:
    """Return whether the ranks stopped at a step boundary instead of finishing the call; some may have before that."""
    return any(isinstance(answer.value, HeldAtStep) for answer in report.values)
