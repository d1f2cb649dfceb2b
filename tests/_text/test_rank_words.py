from __future__ import annotations

from collections.abc import Collection

import pytest

from raysgd._text.rank_words import listed, named


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), ""),
        ((2, 0, 1), "0, 1, 2"),
        ((3, 0, 1, 2), "0-3"),
        ({9, 4, 5, 6, 7, 8, 1}, "1, 4-9"),
        (range(1000), "0-999"),
    ],
)
def test_many_ranks_in_a_row_are_a_range(ranks: Collection[int], expected: str) -> None:
    assert listed(ranks) == expected


def test_one_rank_is_no_ranks() -> None:
    assert [named([7]), named([7, 8]), named(range(1000))] == ["rank 7", "ranks 7, 8", "ranks 0-999"]
