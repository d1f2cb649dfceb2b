"""The user's program of a schedule: its calls, what each may answer or raise, and what is known afterwards."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from raysgd.core.engine.shared.interface import Call, Completed, GroupEvent
from raysgd.core.engine.shared.interface import Left as LeftCall
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.core.history.status import ask_status
from raysgd.exceptions import ReservationTimeoutError, TrainerShutdownError, WorkerError, WorkersLostError
from raysgd.trainer.driver.calls import TrainerCalls
from raysgd.trainer.driver.saving import load_into_all
from tests.simulator.invariants import WatchedBudget
from tests.simulator.kernel import Stopped
from tests.simulator.replica import (
    Left,
    Progress,
    State,
    Walked,
    load,
    look,
    note,
    validate,
    walk,
    walk_left,
    walk_on,
    walk_on_left,
)
from tests.simulator.schedule import LOSSES, Fault, Op

if TYPE_CHECKING:
    from tests.simulator.running import Simulation


CHANGING = ("train", "leave", "steps", "note", "apply")
SHUTDOWN_S = 15.0
DELAYS = ("slow", "load long", "freeze", "stall")
LEAVING_S = 4.0  # longer than a poll, some steps and a copy
VALIDATING_S = 2000.0  # longer than it takes to find out that there is no room for workers, several times
LISTENING_S = 60.0  # longer than any grace: a thread that listens to workers that were ended notices by then


AT_ONCE = "by the workers that train"


class SpareRunner:
    """What a spare runs."""

    validate_on_loan = staticmethod(validate)


class ValidationCalls(TrainerCalls):
    """Those of a front end where nothing has to be divided."""

    def __init__(self, controller: Any) -> None:
        life: Any = SimpleNamespace(controller=controller, framework=SimpleNamespace(runner_cls=SpareRunner))
        super().__init__(life)

    def requests(self, name: str, asked: Any, *parts: Any, **named: Any) -> Any:
        return [(asked,)]

    def answers_of_validation(self, asked: Any, dataset: Any) -> list[Any]:
        return [AT_ONCE]

    def forget(self) -> None:
        """There is nothing to divide."""


class Program:
    """Runs the calls of a schedule, in one thread or in two.

    Attributes:
        is_in_call: Whether the first thread is inside a call.
        committed: What the last call that returned had seen: nothing of it may ever be lost.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._controller, self._invariants = simulation.controller, simulation.invariants
        self.is_in_call = False
        self._validation_calls = ValidationCalls(self._controller)
        self._num_validating = 0
        self.committed = State()
        self._is_exact = True
        self._has_stop, self._stopped_at = False, float("inf")
        self._file = Snapshot(State(), ((0, 0),))
        self._num_loads = self._num_calls = 0
        self._possible: list[State] = []
        self._before_raised: list[State] = []  # what a loss may go back to until a snapshot has what a failed call did
        schedule = simulation.schedule
        sizes = range(1, schedule.num_workers + 1)
        # Else a completed call that is repeated by fewer workers takes other steps, and may use fewer samples.
        self._is_global_batch_constant = len({max(1, schedule.batch_size // n) * n for n in sizes}) == 1

    def run(self) -> None:
        kernel, ops = self._simulation.kernel, self._simulation.schedule.ops
        if self.perform(Op("start")):
            beside = [op for op in ops if op.thread]
            if beside:
                kernel.run_thread(lambda: self._perform_all(beside))
            self._perform_all([op for op in ops if not op.thread])
        kernel.block(lambda: all(thread.is_over for thread in kernel.users[1:]))
        kernel.block(lambda: not self._num_validating, VALIDATING_S)
        self._invariants.require(not self._num_validating, f"{self._num_validating} validations do not end")
        self._controller.stop()
        kernel.block(lambda: all(thread.is_over for thread in kernel.threads[1:]), LISTENING_S)

    def stop_beside(self, force: bool) -> None:
        """Stops the trainer from another thread."""
        if not self._has_stop:
            self._has_stop = True
            self._stopped_at = self._simulation.kernel.now
            self._simulation.kernel.run_thread(lambda: self._controller.stop(force))

    def _perform_all(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.perform(op)

    def perform(self, op: Op) -> bool:
        """Makes a call and judges what came of it; returns whether it succeeded."""
        simulation, is_first = self._simulation, self._simulation.kernel.current.number == 0
        simulation.tell(f"CALL  {op.kind} {op.argument} ({op.max_retries} retries, thread {op.thread})")
        before, began = dict(simulation.befalling.kinds), simulation.kernel.now
        budget = WatchedBudget(op.max_retries, self._invariants)
        failures_before = self._invariants.hooks.num_failures
        snapshots = self._controller.snapshots
        was_coming = snapshots.is_coming or self._controller.holds_only_state  # then one is sent before the call
        must_follow = snapshots.must_follow
        waiting, leaving = self._invariants.waiting(), self._invariants.nodes_to_leave()
        num_events, reasons = len(simulation.controller.history.events), self._invariants.reasons
        self.is_in_call = self.is_in_call or is_first
        try:
            value = getattr(self, f"_{op.kind}")(op, budget)
            simulation.tell(f"DONE  {value}")
        except Stopped:
            raise
        except BaseException as error:
            self._judge(error, op, budget, before)
            self._invariants.forget_reasons()
            simulation.tell(f"RAISED {type(error).__name__}: {str(error)[:300]}")
            return False
        finally:
            if is_first:
                self.is_in_call = False
            self._check_stopped(op, began)
            for event in simulation.controller.history.events[getattr(self, "_num_told", 0) :]:
                simulation.tell(f"EVENT {event}")
            self._num_told = len(simulation.controller.history.events)
        if self._is_alone:
            self._invariants.check_spent(budget.num_spent)
            events = simulation.controller.history.events[num_events:]
            self._check_raised(op, before, events)
            has_loss = any(event.is_failure for event in events)  # perhaps of what befell it between two calls
            is_in_peace = before == dict(simulation.befalling.kinds) and not has_loss
            if op.kind in CHANGING and is_in_peace:
                self._invariants.check_grown(waiting)
                self._invariants.check_left(leaving)
            if op.kind in CHANGING and is_in_peace and not events and not was_coming:  # new workers send one
                self._invariants.check_covered(must_follow or op.kind == "apply")
            if op.kind in (*CHANGING, "look"):  # others bring a budget of their own
                self._check_paid(budget, self._invariants.hooks.num_failures - failures_before)
                self._invariants.check_reasons(reasons, events, op.kind in ("train", "steps"))
            if not self._num_validating:
                self._invariants.check_between_calls()
        return True

    def _check_stopped(self, op: Op, began: float) -> None:
        """A call does not go on for long after a stop from another thread, where all processes can be reached."""
        kinds, late_s = self._simulation.befalling.kinds, self._simulation.kernel.now - max(began, self._stopped_at)
        is_own = self._simulation.schedule.use_local or op.kind == "rest"
        is_known = is_own or kinds["stall"] + kinds["freeze"] > 0 or late_s < SHUTDOWN_S
        self._invariants.require(is_known, f"a call goes on for {late_s:.0f} s after the trainer was shut down")

    def _check_raised(self, op: Op, before: Any, events: Sequence[GroupEvent]) -> None:
        """What user code raised reaches the user, unless a loss may have caused it.

        A replica that raises when it is asked whether it can move is replaced instead.
        """
        befalling = self._simulation.befalling
        has_raised = befalling.kinds["raise in a call"] > before.get("raise in a call", 0)
        is_told = befalling.num_incidents > 0 or any(event.kind in ("left", "grown") for event in events)
        self._invariants.require(not has_raised or is_told, f"{op.kind} hid an error of user code")

    def _check_paid(self, budget: WatchedBudget, num_failures: int) -> None:
        """Each rebuild after a loss is paid for. To leave a node and to grow spends no retry of the call."""
        is_paid = budget.num_restored == num_failures
        self._invariants.require(is_paid, f"{num_failures} rebuilds, {budget.num_restored} paid")

    # ------------------------------------------------------------------------------------ calls

    def _start(self, op: Op, budget: WatchedBudget) -> None:
        self._controller.start()

    def _train(self, op: Op, budget: WatchedBudget) -> State:
        base, is_exact = self.committed, self._is_exact
        state = self._walked(None, budget)
        self._check_pass(state, base, is_exact)
        return state

    def _check_pass(self, state: State, base: State, is_exact: bool) -> None:
        """A pass led from one state to the end of the next."""
        self._invariants.require(state.consumed == 0, f"a pass ended in its middle: {state}")
        if is_exact and self._is_alone and self._is_global_batch_constant:
            self._invariants.require(state.epoch == base.epoch + 1, f"a pass led from {base} to {state}")

    def _steps(self, op: Op, budget: WatchedBudget) -> State:
        base, is_exact = self.committed, self._is_exact
        state = self._walked(op.argument, budget)
        assert op.argument is not None
        if is_exact and self._is_alone and self._is_global_batch_constant:
            self._invariants.require(
                state.steps == base.steps + op.argument, f"{op.argument} steps led from {base} to {state}"
            )
        return state

    def _walked(self, num_steps: int | None, budget: WatchedBudget) -> State:
        call = _training(walk, walk_on, self._next_number(), num_steps)
        before, is_exact = self.committed, self._is_exact
        walked: list[Walked] = self._controller.run(call, budget=budget)
        is_own = num_steps is None or {each.num_steps for each in walked} == {num_steps}
        self._invariants.require(is_own, f"{num_steps} steps were asked for: {walked}")
        return self._taken(walked, before, is_exact)

    def _taken(self, walked: Sequence[Walked], before: State, is_exact: bool) -> State:
        """The state to which a training call led, once it is known to be right."""
        state = self._one([each.state for each in walked])
        is_known = self._is_alone and is_exact and self._is_global_batch_constant
        self._check_measured(walked, state, before if is_known else None)
        self._commit(state)
        return state

    def _leave(self, op: Op, budget: WatchedBudget) -> State:
        """A pass that is left after a while, as for a file, and gone on with in another call."""
        assert op.argument is not None
        if not self._is_alone:  # others may train a pass that was left
            return self._train(op, budget)
        kernel, before, is_exact = self._simulation.kernel, self.committed, self._is_exact
        # Half of them are left where it was planned, the others at some time.
        left_at, hold_at = kernel.now + op.argument % 20 / 10, op.argument % 6 + 1 if op.argument % 2 else None
        call = _training(walk, walk_on, self._next_number(), None, hold_at)
        call = replace(call, leaves=lambda: hold_at is None and kernel.now >= left_at)
        befallen, self._invariants.may_only_copy = dict(self._simulation.befalling.kinds), True
        try:
            ended = self._controller.run_or_leave(call, budget=budget)
        finally:
            self._invariants.may_only_copy = False
        if hold_at is not None:
            self._check_planned(ended, hold_at)
        elif befallen == dict(self._simulation.befalling.kinds) and not any(befallen.get(kind) for kind in DELAYS):
            late_s = kernel.now - left_at - 8 * self._simulation.late_s  # each question may be late
            self._invariants.require(late_s < LEAVING_S, f"a call ended {late_s:.1f} s after it was to be left")
        if isinstance(ended, LeftCall):
            if op.argument % 3 == 0:  # another program goes on
                self._controller.kill_group()
            walked = self._go_on_left([each.progress for each in ended.parts], budget)
        else:
            walked = ended.values
        state = self._taken(walked, before, is_exact)
        self._check_pass(state, before, is_exact)
        return state

    def _check_planned(self, ended: Completed | LeftCall, hold_at: int) -> None:
        """A call ends after the steps that were planned, or earlier, with its pass."""
        is_left = isinstance(ended, LeftCall)
        steps = {each.progress.steps for each in ended.parts} if is_left else {each.num_steps for each in ended.values}
        is_right = steps == {hold_at} if is_left else max(steps) < hold_at
        self._invariants.require(is_right, f"a call that was to be left after {hold_at} steps took {steps}")

    def _go_on_left(self, ranks: Sequence[Progress], budget: WatchedBudget) -> list[Walked]:
        """Goes on where a call was left, once what it has left is known."""
        self._invariants.require(len({each.steps for each in ranks}) == 1, f"ranks left at different steps: {ranks}")
        snapshot = self._controller.landed_snapshot()
        self._invariants.require(snapshot is not None, "a call was left, and no snapshot of it is there")
        assert snapshot is not None
        is_known = self._is_exact and self._is_alone and self._is_global_batch_constant
        num_steps = snapshot.shared_state.steps - self.committed.steps
        is_own = not is_known or num_steps == ranks[0].steps
        self._invariants.require(is_own, f"left after {ranks[0].steps} steps, with the state after {num_steps}")
        self._commit(snapshot.shared_state)
        self._simulation.tell(f"LEFT  {snapshot.shared_state}")
        call = _training(walk_left, walk_on_left, Left.of(ranks), self._next_number())
        walked: list[Walked] = self._controller.run(call, budget=budget)
        return walked

    def _next_number(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _note(self, op: Op, budget: WatchedBudget) -> State:
        return self._noted(op, budget, is_repeatable=True)

    def _apply(self, op: Op, budget: WatchedBudget) -> State:
        return self._noted(op, budget, is_repeatable=False)

    def _noted(self, op: Op, budget: WatchedBudget, is_repeatable: bool) -> State:
        assert op.argument is not None
        argument, before = op.argument, self.committed
        call = Call(
            note,
            lambda worlds: [(argument,)] * len(worlds),
            changes_state=True,
            keeps_alike=True,
            is_repeatable=is_repeatable,
        )
        state = self._one(self._controller.run(call, budget=budget))
        if self._is_exact and self._is_alone:
            wanted = (*before.noted, argument)
            self._invariants.require(state.noted == wanted, f"noted {state.noted}, not {wanted}")
        self._commit(state)
        return state

    def _look(self, op: Op, budget: WatchedBudget) -> State:
        state = self._one(self._controller.run(Call(look), budget=budget))
        self._commit(state, is_change=False)
        if not self._before_raised:  # what a failed call has left is known now, and nothing can go back behind it
            self.committed, self._is_exact, self._possible = state, True, []
        return state

    def _snapshot(self, op: Op, budget: WatchedBudget) -> State:
        state: State = self._controller.snapshot().shared_state
        self._commit(state, is_change=False)
        return state

    def _save(self, op: Op, budget: WatchedBudget) -> State:
        self._file = self._controller.snapshot()
        state: State = self._file.shared_state
        self._commit(state, is_change=False)
        return state

    def _load(self, op: Op, budget: WatchedBudget) -> State:
        """Brings the state of the last file, marked: so it is another one than any that led to it."""
        assert op.argument is not None
        self._num_loads += 1
        saved, rank_states = self._file.shared_state, self._file.rank_states
        state = saved._replace(noted=(*saved.noted, -self._num_loads))
        self._possible.append(state)
        self._load_file(state, rank_states, op.argument % 3)
        self.committed, self._is_exact, self._possible = state, True, []
        return state

    def _load_file(self, state: State, rank_states: tuple[Any, ...], way: int) -> None:
        group = self._controller.ensure_group()
        load_into_all(
            self._controller,
            load,
            group.store(state) if way else state,
            rank_states,
            is_complete=bool(way) and len(rank_states) == self._controller.num_workers,
        )

    def _validate(self, op: Op, budget: WatchedBudget) -> None:
        """Begins a validation on a spare. What comes of it is judged when it is known."""
        with self._controller.turns.take_turn():
            newest = self._controller.newest_snapshot()
            asked, no_settings, sharing = (cast(Any, each) for each in (op.argument, None, self._validation_calls))
            begun = self._validation_calls.begin_on_spare(asked, None, no_settings, sharing, newest)
        self._num_validating += 1
        self._simulation.kernel.run_thread(lambda: self._validated(newest, begun), is_user=False)

    def _validated(self, newest: NewestSnapshot, begun: Any) -> None:
        kinds, require = self._simulation.befalling.kinds, self._invariants.require
        try:
            [state] = begun(lambda: None)
            self._simulation.tell(f"VALIDATED  {state}")
            is_asked = state in (AT_ONCE, newest.result().shared_state)
        except WorkerError as error:
            require(kinds["raise"] > 0, f"a validation raised {error!r}")
        except TrainerShutdownError:
            require(self._controller.stopped.is_set(), "a validation was told of a shutdown")
        except (WorkersLostError, ReservationTimeoutError) as error:
            self._simulation.tell(f"NOT VALIDATED  {error!r}")
            require("no other spare is left" not in str(error) or not self._has_spares, f"{error!r} with a spare")
        else:
            require(is_asked, f"a spare has validated {state}")
        finally:
            self._num_validating -= 1

    @property
    def _has_spares(self) -> bool:
        group = self._controller.group
        return group is not None and group.standby.num_all > 0

    def _landed(self, op: Op, budget: WatchedBudget) -> State | None:
        snapshot = self._controller.landed_snapshot()
        if snapshot is None:
            return None
        self._commit(snapshot.shared_state, is_change=False)
        state: State = snapshot.shared_state
        return state

    def _status(self, op: Op, budget: WatchedBudget) -> str:
        return str(ask_status(self._controller, None))[:60]

    def _rest(self, op: Op, budget: WatchedBudget) -> None:
        self._simulation.kernel.sleep((op.argument or 1) / 10)

    def _lose(self, op: Op, budget: WatchedBudget) -> None:
        """A worker dies between two calls, and the next one comes at once."""
        self._simulation.befalling.befall_one(Fault("die", "between calls", 0, (op.argument or 0) % 6))
        self._simulation.kernel.sleep(0.05)

    def _take_over(self, op: Op, budget: WatchedBudget) -> None:
        """Another process of the driver goes on with the workers. It has no copy of their state."""
        schedule, controller = self._simulation.schedule, self._controller
        is_kept = schedule.regroups and schedule.snapshot_every_s is not None and not schedule.use_local
        if self._is_alone and is_kept and controller.group is not None and not self._num_validating:
            controller.snapshots.clear()
            controller.snapshots.completed(None)
            self._simulation.transitions.watches_only_state = True

    def _kill(self, op: Op, budget: WatchedBudget) -> None:
        if self._is_alone and not self._controller.holds_only_state:
            self._controller.kill_group()

    # ------------------------------------------------------------------------------------ what is known

    @property
    def _is_alone(self) -> bool:
        """Whether only one thread has made calls so far."""
        return len(self._simulation.kernel.users) == 1

    def _one(self, states: Sequence[State]) -> State:
        self._invariants.require(len(set(states)) == 1, f"replicas differ: {'; '.join(map(str, set(states)))}")
        return states[0]

    def _commit(self, state: State, is_change: bool = True) -> None:
        self._invariants.check_state(state)
        possible = (self.committed, *self._possible, *self._before_raised)
        is_known = any(state.extends(self._counted(each)) for each in possible)
        self._invariants.require(is_known, f"lost: {self.committed}; there is {state}")
        self._forget_raised(state)
        if is_change:
            self.committed, self._is_exact, self._possible = state, True, []

    def _forget_raised(self, state: State) -> None:
        """What calls noted since then is run again after a loss. All is safe once a snapshot has landed."""
        snapshots, noted = self._controller.snapshots, state.noted[len(self.committed.noted) :]
        is_safe = snapshots.shares_current and not snapshots.is_coming
        self._before_raised = [] if is_safe else [_noting(each, noted) for each in self._before_raised]

    def _counted(self, state: State) -> State:
        """What of a state is still there after it."""
        return state if self._is_global_batch_constant else State(noted=state.noted)

    def _check_measured(self, walked: Sequence[Walked], state: State, before: State | None) -> None:
        """No sample is measured twice, nor one that was not used; and all that were used, also by lost ranks."""
        for epoch, used in enumerate(state.used):
            masks = _masks([each.measured for each in walked], epoch)
            self._invariants.require(sum(masks) & ~used == 0, f"measured more of pass {epoch} than was used")
            together = 0
            for mask in masks:
                self._invariants.require(together & mask == 0, f"samples of pass {epoch} were measured twice")
                together |= mask
            if before is not None:
                missing = used & ~sum(_masks([before.used], epoch)) & ~together
                self._invariants.require(not missing, f"of pass {epoch}, {missing:b} was used and not measured")

    def _judge(self, error: BaseException, op: Op, budget: WatchedBudget, before: Any) -> None:
        """Whether this error is one that this call may raise."""
        self._is_exact = False
        kinds = self._simulation.befalling.kinds
        since = {kind for kind in kinds if kinds[kind] > before.get(kind, 0)}
        why = f"{op.kind} raised {type(error).__name__}: {str(error)[:300]}"
        require = self._invariants.require
        has_loss = any(kinds[kind] for kind in (*LOSSES, "drain", "poison", "slow", "load long"))
        if isinstance(error, KeyboardInterrupt):
            require("interrupt" in since, why)
        elif isinstance(error, TrainerShutdownError):
            require(self._has_stop, why)
        elif isinstance(error, WorkersLostError):
            if "switches snapshots off" in str(error):
                require(self._simulation.schedule.snapshot_every_s is None, why)
                return
            is_spent = budget.num_spent >= budget.num_retries or "used up" not in str(error)
            require(has_loss or kinds["room goes"] > 0, why)
            self._invariants.check_spent(budget.num_spent)
            require(
                is_spent or op.kind == "start", f"{why}, though {budget.num_spent} of {budget.num_retries} are spent"
            )
        elif isinstance(error, ReservationTimeoutError):
            require(op.kind == "start" and (has_loss or kinds["room goes"] > 0), why)
        elif isinstance(error, WorkerError):
            require("raise" in since, why)
            self._before_raised.append(self.committed)
        else:
            told = "".join(traceback.format_exception(error))
            require(False, f"{why}\n{told}")


def _training(function: Callable[..., Any], resume: Callable[..., Any], *args: Any) -> Call:
    """A call that trains, with the same arguments on all ranks."""
    return Call(function, lambda worlds: [args] * len(worlds), changes_state=True, keeps_alike=True, resume=resume)


def _noting(state: State, noted: Sequence[int]) -> State:
    return state._replace(noted=(*state.noted, *noted))


def _masks(passes: Iterable[Sequence[int]], epoch: int) -> list[int]:
    return [each[epoch] for each in passes if len(each) > epoch]
