"""After which calls the workers copy their state: often enough that little has to be repeated, and for little time.

Why snapshots are throttled, and what is repeated instead: ADR 93.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

EverySeconds = float | Literal["auto"] | None

_SHARE = 0.02  # of the time, for copies
_MAX_REPLAY_S = 30.0
_MAX_CALLS = 10_000  # each is kept, with its arguments


@dataclass(frozen=True)
class SnapshotRule:
    """The rule by which a snapshot is due.

    Attributes:
        every_s: So many seconds after the last one. "auto": so rarely that copies take 2 % of the time at most, but
            before more than 30 s of calls would have to be repeated. None: never.
    """

    every_s: EverySeconds = 0.0

    @property
    def is_off(self) -> bool:
        """True if none is ever due."""
        return self.every_s is None

    def is_due(self, copy_s: float, since_s: float, replay_s: float, num_calls: int) -> bool:
        """Return whether one is due after a call.

        Args:
            copy_s: For how long a copy holds the workers up.
            since_s: Seconds from the last copy to the end of the call.
            replay_s: How long the calls since, and this one, would take again.
            num_calls: How many these are.
        """
        if self.every_s is None:
            return False
        if num_calls > _MAX_CALLS:
            return True
        if self.every_s != "auto":
            return since_s >= self.every_s
        return copy_s <= _SHARE * since_s or self.is_overdue(replay_s)

    def is_overdue(self, replay_s: float) -> bool:
        """Return whether one is due without a call, because so much would have to be repeated."""
        return self.every_s == "auto" and replay_s > _MAX_REPLAY_S

    def words(self, copy_s: float | None) -> str:
        """Return what is due when, for the status of a trainer."""
        if self.every_s is None:
            return "switched off"
        if self.every_s != "auto":
            return f"every {self.every_s:g} s" if self.every_s else "after each call"
        if copy_s is None:
            return "after each call"
        every_s = min(copy_s / _SHARE, _MAX_REPLAY_S)
        return f"every {every_s:.2g} s, because a copy takes {copy_s:.2g} s"


class SnapshotPace:
    """Follows what copies cost and how long calls take.

    Whether a copy is due is decided ahead of a call, because the call takes the request along. So its length is
    expected to be that of the last call of the same function.

    Args:
        rule: When a snapshot is due.
        now: Time.
        heartbeat_s: For how long a worker may give no sign of life.
    """

    def __init__(self, rule: SnapshotRule, now: Callable[[], float], heartbeat_s: float = float("inf")) -> None:
        self.rule, self._now, self._heartbeat_s = rule, now, heartbeat_s
        self.copy_s: float | None = None
        self._taken_at = now()
        self._usual_s: dict[Any, float] = {}
        self._has_warned = False

    def note_call(self, function: Any, seconds: float) -> None:
        """Notes how long a call took."""
        self._usual_s[function] = seconds

    def note_copy(self, seconds: float) -> None:
        """Notes that the state was copied, and for how long that held the workers up."""
        self.copy_s, self._taken_at = seconds, self._now()
        if seconds > self._heartbeat_s and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "`heartbeat_s=%g` is shorter than a copy of the state, which took %.1f s: a worker that is busy with "
                "one may be taken for a frozen one. Use at least `heartbeat_s=%d`",
                self._heartbeat_s,
                seconds,
                int(3 * seconds) + 1,
            )

    def is_due(self, function: Any, replay_s: float, num_calls: int) -> bool:
        """Return whether to copy the state after a call that is about to be made.

        Args:
            function: What the call runs.
            replay_s: How long the calls since the last snapshot took.
            num_calls: How many these are.
        """
        usual_s = self._usual_s.get(function)
        if self.copy_s is None or usual_s is None:
            return not self.rule.is_off
        since_s = self._now() - self._taken_at + usual_s
        return self.rule.is_due(self.copy_s, since_s, replay_s + usual_s, num_calls + 1)

    def words(self) -> str:
        """Return what is due when, for the status of a trainer."""
        return self.rule.words(self.copy_s)
