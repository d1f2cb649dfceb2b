"""`Dataset`: samples in batches that are dealt to the workers."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from raysgd.data import Dataset
from raysgd.exceptions import InvalidCountError
from raysgd.util.iter import from_items

PAIRS = [(number, -number) for number in range(5)]


def test_what_is_plain_repeats_without_end() -> None:
    for data in (PAIRS, lambda: iter(PAIRS)):
        batches = Dataset(data, batch_size=3).get_shard(0).take(4)
        assert [pair for batch in batches for pair in batch] == (PAIRS * 3)[:12]


def test_a_parallel_iterator_ends_unless_it_repeats() -> None:
    dataset = Dataset(from_items(PAIRS, num_shards=2), batch_size=2)
    assert [len(batch) for batch in dataset.get_shard(0)] == [2, 2, 1]
    endless = Dataset(from_items(PAIRS, num_shards=2, repeat=True), batch_size=2)
    assert len(endless.get_shard(0).take(9)) == 9


def test_batches_are_dealt_in_turn_and_worked_on_once() -> None:
    downloaded: list[int] = []

    def download(number: int) -> tuple[int, int]:
        downloaded.append(number)
        return number, -number

    dataset = Dataset(from_items(range(9), num_shards=1), batch_size=2, download_func=download)
    dataset.set_num_shards(2)
    inputs = [[[x for x, _ in batch] for batch in dataset.get_shard(rank)] for rank in range(2)]
    assert inputs == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert sorted(downloaded) == list(range(9))


def test_a_transform_is_for_the_input_only() -> None:
    dataset = Dataset(PAIRS, batch_size=5, transform=lambda x: 10 * x)
    assert dataset.get_shard(0).take(1) == [[(10 * x, y) for x, y in PAIRS]]


def test_shards_travel() -> None:
    dataset = Dataset(PAIRS, batch_size=2, download_func=lambda pair: pair, max_concurrency=2)
    dataset.set_num_shards(2)
    shard: Any = cloudpickle.loads(cloudpickle.dumps(dataset.get_shard(1)))
    assert shard.take(2) == [PAIRS[2:4], [PAIRS[1], PAIRS[2]]]


def test_another_number_of_shards_divides_again() -> None:
    dataset = Dataset(from_items(PAIRS, 1), batch_size=1)
    for number in (2, 3, 1):
        dataset.set_num_shards(number)
        everything = [pair for rank in range(number) for [pair] in dataset.get_shard(rank)]
        assert sorted(everything) == sorted(PAIRS)
    before = dataset.iter
    dataset.set_num_shards(1)
    assert dataset.iter is before


def test_what_is_wrong_is_said() -> None:
    dataset = Dataset(iter(PAIRS), batch_size=2)
    with pytest.raises(AssertionError, match="there are 1 shards"):
        dataset.get_shard(1)
    with pytest.raises(ValueError, match="can be iterated over once"):
        dataset.get_shard(0).take(9)
    with pytest.raises(TypeError, match="`Dataset` got a `int`"):
        Dataset(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidCountError):
        Dataset(PAIRS, batch_size=0)
    with pytest.raises(AssertionError, match="`max_concurrency=-1`"):
        Dataset(PAIRS, download_func=lambda pair: pair, max_concurrency=-1)
