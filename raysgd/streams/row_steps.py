"""Steps that rows go through: functions and filters, with random numbers that belong to the row."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raysgd._numbers.seeds import digest
from raysgd.exceptions import StreamError

logger = logging.getLogger(__name__)

_MOST_WARNINGS = 10  # of one process
_NUM_WARNINGS = itertools.count()

DROPPED = object()
"""Instead of a row that a filter left out."""


def warn_of_row(error: StreamError) -> None:
    """Say what is left out; after some warnings rows are only counted."""
    number = next(_NUM_WARNINGS)
    if number < _MOST_WARNINGS:
        more = "; further ones are counted and not named" if number == _MOST_WARNINGS - 1 else ""
        logger.warning("left out of a stream: %s%s", error, more)


class RowStep(NamedTuple):
    """One function that is called with each row.

    Attributes:
        function: What is called.
        is_filter: Whether its result says if the row stays; else the result takes the place of the row.
        is_seeded: Whether it gets a generator of random numbers as well.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool


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

    def __call__(self, row: Any, shard: str, number: int) -> Any:
        """Return what becomes of a row, or `DROPPED`.

        Args:
            row: The row.
            shard: The name of the shard that it is from.
            number: Its number there.

        Raises:
            StreamError: A step failed.
        """
        try:
            for place, (function, is_filter, is_seeded) in enumerate(self.steps, self.first):
                if is_seeded:
                    seed = digest(f"{self.seed}/{shard}/{number}/{place}")
                    result = function(row, np.random.default_rng(seed))
                else:
                    result = function(row)
                if not is_filter:
                    row = result
                elif not result:
                    return DROPPED
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            what = f"`{name}` failed with {type(error).__name__}: {error}"
            raise StreamError(f"shard {shard!r}, row {number}: {what}") from error
        return row
