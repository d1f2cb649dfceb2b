from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.train._worker.shards import DividedData, check_dataset, with_to_torch


class Numbers:
    def __init__(self, *values: int) -> None:
        self.values = values
        self.num_splits = 0

    def split(self, n: int, *, equal: bool) -> list[Any]:
        assert equal
        self.num_splits += 1
        return [self.values[rank::n] for rank in range(n)]


def test_each_worker_gets_its_part() -> None:
    assert DividedData(Numbers(1, 2, 3, 4))(2) == [(1, 3), (2, 4)]


def test_several_are_divided_one_by_one() -> None:
    data = DividedData({"train": Numbers(1, 2), "val": Numbers(3, 4)})
    assert data(2) == [{"train": (1,), "val": (3,)}, {"train": (2,), "val": (4,)}]


def test_a_restart_gets_the_same_parts_and_another_number_of_workers_new_ones() -> None:
    numbers = Numbers(1, 2, 3, 4)
    data = DividedData(numbers)
    first = data(2)
    assert data(2) is first
    assert numbers.num_splits == 1
    assert data(1) == [(1, 2, 3, 4)]


class NearNumbers(Numbers):
    def split(self, n: int, *, equal: bool, locality_hints: Any = None) -> list[Any]:
        return [(part, locality_hints) for part in super().split(n, equal=equal)]


def test_each_part_is_near_its_worker_where_the_data_can_do_that() -> None:
    data = DividedData({"near": NearNumbers(1, 2), "far": Numbers(3, 4)})
    workers = [SimpleNamespace(actor=SimpleNamespace(ray_actor=name)) for name in ("a", "b")]
    assert data(2, workers) == [
        {"near": ((1,), ["a", "b"]), "far": (3,)},
        {"near": ((2,), ["a", "b"]), "far": (4,)},
    ]
    assert DividedData(NearNumbers(1))(1) == [((1,), None)]


def test_what_cannot_be_divided_is_refused() -> None:
    check_dataset(None)
    check_dataset(Numbers())
    for dataset in ([1, 2], {"train": Numbers(), "val": 3}):
        with pytest.raises(TypeError, match=r"`split\(n, equal=True\)`"):
            check_dataset(dataset)


class Iterator:
    def to_torch(self, **options: Any) -> dict[str, Any]:
        return options


class Dataset:
    def iterator(self) -> Iterator:
        return Iterator()


class OldDataset(Dataset):
    def to_torch(self, **options: Any) -> str:
        return "its own"


def test_shards_have_the_method_that_moved_to_their_iterators() -> None:
    shards = with_to_torch({"new": Dataset(), "old": OldDataset(), "list": [1]})
    assert shards["new"].to_torch(batch_size=2) == {"batch_size": 2}
    assert shards["old"].to_torch(batch_size=2) == "its own"
    assert shards["list"] == [1]
    assert with_to_torch(Dataset()).to_torch(batch_size=3) == {"batch_size": 3}
    assert with_to_torch(None) is None
