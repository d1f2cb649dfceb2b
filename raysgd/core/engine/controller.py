"""Runs calls on the worker group and retries failed calls. No other module of raysgd retries a call.

The controller runs in the driver and is synchronous: `run` blocks until every rank has answered or no further attempt
is possible. After a failure, the module `repair` makes the group usable again. ADR 4 explains when snapshots are taken.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any
from weakref import WeakSet

from raysgd.core.cluster.keeper import CallNumber, keeper
from raysgd.core.cluster.ray_cluster import cluster_view
from raysgd.core.cluster.ray_session import RayThreads
from raysgd.core.cluster.resources import ClusterView
from raysgd.core.engine.group import GroupHooks, WorkerGroup
from raysgd.core.engine.lifecycle import RELEASE_S, START_ATTEMPTS, Clock, ElasticRules, Lifecycle
from raysgd.core.engine.loan import Loan
from raysgd.core.engine.monitor import LEAVING, ROOM, Monitor
from raysgd.core.engine.policies import FailurePolicy, RetryBudget, ScalingPolicy
from raysgd.core.engine.recovery.machine import NUM_COPIES
from raysgd.core.engine.repair import GroupRepair, Movability, NotInPlace, NotLeft
from raysgd.core.engine.shared.call import Call, Completed, Left
from raysgd.core.engine.shared.group_spec import GroupSpec
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Failed, GroupReport, HeldAtStep
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, copy_call
from raysgd.core.engine.transfers import DividedValue
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import OnFailure, RanksDifferError, RaySGDError, UnpicklableError, WorkerError, WorkersLostError

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_NODES_S = 2.0
_SPARE_POLL_S = 0.1
_LOST_ON_ITS_WAY = (
    f"The state was lost on its way to the driver {NUM_COPIES} times. The log above names the cause; "
    "too little memory in Ray's object store is a frequent one."
)

_OF_THIS_PROGRAM: WeakSet[ElasticController] = WeakSet()


class _Phase(Enum):
    """A phase of an attempt to run a call. The value is the error after which the group is kept."""

    SENDING = UnpicklableError  # no rank has received the call
    WAITING = WorkersLostError  # the ranks only wait between two steps
    MENDING = WorkerError  # there is nothing to kill: the group is in sync, or was already killed


class PlaceInLine:
    """A position in a trainer's queue of calls. A background call reserves its position before its thread starts.

    Attributes:
        thread: ID of the thread that runs the call. None until this thread waits for its turn.
        is_interrupted: True if the call was interrupted and must not continue.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.is_interrupted = False

    def check_wanted(self) -> None:
        """Raise `KeyboardInterrupt` if the call that holds this position was interrupted."""
        if self.is_interrupted:
            raise KeyboardInterrupt


class Turns:
    """The queue of calls to a trainer. Only one thread at a time may use the worker group, in queue order."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = lifecycle.clock.make_lock()
        self._ends = lifecycle.clock.make_lock()  # ensures that an interrupt of one call does not hit the next call
        self._num_inside = 0
        self._owner: int | None = None
        self._line: list[PlaceInLine] = []
        self._line_moves = lifecycle.clock.make_condition()
        self._closed = threading.local()

    @contextmanager
    def closed(self, why: str) -> Iterator[None]:
        """Inside the `with` block, refuse calls from this thread: raise `ValueError` with the message `why`."""
        before = self._why_closed
        self._closed.why = why
        try:
            yield
        finally:
            self._closed.why = before

    @property
    def _why_closed(self) -> str | None:
        """Why this thread must not start a call now. None if it may."""
        why: str | None = getattr(self._closed, "why", None)
        return why

    def _check_open(self) -> None:
        if self._why_closed is not None:
            raise ValueError(self._why_closed)

    def reserve(self) -> PlaceInLine:
        """Reserve the next position in the queue of calls.

        Calls that are made later wait until the position is released.

        Raises:
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
            ValueError: This thread is inside a `closed` block.
        """
        self._check_open()
        self._lifecycle.check_active()
        place = PlaceInLine()
        self._line.append(place)
        return place

    @contextmanager
    def take_turn(self, place: PlaceInLine | None = None) -> Iterator[None]:
        """Run the block of a `with` statement while no other thread uses the worker group.

        A thread may nest such blocks.

        If `stop` is called during the block, the group is stopped at the end of the block, and an exception raised in
        the block is replaced by `TrainerShutdownError`.

        Args:
            place: This thread's position in the queue of calls, released after the block. Without a position, the
                thread waits until all positions reserved so far have been released.

        Raises:
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended. Raised before the block, or in
                place of an exception that the block raised.
            KeyboardInterrupt: This thread's call was interrupted.
            ValueError: This thread is inside a `closed` block.
        """
        self._check_open()
        lifecycle = self._lifecycle
        with self._kept(place) if place is not None else nullcontext():
            # The thread that is inside a call must not wait for itself.
            if self._line and self._owner != threading.get_ident():
                self._wait_in_line(place)
            if place is not None:
                place.check_wanted()
            with self._lock:
                self._num_inside += 1
                self._owner = threading.get_ident()
                try:
                    lifecycle.check_active()
                    if place is not None:
                        place.check_wanted()
                    try:
                        yield
                    except (Exception, SystemExit) as error:
                        # If workers were killed, a call may raise any exception. After `ray.shutdown()`, Ray raises
                        # `SystemExit`.
                        lifecycle.check_active(during=error)
                        raise
                finally:
                    with self._ends:
                        self._num_inside -= 1
                        if not self._num_inside:
                            self._owner = None
                            if lifecycle.interrupted is not None:
                                lifecycle.end_interrupt()
                    if lifecycle.stopped.is_set():
                        lifecycle.stop_group(force=True)

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """Run a `with` block like `take_turn`, but never wait.

        Yield True if the block may use the worker group. Yield False if a call is running or queued.
        """
        if self._line or self._num_inside or not self._lock.acquire(blocking=False):
            yield False
            return
        # Lets `take_turn` skip the queue, which this thread may do because it holds the lock.
        self._owner = threading.get_ident()
        try:
            with self.take_turn():
                yield True
        finally:
            self._lock.release()

    @contextmanager
    def _kept(self, place: PlaceInLine) -> Iterator[None]:
        place.thread = threading.get_ident()
        try:
            yield
        finally:
            self.give_up(place)

    def give_up(self, place: PlaceInLine) -> None:
        """Release a position in the queue of calls, so that the calls behind it can run."""
        with self._line_moves:
            self._line.remove(place)
            self._line_moves.notify_all()

    def _wait_in_line(self, place: PlaceInLine | None) -> None:
        """Wait until the calls that are ahead in the queue have finished, or until this call is interrupted."""
        with self._line_moves:
            ahead = self._line[: self._line.index(place)] if place is not None else list(self._line)
            while any(each in self._line for each in ahead) and not (place is not None and place.is_interrupted):
                self._line_moves.wait()

    def interrupt_call(self, place: PlaceInLine) -> None:
        """Interrupt the queued or running call for which `place` was reserved, as Ctrl-C would.

        Call this from a thread other than the one that runs the call.
        """
        with self._line_moves:
            place.is_interrupted = True
            self._line_moves.notify_all()
        with self._ends:
            if place.thread is not None and self._owner == place.thread:
                self._lifecycle.interrupt_thread(place.thread)

    def interrupt_running(self) -> None:
        """Interrupt the running call, if any, as Ctrl-C would.

        Call this from a thread other than the one that runs the call.
        """
        with self._ends:
            if self._owner is not None:
                self._lifecycle.interrupt_thread(self._owner)

    def stop(self, force: bool) -> None:
        """Stop the workers and release their resources. See `ElasticController.stop`."""
        lifecycle = self._lifecycle
        if lifecycle.stopped.is_set():
            return
        lifecycle.stopped.set()  # no group is started after this
        if self._num_inside:
            force = True
            lifecycle.kill_workers()
        # A running call returns because its workers were killed, so wait until it returns. A driver that is the only
        # worker cannot be killed, so waiting for its call would not help.
        is_driver_only = lifecycle.group is not None and lifecycle.group.is_driver_only
        if not self._lock.acquire(timeout=0.0 if is_driver_only else RELEASE_S):
            logger.warning("a call is running in this process; its worker stops when the call ends")
            return
        try:
            lifecycle.stop_group(force=force)
        finally:
            self._lock.release()


class ElasticController(Lifecycle):
    """Runs calls on a worker group. Repairs or replaces the group when workers are lost.

    The base class `Lifecycle` documents the arguments that are not listed here.

    Args:
        scaling: Policy that decides the number of workers.
        failures: Policy that decides whether a failed call continues, restarts or raises.
        start_budget: Retries for workers that die while a group starts. Default: a few attempts for each start.

    Attributes:
        num_calls: Sequence number of the current or last call. Consecutive calls that change the training state have
            different numbers.
        threads: Starts threads that call Ray. `stop` waits for them.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        failures: FailurePolicy | None = None,
        make_group: Callable[[GroupSpec, int], WorkerGroup] = WorkerGroup,
        view: Callable[[], ClusterView] = cluster_view,
        clock: Clock | None = None,
        rules: ElasticRules | None = None,
        start_budget: RetryBudget | None = None,
        hooks: GroupHooks | None = None,
    ) -> None:
        super().__init__(spec, scaling, make_group, view, clock, rules or ElasticRules(), hooks or GroupHooks())
        self._start_budget = start_budget
        _OF_THIS_PROGRAM.add(self)
        # If the driver is the only worker and there are no spares, changes in the cluster do not matter.
        self._follows_cluster = scaling.max_workers > spec.use_local or bool(spec.num_spares)
        self._monitor = Monitor(self)
        self.recovery = GroupRepair(self, self._monitor, failures or FailurePolicy(), start_budget)
        self.turns = Turns(self)
        self.threads = RayThreads()
        self.num_calls = 0
        self._left_by_driver: Call | None = None
        self._nodes_due = float("-inf")

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self.stopped.is_set()

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the running call. None between calls, and in calls whose only worker is the driver."""
        return self._monitor if self._monitor.is_on else None

    def observe_with(self, observer: Callable[[], None]) -> None:
        """Make the monitor call `observer` about once a second during a call, and once after a call raised an error.

        If the driver is the only worker, `observer` is called only after errors.
        """
        self._monitor.observer = observer

    def ensure_group(self) -> WorkerGroup:
        """Return the running group. If no group is running, start one from the last snapshot.

        Raises:
            WorkersLostError: Too few workers could be started, or the training state is lost.
            WorkerError: The user's set-up code failed.
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
        """
        self.check_active()
        if self.group is not None:
            return self.group
        with self.turns.take_turn():
            if self.group is None:  # another thread may have started it
                self.recovery.restart_workers("restarted", "the last workers were stopped")
            return self.running

    def stand_by(self) -> None:
        """If resources are free, start missing spare workers and missing workers of the group.

        This method does not wait until the new workers are ready.
        """
        with self.turns.take_turn():
            self.start_spares()
            self.start_standby()

    def start(self, *, as_fits: bool = False) -> None:
        """Start the workers for the first time, or adopt the workers that the trainer's previous process left running.

        Args:
            as_fits: True to start as many workers as fit into the free resources. False to reserve resources for all
                workers or raise.
        """
        with self.turns.take_turn():
            if self.take_over():
                self._monitor.settle_last_hold()
            elif as_fits:
                self.recovery.restart_workers("started", "a new trainer")
            else:
                self.start_workers(self._start_budget or RetryBudget(START_ATTEMPTS - 1))

    def stop(self, force: bool = False) -> None:
        """Stop the workers and release their resources. If a call is running, it raises `TrainerShutdownError`.

        If the driver is the only worker, a running call is not aborted. The worker is stopped when the call ends.

        May be called from any thread, and more than once.

        Args:
            force: True to kill the remote workers without closing their replicas first. During a call, they are always
                killed.
        """
        try:
            self.turns.stop(force)
        finally:
            self.threads.join()

    def make_room(self) -> str:
        """If resources are short, release resources that this program's other trainers hold.

        First, trainers that the program no longer references are garbage collected. Then idle trainers stop their
        workers.

        Returns:
            If resources are still short, a description of the trainers that hold them; otherwise an empty string.
        """
        if not self._others() or self.has_room():
            return ""
        gc.collect()
        while not self.has_room():
            if not any(other.give_way() for other in self._others()):
                return ", ".join(dict.fromkeys(other.spec.words.name for other in self._others()))
        return ""

    def _others(self) -> list[ElasticController]:
        """Return this program's other trainers that hold resources of the same cluster."""
        return [
            each
            for each in tuple(_OF_THIS_PROGRAM)
            if each.view is self.view
            # One trainer may have two controllers, which then have the same `make_replica`.
            and each.spec.make_replica is not self.spec.make_replica
            and each._holds_room
        ]

    @property
    def _holds_room(self) -> bool:
        group = self.group
        return group is not None and not group.is_driver_only and not self.has_session_ended

    def give_way(self) -> bool:
        """If this trainer is idle, take a snapshot and stop its workers, so that another trainer can use the resources.

        The next call to this trainer starts new workers from the snapshot.

        Returns:
            True if the workers were stopped. False if the trainer is busy, if its state could be lost, if its snapshot
            is sharded over the nodes, or if it must keep its workers (`use_local`, spares, a detached trainer).
        """
        spec = self.spec
        if not spec.captures or spec.use_local or spec.num_spares or keeper() is not None:
            return False
        with self.turns.take_if_free() as is_free:
            if not is_free:
                return False
            try:
                if isinstance(self.snapshot().shared_state, DividedValue):
                    return False
            except RaySGDError as error:  # this trainer's next call raises the error to the user
                logger.debug("no snapshot of an idle trainer: %r", error)
                return False
            cause = f"{spec.words.name} is idle, and another trainer of this program needs the room"
            self.end_call(f"{cause}; the next call starts its workers again")
            return True

    def run(self, call: Call, *, max_retries: int = _DEFAULT_RETRIES, budget: RetryBudget | None = None) -> list[Any]:
        """Run a call that never ends early and return the values in rank order. See `run_or_leave`."""
        ended = self.run_or_leave(call, max_retries=max_retries, budget=budget)
        assert isinstance(ended, Completed), "the call ended early"
        return ended.values

    def run_or_leave(
        self, call: Call, *, max_retries: int = _DEFAULT_RETRIES, budget: RetryBudget | None = None
    ) -> Completed | Left:
        """Run `call` on every rank, or only on the rank `call.rank` if it is set. After a failure, retry the call.

        Args:
            call: The function to run on the workers, with its arguments for each rank.
            max_retries: Number of retries for failures of this call.
            budget: A number of retries that several calls share. If given, `max_retries` has no effect.

        Raises:
            WorkerError: User code raised an exception. The error is also an instance of that exception's class. The
                call is retried only if the failure policy allows it.
            UnevenStepsError: The ranks ran different steps.
            UnpicklableError: The call cannot be sent to the workers.
            WorkersLostError: The retries are used up, or too few workers can be started.
            TrainerShutdownError: The trainer was stopped before or during the call, or its Ray session has ended.
        """
        with self.turns.take_turn():
            budget, has_failed = budget or RetryBudget(max_retries), True
            self.snapshots.keeps_replaced = self.is_ending
            try:
                # If the program is ending, Ray may be shutting down, too.
                if self._follows_cluster and not self.is_ending:
                    self._adapt(call)
                if self.holds_only_state and not (call.captures or self._is_taken_up):
                    self._copy_only_state(call, budget)
                ended = self._run(call, budget)
                # If the call took longer than estimated, a snapshot is due now.
                if self.spec.captures_after_calls and self.snapshots.is_overdue:
                    self._run(copy_call(), budget)
                if self._follows_cluster and not self.is_ending:
                    self.start_owed_spares()
                has_failed = False
                return ended
            finally:
                if has_failed:
                    self._monitor.observe()
                self._monitor.is_on = False

    @property
    def _is_taken_up(self) -> bool:
        """True if the workers may still be running a call that the trainer's previous process started."""
        kept_by = keeper()
        return kept_by is not None and kept_by.found is not None and kept_by.found.call > kept_by.num_calls

    def _copy_only_state(self, call: Call, budget: RetryBudget) -> None:
        """Before a call, copy the training state to the driver, because only the workers have it.

        Unless survivors of a failure can continue the call, also wait until the copy has arrived.

        Args:
            call: The call that is about to run.
            budget: Retries for the copy.

        Raises:
            WorkersLostError: The copy was lost in transit several times.
        """
        for _ in range(NUM_COPIES):
            if not self.snapshots.is_coming:
                self._run(copy_call(), budget)
            if not call.can_continue:
                self._monitor.await_snapshot()
            if call.can_continue or not self.holds_only_state:
                return
        raise WorkersLostError(_LOST_ON_ITS_WAY)

    def end_left_call(self) -> None:
        """End a call that the trainer's previous process left running, by killing the worker group.

        Before that, fetch training state that exists only in the workers.
        """
        with self._turn_to_copy():
            self.recovery.fetch_only_state()
            self.end_call("KeyboardInterrupt")

    def lend_spare(self) -> Loan | None:
        """Reserve a ready spare worker for a call of `run_on_spare` (a loan).

        If no spare is ready, start missing spares and return None. If the worker group later needs the reserved spare,
        the loan is recalled.
        """
        with self.turns.take_turn():
            loan = self.ensure_group().standby.lend()
            if loan is None:
                self.start_spares()
            return loan

    @property
    def has_spares(self) -> bool:
        """True if any spare worker is starting, ready, or on loan to a call of `run_on_spare`."""
        return self.running.standby.num_all > 0

    def run_on_spare(
        self,
        loan: Loan | None,
        function: Callable[..., Any],
        make_args: Callable[[], Sequence[Any]],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a function on a spare worker while the worker group runs other calls.

        If the spare is lost or has to join the group, run the function again on another spare.

        Args:
            loan: The spare that `lend_spare` reserved. If None, this method waits until a spare is ready.
            function: Called as `function(replica, loan_number, *args)`. It must return None if the loan was recalled,
                and only then.
            make_args: Creates the arguments for each attempt.
            on_wait: Called regularly while this method waits for the spare's answer.

        Returns:
            The value that `function` returned.

        Raises:
            WorkerError: User code raised an exception.
            WorkersLostError: Several spares died during this call, or no spare is left.
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
        """
        num_died = 0
        while True:
            outcome = None if loan is None else loan.run_call(function, make_args, on_wait)
            if isinstance(outcome, Failed):
                raise worker_error((outcome.failure.fault,))
            if outcome is not None:
                return outcome.value.value
            on_wait()
            if loan is not None:
                num_died += loan.has_died
                logger.warning(
                    "a spare %s its call, so the call runs again on another spare",
                    "died in" if loan.has_died else "left",
                )
            if num_died > _DEFAULT_RETRIES:
                raise WorkersLostError(
                    f"{num_died} spares have died in this call, one after the other. Ray's log of the worker "
                    "(`worker-*.err`) may name the cause; too little memory is a frequent one."
                )
            with self.turns.take_turn(self.turns.reserve()):
                loan = self.lend_spare()
                if loan is None and not self.has_spares:
                    raise WorkersLostError(
                        "The spare that ran this call was lost, or has replaced a lost worker, and no other spare is "
                        "left."
                    )
            if loan is None:
                self.sleep(_SPARE_POLL_S)

    def snapshot(self) -> Snapshot:
        """Wait until a snapshot of the current training state has arrived in the driver, and return it.

        If no snapshot contains the current state, take a new snapshot first.

        Raises:
            WorkersLostError: The snapshot was lost in transit several times.
        """
        with self._turn_to_copy():
            for num_copies in range(NUM_COPIES + 1):
                if num_copies:
                    self.run(copy_call())
                self._monitor.await_snapshot()
                landed = self.snapshots.landed
                if landed is not None and self._is_known:
                    return landed
        raise WorkersLostError(_LOST_ON_ITS_WAY)

    def newest_snapshot(self) -> NewestSnapshot:
        """Return a snapshot of the current training state as soon as the workers have copied the state.

        The snapshot may still be in transit to the driver: see `NewestSnapshot.result`.
        """
        with self._turn_to_copy():
            self.snapshots.poll()
            if not self._is_known:
                self._monitor.await_snapshot()
                self.run(copy_call())
            return self.snapshots.newest()

    @property
    def _is_known(self) -> bool:
        return self.snapshots.is_known(has_group=self.group is not None)

    def landed_snapshot(self) -> Snapshot | None:
        """Wait until the newest snapshot has arrived in the driver, and return it.

        Return None if there is no snapshot, if it was lost in transit, or if state that all ranks share, such as the
        model, has changed since it was taken.
        """
        with self._turn_to_copy():
            self._monitor.await_snapshot()
            return self.snapshots.landed if self.snapshots.shares_current else None

    @contextmanager
    def _turn_to_copy(self) -> Iterator[None]:
        """Wait in the queue of calls, then run the `with` block.

        The block may use the monitor, which stops watching afterwards.
        """
        with self.turns.take_turn():
            try:
                yield
            finally:
                self._monitor.is_on = False

    def _run(self, call: Call, budget: RetryBudget) -> Completed | Left:
        """Run a call until an attempt succeeds or no further attempt is allowed."""
        kept_by = keeper()
        number = kept_by.number(call) if kept_by is not None else None
        self.num_calls = number.call if number is not None else self.num_calls + 1
        is_inside, num_lost = number is not None and number.is_resumed, 0
        while True:
            function = call.resume if is_inside and call.resume is not None else call.function
            group = self.ensure_group()
            args = call.args_for(group.worlds)
            phase = _Phase.SENDING
            try:
                report, values = self._attempt(group, call, function, args, number)
                if values is not None:
                    return Completed(values)
                must_end = self._is_left(call, report)
                if must_end:
                    if (ended := self._left(group, report)) is not None:
                        return ended
                    num_lost += 1
                    if num_lost == NUM_COPIES:
                        phase = _Phase.WAITING
                        raise WorkersLostError(_LOST_ON_ITS_WAY)
                    report = self.recovery.ask_progress()
                phase = _Phase.MENDING
                if not report.ok:
                    mended = self._leave_or_recover(call, report, budget)
                    if isinstance(mended, Left):
                        return mended
                    is_inside = mended
                else:  # if the call must end, all ranks go on, and soon stop again
                    is_inside = must_end or self.recovery.change_held(report)
            except BaseException as error:  # Ctrl-C or an error in the driver: ranks may still be in the call
                # A driver that is the only worker is not stuck in a collective, so its group can be kept.
                broken = None if isinstance(error, phase.value) else self.group
                try:
                    if broken is not None and not broken.is_driver_only:
                        self.interrupted = None  # this block handles the interrupt, so it must not be raised again
                        self.recovery.fetch_only_state()
                        self.end_call(type(error).__name__)
                finally:  # also if Ctrl-C comes again
                    if isinstance(error, RanksDifferError):
                        # Repeating the calls since the last snapshot may make the ranks differ again.
                        self.snapshots.forget_calls()
                    if not self.is_ending:
                        self.snapshots.note_broken_off(call, has_group=self.group is not None)
                raise
            if number is not None:
                number = replace(number, attempt=number.attempt + 1, is_resumed=is_inside)

    def _leave_or_recover(self, call: Call, report: GroupReport, budget: RetryBudget) -> Left | bool:
        """After a failure, end the call with the survivors' state if it must end early, or repair the group.

        Args:
            call: The call that failed.
            report: The outcomes of the call.
            budget: Retries for the call.

        Returns:
            `Left` if the call has ended. Otherwise, True if it can resume where it stopped, or False if it starts over.
        """
        if call.leaves is not None and call.leaves():
            ended = self.recovery.leave_with_survivors(call, report, budget)
            if isinstance(ended, Left):
                self._end_if_too_small()
                return ended
            if ended is NotLeft.RUNNABLE:
                return True
        return self.recovery.recover(call, report, budget)

    def _end_if_too_small(self) -> None:
        """End a group whose training state was copied to the driver, if it has too few workers to train.

        The next attempt or call starts a new group, unless the program is ending.
        """
        num_workers, least = self.num_workers, self.scaling.min_workers
        if num_workers < least and not self.is_ending:
            self.end_call(f"{num_workers} of at least {least} workers are left")

    def _is_left(self, call: Call, report: GroupReport) -> bool:
        """Return True if all ranks stopped after the same step and the call must end early.

        They may have stopped for another reason, for example to let workers join, before the call had to end.
        """
        values = [each.value for each in report.values] if report.ok else []
        if not values or not all(isinstance(each, HeldAtStep) for each in values):
            return False
        is_planned = self._monitor.is_leaving or all(each.is_planned for each in values)
        return is_planned or (call.leaves is not None and call.leaves())

    def _left(self, group: WorkerGroup, report: GroupReport) -> Left | None:
        """End a call early, after all ranks stopped at the same step. Take a snapshot of the state after that step.

        Wait until the snapshot has arrived in the driver.

        Returns:
            How the call ended. None if the snapshot was lost in transit. The call has then not ended.

        Raises:
            WorkersLostError: Ray was stopped before the snapshot arrived.
        """
        captures: list[Capture] = [answer.value.part for answer in report.values]
        self.snapshots.take_from(group, captures)
        self._monitor.await_snapshot()
        if not self.snapshots.shares_current:
            self.refuse_if_cut_off()
            return None
        self.snapshots.leave_call()
        return Left(captures)

    def hold_to_leave(self, call: Call) -> None:
        """If `call.leaves` returns True, make the running call stop after the next step.

        This method is for groups whose only worker is the driver. The call itself runs this method between two steps.
        In other groups, the monitor stops the call while the driver waits for the workers' answers.
        """
        if self._left_by_driver is not call:
            self._left_by_driver = call
            self._monitor.watch(call)
            self._monitor.is_on = False
        self._monitor.hold_to_leave()

    def _attempt(
        self,
        group: WorkerGroup,
        call: Call,
        function: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        number: CallNumber | None,
    ) -> tuple[GroupReport, list[Any] | None]:
        """Run a call once. If all ranks completed it, store the snapshot that was sent with the answers, if any.

        Also record the call if a restart must not lose its effect.

        Returns:
            The outcomes, and the values by rank. The values are None unless all ranks completed the call.
        """

        def on_wait() -> None:
            self._monitor.poll()
            if self.interrupted is not None:
                self.check_active()
            if call.on_wait is not None:
                call.on_wait()

        self.snapshots.poll()
        began, has_others, captures = self.now(), not group.is_driver_only, self.snapshots.is_due_after(call)
        if has_others:
            self._monitor.watch(call)
        else:
            self._monitor.is_on = False
        report = group.on_replica(
            function,
            call.on_its_ranks(args),
            capture=captures,
            landed=self.snapshots.landed_token,
            number=number,
            on_wait=on_wait if has_others else call.on_wait,
            by_line=call.is_short,
        )
        if not report.ok:
            return report, None
        values = [answer.value for answer in report.values]
        # If some ranks stopped between two steps, the call is not complete, even if it has ended on other ranks.
        if any(isinstance(value, HeldAtStep) for value in values):
            return report, None
        is_right = False
        try:
            call.check(values)
            is_right = True
        finally:
            if not is_right:
                # Wait for the previous call's snapshot while the worker that holds it can still send it.
                self._monitor.await_snapshot()
        if call.is_kept:
            self.snapshots.note_call(call, self.now() - began)
        # A worker that repeats its reply to the last attempt may send a copy even if `captures` is False.
        if self.spec.captures or captures:
            copies = [answer.capture for answer in report.values if answer.capture is not None]
            if copies:
                self.snapshots.take_from(group, copies)
                self.snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return report, values

    def _adapt(self, call: Call) -> None:
        """Before a call, move workers off nodes that are being removed, and add workers if resources are free.

        Workers are added only before a call that changes the training state. None of these changes counts as a retry.

        If the group was adopted from the trainer's previous process, its ranks may already be running the call. Such a
        group can change only between two steps, so this method then does nothing.
        """
        kept_by = keeper()
        if kept_by is not None and kept_by.found is not None:
            return
        now = self.now()
        if now >= self._nodes_due:
            self._nodes_due = now + _NODES_S
            if self.leaving_nodes_in_use():
                self._leave_nodes()
        if call.changes_state:
            self._grow_if_possible(call)

    def _leave_nodes(self) -> None:
        """Move the workers off nodes that are being removed. Restart all workers only if there is no other way."""
        self._monitor.watch()
        movability = self.recovery.movability()
        if movability is Movability.LOST:
            return
        failed: NotInPlace | None = NotInPlace("left", LEAVING)
        if movability is Movability.CAN_MOVE:
            failed = self.recovery.change(self.leaving_nodes_in_use(), LEAVING)
        else:
            self.snapshot()
        if failed is not None:
            self.recovery.restart_workers(failed.kind, failed.cause)

    def _grow_if_possible(self, call: Call) -> None:
        """If resources are free, start missing spare workers and add workers to the group.

        If workers cannot join a running group, restart all workers as a larger group.
        """
        group, most = self.ensure_group(), self.scaling.max_workers
        self.start_spares()
        if len(group) >= most:
            return
        self._monitor.watch()
        movability = self.recovery.movability()
        if movability is Movability.LOST:
            return
        if movability is Movability.CAN_MOVE:
            num_awaited = most if call.resume is None else self.resizing.num_awaited_by_call
            failed = self.recovery.grow(num_awaited, ROOM)
            if failed is not None:
                self.recovery.restart_workers(failed.kind, failed.cause)
            return
        num_more = self.find_room()
        if not num_more:
            return
        target = len(group) + num_more
        self.snapshot()
        if self.num_workers < target:  # otherwise a recovery during `snapshot` has already used the free resources
            self.recovery.restart_workers("grown", f"resources for {target} workers are free")

    def renew(self, function: Callable[..., Any], *args: Any) -> None:
        """Rebuild the replicas in the existing worker processes and discard the trained state.

        This has the same effect as `restart` but saves the time to start processes. Before you call this method, update
        the group spec's `make_replica`. Otherwise, workers that start later would build replicas with the old settings.

        Args:
            function: Called as `function(replica, *args)` on each worker. Returns what `Replica.setup` returns.
            args: Further arguments of `function`.

        Raises:
            WorkerError: The user's set-up code failed. The workers are killed, and the next call starts new workers.
            WorkersLostError: Workers were lost too often.
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
        """
        group = self.group
        if group is None:
            self.restart()
            return
        self.landed_snapshot()  # wait for a snapshot in transit before the workers discard it
        self.snapshots.begin_again()
        group.standby.kill_all()
        call = Call(function, lambda worlds: [args] * len(worlds), changes_state=True, leaves_as_new=True)
        with OnFailure(self.kill_group):  # a group in which some replicas are new and some are old must not be used
            self.keep_facts(self.run(call))

    def restart(self) -> None:
        """Replace all worker processes and discard the trained state.

        Use this method instead of `renew` if the replicas cannot be rebuilt in the same process.
        """
        self.snapshots.begin_again()
        self.kill_group()
        self.ensure_group()
