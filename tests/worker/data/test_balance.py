"""How shares follow the speed of the workers."""

from __future__ import annotations

import random

import pytest

from raysgd.arrays.division import proportional_counts
from raysgd.torch.data.balancing import SpeedPlan, corrected


def test_times_that_hardly_differ_change_nothing() -> None:
    assert corrected((), [32, 32], [1.0, 1.09]) is None
    assert corrected((1.0, 0.5), [40, 20], [1.05, 1.0]) is None


@pytest.mark.parametrize(("samples", "seconds"), [([32, 0], [1.0, 1.0]), ([32, 32], [1.0, 0.0])])
def test_what_was_not_measured_changes_nothing(samples: list[float], seconds: list[float]) -> None:
    assert corrected((), samples, seconds) is None


def test_the_first_measurement_counts_in_full_and_later_ones_by_half() -> None:
    assert corrected((), [32, 32], [1.0, 2.0]) == (1.0, 0.5)
    assert corrected((1.0, 0.5), [40, 20], [1.0, 4.0]) == pytest.approx((1.0, 0.3125))


def test_a_worker_never_counts_as_slower_than_the_cap() -> None:
    assert corrected((), [8, 8], [1.0, 1000.0]) == (1.0, 0.125)


def test_times_become_alike_whatever_the_speeds_are() -> None:
    draw = random.Random(4)
    for _ in range(100):
        true_speeds = [draw.uniform(1.0, 3.0) for _ in range(draw.randint(2, 6))]
        speeds: tuple[float, ...] = ()
        for _ in range(6):
            counts = proportional_counts(600, speeds or [1.0] * len(true_speeds))
            times = [count / speed * draw.uniform(0.98, 1.02) for count, speed in zip(counts, true_speeds, strict=True)]
            speeds = corrected(speeds, [float(count) for count in counts], times) or speeds
        times = [count / speed for count, speed in zip(counts, true_speeds, strict=True)]
        assert max(times) < 1.16 * min(times)


def test_a_change_holds_from_its_position_on() -> None:
    plan = SpeedPlan()
    plan.change(40, (1.0, 0.5))
    assert [plan.at(position) for position in (0, 39, 40, 80)] == [(), (), (1.0, 0.5), (1.0, 0.5)]
    assert (plan.reach(20), plan.is_changing) == (False, True)
    assert (plan.reach(40), plan.is_changing) == (True, False)
    assert plan.at(0) == (1.0, 0.5)


def test_a_change_that_a_pass_did_not_reach_holds_in_the_next_one() -> None:
    plan = SpeedPlan()
    plan.change(1000, (1.0, 0.5))
    plan.begin_pass()
    assert plan.at(0) == (1.0, 0.5)
    assert not plan.is_changing
