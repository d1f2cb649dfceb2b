"""A shuffled range that is computed where it is read: each number once, well mixed, at any length."""

from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from raysgd.torch.data.sample_order import Permutation

FIRST_TEN = [5, 8, 2, 9, 1, 6, 4, 0, 3, 7]
DIGEST = "f132f0a5a961d3fa"
IN_THE_MIDDLE = [707629101, 103045782, 374579954]


def whole(length: int, seed: str = "3/0") -> Any:
    return Permutation(length, seed).at(np.arange(length, dtype=np.uint64)).astype(np.int64)


@pytest.mark.parametrize("lengths", [range(130), (1023, 1024, 1025, 4096, 4097, 65535, 65537, 250_000)])
def test_each_number_stands_at_one_place(lengths: Any) -> None:
    for length, seed in itertools.product(lengths, ("3/0", "3/1")):
        assert np.array_equal(np.sort(whole(length, seed)), np.arange(length)), (length, seed)


def test_it_is_read_like_any_sequence() -> None:
    numbers = Permutation(9001, "7")
    expected = whole(9001, "7").tolist()
    assert len(numbers) == 9001
    assert list(numbers) == expected
    assert (numbers[0], numbers[-1], numbers[np.int64(4)]) == (expected[0], expected[-1], expected[4])
    for part in (slice(5, 9), slice(8990, 9999), slice(None, None, 1000), slice(7, 2, -2), slice(4, 4)):
        assert numbers[part] == expected[part]
    assert all(type(number) is int for number in (numbers[0], *numbers[3:5]))
    for place in (9001, -9002):
        with pytest.raises(IndexError):
            numbers[place]
    assert list(Permutation(0, "7")) == []


def test_it_is_the_same_on_every_machine_and_in_every_version() -> None:
    """Positions in files belong to it."""
    assert Permutation(10, "3/0")[:] == FIRST_TEN
    assert hashlib.sha256(whole(100_003).astype("<i8").tobytes()).hexdigest()[:16] == DIGEST
    assert Permutation(10**9, "3/0")[500_000_000:500_000_003] == IN_THE_MIDDLE


@pytest.mark.parametrize("length", [2**16, 99_991])
def test_numbers_are_mixed_as_if_they_were_drawn(length: int) -> None:
    """Five standard deviations; distances of a row of the table are where too few rounds would show first."""
    width = math.isqrt(length - 1) + 1
    for seed in ("3/0", "3/1", "4/0"):
        numbers = whole(length, seed)
        for apart in (1, 2, width - 1, width, width + 1, length // 2):
            assert abs(np.corrcoef(numbers[:-apart], numbers[apart:])[0, 1]) < 5 / math.sqrt(length - apart), apart
        assert abs(np.corrcoef(numbers, np.arange(length))[0, 1]) < 5 / math.sqrt(length)
        assert (numbers == np.arange(length)).sum() < 10, "one number in a whole range stays, on average"
        counts = np.histogram2d(np.arange(length), numbers, bins=16)[0]
        expected = length / 256
        assert ((counts - expected) ** 2 / expected).sum() < 225 + 5 * math.sqrt(2 * 225)
        assert np.bincount(np.diff(numbers) % length).max() < 12, "no distance comes up again and again"


def test_a_billion_numbers_are_read_from_the_middle_and_at_the_end_in_little_memory() -> None:
    tracemalloc.start()
    try:
        numbers = Permutation(10**9, "3/0")
        parts = [numbers[start : start + 256] for start in (0, 5 * 10**8, 10**9 - 256)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = set(itertools.chain(*parts))
    assert len(found) == 3 * 256
    assert min(found) >= 0
    assert max(found) < 10**9
    assert most < 2**20
