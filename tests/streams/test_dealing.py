"""Lanes and turns: which lane reads what, whose row is next.

Covers the arithmetic of `raysgd.streams.lanes`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from raysgd.streams.lanes import LanePosition, deal, lanes_of, slices, spread_order
from tests.streams.made import MadeStream, joint, pass_of, read_together


def one_by_one(num_rows: int, left: list[int], turn: int) -> list[int]:
    order, counts = spread_order(len(left)), [0] * len(left)
    while num_rows and any(count < most for count, most in zip(counts, left, strict=True)):
        lane = order[turn]
        if counts[lane] < left[lane]:
            counts[lane] += 1
            num_rows -= 1
        turn = (turn + 1) % len(left)
    return counts


def test_rows_are_dealt_in_turn_one_by_one_and_in_any_portions() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        num_lanes = chance.randint(1, 9)
        left = [chance.choice([0, 1, 2, 6, 50]) for _ in range(num_lanes)]
        num_rows, turn = chance.randint(0, 40), chance.randrange(num_lanes)
        dealt, _ = deal(num_rows, left, turn)
        assert dealt == one_by_one(num_rows, left, turn)
        first, between = deal(chance.randint(0, num_rows), left, turn)
        rest = [most - count for most, count in zip(left, first, strict=True)]
        second, _ = deal(num_rows - sum(first), rest, between)
        assert [sum(each) for each in zip(first, second, strict=True)] == dealt


def test_each_row_of_each_shard_is_in_one_lane() -> None:
    chance = random.Random(1)
    for _ in range(300):
        lengths = [chance.choice([0, 1, 5, 40]) for _ in range(chance.randint(1, 30))]
        stream = chance.choice([MadeStream(lengths), MadeStream(lengths).shuffle(9)])
        of_pass = pass_of(stream, seed=chance.randrange(99), num_lanes=chance.randint(1, 12))
        read: Counter[tuple[int, int]] = Counter()
        for parts, length in zip(of_pass.parts, of_pass.lengths, strict=True):
            own = [(part.shard, row) for part in parts for row in range(part.first, lengths[part.shard], part.step)]
            assert len(own) == length
            read.update(own)
        assert read == Counter({(shard, row): 1 for shard, length in enumerate(lengths) for row in range(length)})


def test_lanes_of_shards_of_one_length_have_about_as_many_rows() -> None:
    for num_shards in (1, 5, 100, 6400):
        lengths = pass_of(MadeStream([1000] * num_shards)).lengths
        assert max(lengths) <= min(lengths) + (500 if num_shards == 100 else 9)  # 28 of 64 lanes halve 14 of 36 shards


def test_positions_are_found_by_arithmetic() -> None:
    of_pass = pass_of(MadeStream([2, 5, 7, 20]), num_lanes=3)
    assert of_pass.parts[1] == [(1, 0, 1), (3, 2, 3)]
    assert [of_pass.position(1, count) for count in (0, 4, 5, 7, 12)] == [
        LanePosition(0, 0),
        LanePosition(0, 4),
        LanePosition(1, 2),
        LanePosition(1, 8),
        LanePosition(2),
    ]
    shuffled = pass_of(MadeStream([20]).shuffle(12), num_lanes=3)
    [(_, first, step)] = shuffled.parts[1]
    assert shuffled.position(1, 5) == LanePosition(0, first + 4 * step, skip=1)


def test_one_shard_is_dealt_in_its_order() -> None:
    stream = pass_of(MadeStream([100]).batch(7))
    rows = [sorted(row for _, row in joint(step)) for step in read_together(stream, 3)]
    assert [row for batch in rows for row in batch] == list(range(100))


def test_any_run_of_turns_is_spread_over_all_lanes() -> None:
    for num_lanes in (1, 2, 7, 60, 64):
        assert sorted(spread_order(num_lanes)) == list(range(num_lanes))
    order = spread_order(64)
    for start in range(64):
        run = (order + order)[start : start + 24]
        assert all(4 <= sum(lane // 16 == quarter for lane in run) <= 8 for quarter in range(4))


def test_shares_of_a_global_batch_are_runs_of_its_rows() -> None:
    chance = random.Random(2)
    for _ in range(300):
        counts = [chance.randint(0, 3) for _ in range(8)]
        rows = [(lane, row) for lane, count in enumerate(counts) for row in range(count)]
        start, stop = sorted(chance.choices(range(len(rows) + 1), k=2))
        found = [(lane, row) for lane, first, after in slices(counts, start, stop) for row in range(first, after)]
        assert found == rows[start:stop]


def test_each_lane_is_watched_by_one_worker() -> None:
    for world_size in range(1, 8):
        lanes = [lanes_of(rank, world_size, 64) for rank in range(world_size)]
        assert [lane for each in lanes for lane in each] == list(range(64))
        assert max(map(len, lanes)) - min(map(len, lanes)) <= 1
    with pytest.raises(ValueError, match="5 workers for a stream with 4 lanes: need at least as many lanes"):
        lanes_of(0, 5, 4)
