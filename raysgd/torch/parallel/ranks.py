"""What the sources of batches need to know about the worker group: this replica's rank, and sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.torch.parallel.strategy import Strategy, Summation


class RankSums:
    """This replica's rank in its worker group, and sums over the group's ranks. Create a new object for each new group.

    Args:
        parallel: Strategy that keeps the replicas in sync, which provides the sums.
        rank: Rank of this replica.
        world_size: Number of replicas.

    Attributes:
        rank: Rank of this replica.
        world_size: Number of replicas.
    """

    def __init__(
        self,
        parallel: Strategy,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._parallel = parallel
        self.rank, self.world_size = rank, world_size

    @property
    def is_global(self) -> bool:
        """True if this replica takes synchronized steps with other replicas."""
        return self.world_size > 1 and self._parallel.synchronizes

    @cached_property
    def start_sum(self) -> Summation:
        """Function that starts to sum a tensor over the ranks, in the background.

        The first read of this property is a collective operation, in which all ranks must take part.
        """
        return self._parallel.summation()

    def adding(self) -> StartSum:
        """Return a function that starts to sum a NumPy array over the ranks, and returns a function that waits for it.

        Raises:
            ValueError: The workers do not communicate.
        """
        if not self.is_global:
            raise ValueError(
                'With `strategy="none"` workers do not communicate, but a stream with a filter, or with shards of '
                "unknown length, needs this. Omit `strategy`, or pass a stream without these."
            )
        start_sum = self.start_sum

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            wait = start_sum(torch.from_numpy(numbers))

            def summed() -> Numbers:
                wait()
                return numbers

            return summed

        return start
