"""Keeps the workers alive and runs calls on them. Nothing else in raysgd retries a call.

The controller runs in the driver and is synchronous: `run` blocks until every rank has answered or nothing more can be
tried. `recovery` handles failures. ADR 4 explains when snapshots are taken.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from raysgd.core.engine.group import GroupHooks, WorkerGroup
from raysgd.core.engine.keeper import CallNumber, keeper
from raysgd.core.engine.lifecycle import RELEASE_S, START_ATTEMPTS, Clock, ElasticRules, Lifecycle
from raysgd.core.engine.liveness import quiet_s
from raysgd.core.engine.monitor import LEAVING, ROOM, Monitor, ask_heartbeats
from raysgd.core.engine.placement import cluster_view
from raysgd.core.engine.policies import FailurePolicy, RetryBudget, ScalingPolicy
from raysgd.core.engine.recovery import Recovery
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.group_spec import GroupSpec
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import ClusterView, GroupReport, Heartbeat, HeldAtStep
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, copy_call
from raysgd.core.engine.startup import Loan
from raysgd.core.engine.status import TrainerStatus, compose
from raysgd.core.engine.transfers import DividedValue
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import OnFailure, RanksDifferError, RaySGDError, UnpicklableError, WorkerError, WorkersLostError

logger = logging.getLogger(__name__)

_DEFAULT_RETRIES = 3
_NODES_S = 2.0
_SPARE_POLL_S = 0.1
_NUM_COPIES = 4
_LOST_ON_ITS_WAY = (
    f"The state was lost on its way to the driver {_NUM_COPIES} times. The log above names the cause; "
    "too little memory in Ray's object store is a frequent one."
)

_OF_THIS_PROGRAM: WeakSet[ElasticController] = WeakSet()


class PlaceInLine:
    """A place in the line of calls, reserved for a thread that takes its turn later.

    Attributes:
        thread: ID of the thread that has the place, once it runs.
        is_interrupted: True if the call must not continue.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.is_interrupted = False

    def check_wanted(self) -> None:
        """Raise `KeyboardInterrupt` if the call must not continue."""
        if self.is_interrupted:
            raise KeyboardInterrupt


class Turns:
    """Lets threads use the group of a lifecycle one after the other."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = lifecycle.clock.make_lock()
        self._ends = lifecycle.clock.make_lock()  # orders the end of a call and an interrupt
        self._num_inside = 0
        self._owner: int | None = None
        self._line: list[PlaceInLine] = []
        self._line_moves = lifecycle.clock.make_condition()
        self._closed_to: int | None = None
        self._why_closed = ""

    @contextmanager
    def closed(self, why: str) -> Iterator[None]:
        """Refuse turns to this thread inside the block, because it is in a call or has one to finish."""
        before = self._closed_to
        self._closed_to, self._why_closed = threading.get_ident(), why
        try:
            yield
        finally:
            self._closed_to = before

    def _check_open(self) -> None:
        if self._closed_to == threading.get_ident():
            raise ValueError(self._why_closed)

    def reserve(self) -> PlaceInLine:
        """Reserve a place ahead of all calls that are made from now on.

        Raises:
            TrainerShutdownError: After `stop`.
            ValueError: Inside `closed`.
        """
        self._check_open()
        self._lifecycle.check_active()
        place = PlaceInLine()
        self._line.append(place)
        return place

    @contextmanager
    def take_turn(self, place: PlaceInLine | None = None) -> Iterator[None]:
        """Run a block without calls of other threads in between. Blocks may be nested.

        An exception after `stop` counts as its consequence, and the group ends here.

        Args:
            place: This thread's place in the line, which is given up afterwards. Without it, the thread waits behind
                all others.

        Raises:
            TrainerShutdownError: After `stop`, or if another thread calls `stop` in the meantime.
            KeyboardInterrupt: The call of this place was interrupted.
            ValueError: Inside `closed`.
        """
        self._check_open()
        lifecycle = self._lifecycle
        with self._kept(place) if place is not None else nullcontext():
            if self._line and self._owner != threading.get_ident():  # otherwise this thread is already inside a call
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
                    except Exception as error:  # a call may raise anything when its workers are killed
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
        """Take a turn and yield True if no call runs or waits; otherwise yield False at once."""
        if self._line or self._num_inside or not self._lock.acquire(blocking=False):
            yield False
            return
        self._owner = threading.get_ident()  # threads that have just reserved a place wait for the lock
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
        """Give up a place that is not needed any more, so that the threads behind it can continue."""
        with self._line_moves:
            self._line.remove(place)
            self._line_moves.notify_all()

    def _wait_in_line(self, place: PlaceInLine | None) -> None:
        """Wait for the calls whose places are ahead."""
        with self._line_moves:
            ahead = self._line[: self._line.index(place)] if place is not None else list(self._line)
            while any(each in self._line for each in ahead) and not (place is not None and place.is_interrupted):
                self._line_moves.wait()

    def interrupt_call(self, place: PlaceInLine) -> None:
        """End the call of a place, running or waiting, like Ctrl-C inside it. Called from another thread."""
        with self._line_moves:
            place.is_interrupted = True
            self._line_moves.notify_all()
        with self._ends:
            if place.thread is not None and self._owner == place.thread:
                self._lifecycle.interrupt_thread(place.thread)

    def interrupt_running(self) -> None:
        """End the running call, if any, like Ctrl-C inside it. Called from another thread."""
        with self._ends:
            if self._owner is not None:
                self._lifecycle.interrupt_thread(self._owner)

    def stop(self, force: bool) -> None:
        """Stop everything, from any thread. A running call then raises. Calling it again does nothing."""
        lifecycle = self._lifecycle
        if lifecycle.stopped.is_set():
            return
        lifecycle.stopped.set()  # from now on no group is started
        if self._num_inside:
            force = True
            lifecycle.kill_workers()
        # Wait for a call whose workers were killed. If the worker is in this process, waiting does not help.
        is_driver_only = lifecycle.group is not None and lifecycle.group.is_driver_only
        if not self._lock.acquire(timeout=0.0 if is_driver_only else RELEASE_S):
            logger.warning("a call is running in this process; its worker stops when the call ends")
            return
        try:
            lifecycle.stop_group(force=force)
        finally:
            self._lock.release()


class ElasticController(Lifecycle):
    """Runs calls on a group of replicas. Repairs or replaces the group when workers are lost.

    Arguments that are not listed here are those of `Lifecycle`.

    Args:
        scaling: Decides the number of workers.
        failures: Decides what follows a failed call.
        start_budget: Retries for workers that die during a start. None: each start is tried a few times.

    Attributes:
        num_calls: Number of the current or last call. Two consecutive calls that change the state never have the same
            number.
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
        # A driver that is the only worker, without spares, need not watch the cluster.
        self._follows_cluster = scaling.max_workers > spec.use_local or bool(spec.num_spares)
        self._monitor = Monitor(self)
        self.recovery = Recovery(self, self._monitor, failures or FailurePolicy(), start_budget)
        self.turns = Turns(self)
        self.num_calls = 0
        self._left_by_driver: Call | None = None
        self._nodes_due = float("-inf")

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self.stopped.is_set()

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the running call; None between calls."""
        return self._monitor if self._monitor.is_on else None

    def observe_with(self, observer: Callable[[], None]) -> None:
        """Call `observer` about once a second during a call, and after a call failed for good."""
        self._monitor.observer = observer

    def ensure_group(self) -> WorkerGroup:
        """Start a group from the last snapshot if there is none. Return the running group.

        Raises:
            WorkersLostError: Too few workers could be started.
            TrainerShutdownError: After `stop`.
        """
        self.check_active()
        if self.group is not None:
            return self.group
        with self.turns.take_turn():
            if self.group is None:  # another thread may have started it
                self.recovery.restart_workers("restarted", "the last workers were stopped")
            return self.running

    def stand_by(self) -> None:
        """Start spares, and the workers that the group lacks if there is room. Does not wait for them."""
        with self.turns.take_turn():
            self.start_spares()
            self.start_standby()

    def start(self, *, as_fits: bool = False) -> None:
        """Start the workers for the first time: all of them, or with `as_fits` as many as there is room for."""
        with self.turns.take_turn():
            if self.take_over():
                self._monitor.settle_last_hold()
            elif as_fits:
                self.recovery.restart_workers("started", "a new trainer")
            else:
                self.start_workers(self._start_budget or RetryBudget(START_ATTEMPTS - 1))

    def stop(self, force: bool = False) -> None:
        """Stop everything, from any thread. A running call then raises. Calling it again does nothing.

        Args:
            force: Kill the processes at once, without letting them close. During a call, this is always so.
        """
        self.turns.stop(force)

    def make_room(self) -> str:
        """If room is missing, free unused trainers of this program, and let idle ones release their workers.

        Returns:
            The trainers of this program that still hold room, in words; empty if there are none.
        """
        if not self._others() or self.has_room():
            return ""
        gc.collect()
        while not self.has_room():
            if not any(other.give_way() for other in self._others()):
                return ", ".join(dict.fromkeys(other.spec.words.name for other in self._others()))
        return ""

    def _others(self) -> list[ElasticController]:
        """Return the other trainers of this program that have workers in the same cluster."""
        return [
            each
            for each in tuple(_OF_THIS_PROGRAM)
            if each.view is self.view
            and each.spec.make_replica is not self.spec.make_replica  # a trainer may have two controllers
            and each._holds_room
        ]

    @property
    def _holds_room(self) -> bool:
        group = self.group
        return group is not None and not group.is_driver_only and not self.has_session_ended

    def give_way(self) -> bool:
        """Take a snapshot and stop the workers, if they are idle. The next call starts workers from the snapshot.

        Returns:
            True if the workers were stopped. False if something would be lost, or the snapshot is divided over the
            nodes.
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
            except RaySGDError as error:  # the next call of that trainer will raise it again
                logger.debug("no snapshot of an idle trainer: %r", error)
                return False
            cause = f"{spec.words.name} is idle, and another trainer of this program needs the room"
            self.end_call(f"{cause}; the next call starts its workers again")
            return True

    def run(self, call: Call, *, max_retries: int = _DEFAULT_RETRIES, budget: RetryBudget | None = None) -> list[Any]:
        """Run `call` on every rank and return the values in rank order.

        Args:
            call: What to run.
            max_retries: How many retries a failure may use.
            budget: Replaces `max_retries` if several calls share their retries.

        Raises:
            WorkerError: An exception in user code; also of its class. Retried only if the failure policy says so.
            WorkersLostError: The retries are used up, or too few workers can be started.
            TrainerShutdownError: After `stop`, or if another thread calls `stop` in the meantime.
        """
        with self.turns.take_turn():
            budget, has_failed = budget or RetryBudget(max_retries), True
            try:
                if self._follows_cluster and not self.is_ending:  # else Ray may be ending, too
                    self._adapt(call)
                if self.holds_only_state and not (call.captures or self._is_taken_up):
                    self._copy_only_state(call, budget)
                values = self._run(call, budget)
                if self.spec.captures_after_calls and self.snapshots.is_overdue:  # the call took longer than expected
                    self._run(copy_call(), budget)
                if self._follows_cluster and not self.is_ending:
                    self.start_owed_spares()
                has_failed = False
                return values
            finally:
                if has_failed:
                    self._monitor.observe()
                self._monitor.is_on = False

    @property
    def _is_taken_up(self) -> bool:
        """True if the workers may still be in a call of a previous process."""
        kept_by = keeper()
        return kept_by is not None and kept_by.found is not None and kept_by.found.call > kept_by.num_calls

    def _copy_only_state(self, call: Call, budget: RetryBudget) -> None:
        """Before a call, copy a state that only workers have. Wait for the copy if survivors could not continue."""
        for _ in range(_NUM_COPIES):
            if not self.snapshots.is_coming:
                self._run(copy_call(), budget)
            if not call.can_continue:
                self._monitor.await_snapshot()
            if call.can_continue or not self.holds_only_state:
                return
        raise WorkersLostError(_LOST_ON_ITS_WAY)

    def end_left_call(self) -> None:
        """End the call of a previous process if nothing continues it."""
        with self._turn_to_copy():
            self.recovery.fetch_only_state()
            self.end_call("KeyboardInterrupt")

    def lend_spare(self) -> Loan | None:
        """Return a spare for `run_on_spare`, or None if none is ready. The group can still call it back."""
        with self.turns.take_turn():
            loan = self.ensure_group().standby.lend()
            if loan is None:
                self.start_spares()
            return loan

    @property
    def has_spares(self) -> bool:
        """True if there is a spare, ready or starting or on loan."""
        return self.running.standby.num_all > 0

    def run_on_spare(
        self,
        loan: Loan | None,
        function: Callable[..., Any],
        make_args: Callable[[], Sequence[Any]],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a call on a spare, outside of turns. If the spare is lost or steps in, run it again on another one.

        Args:
            loan: The spare, if one was ready.
            function: Takes the replica, the number of the loan, and the arguments. Returns None if it gave up.
            make_args: Makes the arguments of each attempt.
            on_wait: Called regularly during the wait.

        Returns:
            The value.

        Raises:
            WorkerError: An exception in user code.
            WorkersLostError: Several spares have died, or none is left.
            TrainerShutdownError: After `stop`.
        """
        num_died = 0
        while True:
            found = None if loan is None else loan.run_call(function, make_args, on_wait)
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
            with self.turns.take_turn(self.turns.reserve()):
                loan = self.lend_spare()
                if loan is None and not self.has_spares:
                    raise WorkersLostError(
                        "The spare that ran this call was lost, or has replaced a lost worker, and no other is left."
                    )
            if loan is None:
                self.sleep(_SPARE_POLL_S)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the present state, once the driver has it. Copy the state if no snapshot has it yet.

        Raises:
            WorkersLostError: It was lost on its way again and again.
        """
        with self._turn_to_copy():
            for _ in range(_NUM_COPIES):
                self._monitor.await_snapshot()
                landed = self.snapshots.landed
                if landed is not None and self._is_known:
                    return landed
                self.run(copy_call())
        raise WorkersLostError(_LOST_ON_ITS_WAY)

    def newest_snapshot(self) -> NewestSnapshot:
        """Return a snapshot of the present state as soon as the workers have copied it. It may still be on its way."""
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
        """Return the last snapshot, waiting for it if it is on its way; None if the shared state has changed since."""
        with self._turn_to_copy():
            self._monitor.await_snapshot()
            return self.snapshots.landed if self.snapshots.shares_current else None

    @contextmanager
    def _turn_to_copy(self) -> Iterator[None]:
        """Take a turn, and stop watching the group at its end."""
        with self.turns.take_turn():
            try:
                yield
            finally:
                self._monitor.is_on = False

    def status(self, samples_per_s: float | None) -> TrainerStatus:
        """Ask the workers how they are, and return the status.

        Args:
            samples_per_s: Throughput of the last training call, in case none is running.
        """
        if self.is_stopped or not self.has_session_ended:
            self.check_active()
        group = None if self.has_session_ended else self.group
        asked = ask_heartbeats(group, quiet_s(self.spec.heartbeat_s)) if group is not None else {}
        return self._status(asked, samples_per_s)

    def glance(self, last_heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        """Return the status without asking the workers.

        Args:
            last_heartbeats: The heartbeats at the end of the last training call.
            samples_per_s: As for `status`.
        """
        heartbeats = self.monitor.heartbeats if self.monitor is not None else {}
        is_training = any(heartbeat.is_training for heartbeat in heartbeats.values())
        return self._status(heartbeats if is_training else last_heartbeats, samples_per_s)

    def _status(self, heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None) -> TrainerStatus:
        monitor, has_ended = self.monitor, self.has_session_ended and not self.is_stopped
        group = None if has_ended else self.group
        present = monitor.samples_per_s if monitor is not None else None
        return compose(
            infos=group.infos if group is not None else (),
            heartbeats=heartbeats,
            num_wanted=self.scaling.max_workers,
            num_spares=group.standby.num_ready if group is not None else 0,
            samples_per_s=samples_per_s if present is None else present,
            history=self.history,
            snapshots=self.snapshots,
            pace=self.snapshots.pace if self.spec.captures else None,
            has_session_ended=has_ended,
        )

    def _run(self, call: Call, budget: RetryBudget) -> list[Any]:
        """Run a call, and retry it while that is allowed. Return the values of the attempt that succeeded."""
        kept_by = keeper()
        number = kept_by.number(call) if kept_by is not None else None
        self.num_calls = number.call if number is not None else self.num_calls + 1
        is_inside = number is not None and number.is_resumed
        while True:
            function = call.resume if is_inside and call.resume is not None else call.function
            group = self.ensure_group()
            args = call.args_for(group.worlds)
            kept: type[Exception] = UnpicklableError  # keep the group: nothing was sent
            try:
                report, values = self._attempt(group, call, function, args, number)
                if values is not None:
                    return values
                if self._is_left(report):
                    return self._left(group, report)
                kept = WorkerError  # keep the group: all ranks are at the same place, or recovery has killed it
                held = None
                if not report.ok and call.leaves is not None and call.leaves():
                    held = self.recovery.leave_with_survivors(report)
                    if held:
                        return held
                is_inside = True if held is not None else self._mended(call, report, budget)
            except BaseException as error:  # Ctrl-C, or an error in the driver: the ranks are somewhere in the call
                # A driver that is the only worker does not wait for any other, and is kept unchanged.
                left = None if isinstance(error, kept) else self.group
                if left is not None and not left.is_driver_only:
                    self.interrupted = None  # this handles it
                    self.recovery.fetch_only_state()
                    self.end_call(type(error).__name__)
                if isinstance(error, RanksDifferError):
                    self.snapshots.forget_calls()  # the states may have become different in one of these calls
                if not self.is_ending:
                    self.snapshots.note_broken_off(call, has_group=self.group is not None)
                raise
            if number is not None:
                number = replace(number, attempt=number.attempt + 1, is_resumed=is_inside)

    def _mended(self, call: Call, report: GroupReport, budget: RetryBudget) -> bool:
        """Change the group after a failure, or where its ranks were held; return whether these are inside the call."""
        return self.recovery.change_held(report) if report.ok else self.recovery.recover(call, report, budget)

    def _is_left(self, report: GroupReport) -> bool:
        """Return whether all ranks were held so that the call can be left; where some have completed it, it goes on."""
        values = [each.value for each in report.values] if report.ok else []
        if not values or not all(isinstance(each, HeldAtStep) for each in values):
            return False
        return self._monitor.is_leaving or all(each.is_planned for each in values)

    def _left(self, group: WorkerGroup, report: GroupReport) -> list[Capture]:
        """After all ranks were held to leave the call: bring the state of that step to the driver, as after a call."""
        captures: list[Capture] = [answer.value.part for answer in report.values]
        self.snapshots.take_from(group, captures)
        self._monitor.await_snapshot()
        self.snapshots.leave_call()
        return captures

    def hold_to_leave(self, call: Call) -> None:
        """Let a call be left, where this process is the only worker, which no one watches; called between two steps."""
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
        """Run the call once. If it changed the state, note so and take the snapshot that came with the answers.

        Returns:
            The report, and the values if all ranks completed the call.
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
        if any(isinstance(value, HeldAtStep) for value in values):  # other ranks may have completed the call
            return report, None
        is_right = False
        try:
            call.check(values)
            is_right = True
        finally:
            if not is_right:
                self._monitor.await_snapshot()  # of the previous call, while a worker can still send it
        if call.is_kept:
            self.snapshots.note_call(call, self.now() - began)
        if self.spec.captures or captures:  # a reply to a previous process may contain a copy, too
            copies = [answer.capture for answer in report.values if answer.capture is not None]
            if copies:
                self.snapshots.take_from(group, copies)
                self.snapshots.pace.note_copy(max(copy.seconds for copy in copies))
        return report, values

    def _adapt(self, call: Call) -> None:
        """Before a call, leave nodes that are going away, and grow if there is room. Uses no retry.

        Ranks that a previous process left may already be inside the call. They can change only at a step of it.
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
        """Move to other nodes, in place if possible."""
        self._monitor.watch()
        in_place = self.recovery.can_change()
        if in_place is None:  # a failure, which the call will run into
            return
        if in_place:
            failed = self.recovery.change(self.leaving_nodes_in_use(), LEAVING)
        else:
            self.snapshot()
            failed = "left", LEAVING
        if failed is not None:
            self.recovery.restart_workers(*failed)

    def _grow_if_possible(self, call: Call) -> None:
        """Let more workers step in, or start a larger group, if there is room."""
        group, most = self.ensure_group(), self.scaling.max_workers
        self.start_spares()
        if len(group) >= most:
            return
        self._monitor.watch()
        in_place = self.recovery.can_change()
        if in_place is None:  # a failure; the call will run into it and report it
            return
        if in_place:
            num_awaited = most if call.resume is None else self.resizing.num_awaited_by_call
            failed = self.recovery.grow(num_awaited, ROOM)
            if failed is not None:
                self.recovery.restart_workers(*failed)
            return
        num_more = self.find_room()
        if not num_more:
            return
        target = len(group) + num_more
        self.snapshot()
        if self.num_workers < target:  # otherwise a failure came in between and used the room
            self.recovery.restart_workers("grown", f"resources for {target} workers are free")

    def renew(self, function: Callable[..., Any], *args: Any) -> None:
        """Make new replicas in the present workers and group. What was trained is dropped.

        This has the effect of new workers without the time to start them. Before you call it, make sure that workers
        that start later get the same arguments.

        Args:
            function: Runs on each worker as `function(replica, *args)`, and returns facts like `Replica.setup`.
            args: Its arguments.

        Raises:
            WorkerError: The user's set-up failed. The workers are killed, and the next call starts new ones.
            WorkersLostError: Workers were lost too often.
            TrainerShutdownError: After `stop`.
        """
        group = self.group
        if group is None:
            self.restart()
            return
        self.landed_snapshot()  # wait for a snapshot on its way, whose source is about to disappear
        self.snapshots.begin_again()
        group.standby.kill_all()
        call = Call(function, lambda worlds: [args] * len(worlds), changes_state=True, leaves_as_new=True)
        with OnFailure(self.kill_group):  # otherwise some replicas could be new and others not
            self.keep_facts(self.run(call))

    def restart(self) -> None:
        """Start new processes without the trained state, for replicas that would leave something behind in theirs."""
        self.snapshots.begin_again()
        self.kill_group()
        self.ensure_group()
