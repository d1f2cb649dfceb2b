"""At which steps a run pauses inside an epoch, and for what."""

from __future__ import annotations

import pytest

from raysgd.callbacks import Callback
from raysgd.trainer.driver.fit_epoch import Pauses


class Every(Callback):
    def __init__(self, steps: int) -> None:
        self.steps, self.is_due = steps, False

    def _pause_at(self, global_step: int) -> int | None:
        return (global_step // self.steps + 1) * self.steps

    def _pauses_now(self) -> bool:
        return self.is_due


@pytest.mark.parametrize(
    ("every", "validate_every", "last_step", "step", "expected"),
    [
        ([], None, None, 0, None),
        ([10], None, None, 0, 10),
        ([10], None, None, 10, 20),
        ([10, 4], None, None, 10, 12),
        ([10], 4, None, 3, 4),
        ([10], 4, 3, 0, 3),
        ([], None, 3, 3, None),  # nothing is left
        ([], 4, None, 4, 8),
    ],
)
def test_the_next_pause_is_the_first_that_anything_needs(
    every: list[int], validate_every: int | None, last_step: int | None, step: int, expected: int | None
) -> None:
    assert Pauses([Every(each) for each in every], validate_every, last_step).next_after(step) == expected


@pytest.mark.parametrize(
    ("began_at", "step", "is_due"),
    [(0, 4, True), (0, 3, False), (4, 7, False), (4, 8, True), (2, 6, True), (5, 6, False)],
)
def test_a_validation_is_due_at_the_first_pause_behind_its_step(began_at: int, step: int, is_due: bool) -> None:
    pauses = Pauses([], 4, None)
    pauses.next_after(began_at)
    assert pauses.validates_at(step) == is_due
    assert not Pauses([], None, 9).validates_at(step)


def test_a_callback_may_ask_for_a_pause_at_any_time() -> None:
    one, other = Every(10), Every(10)
    pauses = Pauses([one, other], None, None)
    assert not pauses.is_due
    other.is_due = True
    assert pauses.is_due


def test_a_run_ends_at_its_last_step_or_behind_it() -> None:
    pauses = Pauses([], None, 10)
    assert [pauses.ends_at(step) for step in (9, 10, 12)] == [False, True, True]
    assert not Pauses([], 4, None).ends_at(100)
