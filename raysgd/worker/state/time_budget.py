"""A part of the time that a precaution may take."""

from __future__ import annotations

import time
from collections.abc import Callable

_MEMORY_S = 600.0


class TimeBudget:
    """Says whether something may be done again, so that it takes at most a part of all time, or so long each time.

    What costs more is done so much more rarely. Times that are long ago count less.

    Args:
        share: The part.
        least_s: What it may take from one question to the next, if that is more than the part.
        spent: Returns the seconds that it has taken so far.
        clock: Returns seconds; only differences are used.
    """

    def __init__(
        self,
        share: float,
        least_s: float,
        spent: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share, self._least_s, self._spent, self._clock = share, least_s, spent, clock
        self._all_s = self._left_s = 0.0
        self._spent_s = spent()
        self._at: float | None = None

    def pause(self) -> None:
        """Leave out the time from here to the next `has_some`."""
        self._at = None

    def forgive(self) -> None:
        """Leave out what was spent since the last `has_some`."""
        self._spent_s = self._spent()

    def has_some(self) -> bool:
        """Return whether it may be done now."""
        now, before_s, self._spent_s = self._clock(), self._spent_s, self._spent()
        self._left_s -= self._spent_s - before_s
        if self._at is not None:
            self._all_s += now - self._at
            self._left_s += max(self._share * (now - self._at), self._least_s)
        self._at = now
        if self._all_s > _MEMORY_S:
            self._all_s, self._left_s = self._all_s / 2, self._left_s / 2
        return self._left_s >= 0.0
