"""A part of the time that a precaution may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

_MEMORY_S = 600.0


class TimeBudget(AbstractContextManager[None]):
    """Says whether something may be done again, so that it takes at most a part of all time, or so long each time.

    It is done inside the budget, as a context. What costs more is done so much more rarely. Times that are long ago
    count less.

    Args:
        share: The part.
        least_s: What it may take from one question to the next, if that is more than the part.
        clock: Returns seconds; only differences are used.
    """

    def __init__(self, share: float, least_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share, self._least_s, self._clock = share, least_s, clock
        self._all_s = self._allowed_s = self._spent_s = 0.0
        self._at: float | None = None

    def pause(self) -> None:
        """Leave out the time from here to the next `has_some`."""
        self._at = None

    def has_some(self) -> bool:
        """Return whether it may be done now."""
        now = self._clock()
        if self._at is not None:
            self._all_s += now - self._at
            self._allowed_s += max(self._share * (now - self._at), self._least_s)
        self._at = now
        if self._all_s > _MEMORY_S:
            self._all_s, self._allowed_s, self._spent_s = self._all_s / 2, self._allowed_s / 2, self._spent_s / 2
        return self._spent_s <= self._allowed_s

    def __enter__(self) -> None:
        self._spent_s -= self._clock()

    def __exit__(self, *_: object) -> None:
        self._spent_s += self._clock()
