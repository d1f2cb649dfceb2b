"""The table of a recovery: how stories end, which rows stories and seeds visit, and rows that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import CodeType

import pytest

from raysgd.core.engine.recovery import machine
from tests.simulator.cells import Visit, differs, mutants, mutated, rows, rows_of, visits_of
from tests.simulator.running import run
from tests.simulator.schedule import drawn
from tests.simulator.stories import STORIES

SEEDS = (100677, 2079, 3399, 1679, 479, *range(60), *range(19, 1500, 20), *range(3, 400, 8))
"""Many of them let calls end early, or let only workers have the state."""


@pytest.mark.parametrize("name", STORIES)
def test_what_seldom_happens_ends_as_it_should(name: str) -> None:
    told = STORIES[name].run()
    assert told.verdict.broken is None, "\n".join(told.verdict.log)
    assert told.ending == STORIES[name].ends, "\n".join(told.verdict.log)


@cache
def sources() -> tuple[tuple[Callable[[], bool], list[Visit]], ...]:
    """Stories and schedules: whether each breaks something, and its transitions."""
    stories = [(story.is_broken, story.run().visited) for story in STORIES.values()]
    schedules = [(lambda seed=seed: run(drawn(seed)).broken is not None, visits_of(drawn(seed))) for seed in SEEDS]
    return (*stories, *schedules)


@pytest.mark.soak
def test_every_row_is_visited() -> None:
    counts = sum((rows_of(visits) for _, visits in sources()), Counter[int]())
    never = [words for line, words in rows().items() if not counts[line]]
    assert never == []


MUTANTS = [*mutants()]
NOT_FOUND: dict[str, str] = {}
"""Mutants that nothing finds, and why."""


@pytest.mark.soak
def test_nearly_all_mutants_of_the_table_are_to_be_found() -> None:
    words = [words for words, _ in MUTANTS]
    assert NOT_FOUND.keys() <= {*words}
    assert sum(each in NOT_FOUND for each in words) <= len(words) / 20


@pytest.mark.soak
@pytest.mark.parametrize(("words", "code"), [each for each in MUTANTS if each[0] not in NOT_FOUND])
def test_a_row_that_is_missing_is_found(words: str, code: CodeType, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = mutated(code)
    # Those that go another way come first. Changes between two calls begin beside the table, so the others come, too.
    in_order = sorted(sources(), key=lambda source: not any(differs(functions, visit) for visit in source[1]))
    for name, function in functions.items():
        monkeypatch.setattr(machine, name, function)
    assert any(is_broken() for is_broken, _ in in_order), f"not found: {words}"
