"""The table of sizes is that of this tree, and rooms that grew have a reason."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.sizes import GROWTH, Size, measured, size_of, table


def test_the_table_is_that_of_this_tree() -> None:
    sizes = asdict(Size())
    written = {room: {name: row[name] for name in sizes} for room, row in table().items()}
    assert written == {room: asdict(size) for room, size in measured().items()}, "`python -m tests.sizes --write`"


def test_rooms_that_grew_by_more_than_a_tenth_have_a_reason() -> None:
    grown = [room for room, row in table().items() if row["lines"] > GROWTH * row["agreed"] and "reason" not in row]
    assert grown == [], "write a `reason` of one line into their rows of `tests/sizes.json`"


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ('"""Only words."""\n# more words\n\n', Size(statements=1)),
        ('def shown():\n    """Says why."""\n    return 1\n', Size(2, 3, 0, 1)),
        ("class Shown:\n    def method(self): ...\n\n\nclass _Own: ...\n", Size(3, 5, 2, 1)),
        ('text = """two\nlines"""\n', Size(2, 1)),
    ],
)
def test_only_code_counts(source: str, size: Size) -> None:
    assert size_of(source) == size
