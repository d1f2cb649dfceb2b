from __future__ import annotations

import pytest

from raysgd.train._shards import DividedData, check_dataset


class Numbers:
    def __init__(self, *values: int) -> None:
        self.values = values
        self.num_splits = 0

    def split(self, n: int, *, equal: bool) -> list[tuple[int, ...]]:
        assert equal
        self.num_splits += 1
        return [self.values[rank::n] for rank in range(n)]


def test_each_worker_gets_its_part() -> None:
    assert DividedData(Numbers(1, 2, 3, 4)).of(2) == [(1, 3), (2, 4)]


def test_several_are_divided_one_by_one() -> None:
    data = DividedData({"train": Numbers(1, 2), "val": Numbers(3, 4)})
    assert data.of(2) == [{"train": (1,), "val": (3,)}, {"train": (2,), "val": (4,)}]


def test_a_restart_gets_the_same_parts_and_another_number_of_workers_new_ones() -> None:
    numbers = Numbers(1, 2, 3, 4)
    data = DividedData(numbers, place=lambda part: [part])
    first = data.of(2)
    assert data.of(2) is first
    assert numbers.num_splits == 1
    assert data.of(1) == [[(1, 2, 3, 4)]]


def test_what_cannot_be_divided_is_refused() -> None:
    check_dataset(None)
    check_dataset(Numbers())
    for dataset in ([1, 2], {"train": Numbers(), "val": 3}):
        with pytest.raises(TypeError, match=r"`split\(n, equal=True\)`"):
            check_dataset(dataset)
