"""Messages of functions that run ahead: what the driver has of each rank until it has the same step of all.

Why functions may run ahead of their reports: ADR 94.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import FunctionMessage, Question, RanksMet, TrainingResultType

Message = FunctionMessage | FunctionEnded | Question | RanksMet


class MessageQueues:
    """The messages of each rank, oldest first. Those of workers that are lost are dropped with them."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._members: Sequence[Any] = ()
        self._queues: list[deque[Any]] = []
        self._nums_taken: list[int] = []
        self._met: set[Any] = set()
        self._joined: Mapping[Any, int] = {}

    def begin(self, attempt: int | None, members: Mapping[Any, int]) -> None:
        """Says which workers messages come from, by rank; of others nothing is kept.

        Args:
            attempt: How often functions were started: those that start again have told nothing yet.
            members: What each worker is known by, with the number of the group in which it stepped in.
        """
        known = dict(zip(self._members, zip(self._queues, self._nums_taken, strict=True), strict=True))
        if attempt != self._attempt:
            known, self._met = {}, set(members)
        if not self._met.intersection(members):  # those that they have met are all lost by now
            self._met = set(members)
        self._joined = members
        kept = [known.get(member, (deque(), 0)) for member in members]
        self._attempt, self._members = attempt, tuple(members)
        self._queues, self._nums_taken = [queue for queue, _ in kept], [number for _, number in kept]

    @property
    def has_step(self) -> bool:
        """True if there is a message of each rank that reports."""
        for queue in self._queues:
            while queue and isinstance(queue[0], RanksMet):
                number = queue.popleft().number
                self._met |= {member for member, joined in self._joined.items() if joined <= number}
        return bool(self._queues) and all(self._queues[rank] for rank in self._reporting)

    @property
    def _reporting(self) -> list[int]:
        """The ranks that report: those that have stepped in do when they have met the others."""
        return [rank for rank, member in enumerate(self._members) if member in self._met]

    @property
    def are_all_there(self) -> bool:
        """True if all ranks report."""
        return len(self._reporting) == len(self._members)

    def is_needed(self, rank: int) -> bool:
        """Return whether there is none of this rank, and it reports."""
        return not self._queues[rank] and self._members[rank] in self._met

    def num_taken(self, rank: int) -> int:
        """Return how many messages of this rank have come so far."""
        return self._nums_taken[rank]

    def add(self, found: Sequence[Sequence[Message]]) -> None:
        """Takes what the ranks answered."""
        for rank, messages in enumerate(found):
            self._queues[rank].extend(messages)
            self._nums_taken[rank] += len(messages)

    def take_step(self) -> list[FunctionMessage | FunctionEnded | Question | None]:
        """The oldest message of each rank, of which there has to be one; None of a rank that does not report yet."""
        reporting = self._reporting
        return [queue.popleft() if rank in reporting else None for rank, queue in enumerate(self._queues)]

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
