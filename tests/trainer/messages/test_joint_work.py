"""Ranks that did the same, that may still come to the same, and that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.core.engine.shared.types import Heartbeat
from raysgd.trainer.messages.comparison import JointWork, difference


def work(done: str, is_over: bool = False, num_marks: int = 4, number: int = 1) -> Heartbeat:
    """What a rank says it did, a letter for each thing; its marks are what it had done by then."""
    marks = [hash(done[:num]) for num in range(len(done) + 1)]
    counts = {letter: done.count(letter) for letter in done}
    return Heartbeat(joint_work=JointWork(counts, tuple(marks[-num_marks:]), is_over, number))


@pytest.mark.parametrize(
    "works",
    [
        [work("abab", is_over=True), work("abab", is_over=True)],
        [work("abab"), work("abab", is_over=True)],
        [work("abab"), work("ab"), work("aba")],
        [work("ab"), work("abab", is_over=True)],
        [work(""), work("a")],
        [work("xx"), work("ababab")],  # so far behind that nothing is known
        [work("aba", True), work("xx", number=2)],  # that rank is still in the call before
        [Heartbeat(), work("a"), object()],
        [Heartbeat()],
    ],
)
def test_ranks_that_may_come_to_the_same_do_not_differ(works: list[Any]) -> None:
    assert difference(dict(enumerate(works))) == ""


@pytest.mark.parametrize(
    ("works", "told"),
    [
        ([work("aba", True), work("abab", True)], "on rank 0 b once; on rank 1 b 2 times."),
        ([work("aba", True), work("abab")], "on rank 0 b once; on rank 1 b 2 times."),
        ([work("", True), work("aaaaaaaaa")], "on rank 0 a 0 times; on rank 1 a 9 times."),
        ([work("ab"), work("aa"), work("ab")], "on ranks 0, 2 a once, b once; on rank 1 a 2 times, b 0 times."),
        ([work("ab", True), work("ba", True)], "a, b as often on all of them, but in another order."),
    ],
)
def test_ranks_that_cannot_are_told_apart_by_what_they_did(works: list[Any], told: str) -> None:
    assert told in difference(dict(enumerate(works)))
