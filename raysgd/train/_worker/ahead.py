"""Messages of functions that run ahead: what the driver has of each rank until it has the same step of all.

Why functions may run ahead of their reports: ADR 94.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import FunctionMessage, Question, TrainingResultType


class MessageQueues:
    """The messages of each rank, oldest first. Those of workers that were replaced are dropped with them."""

    def __init__(self) -> None:
        self._group: Any = None
        self._queues: list[deque[FunctionMessage | FunctionEnded | Question]] = []

    def begin(self, group: Sequence[Any]) -> None:
        """Says which workers messages come from; nothing of others is kept."""
        if group is not self._group:
            self._group, self._queues = group, [deque() for _ in group]

    def has_step(self, group: Sequence[Any] | None) -> bool:
        """Return whether there is a message of each rank of these workers."""
        return group is not None and group is self._group and all(self._queues)

    def is_needed(self, rank: int) -> bool:
        """Return whether there is none of this rank."""
        return not self._queues[rank]

    def add(self, found: Sequence[Sequence[FunctionMessage | FunctionEnded | Question]]) -> None:
        """Takes what the ranks answered."""
        for queue, messages in zip(self._queues, found, strict=True):
            queue.extend(messages)

    def take_step(self) -> list[FunctionMessage | FunctionEnded | Question]:
        """The oldest message of each rank. There has to be one."""
        return [queue.popleft() for queue in self._queues]

    def drop_reports(self) -> None:
        """Drops reports that carry only metrics, as the workers do with theirs once they are muted."""
        self._queues = [deque(message for message in queue if not is_mere_report(message)) for queue in self._queues]


def is_mere_report(message: Any) -> bool:
    """Return whether it is metrics without a checkpoint."""
    return (
        isinstance(message, FunctionMessage)
        and message.kind is TrainingResultType.REPORT
        and message.checkpoint_ref is None
    )
