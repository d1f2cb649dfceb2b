"""Steps that rows go through: functions and filters, with random numbers that belong to the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raysgd._numbers.seeds import digest
from raysgd.exceptions import StreamError

DROPPED = object()
"""Instead of a row that a filter left out."""


class Origin(NamedTuple):
    """Where a row is from: the name of its shard, and its number there."""

    shard: str
    row: int


@dataclass(frozen=True)
class RowStep:
    """One function that is called with each row.

    Attributes:
        function: What is called.
        is_filter: Whether its result says if the row stays; else the result takes the place of the row.
        is_seeded: Whether it gets a generator of random numbers as well.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool

    def __call__(self, row: Any, seed: str) -> Any:
        """Return what becomes of a row, or `DROPPED`."""
        result = self.function(row, np.random.default_rng(digest(seed))) if self.is_seeded else self.function(row)
        if not self.is_filter:
            return result
        return row if result else DROPPED


@dataclass(frozen=True)
class RowSteps:
    """Some steps, one after the other.

    Attributes:
        steps: The steps.
        seed: What random numbers of this pass depend on.
        first: The place of the first step in the stream.
    """

    steps: Sequence[RowStep]
    seed: str
    first: int = 0

    def __call__(self, row: Any, origin: Origin) -> Any:
        """Return what becomes of a row, or `DROPPED`.

        Raises:
            StreamError: A step failed.
        """
        try:
            for number, step in enumerate(self.steps, self.first):
                row = step(row, f"{self.seed}/{origin.shard}/{origin.row}/{number}" if step.is_seeded else "")
                if row is DROPPED:
                    break
        except Exception as error:
            name = getattr(step.function, "__name__", type(step.function).__name__)
            what = f"`{name}` failed with {type(error).__name__}: {error}"
            raise StreamError(f"shard {origin.shard!r}, row {origin.row}: {what}") from error
        return row
