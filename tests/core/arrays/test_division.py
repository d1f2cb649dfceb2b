"""How a global batch is divided by uneven shares."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from raysgd.core.arrays.division import Division, ShardedGlobalBatch, even_counts, even_shares


def random_divisions(num: int, seed: int) -> Iterator[tuple[Division, int]]:
    draw = random.Random(seed)
    for _ in range(num):
        division = Division(draw.randint(1, 80), draw.randint(1, 9), draw.choice([None, draw.randint(1, 12)]))
        yield division, draw.randint(1, division.global_size)


@pytest.mark.parametrize(
    ("num_samples", "num_shares", "expected"),
    [(18, 7, [3, 3, 3, 3, 2, 2, 2]), (18, 3, [6, 6, 6]), (2, 4, [1, 1, 0, 0]), (5, 1, [5])],
)
def test_even_shares_differ_by_one_and_the_larger_ones_come_first(
    num_samples: int, num_shares: int, expected: list[int]
) -> None:
    assert even_counts(num_samples, num_shares) == expected


@pytest.mark.parametrize(
    ("num_samples", "num_shares", "most", "expected"),
    [
        (3, 2, None, [3, 0]),
        (5, 3, None, [3, 2, 0]),
        (8, 8, None, [2, 2, 2, 2, 0, 0, 0, 0]),
        (1, 2, None, [1, 0]),
        (0, 2, None, [0, 0]),
        (3, 2, 3, [3, 0]),
        (4, 3, 2, [2, 2, 0]),
        (3, 2, 2, [2, 1]),  # no other split
        (3, 3, 2, [1, 1, 1]),
        (8, 8, 1, [1] * 8),
        (35, 2, None, [18, 17]),
    ],
)
def test_no_share_is_a_single_sample_where_another_split_exists(
    num_samples: int, num_shares: int, most: int | None, expected: list[int]
) -> None:
    assert even_shares(num_samples, num_shares, most) == expected


def test_above_the_cap_a_share_is_taken_in_several_batches() -> None:
    division = Division(global_size=18, world_size=2, cap=4)
    assert division.num_batches(18) == 3
    assert [(part.start, part.stop, part.plan.total_samples) for part in division.parts(18, rank=0)] == [
        (0, 3, 6),
        (3, 6, 6),
        (6, 9, 6),
    ]
    assert [(part.start, part.stop, part.plan.total_samples) for part in division.parts(2, rank=0)] == [(0, 2, 2)], (
        "a short global batch fits at once"
    )


def test_each_sample_is_in_one_batch_in_the_order_of_ranks_which_take_equally_many_and_none_above_the_cap() -> None:
    for division, num_samples in random_divisions(2000, seed=1):
        parts = [division.parts(num_samples, rank) for rank in range(division.world_size)]
        covered = [at for of_rank in parts for part in of_rank for at in range(part.start, part.stop)]
        assert covered == list(range(num_samples)), division
        sizes = [part.stop - part.start for of_rank in parts for part in of_rank]
        must_be = num_samples == 1 or division.cap == 1 or (division.cap == 2 and num_samples % 2 == 1)
        assert must_be or 1 not in sizes, (division, num_samples)
        assert {len(of_rank) for of_rank in parts} == {division.num_batches(num_samples)}
        for together in zip(*parts, strict=True):
            assert {part.plan.total_samples for part in together} == {sum(part.stop - part.start for part in together)}
            if division.cap is not None:
                assert max(part.stop - part.start for part in together) <= division.cap


def test_logical_shards_are_cut_alike_for_any_number_of_workers() -> None:
    draw = random.Random(7)
    for _ in range(300):
        global_size, num_shards, cap = draw.randint(1, 50), draw.randint(1, 8), draw.choice([None, 1, 2])
        num_samples = draw.randint(1, global_size)
        num_shards = max(num_shards, -(-global_size // cap)) if cap else num_shards
        alone = ShardedGlobalBatch(global_size, 1, cap, num_shards).parts(num_samples, 0)
        assert [at for part in alone for at in range(part.start, part.stop)] == list(range(num_samples))
        assert num_samples == 1 or cap or all(part.stop - part.start > 1 for part in alone)
        world_size = draw.randint(1, 10)
        shards = ShardedGlobalBatch(global_size, world_size, cap, num_shards)
        parts = [shards.parts(num_samples, rank) for rank in range(world_size)]
        bounds = [(part.start, part.stop) for of_rank in parts for part in of_rank if part.start < part.stop]
        assert bounds == [(part.start, part.stop) for part in alone]
        assert max(len(of_rank) for of_rank in parts) <= shards.num_batches(num_samples)
        assert all(parts), "also a worker without a shard takes part in the exchange"
