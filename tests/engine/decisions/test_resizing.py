"""With how many workers the survivors of a loss go on, and when a smaller group looks for more."""

from __future__ import annotations

import pytest

from raysgd.engine.decisions.resizing import ResizeCheck, Resizing, resizing


@pytest.mark.parametrize(
    ("max_workers", "enough"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (9, 6), (32, 22)]
)
def test_survivors_go_on_as_long_as_no_share_grows_by_more_than_a_half(max_workers: int, enough: int) -> None:
    found = resizing("auto", True, max_workers)
    assert found == Resizing(60.0, enough, enough, waits_for_memory=True)
    assert max_workers / found.num_awaited <= 1.5
    assert enough == 1 or max_workers / (enough - 1) > 1.5


@pytest.mark.parametrize(("num_short", "enough"), [(0, 4), (3, 4), (4, 5), (5, 6), (6, 6), (7, 6)])
def test_survivors_wait_for_more_than_those_with_whom_memory_ran_out(num_short: int, enough: int) -> None:
    assert resizing("auto", True, 6, num_short).num_awaited == enough


@pytest.mark.parametrize(
    ("option", "keeps_joint_batch", "expected"),
    [
        ("auto", False, Resizing(None, 4, 4)),
        (None, True, Resizing(None, 4, 4)),
        (None, False, Resizing(None, 4, 4)),
        (2.0, True, Resizing(2.0, 1, 4)),
        (2.0, False, Resizing(2.0, 1, 4)),
    ],
)
def test_where_a_step_would_be_another_one_survivors_wait_unless_a_number_says_that_they_do_not(
    option: ResizeCheck, keeps_joint_batch: bool, expected: Resizing
) -> None:
    assert resizing(option, keeps_joint_batch, 4) == expected
    assert resizing(option, keeps_joint_batch, 4, num_short=3) == expected
