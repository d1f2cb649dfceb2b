"""The order of a pass: the same on every rank, and nobody else's randomness is touched."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Sampler, WeightedRandomSampler

from raysgd.torch.data.sample_order import Permutation, SampleOrder, SamplerOrder, SequentialOrder, ShuffledOrder
from raysgd.torch.data.sampling import ElasticBatchSampler
from tests.torch.samplers import Epochs, EveryGlobalSource


def test_the_default_device_does_not_matter_to_a_shuffle() -> None:
    expected = list(ShuffledOrder(9).indices(seed=3, pass_index=0))
    with torch.device("meta"):
        assert list(ShuffledOrder(9).indices(seed=3, pass_index=0)) == expected


@pytest.mark.parametrize("order", [SequentialOrder(0), ShuffledOrder(0), SamplerOrder([])])
def test_an_empty_dataset_has_an_empty_order(order: SampleOrder) -> None:
    assert order.num_samples == 0
    assert list(order.indices(seed=0, pass_index=0)) == []


class OwnSource(Sampler[int]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(1000, (10,), generator=self.generator).tolist())

    def __len__(self) -> int:
        return 10


def numpy_state(source: Any) -> list[Any]:
    state = source.get_state(legacy=False)
    return [state["state"]["key"].tolist(), state["state"]["pos"]]


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state(numpy.random), torch.initial_seed()]


@pytest.mark.parametrize("sampler_class", [EveryGlobalSource, OwnSource])
def test_what_a_sampler_draws_depends_on_seed_and_pass_alone(sampler_class: type[Any]) -> None:
    here, elsewhere = SamplerOrder(sampler_class()), SamplerOrder(sampler_class())
    first = list(here.indices(seed=1, pass_index=0))
    torch.rand(1), random.random(), numpy.random.rand()
    assert list(here.indices(seed=1, pass_index=1)) != first
    assert len({tuple(list(here.indices(seed, 0))) for seed in (1, 2, 0, -1, 2**64 - 1)}) == 5
    assert list(elsewhere.indices(seed=1, pass_index=0)) == first


def test_drawing_an_order_leaves_all_random_state_as_it_was() -> None:
    sampler = OwnSource()
    outside, inside = global_states(), sampler.generator.get_state().tolist()
    for order in (SamplerOrder(EveryGlobalSource()), SamplerOrder(sampler)):
        order.indices(seed=1, pass_index=0)
    assert global_states() == outside
    assert sampler.generator.get_state().tolist() == inside


def test_a_samplers_generator_keeps_the_seed_its_user_gave() -> None:
    generator = torch.Generator().manual_seed(123)
    expected = torch.Generator().manual_seed(123).get_state()
    SamplerOrder(WeightedRandomSampler([0.5, 0.5], 4, generator=generator)).indices(seed=9, pass_index=3)
    assert generator.initial_seed() == 123
    assert torch.equal(generator.get_state(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_sampler_that_draws_on_the_gpu_is_seeded_and_restored_too() -> None:
    def draw() -> list[int]:
        sampler = WeightedRandomSampler(torch.ones(50, device="cuda"), 20)  # type: ignore[arg-type]
        return list(SamplerOrder(sampler).indices(seed=1, pass_index=0))

    torch.rand(1, device="cuda")
    outside = torch.cuda.get_rng_state()
    first = draw()
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    torch.rand(1, device="cuda")
    assert draw() == first


class FailsAfterDrawing(EveryGlobalSource):
    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(super().__iter__(), 3)
        raise LookupError("no such sample")


def test_random_state_is_restored_when_the_sampler_fails() -> None:
    outside = global_states()
    with pytest.raises(LookupError, match="no such sample"):
        SamplerOrder(FailsAfterDrawing()).indices(seed=1, pass_index=0)
    assert global_states() == outside


def test_a_sampler_is_told_the_pass() -> None:
    order = SamplerOrder(Epochs())
    assert [list(order.indices(seed=0, pass_index=index)) for index in (0, 1)] == [[0, 1, 2, 3], [1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([numpy.int64(3), torch.tensor(1), 2], [3, 1, 2]),
        (["a", "b"], ["a", "b"]),
        ([(0, 32), (1, 64)], [(0, 32), (1, 64)]),
        ([2**70, 1], [2**70, 1]),
    ],
)
def test_a_sampler_may_draw_whatever_its_dataset_takes(drawn: list[Any], expected: list[Any]) -> None:
    assert list(SamplerOrder(drawn).indices(seed=0, pass_index=0)) == expected


class Announces(Sampler[int]):
    """Draws 0, 1, 2, ...: `drawn` of them, or without end."""

    def __init__(self, announced: int, drawn: int | None) -> None:
        self.announced = announced
        self.drawn = drawn

    def __iter__(self) -> Iterator[int]:
        return iter(itertools.count()) if self.drawn is None else iter(range(self.drawn))

    def __len__(self) -> int:
        return self.announced


@pytest.mark.parametrize("drawn", [6, None])
def test_a_sampler_that_draws_more_than_it_announces_is_refused(drawn: int | None) -> None:
    with pytest.raises(ValueError, match=r"`Announces` draws more than the 5 samples"):
        SamplerOrder(Announces(5, drawn)).indices(seed=0, pass_index=0)


def test_a_sampler_that_draws_tensors_of_indices_can_be_compared_with_itself() -> None:
    assert SamplerOrder([torch.tensor([0, 1]), torch.tensor([2, 3])]).is_repeatable(0)


def test_a_sampler_that_draws_less_than_it_announces_makes_a_shorter_pass() -> None:
    sampler = ElasticBatchSampler(SamplerOrder(Announces(9, 5)), 2, False, True, rank=0, world_size=1)
    assert len(sampler) == 5
    assert sampler.plan_pass(0, seed=0).num_samples == 5
    assert list(sampler) == [[0, 1], [2, 3], [4]]
    assert len(sampler) == 3


def test_a_long_shuffle_is_computed_and_a_short_one_drawn() -> None:
    short, long = ShuffledOrder(2**20 - 1), ShuffledOrder(2**20)
    assert isinstance(long.indices(seed=3, pass_index=0), Permutation)
    assert isinstance(short.indices(seed=3, pass_index=0), array)


@pytest.mark.parametrize("drawn_below", [0, 2**20], ids=["computed", "drawn"])
def test_a_shuffle_is_a_permutation_decided_by_seed_and_pass(drawn_below: int) -> None:
    order = ShuffledOrder(50, drawn_below)
    outside, seeds = global_states(), (-1, *range(8), 2**64 - 1)
    orders = {tuple(list(order.indices(seed, pass_index))) for seed in seeds for pass_index in range(8)}
    assert len(orders) == 80, "neighboring seeds share no passes"
    assert {tuple(sorted(each)) for each in orders} == {tuple(range(50))}
    assert list(ShuffledOrder(50, drawn_below).indices(0, 0)) == list(order.indices(0, 0))
    assert global_states() == outside
