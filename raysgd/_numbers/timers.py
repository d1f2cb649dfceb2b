"""Timers for the phases of training, cheap enough to leave in the code.

A `TimerStat` keeps the latest durations of one phase in a window; a `TimerCollection` holds one per name and
can be switched off as a whole. Pure Python, and the clock is an argument: tests pass one in. All durations are in
seconds.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Clock = Callable[[], float]

_NOTHING = nullcontext()


class TimerStat(AbstractContextManager[None]):
    """Durations of one repeated piece of work, over a window of the latest ones.

    Examples:
        >>> timer = TimerStat(window_size=2)
        >>> for seconds in (1.0, 2.0, 4.0):
        ...     timer.push(seconds)
        >>> timer.mean, timer.first, timer.last, timer.count
        (3.0, 2.0, 4.0, 3)

    Args:
        window_size: How many of the latest durations the statistics look at.
        clock: Returns the current time in seconds; only differences are used.

    Attributes:
        count: How many durations were pushed since construction or `reset`, also those that left the window.
    """

    def __init__(self, window_size: int = 10, clock: Clock = time.perf_counter) -> None:
        if window_size < 1:
            raise ValueError(f"`window_size={window_size}`: need at least 1, the number of durations to look at.")
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=window_size)
        self._units_processed: deque[float] = deque(maxlen=window_size)
        self._started_at: float | None = None
        self.count = 0

    def __enter__(self) -> None:
        """Start the clock.

        Raises:
            AssertionError: If the timer already runs: one timer times one thing at a time.
        """
        if self._started_at is not None:
            raise AssertionError("this `TimerStat` already runs: nest two timers instead of entering one twice.")
        self._started_at = self._clock()

    def __exit__(self, *error: object) -> None:
        """Stop the clock and keep the duration, also when the timed work raised."""
        if self._started_at is not None:  # else `reset` was called inside the block
            self.push(self._clock() - self._started_at)
            self._started_at = None

    def push(self, duration_s: float) -> None:
        """Add one duration that was measured elsewhere."""
        self._durations_s.append(duration_s)
        self.count += 1

    def push_units_processed(self, num_units: float) -> None:
        """Add how many units (samples, tokens) one duration was spent on."""
        self._units_processed.append(num_units)

    def reset(self) -> None:
        """Forget everything, a running measurement included."""
        self._durations_s.clear()
        self._units_processed.clear()
        self._started_at = None
        self.count = 0

    @property
    def mean(self) -> float:
        """Mean duration in the window; NaN when it is empty."""
        return _mean(self._durations_s)

    @property
    def median(self) -> float:
        """Median duration in the window; NaN when it is empty."""
        return float(statistics.median(self._durations_s)) if self._durations_s else float("nan")

    @property
    def sum(self) -> float:
        """Total of the durations in the window."""
        return float(sum(self._durations_s))

    @property
    def max(self) -> float:
        """Longest duration in the window.

        Raises:
            ValueError: If the window is empty.
        """
        return max(self._durations_s)

    @property
    def first(self) -> float | None:
        """Oldest duration in the window; None when it is empty."""
        return self._durations_s[0] if self._durations_s else None

    @property
    def last(self) -> float | None:
        """Latest duration; None when the window is empty."""
        return self._durations_s[-1] if self._durations_s else None

    @property
    def size(self) -> int:
        """The number of durations in the window."""
        return len(self._durations_s)

    @property
    def mean_units_processed(self) -> float:
        """Mean units per push in the window; NaN when none were pushed."""
        return _mean(self._units_processed)

    @property
    def mean_throughput(self) -> float:
        """Units per second over the window; 0.0 while no time has passed."""
        return float(sum(self._units_processed)) / self.sum if self.sum else 0.0


class TimerCollection:
    """Timers by name, created on first use and switched on or off together.

    Examples:
        >>> timers = TimerCollection(clock=iter([1.0, 3.0]).__next__)
        >>> with timers.record("fwd"):
        ...     pass
        >>> timers.stats(mean=True, last=True)
        {'mean_fwd_s': 2.0, 'last_fwd_s': 2.0}

    Args:
        clock: Returns the current time in seconds; handed to every timer.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._timers: dict[str, TimerStat] = {}
        self._enabled = True

    def record(self, key: str) -> AbstractContextManager[None]:
        """Time the body of a `with` block under a name; does nothing while disabled."""
        if not self._enabled:
            return _NOTHING
        timer = self._timers.get(key)
        if timer is None:
            timer = self._timers[key] = TimerStat(clock=self._clock)
        return timer

    def enable(self) -> None:
        """Let `record` measure."""
        self._enabled = True

    def disable(self) -> None:
        """Make `record` free of cost and without effect; what was measured stays."""
        self._enabled = False

    def reset(self) -> None:
        """Forget what every timer measured."""
        for timer in self._timers.values():
            timer.reset()

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, float]:
        """Report the timers that fired since the last reset.

        Args:
            mean: Include `mean_<key>_s`, the mean over each timer's window.
            last: Include `last_<key>_s`, the latest duration.
        """
        result: dict[str, float] = {}
        for key, timer in self._timers.items():
            if timer.last is None:
                continue
            if mean:
                result[f"mean_{key}_s"] = timer.mean
            if last:
                result[f"last_{key}_s"] = timer.last
        return result


def _mean(values: deque[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
