"""The batches of one rank, from any position in a pass and for groups of any size."""

from __future__ import annotations

import itertools

from raysgd.torch.data.sample_order import SampleOrder, SamplerOrder, SequentialOrder, ShuffledOrder
from raysgd.torch.data.sampling import ElasticBatchSampler


def make_sampler(
    order: SampleOrder, *, batch_size: int = 2, rank: int = 0, world_size: int = 1, pad: bool = True
) -> ElasticBatchSampler:
    return ElasticBatchSampler(order, batch_size, drop_last=False, pad=pad, rank=rank, world_size=world_size)


def test_batches_are_lists_of_plain_integers() -> None:
    for order in (SequentialOrder(4), ShuffledOrder(4), SamplerOrder([3, 2, 1, 0])):
        sampler = make_sampler(order)
        sampler.plan_pass(0, seed=0)
        batches = list(sampler)
        assert len(batches) == 2
        assert all(type(batch) is list and all(type(index) is int for index in batch) for batch in batches)


def test_the_order_of_a_pass_is_drawn_once() -> None:
    drawn: list[tuple[int, int]] = []

    class Recorded:
        num_samples = 4
        name = "recorded"

        def indices(self, seed: int, pass_index: int) -> range:
            drawn.append((seed, pass_index))
            return range(4)

    sampler = make_sampler(Recorded())
    for pass_index, seed, consumed in [(0, 7, 0), (0, 7, 2), (1, 7, 0), (1, 8, 0)]:
        sampler.plan_pass(pass_index, seed, consumed)
    assert drawn == [(7, 0), (7, 1), (8, 1)]


def test_an_iterator_belongs_to_the_pass_it_was_started_in() -> None:
    sampler = make_sampler(ShuffledOrder(8))
    sampler.plan_pass(0, seed=0)
    expected = list(sampler)
    started, untouched = iter(sampler), iter(sampler)
    head = [next(started)]
    sampler.plan_pass(1, seed=0, consumed=6)
    sampler.reshape(rank=1, world_size=2)
    assert head + list(started) == expected
    assert list(untouched) == expected


def test_length_is_that_of_the_pass_begun_else_of_a_whole_one() -> None:
    sampler = make_sampler(SequentialOrder(10))
    assert len(sampler) == 5
    sampler.plan_pass(0, seed=0, consumed=7)
    assert len(sampler) == 2
    sampler.reshape(rank=2, world_size=3)
    assert sampler.plan is None
    assert len(sampler) == 2


def test_by_hand_ranks_divide_whole_passes_shuffled_anew() -> None:
    ranks = [make_sampler(ShuffledOrder(12), rank=rank, world_size=2) for rank in range(2)]
    passes = [[list(rank) for rank in ranks] for _ in range(2)]
    assert passes[0] != passes[1]
    for drawn in passes:
        assert sorted(itertools.chain(*itertools.chain(*drawn))) == list(range(12))


def test_by_hand_changes_nothing_about_the_passes() -> None:
    sampler, untouched = make_sampler(ShuffledOrder(9)), make_sampler(ShuffledOrder(9))
    assert len(list(sampler)) == len(sampler) == 5
    assert sampler.plan is None
    for each in (sampler, untouched):
        each.plan_pass(0, seed=7)
    assert list(sampler) == list(untouched)
