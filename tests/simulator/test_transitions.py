"""The table of a recovery: how stories end, which rows they visit, and rows that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import CodeType

import pytest

from raysgd.core.engine.recovery import machine
from tests.simulator.cells import differs, mutants, mutated, rows, rows_of
from tests.simulator.stories import STORIES, Told


@cache
def told(name: str) -> Told:
    return STORIES[name].run()


@pytest.mark.parametrize("name", STORIES)
def test_what_seldom_happens_ends_as_it_should(name: str) -> None:
    verdict, _, ending = told(name)
    assert verdict.broken is None, "\n".join(verdict.log)
    assert ending == STORIES[name].ends, "\n".join(verdict.log)


@pytest.mark.long
def test_stories_visit_every_row() -> None:
    counts = sum((rows_of(told(name).visited) for name in STORIES), Counter[int]())
    assert [words for line, words in rows().items() if not counts[line]] == []


@pytest.mark.soak
@pytest.mark.parametrize(("words", "make"), [*mutants()])
def test_a_row_that_is_missing_is_found(
    words: str, make: Callable[[], CodeType], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = mutated(make)
    # First those that go another way. A change between two calls begins beside the table, so all others come, too.
    in_order = sorted(STORIES, key=lambda name: not any(differs(functions, visit) for visit in told(name).visited))
    for name, function in functions.items():
        monkeypatch.setattr(machine, name, function)
    assert any(STORIES[name].is_broken() for name in in_order), f"not found: {words}"
