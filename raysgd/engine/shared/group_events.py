"""Events of a trainer's workers: one record and one log line for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


EventKind = Literal["started", "continued", "restored", "restarted", "grown", "left", "hung", "lost", "ended"]

# What repeats work or changes the number of workers is shown where the user set up no logging.
_LEVELS = {"started": logging.DEBUG, "restarted": logging.INFO}
_RECOVERED = {"continued": "resumed", "restored": "restarted all workers and resumed"}


@dataclass(frozen=True)
class GroupEvent:
    """One change in the life of a group.

    Attributes:
        kind: "started"; "continued" (survivors of a failure went on), "restored" (after a failure, new workers from a
            snapshot), "restarted" (the same because the workers before were stopped: after Ctrl-C, an exception that
            left some of them stuck, or a call that had spent its retries), "grown", "left" (a node that is going away),
            "hung" (a worker was ended because it gave no sign of life), "lost" (a failure ended the call in an error),
            or "ended" (all workers were, because of Ctrl-C, or of an exception that left some of them stuck).
        old_size: Workers before.
        new_size: Workers after.
        seconds: How long it took.
        cause: Why.
        detail: What it means for the work, in the user's terms.
        at: When it was over, in seconds since the epoch.
        num_kept: Of workers that went back to a snapshot, those that kept their processes.
    """

    kind: EventKind
    old_size: int
    new_size: int
    seconds: float
    cause: str
    detail: str = ""
    at: float = 0.0
    num_kept: int = 0

    @property
    def began_at(self) -> float:
        """The time when it began, in seconds since the epoch: for a failure, when it was noticed."""
        return self.at - self.seconds

    @property
    def is_failure(self) -> bool:
        """True if workers were lost, whatever came of it."""
        return self.kind in ("continued", "restored", "lost")

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        if self.kind in _RECOVERED:
            size = (
                f"{self.new_size}" if self.new_size == self.old_size else f"{self.new_size} instead of {self.old_size}"
            )
            return f"{self.cause}; {self._recovered} with {size} workers after {self.seconds:.2f} s{detail}"
        return f"{self.kind}: {self.old_size} -> {self.new_size} workers in {self.seconds:.2f} s: {self.cause}{detail}"

    @property
    def _recovered(self) -> str:
        if not self.num_kept:
            return _RECOVERED[self.kind]
        return f"kept {self.num_kept} {'process' if self.num_kept == 1 else 'processes'} and resumed"


class GroupHistory:
    """The events so far.

    Args:
        now: Time.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.events: list[GroupEvent] = []
        self.last_resize = float("-inf")

    def record(
        self,
        kind: EventKind,
        old_size: int,
        new_size: int,
        seconds: float,
        cause: str,
        detail: str = "",
        num_kept: int = 0,
    ) -> None:
        """Note an event and log it."""
        event = GroupEvent(kind, old_size, new_size, seconds, cause, detail, self._now(), num_kept)
        self.events.append(event)
        logger.log(_LEVELS.get(kind, logging.WARNING), "%s", event)

    @property
    def num_failures(self) -> int:
        """The number of failures of workers that were recovered from."""
        return self.count("continued") + self.count("restored")

    def count(self, kind: EventKind) -> int:
        """Return how many events of this kind there were."""
        return sum(event.kind == kind for event in self.events)
