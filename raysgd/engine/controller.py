"""Keeps the workers alive. The only place in raysgd where a call is retried or a group is resized.

It runs in the driver and is synchronous: `run` blocks until every rank has answered or nothing more can be tried.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from raysgd.engine.call import Call
from raysgd.engine.call_monitor import CallMonitor, ask_heartbeats
from raysgd.engine.failures import Diagnosis, classify, failed_alike, listed, words
from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.history import History
from raysgd.engine.lifecycle import Clock, ElasticRules, Lifecycle
from raysgd.engine.policies import FailurePolicy, Raise, Rejoin, RetryBudget, ScalingPolicy
from raysgd.engine.replica import Capture, Replica
from raysgd.engine.snapshots import Snapshot, SnapshotKeeper, Transfer
from raysgd.engine.status import TrainerStatus, compose
from raysgd.engine.types import ClusterView, GroupReport, Heartbeat, Held
from raysgd.engine.worker_group import WorkerGroup
from raysgd.exceptions import TrainerShutdownError, UnpicklableError, WorkersLostError, worker_error

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_NODES_S = 2.0
_POLL_S = 0.2


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

    Attributes:
        observer: Called about once a second while a call runs, and when one failed for good; if it is set.
        monitor: Looks after the call that is running.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        failures: FailurePolicy | None = None,
        make_group: Callable[[GroupSpec, int], WorkerGroup] = WorkerGroup,
        view: Callable[[], ClusterView] | None = None,
        clock: Clock | None = None,
        release_timeout_s: float = 100.0,
        rules: ElasticRules | None = None,
        start_budget: RetryBudget | None = None,
    ) -> None:
        self._spec = spec
        self._failures = failures or FailurePolicy()
        self._snapshots: SnapshotKeeper[Call] = SnapshotKeeper()
        self._lifecycle = Lifecycle(
            spec,
            scaling,
            self._snapshots,
            make_group,
            view or _cluster_view,
            clock,
            release_timeout_s,
            rules or ElasticRules(),
            start_budget,
        )
        self._turn = threading.RLock()  # calls from several threads come one after the other
        self._num_inside = 0
        self._nodes_due = float("-inf")
        self.observer: Callable[[], None] | None = None
        self.monitor: CallMonitor | None = None

    # ---------------------------------------------------------------------------------------------- public

    @property
    def num_workers(self) -> int:
        """How many workers there are now; while there is no group, how many the next one is meant to have."""
        return self._lifecycle.num_workers

    @property
    def facts(self) -> list[Any]:
        """What the replicas said of themselves when they were set up, by rank."""
        return self._lifecycle.facts

    @property
    def history(self) -> History:
        """What happened to the workers so far."""
        return self._lifecycle.history

    @property
    def snapshots(self) -> SnapshotKeeper[Call]:
        """The retry point."""
        return self._snapshots

    @property
    def group(self) -> WorkerGroup:
        """The running group.

        Raises:
            TrainerShutdownError: After `stop`.
        """
        self._lifecycle.check_active()
        if self._lifecycle.group is None:
            with self._in_turn():
                return self._new_group()
        return self._lifecycle.group

    def _new_group(self) -> WorkerGroup:
        if self._lifecycle.group is None:  # it may be there by now, if another thread was first
            self._lifecycle.rebuild("the last group was given up", "restarted")
        assert self._lifecycle.group is not None
        return self._lifecycle.group

    def start(self, *, as_fits: bool = False) -> None:
        """Starts the workers for the first time: the full number, or with `as_fits` as many as there is room for."""
        with self._in_turn():
            self._lifecycle.start(as_fits=as_fits)

    def give_up(self) -> None:
        """Ends the workers, whatever they are doing; the next call starts new ones."""
        self._lifecycle.give_up()

    def run(self, call: Call, *, max_retries: int = _DEFAULT_RETRIES, budget: RetryBudget | None = None) -> list[Any]:
        """Runs `call` on every rank and returns the values in rank order.

        Args:
            call: What to run.
            max_retries: How many times to start again after a loss of workers.
            budget: Instead of `max_retries`, for work that is made of several calls: what they may use up together.

        Raises:
            WorkerError: An exception in user code; of its class too. Never retried.
            WorkersLostError: When the retries are spent or too few workers can be had.
            TrainerShutdownError: After `stop`, or when another thread calls that meanwhile.
        """
        with self._in_turn():
            try:
                self._adapt(call)
                return self._run(call, budget or RetryBudget(max_retries))
            except BaseException:
                self._observe()
                raise
            finally:
                self.monitor = None

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread after the other. What fails after `stop` fails because of that, and the group ends here."""
        with self._turn:
            self._num_inside += 1
            try:
                self._lifecycle.check_active()
                with self._telling_of_shutdown():
                    yield
            finally:
                self._num_inside -= 1
                if self._lifecycle.is_stopped:
                    self._end(force=True)

    @contextmanager
    def _telling_of_shutdown(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._lifecycle.is_stopped:
                raise
            raise TrainerShutdownError(
                "The trainer was shut down while this call was running, so the call did not finish. What was not saved "
                "before is lost."
            ) from (error if not isinstance(error, TrainerShutdownError) else None)

    def _run(self, call: Call, budget: RetryBudget) -> list[Any]:
        function = call.function
        while True:
            group = self.group
            args = call.args_for(group.worlds)
            try:
                report = self._attempt(group, call, function, args)
            except UnpicklableError:  # nothing was sent: the group is kept
                self._leave_call(call)
                raise
            except BaseException as error:  # Ctrl-C, or one in the driver: the ranks are somewhere inside the call
                self._lifecycle.end(type(error).__name__, unless_local=True)
                self._leave_call(call)
                raise
            if report.ok and not _is_held(report):
                return [answer.value for answer in report.values]
            try:
                is_inside = self._go_on(call, report, budget)
            except BaseException:
                self._leave_call(call)
                raise
            function = call.resume if is_inside and call.resume is not None else call.function

    def _go_on(self, call: Call, report: GroupReport, budget: RetryBudget) -> bool:
        """Mends or replaces the group after a loss, or changes it where it was held for that.

        Returns:
            Whether the replicas are inside the call, so that it can be gone on with.
        """
        self._lifecycle.check_active()
        if report.ok:
            assert self.monitor is not None, "nobody else asks the ranks to stop"
            reason = self.monitor.reason
            self._renew_monitor()
            leaving = self._lifecycle.leaving_nodes_in_use()
            parts = [answer.value.part for answer in report.values]
            self._lifecycle.take_parts(parts)
            failed = self._lifecycle.change(leaving, reason, self._on_wait, parts)
            if failed is None:
                return True
            self._await_snapshot()
            self._lifecycle.rebuild(failed.cause, failed.kind)
            return self._is_restored_inside
        tell_stuck = partial(self._tell_stuck, self.monitor)
        self._renew_monitor()
        diagnosis = classify(report)
        decision = self._failures.decide(diagnosis, budget, call.can_rejoin)
        if isinstance(decision, Raise):
            self._raise(call, diagnosis, report, decision, budget)
        cause = words(diagnosis)
        if isinstance(decision, Rejoin):
            failed = self._lifecycle.rejoin(report, budget, self._on_wait, tell_stuck)
            if failed is None:
                return True
            cause = failed.cause
        if diagnosis.kind == "disconnected" and not self._spec.regroups:
            tell_stuck()
        if budget.is_spent:
            self._raise(call, diagnosis, report, Raise(lost=True), budget)
        budget.pay_for_rebuild()
        self._lifecycle.rebuild(cause)
        return self._is_restored_inside

    def _await_snapshot(self) -> None:
        """Waits until nothing is on its way any more, for whatever reason."""
        if self.monitor is None:
            self.monitor = self._new_monitor()
        self._snapshots.poll()
        while self._snapshots.is_coming:
            self._snapshots.poll(timeout_s=_POLL_S)
            self._on_wait()

    def _renew_monitor(self) -> None:
        """Forgets what the ranks were asked before they change: what a lost one owes, its successor does not."""
        if self.monitor is not None:
            self.monitor = self._new_monitor()

    def _new_monitor(self, can_hold: bool = False) -> CallMonitor:
        return CallMonitor(self._lifecycle, can_hold, self._take_inside, self._observe)

    def _observe(self) -> None:
        if self.observer is not None and not self._lifecycle.is_stopped:
            self.observer()

    @property
    def _is_restored_inside(self) -> bool:
        """Whether the snapshot that was just restored was taken inside the running call."""
        return self._snapshots.is_inside and not self._snapshots.calls_since

    def snapshot(self) -> Snapshot:
        """The state as it is now, held by the driver; copied from the workers if the last call was not covered."""
        with self._in_turn():
            try:
                for _ in range(1 + _DEFAULT_RETRIES):
                    self._await_snapshot()
                    landed = self._snapshots.landed
                    if landed is not None and (self._snapshots.is_current or self._is_all_there_is):
                        return landed
                    self.run(Call(_nothing, captures=True))
            finally:
                self.monitor = None
        raise WorkersLostError(
            f"The state was lost on its way to the driver {1 + _DEFAULT_RETRIES} times. The log above names the cause; "
            "too little memory in Ray's object store is a frequent one."
        )

    @property
    def _is_all_there_is(self) -> bool:
        """Whether no worker is left that could know more than the snapshot, and no completed call is to be made up for.

        New workers would start from it. So there is no need to wait for any, who may never come.
        """
        return self._lifecycle.group is None and self._spec.captures and not self._snapshots.calls_since

    def adopt(self, snapshot: Snapshot) -> None:
        """Takes `snapshot`, which every rank has just restored, for the state as it is now."""
        self._snapshots.adopt(snapshot)

    def expect(self, transfer: Transfer, rank_states: tuple[Any, ...], call: Call) -> None:
        """Takes what `transfer` will bring, and what `call` has brought to every rank, for the state as it is now."""
        self._snapshots.expect(transfer, rank_states, call)

    def touch(self) -> None:
        """Says that the state may have changed without a call that says so: the next `snapshot` looks again."""
        self._snapshots.touch()

    def status(self, samples_per_s: float | None) -> TrainerStatus:
        """How the workers are doing. Asks them.

        Args:
            samples_per_s: Throughput of the last training call, for when none is running.
        """
        self._lifecycle.check_active()
        group = self._lifecycle.group
        return self._status(ask_heartbeats(group) if group is not None else {}, samples_per_s)

    def glance(self, last_heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        """The same without asking anybody.

        Args:
            last_heartbeats: What the ranks said at the end of the last training call.
            samples_per_s: As for `status`.
        """
        heartbeats = self.monitor.heartbeats if self.monitor is not None else {}
        is_training = any(heartbeat.is_training for heartbeat in heartbeats.values())
        return self._status(heartbeats if is_training else last_heartbeats, samples_per_s)

    def _status(self, heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        group, monitor = self._lifecycle.group, self.monitor
        present = monitor.samples_per_s if monitor is not None else None
        return compose(
            infos=group.infos if group is not None else (),
            heartbeats=heartbeats,
            num_wanted=self._lifecycle.scaling.max_workers,
            num_spares=group.standby.num_ready if group is not None else 0,
            samples_per_s=samples_per_s if present is None else present,
            history=self.history,
            snapshots=self._snapshots,
        )

    def stop(self, force: bool = False) -> None:
        """Ends everything, from any thread; a call that is running then raises. A second time it does nothing.

        Args:
            force: End the processes at once instead of letting them close first; so it is in the middle of a call.
        """
        if self._lifecycle.is_stopped:
            return
        self._lifecycle.forbid()
        if self._num_inside:
            force = True
            self._lifecycle.abandon()
        if not self._turn.acquire(timeout=self._patience_s):
            logger.warning("a call is running in this process; its worker stops when the call ends")
            return
        try:
            self._end(force)
        finally:
            self._turn.release()

    @property
    def _patience_s(self) -> float:
        """How long to wait for a call that was abandoned; one in this process comes to no sooner end than its own."""
        group = self._lifecycle.group
        return 0.0 if group is not None and group.is_driver_only else self._lifecycle.release_timeout_s

    def _end(self, force: bool) -> None:
        group, self._lifecycle.group = self._lifecycle.group, None
        self._snapshots.forget()
        if group is not None:
            self._lifecycle.end_group(group, force=force)

    # ---------------------------------------------------------------------------------------------- one attempt

    def _attempt(
        self, group: WorkerGroup, call: Call, function: Callable[..., Any], args: Sequence[Sequence[Any]]
    ) -> GroupReport:
        """Runs the call once; when it changed the state, notes so and takes the snapshot that came with the answers."""
        self._snapshots.poll()
        self.monitor = self._new_monitor(can_hold=call.resume is not None) if group.remote_ranks else None
        report = group.on_replica(
            function,
            call.on_its_ranks(args),
            capture=call.captures or (call.changes_state and self._spec.captures and not self._snapshots.is_coming),
            landed=self._snapshots.landed_token,
            on_wait=self._waiting_for(call),
        )
        if report.ok and not _is_held(report):
            if call.changes_state:
                self._snapshots.completed(call if self._spec.captures else None)
            self._lifecycle.take_snapshot(report)
        return report

    def _waiting_for(self, call: Call) -> Callable[[], None] | None:
        if self.monitor is None:
            return call.on_wait

        def on_wait() -> None:
            self._on_wait()
            if call.on_wait is not None:
                call.on_wait()

        return on_wait

    def _on_wait(self) -> None:
        if self.monitor is not None:
            self.monitor.poll()

    def _tell_stuck(self, monitor: CallMonitor | None) -> None:
        """Says what every rank is doing, for whoever has to find out why one of them holds the others up.

        Args:
            monitor: The one of the call that failed, which knows how far the ranks were.
        """
        if monitor is not None:
            logger.warning("workers are not stopping:\n%s", monitor.report())

    def _take_inside(self, parts: Sequence[Capture]) -> bool:
        """Takes a snapshot from inside the running call; not while another one is on its way."""
        self._snapshots.poll()
        if self._snapshots.is_coming:
            return False
        self._lifecycle.take_parts(parts)
        return True

    def _leave_call(self, call: Call) -> None:
        """Notes that a call ended half-way: ranks that were kept are in no state that a snapshot knows."""
        self._snapshots.leave_call()
        if call.changes_state and self._lifecycle.group is not None:
            self._snapshots.touch()

    def _raise(
        self, call: Call, diagnosis: Diagnosis, report: GroupReport, decision: Raise, budget: RetryBudget
    ) -> None:
        """Raises for good. The group is kept only if every rank lives, is connected, and is where the others are."""
        if not decision.lost:
            raise worker_error(diagnosis.faults, self._end_if_parted(call, diagnosis, report))
        self._lifecycle.end(words(diagnosis), "lost")
        budget.refuse()
        hint = (
            "Ray's log of the worker (`worker-*.err`) may name the cause: too little memory, say, or a collective that "
            "the ranks called with different sizes. "
        )
        raise WorkersLostError(
            f"{words(diagnosis)}, and the {budget.num_restarts} allowed retries of this call are used up. "
            f"{hint if diagnosis.kind == 'died' else ''}The last completed state is kept: call again to go on from it "
            "with new workers, or use `shutdown(force=True)`."
        ) from diagnosis.faults[0].error

    def _end_if_parted(self, call: Call, diagnosis: Diagnosis, report: GroupReport) -> str:
        """After an exception in user code: ends a group whose ranks are not at the same place, and says so."""
        assert self._lifecycle.group is not None
        if not report.all_answered:
            parted = "others were inside the call"
        elif call.keeps_alike and not self._lifecycle.group.is_driver_only and not self._has_failed_alike(report):
            parted = "others were elsewhere"
            self._await_snapshot()  # of the call before, while somebody is there who can send it
        else:
            return ""
        self._lifecycle.end(f"rank {listed(diagnosis.ranks)} raised {diagnosis.faults[0].type_name} while {parted}")
        if not self._snapshots.has_any:
            return ""
        return (
            "The workers were ended, because they are not in the same state any more. The next call starts new ones, "
            f"{self._lifecycle.restored_from()}."
        )

    def _has_failed_alike(self, report: GroupReport) -> bool:
        return failed_alike(report) and self._lifecycle.are_replicas_alike(self._on_wait)

    # ---------------------------------------------------------------------------------------------- adapting

    def _adapt(self, call: Call) -> None:
        """Before a call: leaves nodes that are going away, and grows when something is free. Spends no retry."""
        self.monitor = self._new_monitor()
        now = self._lifecycle.now()
        if now >= self._nodes_due:
            self._nodes_due = now + _NODES_S
            if self._lifecycle.leaving_nodes_in_use():
                self._leave_nodes()
        if call.changes_state:
            self._grow_if_possible()

    def _leave_nodes(self) -> None:
        """Moves to other nodes, in place if that can be done."""
        reason = "a node is going away"
        in_place = self._spec.regroups and self._lifecycle.can_change_in_place(self._on_wait)
        if in_place is None:  # a loss, which the call will come upon
            return
        if not in_place:
            self.snapshot()
            self._lifecycle.rebuild(reason, "left")
            return
        failed = self._lifecycle.change(self._lifecycle.leaving_nodes_in_use(), reason, self._on_wait)
        if failed is not None:
            self._lifecycle.rebuild(failed.cause, failed.kind)

    def _grow_if_possible(self) -> None:
        """Lets more workers step in, or starts a larger group, when something is free for it."""
        group = self.group
        self._lifecycle.start_spares()
        if len(group) >= self._lifecycle.scaling.max_workers:
            return
        in_place = self._spec.regroups and self._lifecycle.can_change_in_place(self._on_wait)
        if in_place is None:  # a loss, which the call will come upon: it is told and counted as one there
            return
        if in_place:
            self._lifecycle.grow_in_place(self._on_wait)
            return
        num_more = self._lifecycle.find_room()
        if not num_more:
            return
        target = len(group) + num_more
        self.snapshot()
        if self.num_workers < target:  # else a loss came between, and what is free was used already
            self._lifecycle.rebuild(f"resources for {target} workers are free", "grown")


def _is_held(report: GroupReport) -> bool:
    """Whether the ranks stopped at a step boundary instead of finishing the call."""
    return isinstance(report.values[0].value, Held)


def _nothing(replica: Replica) -> None:
    """A call that does nothing but let the state be copied behind it."""


def _cluster_view() -> ClusterView:
    from raysgd.engine.resources import cluster_view

    return cluster_view()
