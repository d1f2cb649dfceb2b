"""Events of a trainer's worker groups, such as starts, failures and recoveries. Each event is recorded and logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

logger = logging.getLogger(__name__)


EventKind = Literal["started", "continued", "restored", "restarted", "grown", "left", "hung", "lost", "ended"]

# Logging levels of events. All other events are logged as warnings, which users see without configuring logging.
_LEVELS = {"started": logging.DEBUG, "restarted": logging.INFO}
_RECOVERED = {"continued": "resumed", "restored": "restarted all workers and resumed"}


@dataclass(frozen=True)
class GroupEvent:
    """One event of a trainer's worker group.

    Attributes:
        kind: One of these:

            * "started": The first group was started.
            * "continued": Survivors of a failure kept their processes and continued in a new group.
            * "restored": After a failure, all workers started again from the last snapshot or checkpoint, if any.
            * "restarted": New workers started from the last snapshot or checkpoint, if any, because the old workers
              had been stopped, for example with the event "lost" or "ended".
            * "grown": More workers joined.
            * "left": Workers left a node that is being removed.
            * "hung": Workers were killed because they did not respond. A later event records the outcome.
            * "lost": A failure ended the call with an error.
            * "ended": All workers were stopped. That happens after Ctrl-C, after an exception that left workers stuck
              or out of sync, and if another trainer of the program needs the resources.
        old_size: Number of workers before the event.
        new_size: Number of workers after the event.
        seconds: Duration of the event.
        cause: Reason for the event.
        detail: A description, for users, of the effect on the training: for example, where it continues.
        at: When the event was over, in Unix time.
        num_kept: Number of workers that kept their process while all workers restored a snapshot.
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
        """Time when the event began, in Unix time. A failure begins when the driver detects it."""
        return self.at - self.seconds

    @property
    def is_failure(self) -> bool:
        """True if the event is a failure of workers, whether or not the trainer recovered."""
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
    """The events of a trainer's worker groups, oldest first.

    Args:
        now: Clock, in Unix time.

    Attributes:
        events: The events so far.
        last_resize: When workers last joined, left or restarted, on the engine's monotonic clock. Minus infinity before
            the first such event.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.events: list[GroupEvent] = []
        self.last_resize = float("-inf")

    def record(self, event: GroupEvent) -> None:
        """Record and log an event that is over now."""
        self.events.append(replace(event, at=self._now()))
        logger.log(_LEVELS.get(event.kind, logging.WARNING), "%s", event)

    @property
    def num_failures(self) -> int:
        """Number of worker failures from which the trainer recovered."""
        return self.count("continued") + self.count("restored")

    def count(self, kind: EventKind) -> int:
        """Return the number of events of this kind."""
        return sum(event.kind == kind for event in self.events)
