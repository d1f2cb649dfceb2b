"""Pure: how long to wait for those who have not answered, seen against those who have.

A live worker answers beside its work, mostly at once. But a machine may stall for seconds, and where thousands are
asked the answers themselves take seconds to come in: no fixed time tells who is gone.

Why silence is relative to those who answer: ADR 56.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_SHORTEST_S = 2.0
_PART_OF_HEARTBEAT = 5
_TIMES_TYPICAL = 10


def quiet_s(heartbeat_s: float) -> float:
    """Returns the time for which nothing more has to come in before those who are missing are silent."""
    return max(_SHORTEST_S, heartbeat_s / _PART_OF_HEARTBEAT)


def max_silence_s(answered_after_s: Sequence[float], num_missing: int, num_others: int, heartbeat_s: float) -> float:
    """Return how long to wait, from the question on, for those who are missing.

    While answers come in, the wait goes on: it ends when none has come for a while, and those who are missing take many
    times as long as the typical one. Where most are missing, they are probably just slow: no rank is silent then before
    the time has passed that a frozen process gets, either.

    Args:
        answered_after_s: When the others answered, seconds from the question on.
        num_missing: How many have not.
        num_others: How many more of the group are known to live, because they had answered before.
        heartbeat_s: What a worker that gives no sign of life gets.
    """
    quiet = quiet_s(heartbeat_s)
    if num_missing > len(answered_after_s) + num_others:
        return max(quiet, heartbeat_s)
    if not answered_after_s:
        return quiet
    wanted = max(max(answered_after_s) + quiet, _TIMES_TYPICAL * median(answered_after_s))
    return min(wanted, max(quiet, heartbeat_s, max(answered_after_s) + quiet))
