"""Seconds in which this process stands still are not counted."""

from __future__ import annotations

import pytest

from raysgd.engine.decisions.own_time import OwnTime
from tests.helpers.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_it_counts_as_the_clock_does_while_it_is_looked_at(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    for _ in range(10):
        clock.sleep(0.5)
        own_time.look()
    assert own_time.look() == pytest.approx(5.0)


def test_a_long_gap_counts_as_a_second(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(60.0)
    assert own_time.look() == pytest.approx(1.0)
    clock.sleep(0.5)
    assert own_time.look() == pytest.approx(1.5)


def test_a_pause_counts_as_no_more_than_it_was_meant_to_take(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(0.7)
    assert own_time.look(0.1) == pytest.approx(0.1)


def test_work_of_its_own_counts_whole(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(60.0)
    own_time.catch_up()
    assert own_time.look() == pytest.approx(60.0)
