"""`RankSums`: this worker's rank in its worker group, and sums over all ranks of the group."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.torch.parallel.strategy import Strategy, Summation


class RankSums:
    """This worker's rank in its worker group, and sums over all ranks of the group.

    Each new worker group needs a new object.

    Args:
        parallel: Strategy, such as DDP, whose communication computes the sums.
        rank: Rank of this worker.
        world_size: Number of workers.

    Attributes:
        rank: Rank of this worker.
        world_size: Number of workers.
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
        """True if this worker takes synchronized optimizer steps with other workers."""
        return self.world_size > 1 and self._parallel.sync.averages

    @cached_property
    def start_sum(self) -> Summation:
        """Function that starts to sum a tensor over the ranks, in the background.

        The first read creates a process group, so all ranks must read this property for the first time together.
        """
        return self._parallel.summation()

    def adding(self) -> StartSum:
        """Return a function that starts to sum a NumPy array over the ranks, in the background.

        The returned function starts a sum and returns another function, which waits for that sum and returns it.

        Raises:
            ValueError: There is only one worker, or the workers do not communicate.
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
