"""Pure: time as this process lives it, without the seconds in which it stands still."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST_GAP_S = 1.0


class OwnTime:
    """Counts seconds from when it is made on, as long as it is looked at often.

    For limits on how long to wait for others: what happens to this process, such as SIGSTOP or a machine that stalls,
    does not shorten their time. They may have stood still for as long.

    Args:
        now: Time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked_at, self._seconds = now(), 0.0

    def look(self, at_most_s: float = _LONGEST_GAP_S) -> float:
        """The seconds until now; since the last look no more than so many, whatever the clock says."""
        return self._count(at_most_s)

    def catch_up(self) -> None:
        """Counts all until now: this process did something else, which took it so long."""
        self._count(float("inf"))

    def _count(self, at_most_s: float) -> float:
        now = self._now()
        self._seconds += min(now - self._looked_at, at_most_s)
        self._looked_at = now
        return self._seconds
