"""Parts of steps from several workers, in any order, and what a later attempt replaces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from raysgd.journal.entries import LEFT_OUT, LEG
from raysgd.journal.keeper import StepBook
from raysgd.journal.recorder import PARTS, LineReport, StepBlock
from raysgd.journal.steps import NO_NORM


def leg(attempt: tuple[int, int], after: int, num_workers: int = 2) -> LineReport:
    return LineReport(LEG, attempt, {"step": after, "num_workers": num_workers})


def part(attempt: tuple[int, int], steps: range, *totals: float, weight: float = 4, norm: float = NO_NORM) -> StepBlock:
    return StepBlock(
        attempt, np.array([(step, total, weight, norm) for step, total in zip(steps, totals, strict=True)], PARTS)
    )


def taken(book: StepBook) -> list[tuple[Any, ...]]:
    """Return number, loss, norm and weight of the steps with new reports."""
    return [
        (number, *record)
        for numbers, records in book.take()
        for number, record in zip(numbers.tolist(), records.tolist(), strict=True)
    ]


def test_a_step_is_the_mean_over_the_samples_of_all_workers() -> None:
    book = StepBook()
    assert book.begin(leg((1, 1), 0)) == {"step": 0, "num_workers": 2}
    assert book.begin(leg((1, 1), 0)) is None, "the other worker reports the same"
    book.add("a", part((1, 1), range(1, 3), 8.0, 4.0))
    assert taken(book) == [(1, 2.0, NO_NORM, 4), (2, 1.0, NO_NORM, 4)]
    book.add("b", part((1, 1), range(1, 2), 4.0, weight=2, norm=0.5))
    assert taken(book) == [(1, 2.0, 0.5, 6), (2, 1.0, NO_NORM, 4)]
    book.add("b", part((1, 1), range(2, 4), 8.0, 6.0))
    assert taken(book) == [(2, 1.5, NO_NORM, 8), (3, 1.5, NO_NORM, 4)], "the first step is complete"
    assert taken(book) == []
    assert book.last_step == 3


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_the_mean_does_not_depend_on_the_order_of_workers(order: str) -> None:
    totals, book = {"a": 1e16, "b": 1.0, "c": -1e16}, StepBook()
    book.begin(leg((1, 1), 0, num_workers=3))
    for name in order:
        book.add(name, part((1, 1), range(1, 2), totals[name], weight=1))
    assert taken(book) == [(1, 1 / 3, NO_NORM, 3)]


def test_an_attempt_replaces_the_steps_after_its_beginning_only() -> None:
    book = StepBook()
    book.begin(leg((1, 1), 0))
    book.add("a", part((1, 1), range(1, 4), 4.0, 4.0, 4.0))
    assert len(taken(book)) == 3
    book.begin(leg((1, 2), 2, num_workers=1))
    assert book.last_step == 2
    book.add("b", part((1, 1), range(1, 5), 8.0, 8.0, 8.0, 8.0))  # a survivor is asked late
    assert taken(book) == [(1, 1.5, NO_NORM, 8), (2, 1.5, NO_NORM, 8)], "the other steps were repeated"
    book.add("a", part((1, 2), range(3, 4), 12.0))
    assert taken(book) == [(3, 3.0, NO_NORM, 4)]


def test_an_attempt_that_began_again_before_its_first_step_is_forgotten() -> None:
    book = StepBook()
    for report in (leg((1, 1), 0), leg((1, 2), 5), leg((1, 3), 2)):
        book.begin(report)
    book.add("a", part((1, 2), range(6, 7), 4.0))
    assert taken(book) == []
    assert book.begin(leg((1, 2), 5)) is None, "an old report"


def test_a_step_without_a_loss_has_none() -> None:
    book = StepBook()
    book.begin(leg((1, 1), 0, num_workers=1))
    book.add("a", part((1, 1), range(1, 2), 0.0, weight=0))
    ((_, loss, _, weight),) = taken(book)
    assert math.isnan(loss)
    assert weight == -1


def test_an_infinite_loss_of_one_worker_shows_in_the_mean() -> None:
    book = StepBook()
    book.begin(leg((1, 1), 0))
    book.add("a", part((1, 1), range(1, 3), math.inf, math.inf))
    book.add("b", part((1, 1), range(1, 3), 4.0, -math.inf))
    (_, first, *_), (_, second, *_) = taken(book)
    assert first == math.inf
    assert math.isnan(second)


def test_a_norm_that_is_too_large_for_its_field_is_infinite() -> None:
    book = StepBook()
    book.begin(leg((1, 1), 0, num_workers=1))
    book.add("a", part((1, 1), range(1, 2), 4.0, norm=1e39))
    assert taken(book) == [(1, 1.0, math.inf, 4)]


def test_a_step_that_was_left_out_is_noted_once_unless_a_later_attempt_repeats_it() -> None:
    book = StepBook()
    book.begin(leg((1, 1), 0))
    entry = {"step": 3, "optimizer": 0}
    assert book.leave_out(LineReport(LEFT_OUT, (1, 1), entry)) == entry
    assert book.leave_out(LineReport(LEFT_OUT, (1, 1), entry)) is None, "the other worker reports the same"
    assert book.leave_out(LineReport(LEFT_OUT, (1, 1), {**entry, "optimizer": 1})) is not None
    book.begin(leg((1, 2), 4))
    assert book.leave_out(LineReport(LEFT_OUT, (1, 1), {**entry, "step": 4})) is not None
    assert book.leave_out(LineReport(LEFT_OUT, (1, 1), {**entry, "step": 5})) is None, "the step is repeated"
    assert book.leave_out(LineReport(LEFT_OUT, (1, 2), {**entry, "step": 5})) is not None
