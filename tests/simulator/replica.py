"""A simulated replica. Its positions in the data are those of the library; its state says which samples made it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

from raysgd.core.arrays.division import Division
from raysgd.core.engine.shared.interface import Capture
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress, StateHandover, World
from raysgd.torch.data.sample_order import ShuffledOrder
from raysgd.torch.data.sampling import PassPlan
from raysgd.trainer.worker import training_call
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.replica_state import StateCopies, StateCopy
from raysgd.trainer.worker.training_call import RankRows
from tests.simulator.kernel import Future, Task
from tests.simulator.network import SimConnection
from tests.simulator.torn_batch import TornBatch


class State(NamedTuple):
    """What all ranks share.

    Attributes:
        epoch: The pass that the next step belongs to.
        consumed: How far it is in that pass.
        steps: Steps in all.
        weights: A number that depends on each step and on its samples.
        used: The samples that each pass has used so far, as bits.
        noted: What calls noted that are no training.
    """

    epoch: int = 0
    consumed: int = 0
    steps: int = 0
    weights: int = 1
    used: tuple[int, ...] = (0,)
    noted: tuple[int, ...] = ()

    def extends(self, earlier: State) -> bool:
        """Whether nothing that `earlier` knows is missing here."""
        passes = zip(earlier.used, self.used, strict=False)
        is_used = len(self.used) >= len(earlier.used) and all(before & ~now == 0 for before, now in passes)
        return is_used and self.noted[: len(earlier.noted)] == earlier.noted and self.steps >= earlier.steps

    def __str__(self) -> str:
        return (
            f"pass {self.epoch} at {self.consumed} after {self.steps} steps ({self.weights % 9973}), noted {self.noted}"
        )


@dataclass(frozen=True)
class Walked:
    """What a training call answers: the state at its end, its steps, and the samples that this rank measured."""

    state: State
    num_steps: int
    measured: tuple[int, ...]


class Given(NamedTuple):
    """What a rank gives to all others in a step.

    Attributes:
        state: The state that it steps from.
        samples: Its samples of the step.
        name: Its name.
        measured: The samples that it has measured, with those of the step.
    """

    state: State
    samples: int
    name: str
    measured: tuple[int, ...]


class Progress(NamedTuple):
    """How far a rank is in a call; see `RunState`."""

    steps: int
    call: int
    requested: int | None
    measured: tuple[int, ...]
    name: str
    others: Mapping[str, tuple[int, ...]]
    lost: Mapping[str, tuple[int, ...]]
    is_finished: bool = False

    def for_others(self) -> Progress:
        return self


@dataclass(frozen=True)
class Left:
    """How far a pass was when its call was left, as the program keeps it.

    Attributes:
        steps: Steps of the pass so far.
        measured: The samples that each rank has measured.
        lost: Those of ranks that were lost before.
    """

    steps: int
    measured: tuple[tuple[int, ...], ...]
    lost: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[Progress]) -> Left:
        return cls(ranks[0].steps, tuple(each.measured for each in ranks), tuple(ranks[0].lost.values()))


@dataclass
class Run:
    """One training call on one replica.

    Attributes:
        call_number: Which call of the user's program it is.
        requested: How many steps it is to take; None for the rest of the pass.
        hold_at: After how many steps all ranks stop, as was planned.
        rows: What all ranks have told of what they measured.
    """

    call_number: int
    requested: int | None
    rows: RankRows
    steps: int = 0
    measured: tuple[int, ...] = ()
    is_finished: bool = False
    hold_at: int | None = None
    answer: Walked | None = None
    proposed: int | None = None
    agreed: Future | None = None

    def count(self, measured: Sequence[int]) -> None:
        self.measured = together(self.measured, measured)

    @property
    def progress(self) -> Progress:
        rows = self.rows
        told = rows.as_of(self.steps)
        return Progress(
            self.steps,
            self.call_number,
            self.requested,
            self.measured,
            rows.name,
            told,
            dict(rows.lost),
            self.is_finished,
        )


def together(*measured: Sequence[int]) -> tuple[int, ...]:
    """What several ranks have measured."""
    # Sums, not unions: a sample that is counted twice shows.
    return tuple(map(sum, itertools.zip_longest(*measured, fillvalue=0)))


class Surroundings(Protocol):
    """What a replica needs of the simulation."""

    num_samples: int
    batch_size: int
    snapshot_every: int | None
    is_large: bool
    has_halves: bool
    undo: bool | None
    joins_late: bool

    def point(self, label: str, replica: SimReplica) -> Iterable[float]:
        """A place where something may happen."""

    def now(self) -> float: ...

    def step_s(self) -> float:
        """How long a step takes."""

    def check_step(self, replica: SimReplica, given: Mapping[int, Given]) -> None:
        """Before all ranks take a step together."""

    def check_stepped(self, replica: SimReplica) -> None:
        """After a step, on each rank."""

    def check_landed(self, replica: SimReplica, token: int | None, newest: int) -> None:
        """When a rank hears which of its copies has landed."""

    def check_formed(self, replica: SimReplica, handover: StateHandover) -> None:
        """After a rank has taken its place in another group."""


@lru_cache(maxsize=64)
def bits_in_order(num_samples: int, epoch: int) -> tuple[int, ...]:
    """The samples of a pass in the order in which it visits them, as bits."""
    return tuple(1 << int(index) for index in ShuffledOrder(num_samples).indices(7, epoch))


@lru_cache(maxsize=2**12)
def used_until(num_samples: int, epoch: int, consumed: int) -> tuple[int, ...]:
    """The samples that each pass has used, as bits, where the pass `epoch` is so far."""
    before = (sum(bits_in_order(num_samples, each)) for each in range(epoch))
    return *before, sum(bits_in_order(num_samples, epoch)[:consumed])


@lru_cache(maxsize=2**12)
def next_part(
    num_samples: int, consumed: int, batch_size: int, world_size: int, rank: int, epoch: int
) -> tuple[int, int]:
    """A rank's next step, as the library divides it: its samples as bits, and how far the pass is then."""
    division = Division(batch_size * world_size, world_size, cap=batch_size)
    plan = PassPlan(num_samples, consumed, division, drop_last=False, pad=True)
    start, [share] = plan.shares_of_step(0, rank)
    own = (
        sum(bits_in_order(num_samples, epoch)[start + share.start : start + share.stop])
        if share.plan.num_samples
        else 0
    )
    return own, plan.consumed_after(1)


class SimReplica:
    """A `RegroupingReplica` whose calls are tasks."""

    def __init__(self, world: World, around: Surroundings, connection: SimConnection, name: str) -> None:
        self.world, self.around, self.connection, self.name = world, around, connection, name
        self.row_name = name
        self.state = State()
        self.torn = TornBatch(around.undo) if around.has_halves else None
        self.is_poisoned = False
        self.run: Run | None = None
        self.is_walking = False
        self.last_left = 0
        self._has_joined = False
        self._last_hold = 0, False
        self.copies = StateCopies(around.snapshot_every, Ledger())
        self._newest_token = 0

    # ------------------------------------------------------------------------------------ its state

    def setup(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def capture(self, landed_token: int | None) -> Capture:
        if not self.world.rank:
            self.around.check_landed(self, landed_token, self._newest_token)
        return self._kept(self.copies.after_call(self, self.world.rank, landed_token))

    def _capture_inside(self, run: Run) -> Capture:
        return self._kept(self.copies.inside_call(self, self.world.rank, run.progress._replace(others={})))

    def copy_for_driver(self, rank: int) -> StateCopy | None:
        return None if rank else StateCopy(self.state, 10**6 if self.around.is_large else 10)

    def _kept(self, part: Capture) -> Capture:
        self._newest_token = part.token or self._newest_token
        return replace(part, seconds=0.0)  # of the clock on the wall

    def own(self) -> tuple[int, int]:
        """What only this rank knows."""
        return self.world.rank, self.state.steps

    def fetch(self, token: int) -> State:
        return cast(State, self.copies.fetch(token))

    def restore(self, shared_state: State, own_state: tuple[int, int] | None) -> None:
        assert own_state in (None, (self.world.rank, shared_state.steps)), f"{own_state} of another rank or time"
        self._go_to(shared_state)
        self.run = None
        self.copies.forget_call()

    def _go_to(self, state: State) -> None:
        self.state = state
        if self.torn is not None:
            self.torn.restore(state.steps)

    @property
    def is_whole(self) -> bool:
        return self.torn is None or self.torn.is_whole

    @property
    def is_undone(self) -> bool:
        """True if the real tensors are those of the state."""
        return self.torn is None or self.torn.num_steps == (self.state.steps, self.state.steps)

    def restore_inside(
        self,
        shared_state: State,
        own_state: Any,
        first: Progress,
        parts: Sequence[Progress],
        everyones: Sequence[Progress],
    ) -> None:
        self.restore(shared_state, own_state)
        assert list(parts) == list(everyones[self.world.rank :: self.world.size])
        self._go_on_from(first, [part.measured for part in everyones])

    def _go_on_from(self, first: Progress, measured: Sequence[tuple[int, ...]]) -> Run:
        """As `ClassRunner` does it: each rank takes its share, and knows those of the others."""
        rank, size = self.world.rank, self.world.size
        names = [f"{first.call} {each}" for each in range(size)]
        self.row_name = names[rank]
        lost = {f"left {number}": each for number, each in enumerate(first.lost.values())}
        self.run = self._run_like(first._replace(others={}, lost=lost))
        self.run.count(together(*measured[rank::size]))
        self.run.rows.note(first.steps - 1, {name: together(*measured[each::size]) for each, name in enumerate(names)})
        return self.run

    def _run_like(self, progress: Progress) -> Run:
        run = Run(progress.call, progress.requested, RankRows(self.row_name), progress.steps)
        run.is_finished = progress.is_finished
        run.rows.lost.update(progress.lost)
        run.rows.keep_lost(run.steps, progress.others, progress.others)
        return run

    def shutdown(self) -> None:
        self.run = None

    # ------------------------------------------------------------------------------------ another group

    def replica_progress(self) -> ReplicaProgress:
        if self.run is None or self.run.is_finished:
            return ReplicaProgress(self.run.steps + 1 if self.run is not None else 0, True)
        return ReplicaProgress(self.run.steps, self.is_whole, None, str(self.state))

    def leave_group(self) -> None:
        if self.torn is not None and not (self.run is None or self.run.is_finished):
            self.torn.leave_group()

    def warm_up(self) -> None: ...

    def regroup(self, world: World, handover: StateHandover) -> Task:
        self.copies.forget_call()
        self.world, self._has_joined = world, False
        if self.run is not None:
            self.run.proposed = self.run.agreed = None
        yield from self.around.point("regroup", self)
        if world.rank == handover.source and handover.takers:
            told = None if self.run is None else self.run.progress
            self.connection.send("handover", (self.state, told))
            yield from self.around.point("sent", self)
        elif world.rank in handover.takers:
            yield from self.around.point("taking", self)
            self._take_over(*(yield from self.connection.receive("handover")))
            yield from self.around.point("taken", self)
        names = yield from self.connection.exchange("names", self.row_name, lambda given: {*given.values()})
        if self.run is not None:
            self.run.rows.keep_lost(self.run.steps, self.run.rows.as_of(self.run.steps), names)
            self.run.rows.lost.update((part.name, part.measured) for part in handover.orphans)
        self.around.check_formed(self, handover)
        return self.setup()

    def _take_over(self, state: State, told: Progress | None) -> None:
        self._go_to(state)
        if told is None:
            self.run = None
            return
        before, self.run = training_call.run_of(self.run, told.call), self._run_like(told)
        if before is not None:
            is_behind = before.steps < told.steps
            self.run.measured = told.others.get(self.row_name, before.measured) if is_behind else before.measured

    # ------------------------------------------------------------------------------------ beside its work

    def heartbeat(self) -> Heartbeat:
        run = self.run
        if run is None or run.is_finished:
            return Heartbeat(step=-1, phase="between calls", at=self.around.now())
        phase = "training" if self.is_walking else "broken off"
        return Heartbeat(self.state.epoch, run.steps, phase, 0, self.copies.newest, self.around.now())

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        run = self.run
        if number <= self._last_hold[0]:
            return None
        self._last_hold = number, False
        if run is None or run.is_finished or not self.is_walking:
            return None
        step = run.steps + margin if at is None else at
        if run.steps >= step:
            return None
        run.proposed, run.agreed = step, Future()
        return step

    def resolve_hold(self, number: int, is_agreed: bool) -> None:
        if number == self._last_hold[0]:
            self._last_hold = number, is_agreed
            if self.run is not None and self.run.agreed is not None:
                self.run.agreed.set(is_agreed)

    def last_hold(self) -> tuple[int, bool]:
        return self._last_hold

    def leave_call(self, number: int) -> None:
        self.last_left = max(self.last_left, number)

    def capture_here(self) -> Capture:
        run = self.run
        return self.capture(None) if run is None or run.is_finished else self._capture_inside(run)

    def part_of_snapshot(self, number: int) -> Capture | None:
        return self.copies.part_of_snapshot(number)

    # ------------------------------------------------------------------------------------ calls

    def walk(self, call: int, num_steps: int | None, hold_at: int | None = None) -> Task:
        """Trains for so many steps; None for the rest of the pass."""
        self.copies.forget_call()
        self.run = None
        if self.around.joins_late and not self._has_joined:
            yield from self.around.point("begin", self)
            yield from self.connection.exchange("begin", self.name, lambda given: None)
            self._has_joined = True
        self.run = Run(call, num_steps, RankRows(self.row_name), hold_at=hold_at)
        return (yield from self._go_through(self.run))

    def walk_left(self, left: Left, call: int) -> Task:
        """Goes on with a pass whose call was left, to its end."""
        self.copies.forget_call()
        if self.run is not None and not self.run.is_finished and self.run.steps == left.steps:
            self.run = replace(self.run, call_number=call, hold_at=None)
            return (yield from self._go_through(self.run))
        first = Progress(
            left.steps, call, None, (), "", {}, {str(number): each for number, each in enumerate(left.lost)}
        )
        return (yield from self._go_through(self._go_on_from(first, left.measured)))

    def walk_on(self, call: int, num_steps: int | None, hold_at: int | None = None) -> Task:
        run = training_call.run_of(self.run, call)
        if run is None:
            return (yield from self.walk(call, num_steps, hold_at))
        if run.answer is not None:
            return self._with_lost(run)
        if run.is_finished:
            return self._finish(run)
        run.hold_at = hold_at
        if hold_at is not None and run.steps >= hold_at:
            return HeldAtStep(run.steps, self._capture_inside(run), is_planned=True)
        return (yield from self._go_through(run))

    def _go_through(self, run: Run) -> Task:
        self.is_walking = True
        if self.torn is not None:
            self.torn.open_call()
        try:
            while not self._has_no_step_left(run):
                yield from self._step(run)
                if self.copies.is_due(run.steps):
                    self.copies.keep(run.steps, self._capture_inside(run))
                if (yield from self._stops(run)):
                    return HeldAtStep(run.steps, self._capture_inside(run), run.steps == run.hold_at)
        except Exception:
            if self.torn is not None and self.connection.is_alone:
                self.torn.break_off(self.state.steps)
            raise
        finally:
            self.is_walking = False
        yield from self.around.point("last", self)
        return self._finish(run)

    def _has_no_step_left(self, run: Run) -> bool:
        if run.requested is not None:
            return run.steps >= run.requested
        return run.steps > 0 and self.state.consumed == 0

    def _finish(self, run: Run) -> Walked:
        run.is_finished, run.answer = True, Walked(self.state, run.steps, run.measured)
        return self._with_lost(run)

    def _with_lost(self, run: Run) -> Walked:
        assert run.answer is not None
        if self.world.rank:
            return run.answer
        return replace(run.answer, measured=together(run.answer.measured, *run.rows.lost.values()))

    def _stops(self, run: Run) -> Task:
        if run.steps == run.hold_at:
            return True
        if run.proposed is None or run.steps < run.proposed:
            return False
        agreed = run.agreed
        assert agreed is not None
        is_agreed = yield agreed
        run.proposed = run.agreed = None
        return bool(is_agreed)

    def _step(self, run: Run) -> Task:
        state = self.state
        own, consumed = self._next_part(state)
        measured = together(run.measured, (*[0] * state.epoch, own))
        yield from self.around.point("step", self)
        yield self.around.step_s()
        if self.torn is not None:
            self.torn.begin()
        name = (state.weights, state.noted, run.steps)
        given: Mapping[int, Given] = yield from self._tell(run, name, Given(state, own, self.row_name, measured))
        if self.torn is not None:
            self.torn.step(0)
            yield from self.around.point("half", self)
            yield from self._reduce((*name, "second half"), Given(state, own, self.row_name, measured))
            self.torn.step(1)
            self.torn.end()
        samples = [each.samples for each in given.values()]
        self.state = stepped(state, consumed, self.around.num_samples, samples)
        self.around.check_stepped(self)
        run.steps += 1
        run.measured = measured
        yield from self.around.point("stepped", self)

    def _tell(self, run: Run, name: tuple[Any, ...], own: Given) -> Task:
        """Tells all others: with the gradients, or in front of large ones, so that a step may break off in between."""
        comes_first = self.around.is_large
        told = yield from self._reduce((*name, "rows") if comes_first else name, own)
        run.rows.note(run.steps, {each.name: each.measured for each in told.values()})
        return (yield from self._reduce(name, own)) if comes_first else told

    def _next_part(self, state: State) -> tuple[int, int]:
        size, num_samples = self.world.size, self.around.num_samples
        batch_size = max(1, self.around.batch_size // size)
        return next_part(num_samples, state.consumed, batch_size, size, self.world.rank, state.epoch)

    def _reduce(self, name: Any, given: Given) -> Task:
        if self.is_poisoned and not self.connection.is_alone:
            self.connection.interrupt()

        def merge(all_given: Mapping[int, Given]) -> Mapping[int, Given]:
            self.around.check_step(self, all_given)
            return dict(all_given)

        return (yield from self.connection.exchange(("step", name), given, merge))


def stepped(state: State, consumed: int, num_samples: int, samples: Sequence[int]) -> State:
    """The state after a step in which the ranks used these samples."""
    used = list(state.used)
    used[state.epoch] += sum(samples)  # a sum, not a union: a sample that is used twice shows
    steps = state.steps + 1
    weights = hash((state.weights, tuple(samples), steps))
    if consumed < num_samples:
        return State(state.epoch, consumed, steps, weights, tuple(used), state.noted)
    return State(state.epoch + 1, 0, steps, weights, (*used, 0), state.noted)


def walk(replica: SimReplica, *args: Any) -> Task:
    return replica.walk(*args)


def walk_on(replica: SimReplica, *args: Any) -> Task:
    return replica.walk_on(*args)


def walk_left(replica: SimReplica, left: Left, call: int) -> Task:
    return replica.walk_left(left, call)


def walk_on_left(replica: SimReplica, left: Left, call: int) -> Task:
    has_begun = training_call.run_of(replica.run, call) is not None
    return replica.walk_on(call, None) if has_begun else replica.walk_left(left, call)


def note(replica: SimReplica, number: int) -> Task:
    """A call that changes the state, and that can only be begun again."""
    yield from replica.around.point("note", replica)
    yield 0.01
    replica.state = replica.state._replace(noted=(*replica.state.noted, number))
    yield from replica.around.point("noted", replica)
    return replica.state


def load(replica: SimReplica, state: State, own_state: Any) -> Task:
    """A call that brings a state that was saved."""
    yield from replica.around.point("load", replica)
    yield 0.01
    replica.restore(state, own_state)
    yield from replica.around.point("loaded", replica)


def look(replica: SimReplica) -> Task:
    """A call that changes nothing."""
    yield from replica.around.point("look", replica)
    yield 0.01
    return replica.state


def validate(replica: SimReplica, number: int, settings: Any, state: State, num_batches: int) -> Task:
    """A validation on a spare, which leaves it between two batches; returns the state that it had at the end."""
    replica.restore(state, None)
    for _ in range(num_batches):
        yield from replica.around.point("validate", replica)
        yield replica.around.step_s()
        if replica.last_left >= number:
            return None
    return replica.state
