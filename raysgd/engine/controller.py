"""Keeps the workers alive. The only place in raysgd where a call is retried or a group is resized.

It runs in the driver and is synchronous: `run` blocks until every rank has answered or nothing more can be tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.engine.failures import Diagnosis, classify
from raysgd.engine.policies import FailurePolicy, GiveUp, Raise, Resize, ScalingPolicy, Wait, capacity
from raysgd.engine.replica import Replica
from raysgd.engine.snapshots import Snapshot, SnapshotKeeper
from raysgd.engine.types import ClusterView, GroupReport, World
from raysgd.engine.worker import Answer
from raysgd.engine.worker_group import GroupSpec, WorkerGroup
from raysgd.exceptions import (
    ReservationTimeoutError,
    TrainerShutdownError,
    WorkersLostError,
    worker_error,
)

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_SETTLE_S = 1.0  # Ray's view of what is free lags behind by some hundred milliseconds
_REBUILD_RESERVATION_S = 10.0  # what the view calls free is granted at once, or somebody else took it


@dataclass(frozen=True)
class Call:
    """One piece of work for the group.

    Attributes:
        function: Runs on the worker as `function(replica, *args)`.
        args_for: The arguments of each rank, made anew for every attempt because the world may have changed.
        changes_state: Whether replicas are different afterwards, so that a snapshot is due.
        captures: Whether to copy the state afterwards in any case.
        rank: The only rank to run on; None for all.
        tick: Called in the driver some ten times a second while it waits.
    """

    function: Callable[..., Any]
    args_for: Callable[[Sequence[World]], Sequence[Sequence[Any]]] = lambda worlds: [()] * len(worlds)
    changes_state: bool = False
    captures: bool = False
    rank: int | None = None
    tick: Callable[[], None] | None = None

    def on_its_ranks(self, args: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
        """Of the arguments of all ranks those of the ranks that it runs on."""
        return dict(enumerate(args)) if self.rank is None else {self.rank: args[self.rank]}


@dataclass(frozen=True)
class Clock:
    """Time as the controller sees it; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class ElasticController:
    """Runs calls on a group of replicas and replaces the group when workers are lost.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        failures: Decides what follows a failed call.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        clock: Time.
        release_timeout_s: How long to wait until Ray has taken the reservation back.
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
    ) -> None:
        self._spec = spec
        self._scaling = scaling
        self._failures = failures or FailurePolicy()
        self._make_group = make_group
        self._view = view or _cluster_view
        self._clock = clock or Clock()
        self._release_timeout_s = release_timeout_s
        self._group: WorkerGroup | None = None
        self._is_stopped = False
        self._snapshots: SnapshotKeeper[Call] = SnapshotKeeper()
        self.num_failures = 0
        self.last_resize = float("-inf")
        self.facts: list[Any] = []

    # ---------------------------------------------------------------------------------------------- public

    @property
    def num_workers(self) -> int:
        """How many workers there are now; while there is no group, how many the next one is meant to have."""
        return self._group.num_workers if self._group is not None else self._scaling.max_workers

    @property
    def group(self) -> WorkerGroup:
        """The running group.

        Raises:
            TrainerShutdownError: After `stop`.
        """
        self._check_active()
        if self._group is None:
            self._rebuild(cause="the last group was given up")
        assert self._group is not None
        return self._group

    def start(self) -> None:
        """Starts the full number of workers, for the first time.

        A worker that dies while starting is tried again a few times; an exception in the user's set-up is raised at
        once.
        """
        for _ in range(1 + _DEFAULT_RETRIES):
            if self._try_start(self._scaling.max_workers, self._spec.reservation_timeout_s):
                return
        raise WorkersLostError(
            f"Worker start-up failed: a worker process died in each of {1 + _DEFAULT_RETRIES} attempts. The log "
            "above and "
            "Ray's worker logs name the cause; too little memory is a frequent one."
        )

    def run(self, call: Call, *, max_retries: int = _DEFAULT_RETRIES) -> list[Any]:
        """Runs `call` on every rank and returns the values in rank order.

        Args:
            call: What to run.
            max_retries: How many times to start again after a loss of workers.

        Raises:
            WorkerError: An exception in user code; of its class too. Never retried.
            WorkersLostError: When the retries are spent or no workers can be had.
        """
        if call.changes_state:
            self._grow_if_possible()
        for num_restarts in range(max_retries + 1):
            group = self.group
            args = call.args_for(group.worlds)
            try:
                report = self._attempt(group, call, args)
            except BaseException:  # Ctrl-C, or an exception in the driver: the ranks are somewhere inside the call
                self._give_group_up(unless_local=True)
                self._leave_call(call)
                raise
            if report.ok:
                return [answer.value for answer in report.values]
            diagnosis = classify(report)
            decision = self._failures.decide(diagnosis, num_restarts, max_retries)
            if isinstance(decision, Raise):
                self._raise(call, diagnosis, report, decision, max_retries)
            self.num_failures += 1
            self._rebuild(cause=_words(diagnosis))
        raise AssertionError("unreachable: the failure policy ends the loop")

    def snapshot(self) -> Snapshot:
        """The state as it is now, held by the driver; copied from the workers if the last call was not covered."""
        self._check_active()
        self._snapshots.poll(timeout_s=None)
        if not self._snapshots.is_current:
            self.run(Call(_nothing, captures=True))
            self._snapshots.poll(timeout_s=None)
        assert self._snapshots.landed is not None
        return self._snapshots.landed

    def adopt(self, snapshot: Snapshot) -> None:
        """Takes `snapshot`, which every rank has just restored, for the state as it is now."""
        self._snapshots.adopt(snapshot)

    def touch(self) -> None:
        """Says that the state may have changed without a call that says so: the next `snapshot` looks again."""
        self._snapshots.touch()

    def stop(self, force: bool = False) -> None:
        """Ends everything. A second time it does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        group, self._group = self._group, None
        self._snapshots.forget()
        if group is None:
            return
        if force:
            group.kill(self._release_timeout_s)
        else:
            group.stop(self._release_timeout_s)

    # ---------------------------------------------------------------------------------------------- one attempt

    def _attempt(self, group: WorkerGroup, call: Call, args: Sequence[Sequence[Any]]) -> GroupReport:
        """Runs the call once; when it changed the state, notes so and takes the snapshot that came with the answers."""
        self._snapshots.poll()
        report = group.on_replica(
            call.function,
            call.on_its_ranks(args),
            capture=call.captures or (call.changes_state and self._spec.captures and not self._snapshots.is_coming),
            landed=self._snapshots.landed_token,
            tick=call.tick,
        )
        if report.ok and call.changes_state:
            self._snapshots.completed(call if self._spec.captures else None)
        if report.ok:
            self._take_snapshot(group, report)
        return report

    def _take_snapshot(self, group: WorkerGroup, report: GroupReport, *, is_first: bool = False) -> None:
        answers: list[Answer] = report.values
        captures = [answer.capture for answer in answers if answer.capture is not None]
        if captures:
            self._snapshots.take(captures, lambda token: group.beside(0, _fetch, token), is_first=is_first)

    def _leave_call(self, call: Call) -> None:
        """Notes that a call ended half-way: ranks that were kept are in no state that a snapshot knows."""
        if call.changes_state and self._group is not None:
            self._snapshots.touch()

    def _raise(self, call: Call, diagnosis: Diagnosis, report: GroupReport, decision: Raise, max_retries: int) -> None:
        """Raises for good. The group is kept only when every rank lives, is connected and has answered."""
        if not report.all_answered:
            self._give_group_up()
        self._leave_call(call)
        if not decision.lost:
            raise worker_error(diagnosis.faults)
        raise WorkersLostError(
            f"{_words(diagnosis)}, and the {max_retries} allowed retries of this call are used up. The last completed "
            "state is kept: call again to go on from it with new workers, or use `shutdown(force=True)`."
        ) from diagnosis.faults[0].error

    def _give_group_up(self, unless_local: bool = False) -> None:
        """Ends the processes; the next call starts new ones from the last snapshot.

        A worker that is the driver itself, alone, waits for nobody: it can be kept as it stands.
        """
        if self._group is None or (unless_local and self._group.is_driver_only):
            return
        group, self._group = self._group, None
        group.kill(self._release_timeout_s)

    def _check_active(self) -> None:
        if self._is_stopped:
            raise TrainerShutdownError(
                "This trainer is not active any more: it was shut down. Create a new one; `save` before `shutdown` "
                "keeps "
                "the state."
            )

    # ---------------------------------------------------------------------------------------------- resizing

    def _grow_if_possible(self) -> None:
        """Starts a larger group when something is free for it. Spends no retry."""
        group = self.group
        if len(group) >= self._scaling.max_workers:
            return
        num_reserved = 0 if group.is_driver_only else len(group)
        decision = self._scaling.grow(self._view(), self._spec.resources, len(group), num_reserved)
        if isinstance(decision, Resize):
            self.snapshot()
            if self.num_workers < decision.num_workers:  # else a loss came between, and what is free was used already
                self._rebuild(cause=f"resources for {decision.num_workers} workers are free")

    def _rebuild(self, cause: str) -> None:
        """Kills what is left, sizes a new group by what is free, starts it, and restores the last snapshot."""
        began = self._clock.monotonic()
        old_size = self.num_workers
        self._snapshots.poll(timeout_s=_SETTLE_S)
        self._snapshots.leave_group()
        self._give_group_up()
        for attempt in range(self._scaling.num_attempts):
            view = self._settled_view()
            decision = self._scaling.decide(view, self._spec.resources, attempt)
            if isinstance(decision, GiveUp):
                raise self._starved(decision, view)
            if isinstance(decision, Wait):
                logger.warning("%s; nothing is free, waiting %.1f s", cause, decision.delay_s)
                self._clock.sleep(decision.delay_s)
            elif self._try_restart(decision.num_workers):
                self.last_resize = self._clock.monotonic()
                seconds = self.last_resize - began
                logger.info("resized %s -> %s in %.2f s: %s", old_size, self.num_workers, seconds, cause)
                return
        raise WorkersLostError(f"No group could be started in {self._scaling.num_attempts} attempts after: {cause}.")

    def _settled_view(self) -> ClusterView:
        """The cluster, once its view of what is free has caught up with what we just gave back."""
        deadline = self._clock.monotonic() + _SETTLE_S
        while True:
            view = self._view()
            need = self._spec.resources
            wanted = min(self._scaling.max_workers, capacity(view, need, free_only=False))
            if capacity(view, need) >= wanted or self._clock.monotonic() >= deadline:
                return view
            self._clock.sleep(0.05)

    def _try_restart(self, num_workers: int) -> bool:
        """Starts a group and restores it; False when a worker died or the resources went to somebody else meanwhile."""
        try:
            return self._try_start(num_workers, _REBUILD_RESERVATION_S) and self._restore()
        except ReservationTimeoutError:
            logger.warning("the resources for %s workers were taken by somebody else", num_workers)
            return False
        except BaseException:  # Ctrl-C too: nobody may ever use a group that is restored half-way
            self._give_group_up()
            raise

    def _try_start(self, num_workers: int, timeout_s: float) -> bool:
        """Starts a group; False when a worker died.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self._make_group(self._spec, num_workers)
        report = group.start(timeout_s)
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("starting %s workers failed: %s", num_workers, _words(diagnosis))
            return False
        self._group = group
        self.facts = [answer.value for answer in report.values]
        if not self._snapshots.has_any:
            self._take_snapshot(group, report, is_first=True)
        return True

    def _restore(self) -> bool:
        """Brings the new group to the state of the last completed call; False when a worker died over it."""
        group, snapshot = self._group, self._snapshots.landed
        assert group is not None
        reports: list[Callable[[], GroupReport]] = []
        if snapshot is not None:
            state = group.share(snapshot.shared_state)
            args = {rank: (state[rank], snapshot.rank_states) for rank in range(len(group))}
            reports.append(lambda: group.on_replica(_restore, args))
        for call in self._snapshots.calls_since:
            logger.info("running a completed call again, because its snapshot was lost with its worker")
            reports.append(partial(_replay, group, call))
        for produce in reports:
            report = produce()
            if report.ok:
                continue
            diagnosis = classify(report)
            self._give_group_up()
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("restoring the state failed: %s", _words(diagnosis))
            return False
        return True

    def _starved(self, decision: GiveUp, view: ClusterView) -> WorkersLostError:
        from raysgd.engine.resources import explain

        table = explain(self._spec.resources, self._scaling.max_workers, view)
        return WorkersLostError(
            f"No workers can be had: {decision.reason}.\n{table}\nThe last completed state is kept: it can be "
            "saved, and "
            "the next call looks for resources again."
        )


def _replay(group: WorkerGroup, call: Call) -> GroupReport:
    return group.on_replica(call.function, call.on_its_ranks(call.args_for(group.worlds)))


def _nothing(replica: Replica) -> None:
    """A call that does nothing but let the state be copied behind it."""


def _fetch(replica: Replica, token: int) -> Any:
    return replica.fetch(token)


def _restore(replica: Replica, shared_state: Any, rank_states: Sequence[Any]) -> None:
    replica.restore(shared_state, rank_states)


def _words(diagnosis: Diagnosis) -> str:
    """The cause in a few words, for logs and messages."""
    ranks = ", ".join(map(str, diagnosis.ranks))
    reason = diagnosis.faults[0].message
    what = "lost" if diagnosis.kind == "died" else "lost the connection to"
    return f"{what} rank {ranks} ({diagnosis.faults[0].type_name}: {reason})"


def _cluster_view() -> ClusterView:
    from raysgd.engine.resources import cluster_view

    return cluster_view()
