"""Running sums of metrics as numbers in a row, with a layout that seldom changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Flat = tuple[Any, Sequence[float]]
"""The state of a metric object, as its framework lays it out: the meaning of its numbers, and the numbers."""


@dataclass
class Tally:
    """The counts of a metric object so far.

    >>> tally = Tally(96.0, {"loss": (28.8, 96.0, 0.2)})
    >>> tally.layout, tally.numbers
    ((('loss',), ()), [96.0, 28.8, 96.0, 0.2])
    >>> Tally.of(tally.layout, tally.numbers) == tally
    True

    Attributes:
        num_samples: Sum of the samples of all batches.
        sums: Of each mean the sum, the weight, and the last value.
        objects: Of each metric object its state.
    """

    num_samples: float
    sums: dict[Any, tuple[float, float, float]] = field(default_factory=dict)
    objects: dict[Any, Flat] = field(default_factory=dict)

    @property
    def layout(self) -> tuple[Any, ...]:
        """The meaning of the numbers."""
        objects = ((name, meaning, len(numbers)) for name, (meaning, numbers) in self.objects.items())
        return tuple(self.sums), tuple(objects)

    @property
    def numbers(self) -> list[float]:
        """All of it as one row."""
        return [self.num_samples, *itertools.chain(*self.sums.values(), *(each for _, each in self.objects.values()))]

    @classmethod
    def of(cls, layout: tuple[Any, ...], numbers: Sequence[float]) -> Tally:
        """Return what was made a row of."""
        names, objects = layout
        num_samples, *left = numbers
        tally = cls(num_samples)
        for name in names:
            total, count, last, *left = left
            tally.sums[name] = (total, count, last)
        for name, meaning, length in objects:
            tally.objects[name], left = (meaning, left[:length]), left[length:]
        return tally
