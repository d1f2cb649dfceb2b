"""Starts a trainer's worker group, finds resources for more workers, and stops the group.

The package `recovery` handles failures of workers.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raysgd.core.cluster.keeper import KeptGroup, keeper
from raysgd.core.cluster.ray_cluster import session
from raysgd.core.cluster.resources import ClusterView, capacity, explain, impossibility
from raysgd.core.engine.group import GroupHooks, WorkerGroup
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.policies import (
    ElasticRules,
    FailurePolicy,
    Resizing,
    RetryBudget,
    ScalingPolicy,
    WaitForWorkers,
    classify,
    words,
)
from raysgd.core.engine.shared.interface import (
    EventKind,
    GroupEvent,
    GroupHistory,
    GroupSpec,
    RegroupingReplica,
    method_of,
)
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.snapshots import Snapshots
from raysgd.core.engine.standby import Replacements
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import OnFailure, ReservationTimeoutError, TrainerShutdownError, WorkersLostError

logger = logging.getLogger(__name__)

START_ATTEMPTS = 4
RELEASE_S = 60.0  # longest wait until Ray has released a reservation
SETTLE_S = 1.0  # Ray's view of free resources lags by a few hundred milliseconds
_RETURN_S = 10.0  # on a busy machine, it takes seconds until a removed placement group has freed its resources
# Timeout for reserving free resources: Ray grants them at once unless another program took them.
_GROWTH_RESERVATION_S = 1.0
_SUSPICION_S = 60.0
_HEAD_S = 0.5


@dataclass(eq=False, repr=False)
class Lifecycle(ABC):
    """Holds, starts and stops a trainer's worker group. After the trainer is stopped, no group is started.

    The subclass `ElasticController` runs calls on the group.

    Attributes:
        spec: The settings with which groups are started.
        scaling: Policy that decides the number of workers.
        failures: Policy that says which failures are retried.
        platform: Through which the engine uses Ray, clocks and threads.
        make_group: Creates a group without starting it.
        rules: How the group responds to changes of the cluster.
        start_budget: Retries for workers that die while a group starts. None to limit only how often a start is
            attempted: `num_attempts` of the scaling policy.
        hooks: The front end's callbacks for when the group starts, changes or ends.
        now: Returns the time of the engine's monotonic clock, in seconds.
        view: Returns the state of the cluster.
        group: The worker group. None before the first start and after the group was killed.
        snapshots: The last snapshot and the calls since that snapshot.
        history: The events of the trainer's worker groups.
        facts: What the replicas' `setup` returned, by rank.
        stopped: Set once the trainer is stopped. No group is started after that.
        interrupted: ID of the thread whose call was interrupted and must end. None if no call was interrupted.
        is_ending: True if the program is about to end: see `expect_end`.
        gives_state_up: True if training state that existed only in the workers could not be fetched and is lost.
        owes_spares: True if starting missing spare workers was postponed, because a starting process slows down other
            workers on its node.
        num_short: Largest group size at which memory ran out.
        replacements: Replacements for workers that die during the next start, in all its attempts together.
        newcomers: Workers that joined a group but may not have received the training state, because forming the group
            failed.
    """

    spec: GroupSpec
    scaling: ScalingPolicy
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    platform: Platform = field(default_factory=Platform)
    make_group: Callable[[GroupSpec, int, Platform], WorkerGroup] = WorkerGroup
    rules: ElasticRules = field(default_factory=ElasticRules)
    start_budget: RetryBudget | None = None
    hooks: GroupHooks = field(default_factory=GroupHooks)

    def __post_init__(self) -> None:
        self.now, self.view = self.platform.now, self.platform.view
        self.stopped = self.platform.make_event()
        self.snapshots = Snapshots(self.spec, self.now, self.is_cut_off)
        self.history = GroupHistory()
        self.group: WorkerGroup | None = None
        self._starting: WorkerGroup | None = None
        self._session: Any = None  # the workers' Ray session; None if the driver is the only worker
        self.facts: list[Any] = []
        self.replacements = Replacements()
        self.owes_spares = False
        self.num_short = 0
        self._suspected: dict[str, float] = {}
        self.interrupted: int | None = None
        self.gives_state_up = self.is_ending = False
        self.newcomers: set[Any] = set()

    def expect_end(self, is_ending: bool) -> None:
        """Note if the program is about to end. Lost workers are then not replaced, and no snapshot's memory is freed.

        If the program continues after all, memory is freed again from the next call on. This method is called in a
        signal handler, so it only sets flags.
        """
        self.is_ending = is_ending
        self.snapshots.keeps_replaced |= is_ending

    def is_cut_off(self) -> bool:
        """Return True if the program is about to end, and Ray was stopped."""
        return self.is_ending and self.group is not None and self.group.is_cut_off

    @property
    def holds_only_state(self) -> bool:
        """True if the training state exists only in the workers. It must then be fetched before a worker is killed.

        False once the trainer is stopped, because that discards the state.
        """
        is_given_up = self.gives_state_up or self.stopped.is_set()
        return self.snapshots.is_only_in_workers and not is_given_up and self.has_remote_workers

    @property
    def has_remote_workers(self) -> bool:
        """True if a group is running, with workers outside the driver."""
        return self.group is not None and not self.group.is_driver_only and not self.has_session_ended

    @property
    def num_workers(self) -> int:
        """Number of workers in the group. Without a group, the number of workers that the next group should have."""
        return self.group.num_workers if self.group is not None else self.scaling.max_workers

    @abstractmethod
    def make_room(self) -> str:
        """If resources are short, release resources that this program's other trainers hold.

        If resources are still short afterwards, return a description of the trainers that hold them. Otherwise, return
        an empty string. See `ElasticController.make_room`.
        """

    @property
    def running(self) -> WorkerGroup:
        """The worker group. Use this property only where a group must exist."""
        assert self.group is not None, "there is no group at this moment"
        return self.group

    def keep_facts(self, facts: list[Any]) -> None:
        """Store what the replicas' `setup` returned (the facts), by rank.

        If the workers outlive this process, also save the facts with the description of the group.
        """
        self.facts = facts
        kept_by, group = keeper(), self.group
        if kept_by and group is not None:  # this method runs after every change of the group
            kept_by.keep_group(KeptGroup(group.workers, group.slots, facts))

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, then raise an error if the current call must not continue.

        See `check_active`.
        """
        self.stopped.wait(seconds)
        self.check_active()

    def check_not_ending(self, cause: str) -> None:
        """Raise an error if the program is about to end, because lost workers are then not replaced.

        Args:
            cause: Why workers are needed, for the message.

        Raises:
            WorkersLostError: The program is about to end.
        """
        if self.is_ending:
            raise WorkersLostError(f"{cause}, and the program is about to end, so no other workers are started.")

    def record(
        self, kind: EventKind, old_size: int, began: float, cause: str, detail: str = "", num_kept: int = 0
    ) -> None:
        """Record an event of the worker group in the history and log it.

        For the events "lost" and "ended", the new number of workers is recorded as 0, and the front end supplies the
        detail.

        Args:
            kind: Kind of the event.
            old_size: Number of workers before the event.
            began: When the event began, in seconds of the engine's clock.
            cause: Reason for the event.
            detail: Effect of the event on the training, for users. Ignored for the events "lost" and "ended".
            num_kept: Number of worker processes that were kept.
        """
        now, num_workers = self.now(), self.num_workers
        if kind in ("lost", "ended"):
            num_workers, detail = 0, self.spec.words.after_end
        elif kind != "started":
            self.history.last_resize = now
        self.history.record(GroupEvent(kind, old_size, num_workers, now - began, cause, detail, num_kept=num_kept))

    # ------------------------------------------------------------------------------------------------ starts

    def take_over(self) -> bool:
        """Adopt the workers that the trainer's previous process left running. Return False if no workers were left."""
        kept_by = keeper()
        kept = kept_by.find() if kept_by else None
        if kept_by is None or kept is None:
            return False
        group = self.make_group(self.spec, len(kept.workers), self.platform)
        group.take_over(kept)
        self._session = session()
        self.group = group
        self.keep_facts(list(kept.facts))
        self.snapshots.completed(None)  # no snapshot has the workers' state yet
        numbers = [number for number in group.ask_workers(WorkerProcess.last_call).values() if number is not None]
        kept_by.found = max(numbers, key=lambda number: (number.call, number.attempt), default=None)
        logger.info("found %s workers again", len(kept.workers))
        return True

    def try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        """Start a group of `num_workers` workers. Return False if too few workers survive the start.

        Args:
            num_workers: Number of workers in the group.
            num_spares: Number of spare workers to start as well.
            timeout_s: How long to wait until the resources are granted.

        Raises:
            WorkerError: The user's set-up code failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self._starting = self.make_group(self.spec, num_workers, self.platform)
        group.standby.replacements = self.replacements
        # Number of workers that must survive the start. None means all: without `keeps_processes`, the group cannot
        # change later.
        num_needed = self.scaling.min_workers if self.spec.keeps_processes else None
        try:
            with OnFailure(group.kill):
                self.check_active()  # if `stop` is called after this check, it finds the group in `_starting`
                report = group.start(timeout_s, num_needed, num_spares)
                if self.scaling.max_workers > self.spec.use_local:
                    self._session = session()
                if report.ok:
                    with OnFailure(partial(self._end_group, group)):
                        failed = self.hooks.on_start(group)
                    if failed is not None:
                        self._end_group(group)
                        report = failed
        finally:
            self._starting = None
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("could not start %s workers: %s", num_workers, words(diagnosis))
            return False
        if len(group) < num_workers:
            logger.warning("started %s of %s workers; the others step in later", len(group), num_workers)
        self.group, self.gives_state_up = group, False
        self.take_answers(report)
        if report.captures and not self.snapshots.has_any:
            self.snapshots.take_captures(report.captures, group, is_first=True)
        if num_spares and not self.spec.runs_on:  # with `runs_on`, the front end starts spares once it has the function
            group.standby.start_more(num_spares, num_workers)
        return True

    def take_answers(self, report: GroupReport) -> None:
        """Store what the replicas' `setup` returned, and request resources for workers that the group still lacks.

        Args:
            report: The report of the start, with the return values of `setup`.
        """
        self.running.slots.ask_up_to(self.scaling.max_workers, len(self.running))
        self.keep_facts(report.values)

    # ------------------------------------------------------------------------------------- room in the cluster

    def has_room(self) -> bool:
        """Return False if this trainer lacks resources and could get them if other trainers released theirs.

        Return True if the free resources are enough for all workers and spares, or if even the whole cluster is too
        small.
        """
        needs_none = self.spec.use_local and self.scaling.max_workers == 1
        if needs_none or self.spec.within not in ("default", None):  # an existing placement group has its own resources
            return True
        view, need = self.settled_view(), self.spec.resources
        wanted = self.scaling.max_workers + self.spec.num_spares
        return capacity(view, need) >= wanted or capacity(view, need, free_only=False) < wanted

    def settled_view(self) -> ClusterView:
        """Return the cluster's nodes and free resources.

        If too few resources are free for all workers, wait up to ten seconds, because Ray reports released resources
        late. If the head node is gone, wait until it is back.

        Raises:
            WorkersLostError: The head node is gone, and the program is about to end.
        """
        need, began = self.spec.resources, self.now()
        while True:
            view = self.view()
            if view.is_head_gone:  # after a minute, Ray itself ends this process
                self.check_not_ending("Ray was stopped")
                self.sleep(_HEAD_S)
                continue
            wanted = min(self.scaling.max_workers, capacity(view, need, free_only=False))
            settling = {node.node_id for node in view.nodes if node.is_settling}
            # Do not wait long for resources of nodes that are probably lost.
            patience_s = _RETURN_S if settling and settling - self.nodes_to_avoid else SETTLE_S
            if capacity(view, need) >= wanted or self.now() >= began + patience_s:
                return view
            self.sleep(0.05)

    def find_resources(self, kind: EventKind, attempt: int, cause: str) -> tuple[int, int]:
        """Return how many workers and spares fit into the free resources. If too few do, wait a while and return zeros.

        Args:
            kind: Kind of the restart: the event to record in the history.
            attempt: Index of this attempt to start workers, from 0.
            cause: Why workers are needed, for the log.

        Raises:
            WorkersLostError: Too few workers fit, and no further attempt is made.
        """
        spec, scaling = self.spec, self.scaling
        if kind == "restarted" and not attempt:
            self.make_room()
        view = self.settled_view()
        decision = scaling.decide(view, spec.resources, attempt)
        if not isinstance(decision, WaitForWorkers):
            return decision, max(0, min(spec.num_spares, capacity(view, spec.resources) - decision))
        # Not checked after a failure, because the workers may fit once lost nodes come back.
        impossible = None
        if kind == "started":
            impossible = impossibility(spec.resources, scaling.min_workers, view, spec.words.with_cpus)
        if decision.delay_s is None:
            table = impossible or explain(spec.resources, scaling.max_workers, view)
            few = f"Too few workers can be started: {decision.reason}."
            raise WorkersLostError(f"{few}\n{table}\n{spec.words.when_starved}".rstrip())
        if impossible and not attempt:
            logger.warning("%s", impossible)
        logger.warning("%s; %s, waiting %.1f s", cause, decision.reason, decision.delay_s)

        def sleep(seconds: float) -> None:
            self.sleep(seconds)
            self.check_not_ending(cause)

        slots = self.make_group(spec, scaling.min_workers, self.platform).slots
        slots.await_room(scaling.min_workers, decision.delay_s, sleep, has_driver=spec.use_local)
        return 0, 0

    @property
    def resizing(self) -> Resizing:
        """The rules for when the number of workers changes, with the current settings and group."""
        return self.rules.resizing(self.scaling.max_workers, self.num_short, regroups=self.spec.regroups)

    def find_room(self) -> int:
        """Return by how many workers the group could grow, given the free resources and the group's reserved slots."""
        group, need = self.running, self.spec.resources
        if len(group) >= self.scaling.max_workers:
            return 0
        group.slots.take_granted()
        avoid = self.nodes_to_avoid
        view = self.view().without(avoid)
        # Check the reserved slots without `num_usable` first, because that method queries Ray.
        if not self.scaling.grow(view, need, len(group), len(group.slots)):
            return 0
        return self.scaling.grow(view, need, len(group), group.slots.num_usable(avoid))

    def start_standby(self) -> None:
        """Start missing workers of the group as standby workers, if resources are free.

        Do not wait until they are ready.
        """
        group, most = self.running, self.scaling.max_workers
        group.slots.take_granted()
        missing = most - len(group) - group.standby.num_all
        if missing > 0:
            self._start_more(missing, most, missing)

    def _start_more(self, count: int, world_size: int, most: int) -> None:
        """Start up to `count` standby workers, in free slots or with new resources.

        Args:
            count: Largest number of workers to start.
            world_size: Size of the group for which the workers prepare.
            most: Largest number of workers for which new resources are reserved.
        """
        group = self.running
        most = min(most, count - group.standby.start_more(count, world_size, self.nodes_to_avoid))
        num_free = min(most, capacity(self.view(), self.spec.resources)) if most > 0 else 0
        if num_free:
            try:
                group.slots.reserve(num_free, _GROWTH_RESERVATION_S)
                group.standby.start_more(num_free, world_size, self.nodes_to_avoid)
            except ReservationTimeoutError:
                logger.info("another program took the resources for %s more workers", num_free)
        group.slots.ask_up_to(self.scaling.max_workers, len(group))
        self.keep_facts(self.facts)  # saves the slots for the trainer's next process

    def let_step_in(self) -> None:
        """Interrupt the running call if workers can join now.

        This method has an effect only if a user's function keeps running between calls (`runs_on` of the group spec).
        Only the wait for the function's messages is interrupted, not the function.
        """
        group = self.group
        if not self.spec.runs_on or group is None or len(group) >= self.scaling.max_workers:
            return
        if group.standby.num_ready and self.admits_others():
            group.ask_beside(method_of(RegroupingReplica.hold))

    def admits_others(self) -> bool:
        """Poll the replicas, even during a call. Return True if all replicas would let other workers join now."""
        reports = self.group.ask_beside(method_of(RegroupingReplica.replica_progress)) if self.group is not None else {}
        admitting = [each for each in reports.values() if each is not None and each.admits and not each.obstacle]
        return len(admitting) == self.num_workers

    def start_spares(self) -> None:
        """Start missing spare workers, without waiting until they are ready."""
        self.owes_spares = False
        group = self.group
        if group is None:
            return
        missing = self.spec.num_spares - group.standby.num_all
        if missing > 0:  # spares may be missing because the last restart lacked resources for them
            num_wanted = self.scaling.max_workers + self.spec.num_spares
            self._start_more(missing, len(group), num_wanted - len(group.slots))

    @property
    def nodes_to_avoid(self) -> frozenset[str]:
        """IDs of nodes on which no new worker should be placed: nodes that may be dead or will be removed soon."""
        now = self.now()
        return frozenset(node for node, until in self._suspected.items() if until > now) | self._leaving_nodes

    def leaving_nodes_in_use(self) -> frozenset[str]:
        """Return the IDs of nodes that will be removed soon and that have workers of the group.

        Return an empty set if all workers are on such nodes, because no worker would be left.
        """
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        bound = {self.group.infos[0].node_id} if self.spec.use_local else set()  # the driver cannot leave its node
        leaving = (self._leaving_nodes & used) - bound
        return leaving if used - leaving else frozenset()

    @property
    def _leaving_nodes(self) -> frozenset[str]:
        """IDs of nodes that will be removed soon.

        Empty if the program is about to end, because no worker moves or starts then. Besides, Ray may already have
        stopped. A save would then have to wait until the request to Ray is given up.
        """
        return frozenset() if self.is_ending else self.rules.leaving_nodes()

    def suspect(self, survivors: Sequence[int]) -> None:
        """Place no new workers on the nodes of silent ranks for a while, because these nodes may be dead.

        Ray reports a dead process at once, but a dead node only after half a minute.

        Args:
            survivors: Ranks that are alive. Their nodes are not avoided.
        """
        group = self.running
        silent = {group.infos[rank].node_id for rank in group.silent}
        until = self.now() + _SUSPICION_S
        self._suspected |= dict.fromkeys(silent - {group.infos[rank].node_id for rank in survivors}, until)

    # --------------------------------------------------------------------------------------------------- ends

    @property
    def has_session_ended(self) -> bool:
        """True if the workers' Ray session has ended, and the workers with it.

        This process may have started a new session since then.
        """
        return self._session is not None and self._session != session()

    def check_active(self, during: BaseException | None = None) -> None:
        """Raise an error if the current call must not continue.

        Args:
            during: The exception raised by a running call. It may be a consequence of stopping the trainer.

        Raises:
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
            KeyboardInterrupt: This thread's call was interrupted.
        """
        if self.interrupted == threading.get_ident():
            raise KeyboardInterrupt
        if self.stopped.is_set():
            if during is None:
                message = f"This trainer was shut down. {self.spec.words.when_shut_down}"
                raise TrainerShutdownError(message.rstrip())
            message = (
                "The trainer was shut down while this call was running, so the call did not finish. "
                f"{self.spec.words.when_interrupted}"
            )
            cause = during if not isinstance(during, TrainerShutdownError) else None
            raise TrainerShutdownError(message.rstrip()) from cause
        if self.has_session_ended:
            raise TrainerShutdownError(
                "The Ray session of this trainer has ended, for instance by `ray.shutdown()`, and its workers ended "
                "with it. Create a new trainer; what was saved can be loaded into it."
            )

    def kill_workers(self) -> None:
        """Kill the workers, so that the running call returns.

        Call this from a thread other than the one that runs the call.
        """
        for group in (self._starting, self.group):
            if group is not None:
                try:
                    if not self.has_session_ended:
                        self.hooks.on_end(group)
                finally:
                    group.kill_workers()

    def end_interrupt(self) -> None:
        """Discard the killed workers of an interrupted call, so that later calls do not use them."""
        self.interrupted = None
        if not self.holds_only_state:
            self.kill_group()

    def kill_group(self) -> None:
        """Kill the worker group. The next call starts a new group from the last snapshot."""
        assert not self.holds_only_state, "a state that only workers have is fetched before they are ended"
        if self.group is not None:
            group, self.group = self.group, None
            self._end_group(group)

    def stop_group(self, *, force: bool) -> None:
        """Stop the worker group and discard all snapshots.

        With `force`, kill the remote workers without closing their replicas.
        """
        group, self.group = self.group, None
        self.snapshots.clear()
        if group is not None:
            self._end_group(group, force=force)

    def _end_group(self, group: WorkerGroup, *, force: bool = True) -> None:
        """Call the front end's hooks, then stop the worker group.

        With `force`, kill the remote workers without closing their replicas.
        """
        if self.has_session_ended:
            group.kill()  # the remote workers ended with the session, so at most the worker in the driver is left
            return
        end = group.kill if force else group.stop
        try:
            self.hooks.on_end(group)
            if not force:
                self.hooks.on_stop(group)
        finally:
            end(RELEASE_S)
