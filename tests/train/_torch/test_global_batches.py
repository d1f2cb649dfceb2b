"""Global batches, and what ranks get of them; also the loader that yields them again.

Covers `raysgd.train._torch.loaders`: it has little to do without batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd.core.connections.torch import end_process_group
from raysgd.core.engine.shared.types import World
from raysgd.torch.parallel.strategy import DDP
from raysgd.train._torch.global_steps import GlobalSteps, step_only_where
from raysgd.train._torch.loaders import GlobalBatches, GlobalStream, RepeatingLoader, of_stream, over_global_batches
from raysgd.train._worker.membership import GroupPlace, Membership
from raysgd.train._worker.messages import Mailbox
from tests.streams.made import MadeStream


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def drawn(self) -> list[int]:
        return list(range(self.count))


def parts(batches: GlobalBatches, size: int, first: int = 0) -> list[list[list[int]]]:
    """What each rank gets."""
    found = []
    for rank in range(size):
        batches.open(first * batches.size, World(rank, size))
        found.append(list(batches))
    return found


def weights_of(batches: GlobalBatches | GlobalStream, size: int, first: int = 0) -> list[list[float]]:
    """How much each rank's part of each global batch counts."""
    plans = [batches.open(first * batches.size, World(rank, size)) for rank in range(size)]
    return [[share.plan.weight for _, share in plan.shares(rank)] for rank, plan in enumerate(plans)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_divide_each_global_batch_however_many_they_are(size: int) -> None:
    batches = GlobalBatches(Numbers(14), 6, drop_last=False)
    batches.draw()
    assert len(batches) == 3
    by_batch = zip(zip(*parts(batches, size), strict=True), zip(*weights_of(batches, size), strict=True), strict=True)
    for number, (joint, weights) in enumerate(by_batch):
        counted = [each for weight, part in zip(weights, joint, strict=True) if weight for each in part]
        assert sorted(counted) == list(range(14))[number * 6 : (number + 1) * 6]
        assert sum(weights) == pytest.approx(size)


def test_a_rank_without_a_sample_gets_one_that_does_not_count() -> None:
    batches = GlobalBatches(Numbers(7), 6, drop_last=False)
    batches.draw()
    assert [part[-1] for part in parts(batches, 2)] == [[6], [6]]
    assert weights_of(batches, 2, first=1) == [[2.0], [0.0]]


def test_a_last_global_batch_that_is_too_small_may_be_left_out() -> None:
    batches = GlobalBatches(Numbers(7), 6, drop_last=True)
    batches.draw()
    assert len(batches) == 1
    assert parts(batches, 3) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_ranks_with_one_sample_each_keep_it() -> None:
    batches = GlobalBatches(Numbers(4), 2, drop_last=False)
    batches.draw()
    assert parts(batches, 2) == [[[0], [2]], [[1], [3]]]


class Steps:
    """Takes steps on batches; some fail, after which the group is another one.

    Args:
        failing: The numbers of the batches that fail, counted as they come.
    """

    def __init__(self, *failing: int, outcome: Callable[[int], str] = lambda number: "done") -> None:
        self.failing, self.outcome = failing, outcome
        self.place = GroupPlace(0, World(0, 2))
        self.num = 0
        self.weights: list[float] = []
        self.is_uneven = self.admits = False

    def number(self, loader: Any) -> None:
        """Takes no note of it."""

    def admit(self) -> None:
        self.admits = True

    def enter(self, takes_steps: bool = True) -> GroupPlace:
        return self.place

    def open_batch(self, place: GroupPlace, weight: float, has_trained: bool, at: int) -> int:
        self.weights.append(weight)
        self.num += 1
        return self.num - 1

    def close_batch(self, mark: int) -> str:
        if mark not in self.failing:
            return self.outcome(mark)
        self.place = GroupPlace(self.place.number + 1, World(0, 1))
        return "failed"

    def leave_batch(self, mark: int) -> bool:
        return True

    def note_unstepped(self) -> None:
        self.is_uneven = True


def loader_of(steps: Steps, num_workers: int = 0) -> RepeatingLoader:
    made = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=num_workers)
    return RepeatingLoader(over_global_batches(made, World(0, 2), None), cast(GlobalSteps, steps))


def seen(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_failed_comes_again_divided_over_those_that_are_left(num_workers: int) -> None:
    steps = Steps(1)
    loader = loader_of(steps, num_workers)
    assert len(loader) == 2
    assert seen(loader) == [[0, 1], [4, 5], [4, 5, 6, 7]]
    assert seen(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert steps.weights == [1.0] * 5
    assert not steps.is_uneven


def test_the_first_batch_can_fail_and_one_can_fail_twice() -> None:
    assert seen(loader_of(Steps(0, 1))) == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("make", "num_passes"), [("samples", 3), ("a stream", 1)])
def test_a_pass_that_is_left_counts_unless_the_next_one_goes_on_with_the_rest(make: str, num_passes: int) -> None:
    steps: Any = Steps()
    loader = loader_of(steps) if make == "samples" else RepeatingLoader(cast(Any, stream_of(World(0, 2))), steps)
    for _ in range(3):
        for number, _batch in enumerate(loader, start=1):
            if number == 1 + (make == "a stream"):
                break
    assert loader.epoch == num_passes
    assert not loader.is_open


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


class Alone:
    """Steps of a function on the only rank of a group, for its loaders."""

    def __init__(self, num_ranks: int) -> None:
        self.membership = Membership(World(num_ranks - 1, num_ranks), Mailbox(int))
        self.iteration = 0
        self.steps = GlobalSteps(cast(Any, self))
        self.steps._is_checked = True  # what checks leaves a hook on all optimizers of the process
        self.model = self.steps.wrap(torch.nn.Linear(1, 1), None, {})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps.guard(self.optimizer)

    def loader(self, num_samples: int = 8) -> RepeatingLoader:
        data = DataLoader(TensorDataset(torch.ones(num_samples, 1)), batch_size=2)
        return RepeatingLoader(over_global_batches(data, self.membership.place.world, None), self.steps)

    def step(self, batch: Any) -> None:
        self.model(batch[0]).sum().backward()
        self.optimizer.step()


def test_two_batches_for_one_step_are_refused(process_group: None) -> None:
    alone = Alone(1)
    with pytest.raises(ValueError, match=r"a second batch was drawn.*StackDataset\(first, second\)"):
        next(zip(alone.loader(), alone.loader(), strict=True))


def test_loaders_may_take_turns_and_passes_be_left(process_group: None) -> None:
    alone = Alone(1)
    first, second = alone.loader(), alone.loader()
    next(iter(first))  # a look at the data
    for number, batch in enumerate(first):
        if number == 1:
            break
        alone.step(batch)
    others = iter(second)
    for batch in first:
        alone.step(batch)
        alone.step(next(others))
    assert alone.membership.num_done == 9
    assert first.epoch == 2


@pytest.mark.parametrize("decays", ["", "before the exchange", "behind the step"])
@pytest.mark.parametrize("fails_in", [0, 1, 3])
def test_what_user_code_does_to_weights_in_a_batch_that_failed_is_undone(
    process_group: None, decays: str, fails_in: int
) -> None:
    def weight(fails: bool) -> float:
        torch.manual_seed(0)
        alone = Alone(1)
        for number, (samples,) in enumerate(alone.loader()):
            if fails and number == fails_in:
                alone.membership.fail()
            for place in ("before the exchange", "behind the step"):
                if place == decays:
                    alone.model.module.weight.data.mul_(0.5)
                if place == "before the exchange":
                    alone.optimizer.zero_grad()
                    alone.step([samples])
        assert alone.membership.num_done == 4
        return alone.model.module.weight.item()

    assert weight(fails=True) == weight(fails=False)


def test_a_pass_with_gradients_and_no_steps_has_no_sample_twice(process_group: None) -> None:
    alone = Alone(2)
    assert len(seen(alone.loader(4))) == 1
    with pytest.raises(ValueError, match=r"Evaluate under `torch.no_grad\(\)`"):
        seen(alone.loader(5))


class Pair(DDP):
    """A group of two ranks; the other one adds what it is told to."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.other = torch.tensor(numbers, dtype=torch.float64)

    def all_sum(self, tensor: torch.Tensor) -> None:
        tensor += self.other


@pytest.mark.parametrize(
    ("numbers", "flaw"),
    [
        ((0.1, 1.0, 3.0, 0.0), None),
        ((math.nan, 0.0, 3.0, 0.0), "not all workers take this step"),
        ((0.1, 2.0, 3.0, 0.0), "not all workers take this step"),
        ((0.1, 1.0, 4.0, 0.0), "not all workers take this step"),
        ((0.2, 1.0, 3.0, 0.0), "the learning rates of the workers differ: give schedulers to `prepare_state`"),
    ],
    ids=["alike", "alone", "another number of steps", "another batch", "another rate"],
)
def test_ranks_that_do_not_do_alike_do_not_step(
    process_group: None, numbers: tuple[float, float, float, float], flaw: str | None
) -> None:
    alone = Alone(2)
    alone.steps._parallel = Pair(*numbers)
    alone.steps.open_batch(alone.membership.place, 1.0, has_trained=True, at=3)
    alone.steps._num_steps = 1
    assert (alone.steps._compared(0.1) is None) == (flaw is None)
    assert alone.membership.flaw == flaw


def test_a_pass_without_gradients_has_no_sample_twice() -> None:
    made = over_global_batches(DataLoader(TensorDataset(torch.arange(5)), batch_size=2), World(1, 2), None)
    steps = Steps()
    steps.place = GroupPlace(0, World(1, 2))
    loader = RepeatingLoader(made, cast(GlobalSteps, steps))
    with torch.no_grad():
        assert seen(loader) == [[2, 3]]
    assert steps.num == 0
    assert seen(loader) == [[2, 3], [4]]
    assert steps.weights == [1.0, 0.0]


def test_a_pass_in_which_only_some_batches_have_a_step_is_noted() -> None:
    steps = Steps(outcome=lambda number: "done" if number else "seen")
    seen(loader_of(steps))
    assert steps.is_uneven


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a loader with batches"):
        over_global_batches(DataLoader(TensorDataset(torch.arange(8)), batch_size=None), World(0, 2), None)


def test_a_loader_counts_its_passes_with_steps_and_another_one_goes_on_where_it_is() -> None:
    steps = Steps()
    loader, other = loader_of(steps), loader_of(steps)
    assert not steps.admits
    assert loader.epoch == 0
    assert steps.admits
    seen(loader)
    with torch.no_grad():
        seen(loader)
    assert loader.epoch == 1
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    batches = iter(loader)
    next(batches), next(batches)
    position = loader.position()
    assert position == {"epoch": 1, "order": 1, "size": 4, "consumed": 4, "is_open": True}
    other.take_over(position | {"size": 2})
    assert (other.epoch, other.position()["consumed"], len(other)) == (1, 4, 4)
    other.epoch = 5
    assert (other.epoch, loader.epoch) == (5, 1)


def stream_of(world: World) -> GlobalStream:
    stream = MadeStream([7, 7]).map(lambda row: np.int64(7 * int(row[0].removeprefix("shard-")) + row[1])).batch(4)
    joint: Any = of_stream(stream, world, exact=True, goes_on=True)
    assert isinstance(joint, GlobalStream)
    return joint


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_divide_each_global_batch_of_a_stream(size: int) -> None:
    found: list[list[list[int]]] = []
    for rank in range(size):
        stream = stream_of(World(rank, size))
        assert len(stream) == 4
        stream.open(stream.size, World(rank, size))
        found.append([batch.tolist() for batch in stream])
    seen: list[int] = []
    weights_by_batch = zip(*weights_of(stream, size, first=1), strict=True)
    for joint, weights in zip(zip(*found, strict=True), weights_by_batch, strict=True):
        seen += [each for weight, part in zip(weights, joint, strict=True) if weight for each in part]
        assert sum(weights) == pytest.approx(size)
    assert len(seen) == len({*seen}) == 10


def test_a_stream_goes_on_from_any_position_and_its_epochs_follow_each_other() -> None:
    def loader() -> RepeatingLoader:
        return RepeatingLoader(cast(Any, stream_of(World(0, 2))), cast(GlobalSteps, Steps(1)))

    first, rest = loader(), loader()
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(3)]
    assert [len(batch) for batch in begun] == [2, 2, 4]  # the second one failed, and came again on one rank
    state = first.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 8)
    rest.load_state_dict(state)
    epochs = [[batch.tolist() for batch in rest] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [2, 2, 2]
    assert (rest.state_dict()["epoch"], rest.state_dict()["consumed"], rest.epoch) == (2, 0, 2)
    assert sorted(each for batch in epochs[1] for each in batch) == list(range(14))
    newcomer = loader()
    batches = iter(rest)
    next(batches)
    newcomer.take_over(rest.position())
    assert (newcomer.state_dict()["epoch"], newcomer.state_dict()["consumed"], newcomer.epoch) == (2, 0, 2)


def test_an_optimizer_steps_only_where_that_counts_also_behind_a_scheduler_and_for_hooks() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer, counts, seen = torch.optim.SGD([weight], lr=1.0), [False], []
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
    step_only_where(optimizer, lambda closure: counts[0])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.item()))
    weight.grad = torch.ones(())
    optimizer.step()
    assert (weight.item(), seen) == (0.0, [])
    counts[0] = True
    optimizer.step()
    optimizer.step(lambda: torch.ones(()))
    assert (weight.item(), seen) == (-2.0, [-1.0, -2.0])
