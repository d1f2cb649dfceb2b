"""Timers for the phases of training. They are cheap enough to leave in production code.

A `TimerStat` stores the latest durations of one phase. A `TimerCollection` holds timers by name and can be disabled as
a whole. Tests can pass their own clock. All durations are in seconds.
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
    """Measures how long repeated `with` blocks take, and computes statistics over the latest durations (the window).

    Examples:
        >>> timer = TimerStat(window_size=2)
        >>> for seconds in (1.0, 2.0, 4.0):
        ...     timer.push(seconds)
        >>> timer.mean, timer.first, timer.last, timer.count
        (3.0, 2.0, 4.0, 3)

    Args:
        window_size: Number of latest durations that the statistics use.
        clock: Returns the current time in seconds. Only differences are used.

    Attributes:
        count: Number of durations since construction or `reset`, including durations that have left the window.

    Raises:
        ValueError: `window_size` is less than 1.
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
            AssertionError: The timer is already running.
        """
        if self._started_at is not None:
            raise AssertionError("this `TimerStat` already runs: nest two timers instead of entering one twice.")
        self._started_at = self._clock()

    def __exit__(self, *error: object) -> None:
        """Stop the clock and store the duration, even if the code in the `with` block raised an error."""
        if self._started_at is not None:  # if `reset` was called inside the block, there is nothing to store
            self.push(self._clock() - self._started_at)
            self._started_at = None

    def push(self, duration_s: float) -> None:
        """Add a duration that the caller measured."""
        self._durations_s.append(duration_s)
        self.count += 1

    def push_units_processed(self, num_units: float) -> None:
        """Add the number of units, such as samples or tokens, that were processed in one measured period."""
        self._units_processed.append(num_units)

    def reset(self) -> None:
        """Discard all durations. If the timer is running, also discard the current measurement."""
        self._durations_s.clear()
        self._units_processed.clear()
        self._started_at = None
        self.count = 0

    @property
    def mean(self) -> float:
        """Mean of the durations in the window; NaN if the window is empty."""
        return _mean(self._durations_s)

    @property
    def median(self) -> float:
        """Median of the durations in the window; NaN if the window is empty."""
        return float(statistics.median(self._durations_s)) if self._durations_s else float("nan")

    @property
    def sum(self) -> float:
        """Sum of the durations in the window."""
        return float(sum(self._durations_s))

    @property
    def max(self) -> float:
        """Longest duration in the window.

        Raises:
            ValueError: The window is empty.
        """
        return max(self._durations_s)

    @property
    def first(self) -> float | None:
        """Oldest duration in the window; None if the window is empty."""
        return self._durations_s[0] if self._durations_s else None

    @property
    def last(self) -> float | None:
        """Latest duration; None if the window is empty."""
        return self._durations_s[-1] if self._durations_s else None

    @property
    def size(self) -> int:
        """Number of durations in the window."""
        return len(self._durations_s)

    @property
    def mean_units_processed(self) -> float:
        """Mean number of units per call of `push_units_processed`, over the window; NaN if the window is empty."""
        return _mean(self._units_processed)

    @property
    def mean_throughput(self) -> float:
        """Number of units processed per second, over the window; 0.0 if no time has passed."""
        return float(sum(self._units_processed)) / self.sum if self.sum else 0.0


class TimerCollection:
    """Timers by name, created on first use and enabled or disabled together.

    Examples:
        >>> timers = TimerCollection(clock=iter([1.0, 3.0]).__next__)
        >>> with timers.record("fwd"):
        ...     pass
        >>> timers.stats(mean=True, last=True)
        {'mean_fwd_s': 2.0, 'last_fwd_s': 2.0}

    Args:
        clock: Returns the current time in seconds. Passed to every timer.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._timers: dict[str, TimerStat] = {}
        self._enabled = True

    def record(self, key: str) -> AbstractContextManager[None]:
        """Return a context manager that measures a `with` block with the timer `key`.

        If timers are disabled, return a context manager that does nothing.
        """
        if not self._enabled:
            return _NOTHING
        timer = self._timers.get(key)
        if timer is None:
            timer = self._timers[key] = TimerStat(clock=self._clock)
        return timer

    def enable(self) -> None:
        """Make `record` measure blocks again."""
        self._enabled = True

    def disable(self) -> None:
        """Make `record` do nothing. Existing measurements are kept."""
        self._enabled = False

    def reset(self) -> None:
        """Discard the measurements of all timers."""
        for timer in self._timers.values():
            timer.reset()

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, float]:
        """Return statistics of the timers that were used since the last reset.

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
