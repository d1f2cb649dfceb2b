"""`LargestBatch`: how many samples a worker processes at once, as `micro_batch_size="auto"` has found (ADR 178)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class LargestBatch:
    """The number of samples that each worker of a trainer processes at once. Every attempt at a call sends it to all.

    Attributes:
        size: The number. None until memory runs out: each worker then processes its whole share of a global batch.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._members: Collection[Any] | None = None  # workers of the last attempt; None to accept any workers
        self._short: Collection[Any] = ()  # workers for which twice the size was too large

    def split(self, sizes: Mapping[Any, int]) -> None:
        """Reduce the size, because memory ran out.

        Args:
            sizes: For each worker that ran out of memory, the number of samples that it can process at once.
        """
        self.size, self._short, self._members = min(sizes.values()), {*sizes}, None
        logger.warning(
            "a worker ran out of memory, so the workers repeat the step, with at most %d samples at once from now on",
            self.size,
        )

    def for_group(self, workers: Collection[Any]) -> int | None:
        """Return the size for the next attempt. If the workers that ran out of memory have left, try twice the size.

        Args:
            workers: The workers of the group.
        """
        members, before = {*workers}, self._members
        if self.size is not None and before not in (None, members) and members.isdisjoint(self._short):
            self.size *= 2
        self._members = members
        return self.size

    def learn(self, size: int | None) -> None:
        """Record the size that the workers have used in a call, perhaps because they loaded it from a checkpoint."""
        self.size = size
