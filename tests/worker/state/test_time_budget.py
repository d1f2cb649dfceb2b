"""A part of the time that a precaution may take."""

from __future__ import annotations

import pytest

from raysgd.worker.state.time_budget import TimeBudget

STEP_S = 1.0


class Watch:
    """A clock that is set by hand, and a budget that goes by it."""

    def __init__(self, share: float = 0.02, least_s: float = 0.0) -> None:
        self.now = self.spent = 0.0
        self.budget = TimeBudget(share, least_s, lambda: self.spent, lambda: self.now)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.spent += seconds


def share_of_steps(cost_s: float, num_steps: int, share: float = 0.02, least_s: float = 0.0) -> float:
    """In how many of so many steps something was done that takes so long."""
    watch, num_done = Watch(share, least_s), 0
    for _ in range(num_steps):
        if watch.budget.has_some():
            num_done += 1
            watch.spend(cost_s)
        watch.now += STEP_S
    return num_done / num_steps


def test_what_takes_little_is_always_done() -> None:
    assert share_of_steps(0.019, 500) > 0.99


@pytest.mark.parametrize("cost_s", [0.05, 0.2, 1.0])
def test_what_takes_more_is_done_so_much_more_rarely(cost_s: float) -> None:
    share = share_of_steps(cost_s, 2000)
    assert share * cost_s / (STEP_S + share * cost_s) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(("cost_s", "share"), [(0.1, 1.0), (0.3, 0.33), (1.0, 0.1)])
def test_short_steps_may_be_a_little_longer_than_their_part(cost_s: float, share: float) -> None:
    assert share_of_steps(cost_s, 2000, least_s=0.1) == pytest.approx(share, abs=0.01)


def test_the_time_of_a_pause_buys_nothing() -> None:
    watch = Watch()
    assert watch.budget.has_some()
    watch.spend(1.0)
    watch.now += 10.0
    assert not watch.budget.has_some()
    watch.budget.pause()
    watch.now += 1e6
    assert not watch.budget.has_some()
    watch.now += 50.0
    assert watch.budget.has_some()


def test_what_is_forgiven_costs_nothing() -> None:
    watch = Watch()
    assert watch.budget.has_some()
    watch.spend(10.0)
    watch.budget.forgive()
    assert watch.budget.has_some()


def test_what_took_long_once_is_forgotten_in_time() -> None:
    watch = Watch()
    watch.budget.has_some()
    watch.spend(30.0)
    num_steps = 0
    while not watch.budget.has_some():
        watch.now += STEP_S
        num_steps += 1
    assert 300 < num_steps < 30.0 / 0.02
