from __future__ import annotations

import contextlib
import math

import numpy
import pytest

from raysgd._numbers.timers import TimerCollection, TimerStat


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pushed() -> TimerStat:
    timer = TimerStat(window_size=4)
    for duration_s in (9.0, 1.0, 2.0, 4.0, 3.0):
        timer.push(duration_s)
    return timer


class TestTimerStat:
    def test_measures_the_body_of_a_with_block(self, clock: FakeClock) -> None:
        timer = TimerStat(clock=clock)
        with timer as entered:
            clock.now_s += 2.5
        assert entered is None
        assert (timer.last, timer.count) == (2.5, 1)

    def test_counts_a_body_that_raised(self, clock: FakeClock) -> None:
        timer = TimerStat(clock=clock)
        with contextlib.suppress(KeyError), timer:
            clock.now_s += 1.0
            raise KeyError("body")
        assert timer.last == 1.0
        with timer:
            clock.now_s += 3.0
        assert timer.last == 3.0

    def test_refuses_to_be_entered_twice(self) -> None:
        timer = TimerStat()
        with timer, pytest.raises(AssertionError, match="already runs"), timer:
            pass

    def test_statistics_agree_with_numpy_over_the_window(self, pushed: TimerStat) -> None:
        timer = pushed
        window = [1.0, 2.0, 4.0, 3.0]
        assert timer.mean == numpy.mean(window)
        assert timer.median == numpy.median(window)
        assert timer.sum == numpy.sum(window)
        assert timer.max == numpy.max(window)

    def test_first_and_last_are_the_ends_of_the_window(self, pushed: TimerStat) -> None:
        timer = pushed
        assert (timer.first, timer.last, timer.size, timer.count) == (1.0, 3.0, 4, 5)

    def test_the_window_holds_ten_unless_told(self) -> None:
        timer = TimerStat()
        for _ in range(12):
            timer.push(1.0)
        assert (timer.size, timer.count) == (10, 12)

    def test_an_empty_window_has_no_values(self) -> None:
        timer = TimerStat()
        assert math.isnan(timer.mean)
        assert math.isnan(timer.median)
        assert math.isnan(timer.mean_units_processed)
        assert (timer.sum, timer.first, timer.last, timer.size, timer.count) == (0.0, None, None, 0, 0)
        with pytest.raises(ValueError, match="empty"):
            _ = timer.max

    def test_throughput_is_units_over_time(self) -> None:
        timer = TimerStat()
        assert timer.mean_throughput == 0.0
        timer.push_units_processed(30)
        assert timer.mean_throughput == 0.0
        timer.push(2.0)
        timer.push(1.0)
        timer.push_units_processed(60)
        assert (timer.mean_units_processed, timer.mean_throughput) == (45.0, 30.0)

    def test_reset_forgets_all(self, pushed: TimerStat) -> None:
        timer = pushed
        timer.push_units_processed(1)
        timer.reset()
        assert (timer.size, timer.count, timer.sum, timer.last) == (0, 0, 0.0, None)
        assert math.isnan(timer.mean_units_processed)

    def test_reset_inside_the_block_drops_the_running_measurement(self, clock: FakeClock) -> None:
        timer = TimerStat(clock=clock)
        with timer:
            timer.reset()
        assert timer.count == 0

    def test_a_window_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`window_size=0`: need at least 1"):
            TimerStat(window_size=0)


class TestTimerCollection:
    def test_reports_each_timer_that_fired(self, clock: FakeClock) -> None:
        timers = TimerCollection(clock=clock)
        for duration_s in (1.0, 3.0):
            with timers.record("fwd"):
                clock.now_s += duration_s
        with timers.record("grad"):
            clock.now_s += 5.0
        assert timers.stats() == {"mean_fwd_s": 2.0, "mean_grad_s": 5.0}
        assert timers.stats(mean=False, last=True) == {"last_fwd_s": 3.0, "last_grad_s": 5.0}
        assert list(timers.stats(last=True)) == ["mean_fwd_s", "last_fwd_s", "mean_grad_s", "last_grad_s"]

    def test_measures_nothing_while_disabled(self, clock: FakeClock) -> None:
        timers = TimerCollection(clock=clock)
        timers.disable()
        with timers.record("fwd"):
            clock.now_s += 1.0
        assert timers.stats() == {}
        timers.enable()
        with timers.record("fwd"):
            clock.now_s += 4.0
        assert timers.stats() == {"mean_fwd_s": 4.0}

    def test_reset_drops_timers_from_the_report_until_they_fire_again(self, clock: FakeClock) -> None:
        timers = TimerCollection(clock=clock)
        with timers.record("fwd"):
            clock.now_s += 1.0
        timers.reset()
        assert timers.stats(last=True) == {}
