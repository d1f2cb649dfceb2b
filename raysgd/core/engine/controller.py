"""Takes calls for the worker group, one after the other.

The controller runs in the driver and is synchronous: `run` blocks until every rank has answered or no further attempt
is possible. The package `recovery` runs each call, makes the group usable again after a failure, and retries the call.
ADR 4 explains when snapshots are taken.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from typing import Any
from weakref import WeakSet

from raysgd.core.cluster.keeper import keeper
from raysgd.core.cluster.ray_cluster import RayThreads
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import RELEASE_S, Lifecycle
from raysgd.core.engine.monitor import LEAVING, NODES_S, ROOM, Monitor
from raysgd.core.engine.policies import RetryBudget, classify
from raysgd.core.engine.recovery import interpreter
from raysgd.core.engine.recovery.incident import LOST_ON_ITS_WAY
from raysgd.core.engine.recovery.interpreter import Interpreter
from raysgd.core.engine.recovery.machine import NUM_COPIES
from raysgd.core.engine.shared.interface import Call, Completed, Left
from raysgd.core.engine.shared.types import Failed
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, copy_call
from raysgd.core.engine.standby import Loan
from raysgd.core.engine.transfers import DividedValue
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import OnFailure, RaySGDError, WorkersLostError

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_SPARE_POLL_S = 0.1
_OF_THIS_PROGRAM: WeakSet[ElasticController] = WeakSet()


class _Movability(Enum):
    """The answer to the question if the replicas can continue in another group, between two calls."""

    CAN_MOVE = auto()
    CANNOT_MOVE = auto()  # a change of the group needs a restart
    LOST = auto()  # workers were lost: the next call fails, and recovery handles the loss


class PlaceInLine:
    """A position in a trainer's queue of calls. A background call reserves its position before its thread starts.

    Attributes:
        thread: ID of the thread that runs the call. 0 until this thread waits for its turn.
        is_interrupted: True if the call was interrupted and must not continue.
    """

    def __init__(self) -> None:
        self.thread = 0
        self.is_interrupted = False

    def check_wanted(self) -> None:
        """Raise `KeyboardInterrupt` if the call that holds this position was interrupted."""
        if self.is_interrupted:
            raise KeyboardInterrupt


class Turns:
    """The queue of calls to a trainer. Only the thread at its head uses the worker group."""

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self._line: list[PlaceInLine] = []
        self._running: PlaceInLine | None = None  # the head of the queue, while its thread uses the worker group
        self._changes = controller.platform.make_condition()  # guards both
        self._closed = threading.local()

    @contextmanager
    def closed(self, why: str) -> Iterator[None]:
        """Inside the `with` block, refuse calls from this thread: raise `ValueError` with the message `why`."""
        before = getattr(self._closed, "why", None)
        self._closed.why = why
        try:
            yield
        finally:
            self._closed.why = before

    def _check_open(self) -> None:
        if (why := getattr(self._closed, "why", None)) is not None:
            raise ValueError(why)

    def _is_of_this_thread(self) -> bool:
        return self._running is not None and self._running.thread == threading.get_ident()

    def reserve(self) -> PlaceInLine:
        """Reserve the next position in the queue of calls.

        Calls that are made later wait until the position is released.

        Raises:
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended.
            ValueError: This thread is inside a `closed` block.
        """
        self._check_open()
        self._controller.check_active()
        place = PlaceInLine()
        with self._changes:
            self._line.append(place)
        return place

    @contextmanager
    def take_turn(self, place: PlaceInLine | None = None) -> Iterator[None]:
        """Run the block of a `with` statement while no other thread uses the worker group.

        A thread may nest such blocks.

        If `stop` is called during the block, the group is stopped at the end of the block, and an exception raised in
        the block is replaced by `TrainerShutdownError`.

        Args:
            place: This thread's position in the queue of calls, released after the block. Default: the last position.

        Raises:
            TrainerShutdownError: The trainer was stopped, or its Ray session has ended. Raised before the block, or in
                place of an exception that the block raised.
            KeyboardInterrupt: This thread's call was interrupted.
            ValueError: This thread is inside a `closed` block.
        """
        controller, own = self._controller, place or PlaceInLine()
        own.thread = threading.get_ident()
        try:
            self._check_open()
            if not self._is_of_this_thread():  # a thread inside a call must not wait for itself
                with self._changes:
                    if own not in self._line:
                        self._line.append(own)
                    self._changes.wait_for(lambda: own.is_interrupted or self._line[0] is own)
                    own.check_wanted()
                    self._running = own
            try:
                controller.check_active()
                try:
                    yield
                except (Exception, SystemExit) as error:
                    # If workers were killed, a call may raise any exception. After `ray.shutdown()`, Ray raises
                    # `SystemExit`.
                    controller.check_active(during=error)
                    raise
            finally:
                if controller.stopped.is_set():
                    controller.stop_group(force=True)
        finally:
            with OnFailure(lambda: self.give_up(own)):  # also if Ctrl-C comes while the position is released
                self.give_up(own)

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """Run a `with` block like `take_turn`, but never wait.

        Yield True if the block may use the worker group. Yield False if a call is running or queued.
        """
        place = PlaceInLine()
        with self._changes:
            is_free = not self._line
            if is_free:
                self._line.append(place)
        with self.take_turn(place) if is_free else nullcontext():
            yield is_free

    def give_up(self, place: PlaceInLine) -> None:
        """Release a position in the queue of calls, so that the calls behind it can run."""
        with self._changes:
            if place in self._line:
                self._line.remove(place)
                self._changes.notify_all()
            if place is self._running:
                self._running = None
                if self._controller.interrupted is not None:
                    self._controller.end_interrupt()

    def interrupt(self, place: PlaceInLine | None = None) -> None:
        """Interrupt a call, queued or running, as Ctrl-C would. Call this from a thread that does not run the call.

        Args:
            place: The position that was reserved for the call. Default: that of the running call, if any.
        """
        with self._changes:
            if place is not None:
                place.is_interrupted = True
                self._changes.notify_all()
            if self._running is not None and (place is None or place.thread == self._running.thread):
                self._controller.interrupt_thread(self._running.thread)

    def stop(self, force: bool) -> None:
        """Stop the workers and release their resources. See `ElasticController.stop`."""
        controller = self._controller
        if controller.stopped.is_set():
            return
        controller.stopped.set()  # no group is started after this
        if self._running is not None:
            force = True
            controller.kill_workers()
        # A running call returns because its workers were killed, so wait until it returns. A driver that is the only
        # worker cannot be killed, so waiting for its call would not help.
        is_driver_only = controller.group is not None and controller.group.is_driver_only
        with self._changes:
            if not self._changes.wait_for(
                lambda: self._running is None or self._is_of_this_thread(), 0.0 if is_driver_only else RELEASE_S
            ):
                logger.warning("a call is running in this process; its worker stops when the call ends")
                return
            controller.stop_group(force=force)


class ElasticController(Lifecycle):
    """Runs calls on a worker group. Repairs or replaces the group when workers are lost.

    The base class `Lifecycle` documents the arguments.

    Attributes:
        num_calls: Sequence number of the current or last call. Consecutive calls that change the training state have
            different numbers.
        monitor: Watches the running call. It is off between calls, and in calls whose only worker is the driver.
        threads: Starts threads that call Ray. `stop` waits for them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _OF_THIS_PROGRAM.add(self)
        # If the driver is the only worker and there are no spares, changes in the cluster do not matter.
        self._follows_cluster = self.scaling.max_workers > self.spec.use_local or bool(self.spec.num_spares)
        self.monitor = Monitor(self)
        self.recovery = Interpreter(self, self.monitor)
        self.turns = Turns(self)
        self.threads = RayThreads()
        self.num_calls = 0
        self._nodes_due = float("-inf")

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
                self.recovery.restart("restarted", "the last workers were stopped")
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
                self.monitor.settle_last_hold()
            else:
                self.recovery.restart("started", "a new trainer", needs_all=not as_fits)

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

    def interrupt_thread(self, thread: int) -> None:
        """Interrupt the call of the thread with this ID, as Ctrl-C would. Call this from another thread.

        The trainer can run further calls afterwards.
        """
        self.interrupted = thread
        # If only the workers have the training state, keep them: the interrupted call fetches the state before it ends.
        if self.spec.use_local or self.recovery.is_fetching or not self.holds_only_state:
            self.kill_workers()

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
            and each.has_remote_workers
        ]

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
            began, num_workers, had_group = self.now(), self.num_workers, self.group is not None
            self.kill_group()
            if had_group:
                cause = f"{spec.words.name} is idle, and another trainer of this program needs the room"
                self.record("ended", num_workers, began, f"{cause}; the next call starts its workers again")
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
        with self._watched_turn(), OnFailure(self.monitor.observe):
            budget = budget or RetryBudget(max_retries)
            self.snapshots.keeps_replaced = self.is_ending
            # If the program is ending, Ray may be shutting down, too.
            if self._follows_cluster and not self.is_ending:
                self._adapt(call, budget)
            if self.holds_only_state and not (call.captures or self._is_taken_up):
                if not self.snapshots.is_coming:
                    self._run(copy_call(), budget)
                if not call.can_continue:  # otherwise, survivors of a failure have the state
                    self.snapshot(budget)
            ended = self._run(call, budget)
            # If the call took longer than estimated, a snapshot is due now.
            if self.spec.captures_after_calls and self.snapshots.is_overdue:
                self._run(copy_call(), budget)
            if self._follows_cluster and self.owes_spares and not self.is_ending:
                self.start_spares()
            return ended

    @property
    def _is_taken_up(self) -> bool:
        """True if the workers may still be running a call that the trainer's previous process started."""
        kept_by = keeper()
        return kept_by is not None and kept_by.found is not None and kept_by.found.call > kept_by.num_calls

    def end_left_call(self) -> None:
        """End a call that the trainer's previous process left running, by killing the worker group.

        Before that, fetch training state that exists only in the workers.
        """
        with self._watched_turn():
            self.recovery.abandon_call()

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
                return outcome.value
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

    def snapshot(self, budget: RetryBudget | None = None) -> Snapshot:
        """Wait until a snapshot of the current training state has arrived in the driver, and return it.

        If no snapshot contains the current state, take a new snapshot first.

        Args:
            budget: Retries for the new snapshot. Default: a few.

        Raises:
            WorkersLostError: The snapshot was lost in transit several times.
        """
        with self._watched_turn():
            for num_copies in range(NUM_COPIES + 1):
                if num_copies:
                    self.run(copy_call(), budget=budget)
                self.monitor.await_snapshot()
                landed = self.snapshots.landed
                if landed is not None and self._is_known:
                    return landed
        raise WorkersLostError(LOST_ON_ITS_WAY)

    def newest_snapshot(self) -> NewestSnapshot:
        """Return a snapshot of the current training state as soon as the workers have copied the state.

        The snapshot may still be in transit to the driver: see `NewestSnapshot.result`.
        """
        with self._watched_turn():
            self.snapshots.poll()
            if not self._is_known:
                self.monitor.await_snapshot()
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
        with self._watched_turn():
            self.monitor.await_snapshot()
            return self.snapshots.landed if self.snapshots.shares_current else None

    @contextmanager
    def _watched_turn(self) -> Iterator[None]:
        """Wait in the queue of calls, then run the `with` block.

        The block may use the monitor, which stops watching afterwards.
        """
        with self.turns.take_turn():
            try:
                yield
            finally:
                self.monitor.is_on = False

    def _run(self, call: Call, budget: RetryBudget) -> Completed | Left:
        """Run a call until an attempt succeeds or no further attempt is allowed."""
        kept_by = keeper()
        number = kept_by.number(call) if kept_by is not None else None
        self.num_calls = number.call if number is not None else self.num_calls + 1
        self.ensure_group()
        return self.recovery.run(call, budget, number)

    def _adapt(self, call: Call, budget: RetryBudget) -> None:
        """Before a call, move workers off nodes that are being removed, and add workers if resources are free.

        Workers are added only before a call that changes the training state. None of these changes counts as a retry,
        unless workers are lost meanwhile.

        If the group was adopted from the trainer's previous process, its ranks may already be running the call. Such a
        group can change only between two steps, so this method then does nothing.
        """
        kept_by = keeper()
        if kept_by is not None and kept_by.found is not None:
            return
        now = self.now()
        if now >= self._nodes_due:
            self._nodes_due = now + NODES_S  # also for the calls by which the nodes are left
            if self.leaving_nodes_in_use():
                self._leave_nodes(budget)
        if call.changes_state:
            self._grow_if_possible(call, budget)

    def _leave_nodes(self, budget: RetryBudget) -> None:
        """Move the workers off nodes that are being removed. Restart all workers only if there is no other way."""
        self.monitor.watch()
        movability = self._movability()
        if movability is _Movability.CAN_MOVE:
            self.recovery.move(self.leaving_nodes_in_use(), LEAVING)
        elif movability is _Movability.CANNOT_MOVE:
            self.snapshot(budget)
            self.recovery.restart("left", LEAVING)

    def _movability(self) -> _Movability:
        """Ask all replicas if they can continue in a new group."""
        if not self.spec.regroups:
            return _Movability.CANNOT_MOVE
        report = self.recovery.ask_progress()
        if not report.ok:
            return _Movability.CANNOT_MOVE if classify(report).kind == "user" else _Movability.LOST
        has_obstacle = any(progress.obstacle for progress in report.values)
        return _Movability.CANNOT_MOVE if has_obstacle else _Movability.CAN_MOVE

    def _grow_if_possible(self, call: Call, budget: RetryBudget) -> None:
        """If resources are free, start missing spare workers and add workers to the group.

        If workers cannot join a running group, restart all workers as a larger group.
        """
        group, most = self.ensure_group(), self.scaling.max_workers
        self.start_spares()
        if len(group) >= most:
            return
        self.monitor.watch()
        movability = self._movability()
        if movability is _Movability.CAN_MOVE:
            self._await_standby(most if call.resume is None else self.resizing.num_awaited_by_call)
            if group.standby.num_ready:
                self.recovery.move(frozenset(), ROOM)
        elif movability is _Movability.CANNOT_MOVE and (num_more := self.find_room()):
            target = len(group) + num_more
            self.snapshot(budget)
            if self.num_workers < target:  # otherwise a recovery during `snapshot` has already used the free resources
                self.recovery.restart("grown", f"resources for {target} workers are free")

    def _await_standby(self, num_awaited: int) -> None:
        """Start missing workers of the group, and wait for them until the group can have `num_awaited` workers.

        The wait lasts at most `STANDBY_WAIT_S`.
        """
        self.start_standby()
        standby, deadline = self.running.standby, self.now() + interpreter.STANDBY_WAIT_S
        num_missing = num_awaited - len(self.running)
        while standby.num_ready < num_missing and standby.num_coming and self.now() < deadline:
            self.sleep(0.005)
            self.monitor.poll()
        standby.kill_unresponsive()

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
