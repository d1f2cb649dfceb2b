"""Dealing of rows from the lanes into joint batches: in turn, one by one. Arithmetic on counts, without any data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from raysgd.streams.lanes import spread_order

ENDLESS = 2**62
"""For the rows of a lane whose end is not known, or not near."""


class DealtRows(NamedTuple):
    """The rows of a joint batch.

    Attributes:
        counts: How many are of each lane.
        turn: Whose turn is next: a place in the order of turns.
    """

    counts: list[int]
    turn: int

    @property
    def num_rows(self) -> int:
        """Rows of all lanes."""
        return sum(self.counts)


def deal(num_rows: int, left: Sequence[int], turn: int) -> DealtRows:
    """Deal rows from the lanes in turn, one by one; a lane that has run dry is passed over.

    Args:
        num_rows: How many rows to deal. Fewer come only if all lanes run dry.
        left: How many rows each lane has.
        turn: Where the turns go on.

    >>> deal(5, left=[9, 9, 1, 9], turn=0)
    DealtRows(counts=[2, 1, 1, 1], turn=1)
    """
    order = _order(len(left))
    order = order[turn:] + order[:turn]
    counts = [0] * len(left)
    after = 0
    while num_rows:
        live = [(place, lane) for place, lane in enumerate(order) if counts[lane] < left[lane]]
        if not live:
            break
        # Whole rounds at once, up to the first lane that runs dry in them; then the round that is not whole.
        rounds = min(num_rows // len(live), *(left[lane] - counts[lane] for _, lane in live))
        dealt = live if rounds else live[:num_rows]
        for _, lane in dealt:
            counts[lane] += rounds or 1
        num_rows -= len(dealt) * (rounds or 1)
        after = 0 if rounds else dealt[-1][0] + 1
    return DealtRows(counts, (turn + after) % len(left))


@functools.cache
def _order(num_lanes: int) -> list[int]:
    return spread_order(num_lanes)


class LaneSlice(NamedTuple):
    """A run of rows of one lane in a joint batch.

    Attributes:
        lane: The lane.
        start: The first of them, counted from the lane's first row in this batch.
        stop: After the last one.
    """

    lane: int
    start: int
    stop: int


def slices(counts: Sequence[int], start: int, stop: int) -> list[LaneSlice]:
    """Return which rows of lanes the rows `start` to `stop` of a joint batch are; it begins with those of lower lanes.

    >>> slices([2, 0, 3, 1], start=1, stop=4)
    [LaneSlice(lane=0, start=1, stop=2), LaneSlice(lane=2, start=0, stop=2)]
    """
    found: list[LaneSlice] = []
    for lane, count in enumerate(counts):
        if max(0, start) < min(count, stop):
            found.append(LaneSlice(lane, max(0, start), min(count, stop)))
        start, stop = start - count, stop - count
    return found
