"""No room of the package grows without being agreed on."""

from __future__ import annotations

import pytest

from tests.house.sizes import Size, agreed, grown, measured


def test_no_room_grows_unnoticed() -> None:
    assert grown(measured(), agreed()) == [], "shorten them, or agree: `python -m tests.house.sizes --write`"


@pytest.mark.parametrize(
    ("tokens", "classes", "is_grown"),
    [(100, 10, False), (104, 11, False), (106, 10, True), (100, 12, True), (50, 3, False)],
)
def test_a_twentieth_and_one_class_are_no_growth(tokens: int, classes: int, is_grown: bool) -> None:
    assert bool(grown({"room": Size(1, tokens, classes)}, {"room": Size(1, 100, 10)})) == is_grown
