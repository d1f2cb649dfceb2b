"""Lanes: a fixed number of row sequences through a stream's shards, independent of the number of workers.

Shards are assigned to lanes in rounds, one shard per lane. In the last round, if there are fewer shards than lanes,
neighboring lanes share a shard, and each reads every k-th row. All lanes therefore have about the same number of rows,
however many shards there are.

The rows of a global batch are dealt from the lanes in turn, one row per lane. The lane with turn 0 provides the first
row. This module computes with row counts only, not with data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NUM_LANES = 64


class LanePart(NamedTuple):
    """The rows that a lane reads from one shard.

    Attributes:
        shard: Index of the shard.
        first: The lane's first row in the shard.
        step: Distance between consecutive rows of the lane.
    """

    shard: int
    first: int = 0
    step: int = 1

    def num_rows(self, of_shard: int) -> int:
        """Return how many rows belong to the lane if the shard has `of_shard` rows."""
        return max(0, -(-(of_shard - self.first) // self.step))

    def next_row(self, row: int) -> int:
        """Return the number of the lane's first row at or after `row`."""
        return max(self.first, row + (self.first - row) % self.step)


class LanePosition(NamedTuple):
    """A position in a lane.

    Attributes:
        part: Index of the current part of the lane.
        row: Row number in the part's shard at which to start reading.
        skip: Number of rows to skip from that row on, counted after filters and in shuffled order.
        left_out: Number of rows of the lane before `row` that were skipped because of errors.
    """

    part: int = 0
    row: int = 0
    skip: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Lanes:
    """The assignment of shards to lanes in one pass.

    Attributes:
        order: Indices of the shards, in the order of the pass.
        num_lanes: Number of lanes.
        turns: Turn of each lane. Lanes that share a shard take its rows in the order of their turns. Default: the turns
            in which rows are dealt, which preserves the order of rows.

    Examples:
        >>> lanes = Lanes(order=[0, 1, 2, 3, 4, 5], num_lanes=4)
        >>> lanes.parts(1)
        [LanePart(shard=1, first=0, step=1), LanePart(shard=4, first=1, step=2)]
        >>> lanes.lengths([10, 10, 10, 10, 5, 6])
        [13, 12, 13, 13]
    """

    order: Sequence[int]
    num_lanes: int = NUM_LANES
    turns: Sequence[int] | None = None

    def parts(self, lane: int) -> list[LanePart]:
        """Return the parts of a lane, in reading order."""
        num_whole, num_left = divmod(len(self.order), self.num_lanes)
        whole = [LanePart(self.order[turn * self.num_lanes + lane]) for turn in range(num_whole)]
        if not num_left:
            return whole
        place = lane * num_left // self.num_lanes
        start, stop = (-(-each * self.num_lanes // num_left) for each in (place, place + 1))
        first = sum(self._turns[each] < self._turns[lane] for each in range(start, stop))
        return [*whole, LanePart(self.order[num_whole * self.num_lanes + place], first, stop - start)]

    @cached_property
    def _turns(self) -> list[int]:
        """The turn of each lane. The first row of a shared shard goes to the lane whose turn comes first."""
        if self.turns is not None:
            return list(self.turns)
        return [turn for _, turn in sorted(zip(spread_order(self.num_lanes), range(self.num_lanes), strict=True))]

    @cached_property
    def all_parts(self) -> list[list[LanePart]]:
        """The parts of all lanes, by lane."""
        return [self.parts(lane) for lane in range(self.num_lanes)]

    def lengths(self, of_shards: Sequence[int]) -> list[int]:
        """Return the number of rows of each lane."""
        return [sum(part.num_rows(of_shards[part.shard]) for part in parts) for parts in self.all_parts]

    def position(self, lane: int, count: int, of_shards: Sequence[int], block: int) -> LanePosition:
        """Return a lane's position after `count` rows. Requires that all shard lengths are known.

        Args:
            lane: Index of the lane.
            count: Number of rows used from the lane.
            of_shards: Lengths of the shards.
            block: Number of rows that are shuffled together. A position consists of the start of a block and a number
                of rows to skip.
        """
        skip = count % block
        left = count - skip
        parts = self.all_parts[lane]
        for number, part in enumerate(parts):
            num_rows = part.num_rows(of_shards[part.shard])
            if left < num_rows:
                return LanePosition(number, part.first + left * part.step, skip)
            left -= num_rows
        return LanePosition(len(parts))


def lanes_of(rank: int, world_size: int, num_lanes: int) -> range:
    """Return the lanes that a worker watches, to detect where they end. Each lane is watched by exactly one worker.

    The worker trains on rows from these lanes and from a few other lanes.

    Raises:
        ValueError: There are more workers than lanes.
    """
    if world_size > num_lanes:
        raise ValueError(f"{world_size} workers for a stream with {num_lanes} lanes: need at least as many lanes.")
    first, after = (each * num_lanes // world_size for each in (rank, rank + 1))
    return range(first, after)


def spread_order(num_lanes: int) -> list[int]:
    """Return the lanes in the order of their turns. Lanes with consecutive turns have distant indices.

    Consecutive rows therefore come from lanes spread over the whole range, so workers mostly read their own lanes.

    >>> spread_order(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    return sorted(range(num_lanes), key=lambda lane: list(_binary_digits(lane, num_lanes)))


def _binary_digits(number: int, end: int) -> Iterator[int]:
    """Yield the binary digits of a number below `end`, least significant digit first."""
    while end > 1:
        yield number % 2
        number, end = number // 2, (end + 1) // 2


ENDLESS = 2**62
"""Stands for the number of rows left in a lane whose end is unknown."""


class DealtRows(NamedTuple):
    """The rows of a global batch.

    Attributes:
        counts: Number of rows from each lane.
        turn: The turn at which the next global batch starts.
    """

    counts: list[int]
    turn: int

    @property
    def num_rows(self) -> int:
        """Total number of rows from all lanes."""
        return sum(self.counts)


def deal(num_rows: int, left: Sequence[int], turn: int) -> DealtRows:
    """Deal rows from the lanes in turn, one by one. Skip lanes that have no rows left.

    Args:
        num_rows: Number of rows to deal. Fewer are dealt only if all lanes run dry.
        left: Number of rows left in each lane.
        turn: The turn at which to start.

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
        # Deal as many whole rounds as possible until a lane runs dry. Deal a partial round last.
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
    """Consecutive rows of one lane in a global batch.

    Attributes:
        lane: Index of the lane.
        start: First row, counted from the lane's first row in this global batch.
        stop: End of the rows (exclusive).
    """

    lane: int
    start: int
    stop: int


def slices(counts: Sequence[int], start: int, stop: int) -> list[LaneSlice]:
    """Return the rows `start` to `stop` of a global batch as lane slices. Rows in a global batch are sorted by lane.

    >>> slices([2, 0, 3, 1], start=1, stop=4)
    [LaneSlice(lane=0, start=1, stop=2), LaneSlice(lane=2, start=0, stop=2)]
    """
    found: list[LaneSlice] = []
    for lane, count in enumerate(counts):
        if max(0, start) < min(count, stop):
            found.append(LaneSlice(lane, max(0, start), min(count, stop)))
        start, stop = start - count, stop - count
    return found
