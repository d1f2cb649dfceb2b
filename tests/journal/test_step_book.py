"""Parts of steps from several workers, in any order, and what a later attempt replaces."""

from __future__ import annotations

import math
from typing import Any

from raysgd.journal.journal import StepRecord
from raysgd.journal.keeper import StepBook
from raysgd.journal.recorder import LegReport, StepReport


def leg(attempt: tuple[int, int], after: int, num_workers: int = 2) -> LegReport:
    return LegReport(attempt, {"step": after, "num_workers": num_workers})


def part(attempt: tuple[int, int], step: int, total: float, weight: float = 4, norm: float | None = None) -> StepReport:
    return StepReport(attempt, step, total, weight, norm)


def test_a_step_is_the_mean_over_the_samples_of_all_workers() -> None:
    book = StepBook()
    assert book.add("a", leg((1, 1), 0)) == {"step": 0, "num_workers": 2}
    assert book.add("b", leg((1, 1), 0)) is None, "the other worker says the same"
    assert book.add("a", part((1, 1), 1, 8.0, 4)) == StepRecord(1, 2.0, None, 4)
    assert book.add("b", part((1, 1), 1, 4.0, 2, norm=0.5)) == StepRecord(1, 2.0, 0.5, 6)
    assert book.last_step == 1


def test_an_attempt_replaces_the_steps_after_its_beginning_only() -> None:
    book = StepBook()
    for report in (leg((1, 1), 0), part((1, 1), 1, 4.0), part((1, 1), 2, 4.0), part((1, 1), 3, 4.0)):
        book.add("a", report)
    book.add("a", leg((1, 2), 2, num_workers=1))
    assert book.last_step == 2
    assert book.add("b", part((1, 1), 2, 8.0)) == StepRecord(2, 1.5, None, 8), "a survivor is asked late"
    assert book.add("b", part((1, 1), 3, 8.0)) is None, "the step was taken again"
    assert book.add("a", part((1, 2), 3, 12.0)) == StepRecord(3, 3.0, None, 4)


def test_an_attempt_that_began_again_before_its_first_step_is_forgotten() -> None:
    book = StepBook()
    for report in (leg((1, 1), 0), leg((1, 2), 5), leg((1, 3), 2)):
        book.add("a", report)
    assert book.add("a", part((1, 2), 6, 4.0)) is None
    assert book.add("a", leg((1, 2), 5)) is None, "an old report"


def test_a_step_without_a_loss_has_none() -> None:
    book = StepBook()
    book.add("a", leg((1, 1), 0, num_workers=1))
    record: Any = book.add("a", part((1, 1), 1, 0.0, weight=0))
    assert math.isnan(record.loss)
    assert record.weight == -1


def test_an_infinite_loss_of_one_worker_shows_in_the_mean() -> None:
    book = StepBook()
    book.add("a", leg((1, 1), 0))
    book.add("a", part((1, 1), 1, math.inf))
    record: Any = book.add("b", part((1, 1), 1, 4.0))
    assert record.loss == math.inf
