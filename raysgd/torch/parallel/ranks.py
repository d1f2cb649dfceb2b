"""The group as the sources of one replica's batches see it: the place in it, and what its ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.torch.parallel.strategy import NoParallel, Summation


class Ranks:
    """One group; a replica that gets a place in another one has another object.

    Attributes:
        rank: The place of the replica.
        world_size: How many replicas there are.
    """

    def __init__(
        self,
        parallel: NoParallel,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._parallel = parallel
        self.rank, self.world_size = rank, world_size

    @property
    def is_global(self) -> bool:
        """True if there are others, with which this one steps together."""
        return self.world_size > 1 and self._parallel.synchronizes

    @cached_property
    def start_sum(self) -> Summation:
        """Starts sums beside the training. Made once in each group, by all ranks at the same time."""
        return self._parallel.summation()

    def adding(self) -> StartSum:
        """Return the same for arrays of NumPy.

        Raises:
            ValueError: The workers tell each other nothing.
        """
        if not self.is_global:
            raise ValueError(
                'With `strategy="none"` workers tell each other nothing, which a stream with a filter, or with shards '
                "of unknown lengths, needs."
            )
        start_sum = self.start_sum

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            wait = start_sum(torch.from_numpy(numbers))

            def summed() -> Numbers:
                wait()
                return numbers

            return summed

        return start
