from __future__ import annotations

import contextlib
import math

import pytest

from raysgd.core.numbers.timing import TimerCollection, TimerStat


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestTimerStat:
    def test_measures_the_body_of_a_with_block_also_if_that_raises(self, clock: FakeClock) -> None:
        timer = TimerStat(clock=clock)
        with contextlib.suppress(KeyError), timer as entered:
            clock.now_s += 2.5
            raise KeyError("body")
        assert entered is None
        with timer:
            clock.now_s += 3.0
        assert (timer.first, timer.last, timer.count) == (2.5, 3.0, 2)

    def test_refuses_to_be_entered_twice(self) -> None:
        timer = TimerStat()
        with timer, pytest.raises(AssertionError, match="already runs"), timer:
            pass

    def test_statistics_are_those_of_the_window(self) -> None:
        timer = TimerStat(window_size=4)
        for duration_s in (9.0, 1.0, 2.0, 4.0, 3.0):
            timer.push(duration_s)
        assert (timer.mean, timer.median, timer.sum, timer.max) == (2.5, 2.5, 10.0, 4.0)
        assert (timer.first, timer.last, timer.size, timer.count) == (1.0, 3.0, 4, 5)
        by_default = TimerStat()
        for _ in range(12):
            by_default.push(1.0)
        assert (by_default.size, by_default.count) == (10, 12)
        with pytest.raises(ValueError, match="`window_size=0`: need at least 1"):
            TimerStat(window_size=0)

    @pytest.mark.parametrize("is_reset", [False, True])
    def test_an_empty_window_has_no_values(self, is_reset: bool) -> None:
        timer = TimerStat()
        if is_reset:
            timer.push(2.0)
            timer.push_units_processed(1)
            timer.reset()
        assert all(map(math.isnan, (timer.mean, timer.median, timer.mean_units_processed)))
        assert (timer.sum, timer.first, timer.last, timer.size, timer.count) == (0.0, None, None, 0, 0)
        with pytest.raises(ValueError, match="empty"):
            _ = timer.max

    def test_throughput_is_units_over_time(self) -> None:
        timer = TimerStat()
        timer.push_units_processed(30)
        assert timer.mean_throughput == 0.0
        timer.push(2.0)
        timer.push(1.0)
        timer.push_units_processed(60)
        assert (timer.mean_units_processed, timer.mean_throughput) == (45.0, 30.0)

    def test_reset_inside_the_block_drops_the_running_measurement(self, clock: FakeClock) -> None:
        timer = TimerStat(clock=clock)
        with timer:
            timer.reset()
        assert timer.count == 0


def test_a_collection_reports_each_timer_that_fired_while_it_was_on(clock: FakeClock) -> None:
    timers = TimerCollection(clock=clock)
    for duration_s in (1.0, 3.0):
        with timers.record("fwd"):
            clock.now_s += duration_s
    timers.disable()
    with timers.record("fwd"), timers.record("off"):
        clock.now_s += 7.0
    timers.enable()
    with timers.record("grad"):
        clock.now_s += 5.0
    assert timers.stats() == {"mean_fwd_s": 2.0, "mean_grad_s": 5.0}
    assert timers.stats(mean=False, last=True) == {"last_fwd_s": 3.0, "last_grad_s": 5.0}
    assert list(timers.stats(last=True)) == ["mean_fwd_s", "last_fwd_s", "mean_grad_s", "last_grad_s"]
    timers.reset()
    assert timers.stats(last=True) == {}
