"""Functions that go on over losses, simulated: what decides there is the real thing, and a seed says where ranks die.

Memberships, mailboxes, sessions, replicas, steps, loaders, the run in the driver and the engine's pure decisions are
real. Exchanges, processes and the calls of the engine are simulated, with threads instead of processes. So a seed gives
the same deaths each time, but not the same order of everything else.

After a run: each sample was used once in each pass, all ranks have the same weights, each report came once and in
order, ranks that lived kept theirs where they could, and no one waits for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd.core.engine import policies
from raysgd.core.engine.policies import RetryBudget, choose_source, takers
from raysgd.core.engine.shared.types import HeldAtStep, StateHandover, World
from raysgd.train._function_run import FunctionRun
from raysgd.train._torch import global_steps
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._torch.loaders import DrawnSampler, RepeatingLoader, over_global_batches
from raysgd.train._worker import function_replica, membership
from raysgd.train._worker.function_replica import FunctionReplica, FunctionReplicas, Session
from raysgd.train._worker.messages import FunctionSpec

NUM_SAMPLES, JOINT, NUM_EPOCHS, RATE = 22, 6, 3, 0.5
_HANGS_S = 8.0
_here = threading.local()


class Died(BaseException):
    """A rank is dead: nothing more happens in it."""


class Broken(Exception):
    """An invariant."""


class Ended(int):
    """The exchanges of a dead rank: none, also after its thread has ended the one that it was in."""

    def __sub__(self, other: int) -> Ended:
        return self


@dataclass(eq=False)
class Exchanges:
    """The connections of one group."""

    size: int
    is_broken: bool = False
    rounds: list[dict[int, tuple[str, Any]]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def exchange(self, rank: int, name: str, given: Any, sim: Simulation) -> list[Any]:
        """What all ranks give, by rank. Where it breaks, some may have it all and others not."""
        with self.changed:
            number = self.counts[rank] = self.counts.get(rank, -1) + 1
            while len(self.rounds) <= number:
                self.rounds.append({})
            found = self.rounds[number]
            found[rank] = name, given
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(found) == self.size or self.is_broken)
            if len({each for each, _ in found.values()}) > 1:
                sim.note_broken(f"ranks exchange different things: {found}")
            if len(found) < self.size or (self.is_broken and sim.chance(0.5)):
                raise dist.DistNetworkError("connection closed by peer")
            return [found[each][1] for each in range(self.size)]

    def end(self) -> None:
        with self.changed:
            self.is_broken = True
            self.changed.notify_all()


class Rank:
    """A worker process.

    Attributes:
        places: The ranks that it has had.
    """

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.number = sim, number
        self.is_dead = False
        self.world = World(0, 1)
        self.exchanges = Exchanges(1)
        self.replica: FunctionReplica = cast(FunctionReplica, None)
        self.places: list[int] = []

    def here(self, call: Callable[[], Any]) -> Any:
        """Calls something in this process."""
        _here.rank = self
        return call()

    def join(self, world: World, exchanges: Exchanges) -> None:
        self.world, self.exchanges = world, exchanges
        self.places.append(world.rank)

    def exchange(self, name: str, given: Any) -> list[Any]:
        self.sim.point(self)
        try:
            found = self.exchanges.exchange(self.world.rank, name, given, self.sim)
        finally:
            if self.is_dead:
                raise Died
        self.sim.point(self)
        return found

    def die(self) -> None:
        self.is_dead = True
        self.exchanges.end()
        session = self.replica._session if self.replica is not None else None
        if session is not None:
            session.mailbox.break_off(Died())
            membership = session.membership
            if membership is not None:  # nothing of it goes on, so nothing waits for it
                with membership._changed:
                    membership._num_in_use = Ended()
                    membership._changed.notify_all()

    def end(self) -> bool:
        """Ends the function of this dead rank where it waits, so that no thread is left; returns whether it ended."""
        session = self.replica._session if self.replica is not None else None
        if session is None:
            return True
        if session.membership is not None:
            with session.membership._changed:
                session.membership.is_usable = session.membership._is_placed = True
                session.membership._verdict = False
                session.membership._changed.notify_all()
        return session.mailbox.cancel(_HANGS_S)

    # ------------------------------------------------------------------------- what stands for PyTorch's distributed

    def all_sum(self, numbers: torch.Tensor) -> None:
        numbers.copy_(torch.stack(self.exchange(f"sum of {len(numbers)}", numbers.clone())).sum(0))

    def reform(self) -> None:
        """Nothing: there are no wrappers."""

    def left_out_of(self, model: torch.nn.Module) -> tuple[str, ...]:
        return ()


def _all_reduce(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    gradients = bucket.buffer()
    try:
        future.set_result(torch.stack(_here.rank.exchange("gradients", gradients.clone())).mean(0))
    except Died:
        raise
    except Exception as error:
        future.set_exception(error)
    return future


def _send(state: Any, to: Sequence[int], device: Any) -> None:
    _here.rank.sim.hand(_here.rank.exchanges, state)


def _receive(source: int, to: Sequence[int], device: Any) -> Any:
    return _here.rank.sim.handed(_here.rank)


class Wrapped(torch.nn.Module):
    """Stands for `DistributedDataParallel`, around one weight for each sample."""

    reducer = SimpleNamespace(_rebuild_buckets=int)

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ParameterList([torch.zeros(NUM_SAMPLES, dtype=torch.float64)])


def _shuffled(batch_size: int) -> DataLoader[Any]:
    """A loader whose order comes from no generator of the process, which its other ranks draw from as well."""
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    return DataLoader(data, batch_size=batch_size, shuffle=True, generator=torch.Generator())


def train(rank: Rank, session: Session) -> list[list[float]]:
    """The user's function."""
    sim = rank.sim
    world = session.world
    steps = GlobalSteps(cast(Any, session))
    steps._parallel, steps._is_checked = cast(Any, rank), True
    steps._comparisons = cast(Any, SimpleNamespace(is_due=True, note_call=lambda *_: None))  # without a clock
    loader = RepeatingLoader(
        over_global_batches(_shuffled(JOINT // world.size), world, 5),
        steps,
    )
    models = [Wrapped() for _ in range(sim.num_steps)]
    steps._models = cast(Any, models)
    steps.share(*models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    for optimizer in optimizers:
        steps.guard(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1.0)
    steps.share(scheduler)
    failed, number = 0, 0
    while loader.epoch < NUM_EPOCHS:
        cast(Any, loader.sampler).set_epoch(loader.epoch)
        for (indices,) in loader:
            for model, optimizer in zip(models, optimizers, strict=True):
                sim.point(rank)
                [weights] = model.parameters()
                weights.grad = torch.zeros_like(weights)
                weights.grad[indices] = 1 / len(indices)
                weights.grad = steps.average(
                    cast(Any, SimpleNamespace(buffer=partial(getattr, weights, "grad"), is_last=lambda: True))
                ).wait()
                optimizer.step()
            sim.point(rank)
            if session.is_repeating:
                failed += 1
            else:
                number += 1
                scheduler.step()
            session.report({"at": (loader._epoch, scheduler.last_epoch)})
            sim.point(rank)
        session.report({"at": (loader.epoch, 0)})
        sim.point(rank)
    return [parameter.tolist() for model in models for parameter in model.parameters()]


def _make_session(world: World, spec: Any, checkpoint: Any, shard: Any, pending: Any) -> Session:
    session = Session(world, spec, checkpoint, shard, pending)
    rank = _here.rank
    session._run = lambda: rank.here(partial(train, rank, session))  # type: ignore[method-assign]
    session.mailbox._function = session._run
    return session


class Standby:
    """Those that wait to step in."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.ready: list[Rank] = []

    def kill_all(self) -> None:
        for rank in self.ready:
            rank.die()
        self.ready = []


class Simulation:
    """One run of a function, over the losses that a seed says. Stands for the controller and for the group.

    Args:
        seed: Decides.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.most = self.max_workers = self.rng.choice([2, 3, 3])
        self.controller = self.checkpoints = self
        self.budget = RetryBudget(float("inf"))
        self.num_spares = self.rng.choice([0, 1, 1])
        self.num_steps = self.rng.choice([1, 2])  # of optimizers in a batch
        self.deaths = {self.rng.randrange(10, 400) for _ in range(self.rng.choice([1, 2, 3]))}
        self._lock = threading.Lock()
        self._num_points = 0
        self._ranks: list[Rank] = []
        self.broken: str | None = None
        self.members: list[Rank] = []
        self.standby = Standby(self)
        self.num_started = self.num_changes = 0
        self.joined: dict[Rank, int] = {}
        self.replicas = FunctionReplicas()
        self.states: dict[Exchanges, Any] = {}
        self.group = self
        self.reports: list[Any] = []
        self.function_run: FunctionRun = cast(FunctionRun, None)
        self.may_lack = False  # reports that all who made them have taken with them

    # ------------------------------------------------------------------------------------------------ what befalls it

    def chance(self, share: float) -> bool:
        with self._lock:
            return self.rng.random() < share

    def note_broken(self, words: str) -> None:
        self.broken = self.broken or words

    def point(self, rank: Rank) -> None:
        """A place where a rank may die."""
        if rank.is_dead:
            raise Died
        with self._lock:
            self._num_points += 1
            is_last = self._num_points in self.deaths
        if is_last and len([each for each in self.members if not each.is_dead]) > 1:
            rank.die()
            raise Died

    def hand(self, exchanges: Exchanges, state: Any) -> None:
        with exchanges.changed:
            copied = {**state, "parts": [_copied(part) for part in state["parts"]]}
            self.states[exchanges] = copied
            exchanges.changed.notify_all()

    def handed(self, rank: Rank) -> Any:
        exchanges = rank.exchanges
        with exchanges.changed:
            exchanges.changed.wait_for(lambda: exchanges in self.states or exchanges.is_broken)
            if exchanges not in self.states:
                raise dist.DistNetworkError("connection closed by peer")
            return self.states[exchanges]

    # ----------------------------------------------------------------------------- what the run sees: hooks and group

    resize_interval_s = 0.0

    @property
    def infos(self) -> list[Rank]:
        return self.members

    def check_free(self) -> None: ...

    def decode(self, data: Any) -> Any:
        return data

    def on_training_start(self) -> None: ...

    def share(self, value: Any) -> list[Any]:
        return [value]

    # ----------------------------------------------------------------------------------------------- the controller

    @property
    def num_workers(self) -> int:
        return len(self.members)

    def ensure_group(self) -> Simulation:
        return self

    def kill_group(self) -> None:
        for rank in self.members:
            rank.die()
        self.members = []

    def admits_others(self) -> bool:
        progress = [rank.replica.replica_progress() for rank in self.members]
        return all(each.admits and not each.obstacle for each in progress)

    def stand_by(self) -> None:
        missing = self.most - len(self.members) + self.num_spares - len(self.standby.ready)
        for _ in range(missing):
            rank = self._new_rank()
            rank.replica = self.replicas(World(0, 1))
            if self._in_each([rank], lambda each: each.replica.warm_up())[0][1] is None:
                self.standby.ready.append(rank)

    def _new_rank(self) -> Rank:
        self._ranks.append(Rank(self, len(self._ranks) + 1))
        return self._ranks[-1]

    def _start_group(self) -> None:
        self.standby.kill_all()
        self.replicas.start = ()
        self.kill_group()
        self.members = [self._new_rank() for _ in range(self.most)]
        exchanges = Exchanges(self.most)
        for number, rank in enumerate(self.members):
            rank.join(World(number, self.most), exchanges)
            rank.replica = self.replicas(rank.world)
        self.num_started += 1

    def _in_each(self, ranks: Sequence[Rank], call: Callable[[Rank], Any]) -> list[tuple[Any, BaseException | None]]:
        """Calls something in each process at the same time; returns what came of it."""
        found: dict[Rank, tuple[Any, BaseException | None]] = {}

        def run(rank: Rank) -> None:
            try:
                found[rank] = rank.here(partial(call, rank)), None
            except BaseException as error:
                found[rank] = None, Died() if rank.is_dead else error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _HANGS_S
        while any(thread.is_alive() for thread in threads):
            if any(error is not None for _, error in list(found.values())):
                self._free(ranks)
            if time.monotonic() > deadline:
                raise Broken("ranks wait for ever")
            threads[0 if threads[0].is_alive() else -1].join(0.002)
        return [found[rank] for rank in ranks]

    def _free(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.exchanges.end()
            session = rank.replica._session
            if session is not None and session.membership is not None and not rank.is_dead:
                session.membership.note_broken(dist.DistNetworkError("the group is formed again"))

    def run(self, call: Any, budget: RetryBudget) -> list[Any]:
        while True:
            if not self.members:
                self._start_group()
            if self.standby.ready and len(self.members) < self.most and self.admits_others():
                for rank in self.members:
                    rank.replica.hold()
            members = self.members
            arguments = dict(zip(members, call.args_for([rank.world for rank in members]), strict=True))
            answers = self._in_each(members, partial(_call, call.function, arguments))
            wrong = [error for _, error in answers if error is not None and not _is_failure(error)]
            if wrong:
                raise wrong[0]
            if all(error is None and not isinstance(value, HeldAtStep) for value, error in answers):
                return [value for value, _ in answers]
            self._continue_in_place()

    def _continue_in_place(self) -> None:
        """Does what the engine does to form another group in place, or drops this one."""
        staying, first = [rank for rank in self.members if not rank.is_dead], {*self.members}
        while True:
            progress = []
            for rank in staying:
                rank.exchanges.end()
                session = rank.replica._session
                if session is not None and session.membership is not None:
                    session.membership.leave()
                progress.append(rank.replica.replica_progress())
            if any(rank.is_dead for rank in staying):
                staying = [rank for rank in staying if not rank.is_dead]
                continue
            source = choose_source(progress)
            if source is None:
                self.kill_group()
                return
            admits = all(each.admits for each in progress)
            joining = [
                self.standby.ready.pop() for _ in range(self.most - len(staying)) if admits and self.standby.ready
            ]
            before = [self.members.index(rank) for rank in staying]
            places = policies.next_ranks(before, len(staying) + len(joining))
            members = [*staying, *joining]
            self.members = [members[index] for index in sorted(range(len(members)), key=places.__getitem__)]
            self._check_places(before, staying)
            behind = [places[index] for index in takers(progress, source)] + places[len(staying) :]
            handover = StateHandover(places[source], tuple(behind))
            exchanges = Exchanges(len(self.members))
            for number, rank in enumerate(self.members):
                rank.join(World(number, len(self.members)), exchanges)
            if self.chance(0.1) and len(self.members) > 1:
                self.rng.choice(self.members).die()
            answers = self._in_each(self.members, partial(_regroup, handover))
            if not any(rank.is_dead for rank in self.members):
                errors = [error for _, error in answers if error is not None]
                if errors:
                    raise Broken(f"no group can be formed: {errors[0]!r}")
                self.num_changes += 1
                self.may_lack |= not self.function_run._queues._met.intersection(self.members)
                self.joined |= {rank: self.num_changes for rank in self.members if rank not in first}
                return
            staying = [rank for rank in self.members if not rank.is_dead]

    def _check_places(self, before: Sequence[int], staying: Sequence[Rank]) -> None:
        for number, rank in zip(before, staying, strict=True):
            if number < len(self.members) and self.members[number] is not rank:
                raise Broken(f"rank {number} has another rank")

    # ----------------------------------------------------------------------------------------------- from outside

    def play(self) -> str | None:
        """Runs the function to its end; returns what broke, or None."""
        spec = FunctionSpec(int, dict, "score", make_session=_make_session, is_elastic=True)
        run = self.function_run = FunctionRun(cast(Any, self), spec)
        returned: list[Any] = []
        attempt = 0
        try:
            run.start()
            while (found := run.next_reports()) is not None:
                if self.num_started != attempt:
                    attempt, self.reports = self.num_started, []
                at = {each["at"] for each in found}
                if len(at) > 1:
                    raise Broken(f"one report is several: {at}")
                self.reports += at
            returned = run.returned or []
        except Broken as error:
            self.note_broken(str(error))
        except Exception as error:
            self.note_broken(f"{type(error).__name__}: {error}")
        finally:
            self.standby.kill_all()
            self.kill_group()
            if not all([rank.end() for rank in self._ranks]):
                self.note_broken("a function does not end")
        if self.broken is None:
            self._check_end(returned)
        return self.broken

    # what `FunctionRun` asks of checkpoints, of which there are none
    restart_point: Any = None
    next_index = 0

    def begin_attempt(self) -> None: ...

    def flush(self) -> None: ...

    def _check_end(self, returned: Sequence[list[list[float]]]) -> None:
        num_steps = -(-NUM_SAMPLES // JOINT)
        last = NUM_SAMPLES - (num_steps - 1) * JOINT
        order = RepeatingLoader(_whole(), cast(Any, SimpleNamespace(number=lambda loader: None)))
        expected = torch.zeros(NUM_SAMPLES, dtype=torch.float64)
        for epoch in range(NUM_EPOCHS):
            cast(Any, order.sampler).set_epoch(epoch)
            drawn = list(cast(Any, order.sampler).drawn())
            for number in range(num_steps):
                size = JOINT if number < num_steps - 1 else last
                expected[drawn[number * JOINT : number * JOINT + size]] -= RATE / size
        for found in (each for weights in returned for each in weights):
            if not torch.allclose(torch.tensor(found, dtype=torch.float64), expected, atol=1e-9):
                off = (torch.tensor(found, dtype=torch.float64) / expected).tolist()
                self.note_broken(f"the weights are those of an undisturbed run times {off}")
        steps = [(epoch, epoch * num_steps + step) for epoch in range(NUM_EPOCHS) for step in range(1, num_steps + 1)]
        told = [at for epoch in range(NUM_EPOCHS) for at in [*steps[epoch * num_steps :][:num_steps], (epoch + 1, 0)]]
        if self.may_lack and len({*self.reports}) == len(self.reports):
            told = [at for at in told if at in self.reports]
        if self.reports != told:
            self.note_broken(f"reports are {self.reports} instead of {told}")


def _whole() -> DataLoader[Any]:
    return over_global_batches(_shuffled(JOINT), World(0, 1), 5)


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(each) for each in state] if isinstance(state, list) else state


def _call(function: Callable[..., Any], arguments: dict[Rank, Any], rank: Rank) -> Any:
    return function(rank.replica, *arguments[rank])


def _regroup(handover: StateHandover, rank: Rank) -> None:
    rank.replica.regroup(rank.world, handover)


_drawing, _really_drawn = threading.Lock(), DrawnSampler.drawn


def _drawn(sampler: DrawnSampler) -> Any:
    """The samples of a pass, for one rank after the other: they share PyTorch's random numbers."""
    with _drawing:
        return _really_drawn(sampler)


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, Died | dist.DistNetworkError)


def play(seed: int) -> str | None:
    """Plays the schedule of a seed; returns what broke, or None."""
    fakes: Any = SimpleNamespace(send=_send, receive=_receive)
    with ExitStack() as stack:
        for owner, name, value in (
            (global_steps, "handover", fakes),
            (global_steps, "allreduce_hook", _all_reduce),
            (global_steps, "dist", SimpleNamespace(group=dist.group, DistNetworkError=dist.DistNetworkError)),
            (DrawnSampler, "drawn", _drawn),
            # The session of a process: here are many processes in one, and some of their functions never end.
            (function_replica, "open_session", lambda session: None),
            (function_replica, "close_session", lambda session: None),
            (membership, "_REST_S", 0.02),
            (membership, "_FIRST_BATCH_S", _HANGS_S / 2),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        return Simulation(seed).play()


def first_broken(seeds: Iterator[int] | range) -> tuple[int, str] | None:
    """The first of these seeds whose schedule breaks something, with what."""
    return next(((seed, words) for seed in seeds if (words := play(seed)) is not None), None)


if __name__ == "__main__":
    import sys

    threading.excepthook = lambda args: None
    began = time.monotonic()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        words = play(seed)
        if words is not None:
            print(seed, words)
    print(f"{time.monotonic() - began:.1f} s")
