"""Timers for the phases of training, and records of how each rank spent its time.

A `TimerStat` stores the latest durations of one phase. A `TimerCollection` holds timers by name and can be disabled as
a whole. They are cheap enough to leave in production code. Tests can pass their own clock. All durations are in
seconds.

A record says how many seconds a rank spent on each kind of work, such as steps, waiting for data or recovery. The
kinds are called bins, and the seconds of all bins add up to the elapsed time. Workers measure the times
(`raysgd/trainer/worker/ledger.py`), and the driver sums them (`raysgd/core/history/accounts.py`). ADR 97 explains the
bins.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

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


USEFUL, AGAIN, DATA, EXCHANGE, SLOWER_RANK = "useful", "again", "data", "exchange", "slower_rank"
SNAPSHOT, UNDO = "snapshot", "undo"
START_UP, EVALUATION, DRIVER, OTHER = "start_up", "evaluation", "driver", "other"
VALIDATION_WAIT = "validation_wait"
DETECT, FORM, HAND_OVER = "recovery_detect", "recovery_form", "recovery_hand_over"
RESUME, REPLACE = "recovery_resume", "recovery_replace"
RECOVERY = (DETECT, FORM, HAND_OVER, RESUME, REPLACE)

BINS: Mapping[str, str] = {
    USEFUL: "useful steps",
    AGAIN: "steps done again",
    DATA: "waiting for data",
    EXCHANGE: "exchanging",
    SLOWER_RANK: "waiting for a slower rank",
    SNAPSHOT: "snapshot",
    UNDO: "copies to undo a batch",
    DETECT: "recovery: leaving the old group",
    FORM: "recovery: forming a new group",
    HAND_OVER: "recovery: handing over the state",
    RESUME: "recovery: resuming the call",
    REPLACE: "recovery: a worker was missing",
    START_UP: "start-up",
    EVALUATION: "evaluation",
    VALIDATION_WAIT: "waiting for a validation that runs elsewhere",
    DRIVER: "driver (between calls)",
    OTHER: "other",
}
"""For each bin (category of time), the name that users see."""

SHOWN_FROM = 0.005
OUTSIDE = (START_UP, EVALUATION, VALIDATION_WAIT, DRIVER)
_LOST = (AGAIN, SNAPSHOT, UNDO, *RECOVERY)
_AVOIDABLE = {
    "waiting for data": (DATA,),
    "exchanging gradients": (EXCHANGE,),
    "waiting for a slower rank": (SLOWER_RANK,),
    "copying snapshots": (SNAPSHOT,),
    "copying to undo a batch": (UNDO,),
    "recovering from failures": (AGAIN, *RECOVERY),
}


@dataclass(frozen=True)
class TimeSpent:
    """The time that one replica spent on each kind of work, as measured in its worker.

    Attributes:
        of: Identifies the replica. If a replica is replaced, its successor with the same rank has a different value.
        seconds: Seconds by bin (category of time) since the replica was created. For a standby worker, since it joined
            a group.
        unsaved_s: Seconds of training steps since the replica's state was last copied. A restart would have to repeat
            these steps.
        is_successor: True if the replica belongs to a standby worker that joined a running group. It then continues
            from the state of that group rather than from a snapshot.
    """

    of: str
    seconds: Mapping[str, float]
    unsaved_s: float = 0.0
    is_successor: bool = False

    @cached_property
    def total_s(self) -> float:
        """Total seconds, summed over all bins (categories of time)."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class TimeLedger:
    """The time that a trainer's ranks spent on each kind of work: steps, waiting for data, recovery and so on.

    Attributes:
        ranks: For each rank that has reported, its seconds by bin (category of time). A rank's seconds add up to the
            time from the rank's start to its last report.
        notes: Sentences that say what the ledger does not include.
    """

    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, rank: int) -> Mapping[str, float]:
        """Return a rank's seconds by bin (category of time).

        Raises:
            ValueError: The rank has not reported yet.
        """
        if rank in self.ranks:
            return self.ranks[rank]
        known = f"available ranks are {sorted(self.ranks)}" if self.ranks else "no rank has reported yet"
        raise ValueError(f"`rank={rank!r}` has no ledger: {'; '.join([known, *self.notes])}.")

    def total(self) -> dict[str, float]:
        """Return the seconds by bin (category of time), summed over all ranks. Empty bins are omitted."""
        return dict(self._total)

    @cached_property
    def _total(self) -> dict[str, float]:
        sums = dict.fromkeys(BINS, 0.0)
        for seconds in self.ranks.values():
            for name in seconds.keys() & sums.keys():
                sums[name] += seconds[name]
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    @property
    def training_s(self) -> float:
        """Seconds in training calls, including recoveries, summed over all ranks."""
        return seconds_in_calls(self.total())

    @property
    def goodput(self) -> float | None:
        """Fraction of the time in training calls that was neither lost to failures nor spent on preparing for failures.

        The value is None before the first training call.
        """
        return goodput_of(self.total())

    def largest_avoidable(self) -> tuple[str, float] | None:
        """Return the avoidable activity, such as waiting for data, that took the most time in training calls.

        Returns:
            The name of the activity and the fraction of the time in training calls that it took. None before the first
            training call.
        """
        total = self.total()
        inside = seconds_in_calls(total)
        if not inside:
            return None
        shares = {words: sum(total.get(name, 0.0) for name in names) / inside for words, names in _AVOIDABLE.items()}
        words = max(shares, key=shares.__getitem__)
        return words, shares[words]

    def __str__(self) -> str:
        total = self.total()
        everything = sum(total.values())
        shares = {name: spent / everything for name, spent in total.items()}
        parts = [f"{words} {shares[name]:.1%}" for name, words in BINS.items() if shares.get(name, 0.0) >= SHOWN_FROM]
        goodput = self.goodput
        head = [] if goodput is None else [f"goodput {goodput:.1%}"]
        return "; ".join([*head, *([", ".join(parts)] if parts else []), *self.notes])


def goodput_of(seconds: Mapping[str, float]) -> float | None:
    """Return the fraction of the time in training calls that was not lost to failures or spent on preparing for them.

    Return None if there was no training call.

    Args:
        seconds: Seconds by bin (category of time).

    Examples:
        >>> goodput_of({"useful": 8.0, "data": 1.0, "recovery_form": 1.0, "driver": 100.0})
        0.9
    """
    inside = seconds_in_calls(seconds)
    return 1.0 - sum(seconds.get(name, 0.0) for name in _LOST) / inside if inside else None


def seconds_in_calls(seconds: Mapping[str, float]) -> float:
    """Return the seconds that were spent in training calls, including recoveries.

    Args:
        seconds: Seconds by bin (category of time).
    """
    return sum(spent for name, spent in seconds.items() if name not in OUTSIDE)
