"""The life of a trainer's group: how it is started, where more workers find room, and how it ends.

What follows the failure of workers: `recovery`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.engine.group import GroupHooks, WorkerGroup
from raysgd.engine.keeper import keeper
from raysgd.engine.placement import session
from raysgd.engine.policies import (
    Resizing,
    RetryBudget,
    ScalingPolicy,
    Wait,
    capacity,
    classify,
    resizing,
    words,
)
from raysgd.engine.shared import replica
from raysgd.engine.shared.group_events import EventKind, GroupHistory
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import ClusterView, GroupReport
from raysgd.engine.snapshots import Snapshots
from raysgd.engine.startup import Replacements
from raysgd.exceptions import OnFailure, ReservationTimeoutError, TrainerShutdownError, WorkersLostError, worker_error

logger = logging.getLogger(__name__)

START_ATTEMPTS = 4
RELEASE_S = 60.0  # until Ray has taken a reservation back
_REPLACEMENTS = START_ATTEMPTS - 1  # of each worker that dies while a group starts: as many as there are retries
SETTLE_S = 1.0  # Ray's view of what is free lags behind by some hundred milliseconds
_RETURN_S = 10.0  # and on a busy machine by seconds, until what a removed placement group held is free
_IN_THE_WAY_S = 5.0  # for room that the program itself holds, which it will hardly give back while it waits
_GROWTH_RESERVATION_S = 1.0  # what the view calls free is granted at once, or another program took it
_SUSPICION_S = 60.0


@dataclass(frozen=True)
class Clock:
    """Time, and what threads take turns by, as the engine sees them; tests bring their own.

    Attributes:
        monotonic: Seconds, on a clock that only goes forward.
        sleep: Waits.
        make_lock: Makes a reentrant lock for the threads of the driver.
        make_condition: Makes a condition variable for them.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    make_lock: Callable[[], Any] = threading.RLock
    make_condition: Callable[[], threading.Condition] = threading.Condition


@dataclass(frozen=True)
class ElasticRules:
    """The rules by which a group follows what happens in the cluster.

    Attributes:
        wait: Whether survivors of a failure wait for new workers, see `resizing`.
        resize_interval_s: How often a running call looks for room to grow; None: never.
        leaving_nodes: Asks for the nodes that will go away soon.
        keeps_global_batch: Whether a step of fewer workers is the same step, for calls that survivors can continue.
    """

    wait: Wait = True
    resize_interval_s: float | None = None
    leaving_nodes: Callable[[], frozenset[str]] = frozenset
    keeps_global_batch: Callable[[], bool] = lambda: False


class Lifecycle(ABC):
    """Holds the group of a trainer. Only here a group is started and ended; nowhere once it is stopped.

    `ElasticController` runs calls on it.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        clock: Time; by default a wait ends when the trainer is stopped.
        rules: How the group follows the cluster.
        hooks: What the front end does when a group starts and ends.

    Attributes:
        group: The group; None before the first start, and after it was killed.
        snapshots: The retry point.
        history: What happened to the workers so far.
        facts: What the replicas told of themselves when they were set up, by rank.
        stopped: Set once there are to be no workers any more: from then on no group is started.
        interrupted: The thread whose call is to end; None without.
        gives_state_up: Whether the state that only workers have could not be fetched.
        is_fetching: Whether it is being fetched.
        newcomers: Workers that were to take over the state, and may not have it.
        is_ending: Whether the program is about to end, so that workers that are lost are not replaced any more.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        make_group: Callable[[GroupSpec, int], WorkerGroup],
        view: Callable[[], ClusterView],
        clock: Clock | None,
        rules: ElasticRules,
        hooks: GroupHooks,
    ) -> None:
        self.spec, self.scaling, self.hooks = spec, scaling, hooks
        self.make_group, self.view, self._rules = make_group, view, rules
        self.stopped = threading.Event()
        self.clock = clock or Clock(sleep=self.stopped.wait)
        self.snapshots = Snapshots(spec, self.now)
        self.history = GroupHistory()
        self.group: WorkerGroup | None = None
        self._starting: WorkerGroup | None = None
        self._session: Any = None  # of Ray, in which the workers are; None without workers outside this process
        self.facts: list[Any] = []
        self._replacements = Replacements()
        self._owes_spares = False
        self._num_short = 0  # workers with which memory ran out, at most
        self._suspected: dict[str, float] = {}
        self.interrupted: int | None = None
        self.gives_state_up = self.is_fetching = self.is_ending = False
        self.newcomers: set[Any] = set()

    @property
    def holds_only_state(self) -> bool:
        """True if workers have a state that is nowhere else: it is fetched before any of them is ended."""
        if not self.snapshots.is_only_in_workers or self.gives_state_up:
            return False
        return self.group is not None and not self.group.is_driver_only and not self.has_session_ended

    @property
    def num_workers(self) -> int:
        """The number of workers now; while there is no group, that which the next one is meant to have."""
        return self.group.num_workers if self.group is not None else self.scaling.max_workers

    @abstractmethod
    def make_room(self) -> str:
        """Let the program itself give room back where `has_room` says no; return who holds it still, in words."""

    @property
    def running(self) -> WorkerGroup:
        """The group, where there must be one."""
        assert self.group is not None, "there is no group at this moment"
        return self.group

    def keep_facts(self, facts: list[Any]) -> None:
        """Take over what new replicas say of themselves; where the group outlives this process, keep it with them."""
        self.facts = facts
        kept_by = keeper()
        if kept_by and self.group is not None:  # whatever changes the group changes them
            kept_by.keep_group(self.group.to_keep(facts))

    def now(self) -> float:
        """Seconds on the clock that all waiting goes by."""
        return self.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait; raise `TrainerShutdownError` if the trainer was stopped meanwhile."""
        self.clock.sleep(seconds)
        self.check_active()

    def record(
        self, kind: EventKind, old_size: int, began: float, cause: str, detail: str = "", num_kept: int = 0
    ) -> None:
        """Record what happened to the group, and log it. After its end there are no workers any more."""
        now, num_workers = self.now(), self.num_workers
        if kind in ("lost", "ended"):
            num_workers, detail = 0, self.spec.words.after_end
        elif kind != "started":
            self.history.last_resize = now
        self.history.record(kind, old_size, num_workers, now - began, cause, detail, num_kept)

    # ------------------------------------------------------------------------------------------------ starts

    def start_workers(self, budget: RetryBudget) -> None:
        """Start the full number of workers, for the first time.

        A worker that dies while starting is tried again, as often as it is paid for; where groups can change, in its
        slot, beside the others. An exception in the user's set-up is raised at once.

        Raises:
            WorkersLostError: Workers died too often.
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        began = self.now()
        self.allow_replacements()
        in_the_way, timeout_s = self.make_room(), self.spec.reservation_timeout_s
        if in_the_way and timeout_s == GroupSpec.reservation_timeout_s:  # else the user has said how long to wait
            timeout_s = _IN_THE_WAY_S
        try:
            while not self.try_start(self.scaling.max_workers, self.spec.num_spares, timeout_s):
                pay_for_start(budget)
        except ReservationTimeoutError as error:
            if not in_the_way:
                raise
            raise ReservationTimeoutError(
                f"This program holds the room itself: call `shutdown()` of {in_the_way} first.\n{error}"
            ) from None
        self.end_replacements()
        self.record("started", 0, began, "a new trainer")

    def take_over(self) -> bool:
        """Go on with the workers that have outlived another process; False where there are none."""
        kept_by = keeper()
        kept = kept_by.find() if kept_by else None
        if kept_by is None or kept is None:
            return False
        group = self.make_group(self.spec, len(kept.workers))
        group.take_over(kept)
        self._session = session()
        self.group = group
        self.keep_facts(list(kept.facts))
        self.snapshots.completed(None)  # their state is nowhere else yet
        numbers = [number for number in group.ask_beside("last_call").values() if number is not None]
        kept_by.found = max(numbers, key=lambda number: (number.call, number.attempt), default=None)
        logger.info("found %s workers again", len(kept.workers))
        return True

    def try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        """Start a group, of those who live through it where that are enough; False when too few do.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self.make_group(self.spec, num_workers)
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
        self.group, self.gives_state_up = group, False
        self.newcomers.clear()
        self.take_answers(report)
        copies = [answer.capture for answer in report.values if answer.capture is not None]
        if copies and not self.snapshots.has_any:
            self.snapshots.take_from(group, copies, is_first=True)
        if num_spares and not self.spec.runs_on:  # else they are told what runs when it does
            group.standby.start_more(num_spares, num_workers)
        return True

    def take_answers(self, report: GroupReport) -> None:
        """Take over what new replicas say of themselves; ask for the workers that the group lacks."""
        self.running.slots.ask_up_to(self.scaling.max_workers, len(self.running))
        self.keep_facts([answer.value for answer in report.values])

    def _start_group(self, group: WorkerGroup, timeout_s: float) -> GroupReport:
        """Start a group and let the front end see it. After a failure, nothing of it is left."""
        self._starting = group
        group.standby.replacements = self._replacements
        # How many have to live through it; None for all, where a group cannot change.
        num_needed = self.scaling.min_workers if self.spec.keeps_processes else None
        try:
            with OnFailure(group.kill):
                self.check_active()  # a stop that comes later than this finds the group
                report = group.start(timeout_s, num_needed)
                if self.scaling.max_workers > self.spec.use_local:
                    self._session = session()
                report = self.without_lost(report, group, captures=self.spec.captures_after_calls)
                if not report.ok:
                    group.kill()
                    return report
                with OnFailure(partial(self._end_group, group)):
                    failed = self.hooks.on_start(group)
                if failed is not None:
                    self._end_group(group)
                return failed or report
        finally:
            self._starting = None

    def without_lost(
        self,
        report: GroupReport,
        group: WorkerGroup,
        on_wait: Callable[[], None] | None = None,
        *,
        captures: bool = False,
    ) -> GroupReport:
        """Make new replicas in those who live, where others were lost while replicas were made or given a state.

        Where too few live, it waits for standby workers as long as any are coming.

        Args:
            report: What became of it.
            group: Cannot be used any more where it cannot be done.
            on_wait: As for `WorkerGroup.renew`.
            captures: As for `WorkerGroup.renew`.

        Returns:
            The set-up answers; or the last report, where too few are left or not only workers were lost.
        """
        while self.spec.keeps_processes and not report.ok and not group.is_ended and classify(report).kind != "user":
            logger.warning("%s; continuing with the others", words(classify(report)))
            survivors = group.settle(report)
            lost = [rank for rank in range(len(group)) if rank not in survivors]
            if not lost:
                break
            group.remove_workers(lost)
            group.standby.replace(len(lost), len(group))
            joining = group.standby.take_needed(self.scaling.min_workers - len(survivors), len(lost), on_wait)
            if joining is None:
                break
            report = group.renew(survivors, joining, on_wait, captures=captures)
        return report

    def allow_replacements(self) -> None:
        """Allow so many for all attempts of a start together: what dies again and again is not started without end."""
        num_allowed = _REPLACEMENTS * self.scaling.max_workers
        self._replacements.num_left = num_allowed if self.spec.keeps_processes else 0

    def end_replacements(self) -> None:
        """Allow no more: the start is over."""
        self._replacements.num_left = 0

    # ------------------------------------------------------------------------------------- room in the cluster

    def has_room(self) -> bool:
        """Return whether there is room for all workers; also where they can never fit, so no one is to give way."""
        needs_none = self.spec.use_local and self.scaling.max_workers == 1
        if needs_none or self.spec.within not in ("default", None):  # it waits for no one
            return True
        view, need = self.settled_view(), self.spec.resources
        wanted = self.scaling.max_workers + self.spec.num_spares
        return capacity(view, need) >= wanted or capacity(view, need, free_only=False) < wanted

    def settled_view(self) -> ClusterView:
        """The cluster, once its view of what is free has caught up with what we just gave back."""
        need, began = self.spec.resources, self.now()
        while True:
            view = self.view()
            wanted = min(self.scaling.max_workers, capacity(view, need, free_only=False))
            settling = {node.node_id for node in view.nodes if node.is_settling}
            # What will be free in a moment on a node that is probably lost is not waited for.
            patience_s = _RETURN_S if settling and settling - self.nodes_to_avoid else SETTLE_S
            if capacity(view, need) >= wanted or self.now() >= began + patience_s:
                return view
            self.sleep(0.05)

    @property
    def resizing(self) -> Resizing:
        """The way the number of workers changes, as of now."""
        keeps_global_batch = self.spec.regroups and self._rules.keeps_global_batch()
        rules, most = self._rules, self.scaling.max_workers
        return resizing(rules.wait, rules.resize_interval_s, keeps_global_batch, most, self._num_short)

    def note_short_of_memory(self) -> None:
        """Note that memory has run out with so many workers as there are."""
        self._num_short = len(self.running)

    def find_room(self) -> int:
        """Return how many workers more a new group could have, with all that this one gives back; 0 when none."""
        group, need = self.running, self.spec.resources
        if len(group) >= self.scaling.max_workers:
            return 0
        group.slots.take_granted()
        avoid = self.nodes_to_avoid
        view = self.view().without(avoid)
        if not self.scaling.grow(view, need, len(group), len(group.slots)):  # asks Ray nothing more without room
            return 0
        return self.scaling.grow(view, need, len(group), group.slots.num_usable(avoid))

    def start_standby(self) -> None:
        """Begin to start the workers that the group lacks, as far as there is room; do not wait for them."""
        group, most = self.running, self.scaling.max_workers
        group.slots.take_granted()
        missing = most - len(group) - group.standby.num_all
        if missing > 0:
            self._start_more(missing, most, missing)

    def _start_more(self, count: int, world_size: int, most: int) -> None:
        """Begin to start so many workers, `most` of them in room that was not reserved yet."""
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
        self.keep_facts(self.facts)  # another process that follows this one is to know of the room

    def let_step_in(self) -> None:
        """Hold replicas that run on by themselves, wherever they are, as soon as others can join them."""
        group = self.group
        if not self.spec.runs_on or group is None or len(group) >= self.scaling.max_workers:
            return
        if group.standby.num_ready and self.admits_others():
            group.ask_beside("beside", replica.hold)

    def admits_others(self) -> bool:
        """Return whether all replicas would let others join where they are. Asks them, beside their work."""
        reports = self.group.ask_beside("beside", replica.replica_progress) if self.group is not None else {}
        return len(reports) == self.num_workers and all(each.admits and not each.obstacle for each in reports.values())

    def start_spares(self) -> None:
        """Begin to start as many workers as are to wait as spares, and were used up or lost."""
        self._owes_spares = False
        group = self.group
        if group is None:
            return
        missing = self.spec.num_spares - group.standby.num_all
        if missing > 0:  # after a restart there may have been room for fewer
            num_wanted = self.scaling.max_workers + self.spec.num_spares
            self._start_more(missing, len(group), num_wanted - len(group.slots))

    def owe_spares(self) -> None:
        """Note that spares may be missing. A new process takes the time of the others' cores, so it comes later."""
        self._owes_spares = True

    def start_owed_spares(self) -> None:
        """Do what `start_spares` does, once for each time that spares may have been used up."""
        if self._owes_spares:
            self.start_spares()

    @property
    def nodes_to_avoid(self) -> frozenset[str]:
        """Nodes on which no new worker should be placed."""
        now = self.now()
        return frozenset(node for node, until in self._suspected.items() if until > now) | self._rules.leaving_nodes()

    def leaving_nodes_in_use(self) -> frozenset[str]:
        """Nodes with our workers that will go away soon, unless no worker would be left."""
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        bound = {self.group.infos[0].node_id} if self.spec.use_local else set()  # the driver cannot leave
        leaving = (self._rules.leaving_nodes() & used) - bound
        return leaving if used - leaving else frozenset()

    def suspect(self, survivors: Sequence[int]) -> None:
        """Avoid for a while the nodes of ranks that went silent without a report of their death: perhaps all is gone.

        Ray tells of the death of a process at once, of that of a node half a minute later.
        """
        group = self.running
        silent = {group.infos[rank].node_id for rank in group.silent}
        until = self.now() + _SUSPICION_S
        self._suspected |= dict.fromkeys(silent - {group.infos[rank].node_id for rank in survivors}, until)

    # --------------------------------------------------------------------------------------------------- ends

    @property
    def has_session_ended(self) -> bool:
        """True if the workers ended with their Ray session; another one is none of this trainer's business."""
        return self._session is not None and self._session != session()

    def check_active(self, during: Exception | None = None) -> None:
        """Raise `TrainerShutdownError` once it was stopped or the Ray session has ended.

        Raises `KeyboardInterrupt` after `interrupt`.

        Args:
            during: What the running call has raised, perhaps because of that.
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
        """From another thread, once it was stopped: makes the call that is running return, wherever it is."""
        for group in (self._starting, self.group):
            if group is not None:
                try:
                    if not self.has_session_ended:
                        self.hooks.on_end(group)
                finally:
                    group.kill_workers()

    def interrupt_thread(self, thread: int) -> None:
        """From another thread: ends the call that a thread is in as Ctrl-C inside it would; another one can follow."""
        self.interrupted = thread
        if self.spec.use_local or self.is_fetching or not self.holds_only_state:  # else that thread fetches it
            self.kill_workers()

    def end_interrupt(self) -> None:
        """The call that was interrupted is over: no one is to use the workers that were killed for it."""
        self.interrupted = None
        if not self.holds_only_state:
            self.kill_group()

    def kill_group(self) -> None:
        """Kill the processes; the next call starts new ones from the last snapshot."""
        assert not self.holds_only_state, "a state that only workers have is fetched before they are ended"
        if self.group is not None:
            group, self.group = self.group, None
            self._end_group(group)

    def end_call(self, cause: str, kind: EventKind = "ended") -> None:
        """Kill the group of a call that cannot go on, and record why."""
        began, group = self.now(), self.group
        self.kill_group()
        if group is not None:
            self.record(kind, len(group), began, cause)

    def stop_group(self, *, force: bool) -> None:
        """Stop the group and drop all snapshots, for good; with `force`, without letting the workers close."""
        group, self.group = self.group, None
        self.snapshots.clear()
        if group is not None:
            self._end_group(group, force=force)

    def _end_group(self, group: WorkerGroup, *, force: bool = True) -> None:
        """Stop a group, or with `force` kills it; the front end's hooks come first."""
        if self.has_session_ended:
            group.kill()  # what of it is in this process
            return
        end = group.kill if force else group.stop
        try:
            self.hooks.on_end(group)
            if not force:
                self.hooks.on_stop(group)
        finally:
            end(RELEASE_S)


def pay_for_start(budget: RetryBudget) -> None:
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
    budget.pay_for_restart()
