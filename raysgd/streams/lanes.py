"""Lanes: a fixed number of row sequences into which the rows of a stream are divided.

The lanes do not depend on the number of workers. Shards are assigned to lanes in rounds, one shard per lane and round.
If fewer shards than lanes are left for the last round, neighboring lanes share a shard, and each takes every k-th row.
Each lane therefore has rows even if there are fewer shards than lanes.

A global batch takes its rows from the lanes in turn, one row per lane (the rows are dealt). The lane with turn 0
contributes the first row of a pass. This module only computes with numbers of rows, and reads no data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NUM_LANES = 64


class LanePart(NamedTuple):
    """The rows that a lane takes from one shard.

    Attributes:
        shard: Index of the shard.
        first: Number of the first row that the lane takes.
        step: Distance between two rows that the lane takes. 1 if the lane has the whole shard.
    """

    shard: int
    first: int = 0
    step: int = 1

    def num_rows(self, of_shard: int) -> int:
        """Return how many rows the lane takes if the shard has `of_shard` rows."""
        return max(0, -(-(of_shard - self.first) // self.step))

    def next_row(self, row: int) -> int:
        """Return the number of the first row at or after `row` that the lane takes."""
        return max(self.first, row + (self.first - row) % self.step)


class LanePosition(NamedTuple):
    """A position in a lane.

    Attributes:
        part: Index of the part of the lane (its rows from one shard) that contains the position.
        row: Number of the row in that shard at which reading starts.
        skip: Number of rows to skip from there on. Rows that a filter drops are not counted, and rows are counted in
            shuffled order.
        left_out: Number of rows of the lane before `row` that were left out because of errors.
    """

    part: int = 0
    row: int = 0
    skip: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Lanes:
    """The assignment of the shards of a stream to lanes in one pass.

    Attributes:
        order: Indices of the shards, in the order of the pass.
        num_lanes: Number of lanes.
        turns: The turn of each lane. Of the lanes that share a shard, the lane whose turn comes first takes the first
            row, and so on. Default: the turns in which the lanes contribute rows to global batches, so that the rows
            of a shared shard stay in order.

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
        """Return the parts of a lane in the order of reading. A part is the rows that the lane takes from one shard."""
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
        """The turn of each lane. Of lanes that share a shard, the lane whose turn comes first takes the first row."""
        if self.turns is not None:
            return list(self.turns)
        return [turn for _, turn in sorted(zip(spread_order(self.num_lanes), range(self.num_lanes), strict=True))]

    @cached_property
    def all_parts(self) -> list[list[LanePart]]:
        """For each lane, its parts, as `parts` returns them."""
        return [self.parts(lane) for lane in range(self.num_lanes)]

    def lengths(self, of_shards: Sequence[int]) -> list[int]:
        """Return the number of rows in each lane.

        Args:
            of_shards: Number of rows in each shard.
        """
        return [sum(part.num_rows(of_shards[part.shard]) for part in parts) for parts in self.all_parts]

    def position(self, lane: int, count: int, of_shards: Sequence[int], block: int) -> LanePosition:
        """Return the position in a lane after `count` rows.

        Args:
            lane: Index of the lane.
            count: Number of rows that were used from the lane.
            of_shards: Number of rows in each shard, which must be known.
            block: Number of rows that are shuffled together. A position consists of the start of such a block and the
                number of rows to skip in this block.
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
    """Return the lanes that a worker watches. The worker looks ahead in these lanes to find out where they end.

    Exactly one worker watches each lane. A worker trains on rows of the lanes that it watches, and on rows of a few
    other lanes.

    Args:
        rank: Rank of the worker.
        world_size: Number of workers.
        num_lanes: Number of lanes.

    Raises:
        ValueError: There are more workers than lanes.
    """
    if world_size > num_lanes:
        raise ValueError(f"{world_size} workers for a stream with {num_lanes} lanes: need at least as many lanes.")
    first, after = (each * num_lanes // world_size for each in (rank, rank + 1))
    return range(first, after)


@functools.cache
def spread_order(num_lanes: int) -> list[int]:
    """Return the lane indices in order of turns: the order in which the lanes contribute rows to global batches.

    Lanes with consecutive turns have distant indices. A global batch with few rows therefore takes these rows from
    lanes of all workers, so that each worker mostly reads the lanes that it watches.

    >>> spread_order(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    num_digits = (num_lanes - 1).bit_length()
    return sorted(range(num_lanes), key=lambda lane: f"{lane:0{num_digits}b}"[::-1])


ENDLESS = 2**62
"""Stands for the number of rows left in a lane whose end is unknown."""


class DealtRows(NamedTuple):
    """The number of rows that a global batch takes from each lane.

    Attributes:
        counts: Number of rows from each lane.
        turn: Number of the turn with which the next global batch starts.
    """

    counts: list[int]
    turn: int

    @property
    def num_rows(self) -> int:
        """Number of rows from all lanes together."""
        return sum(self.counts)


def deal(num_rows: int, left: Sequence[int], turn: int) -> DealtRows:
    """Compute how many rows a global batch takes from each lane.

    The lanes contribute one row each, in turn. Lanes without rows are left out.

    Args:
        num_rows: Number of rows in the global batch. Fewer rows are taken only if the lanes have fewer rows left.
        left: Number of rows left in each lane.
        turn: Number of the turn with which to start.

    >>> deal(5, left=[9, 9, 1, 9], turn=0)
    DealtRows(counts=[2, 1, 1, 1], turn=1)
    """
    order = spread_order(len(left))
    order = order[turn:] + order[:turn]
    counts = [0] * len(left)
    after = 0
    while num_rows:
        live = [(place, lane) for place, lane in enumerate(order) if counts[lane] < left[lane]]
        if not live:
            break
        # In each iteration of this loop, deal as many whole rounds as possible before a lane runs out of rows. If a
        # whole round would be more than `num_rows`, deal a part of a round.
        rounds = min(num_rows // len(live), *(left[lane] - counts[lane] for _, lane in live))
        dealt = live if rounds else live[:num_rows]
        for _, lane in dealt:
            counts[lane] += rounds or 1
        num_rows -= len(dealt) * (rounds or 1)
        after = 0 if rounds else dealt[-1][0] + 1
    return DealtRows(counts, (turn + after) % len(left))


class LaneSlice(NamedTuple):
    """Some consecutive rows of one lane in a global batch.

    Attributes:
        lane: Index of the lane.
        start: Number of the first row, counted from the first row that the global batch takes from this lane.
        stop: Number of the last row, plus one.
    """

    lane: int
    start: int
    stop: int


def slices(counts: Sequence[int], start: int, stop: int) -> list[LaneSlice]:
    """Return from which lanes the rows `start` to `stop` of a global batch come.

    In a global batch, the rows are sorted by lane.

    Args:
        counts: Number of rows that the global batch takes from each lane.
        start: Index of the first row in the global batch.
        stop: Index of the last row, plus one.

    >>> slices([2, 0, 3, 1], start=1, stop=4)
    [LaneSlice(lane=0, start=1, stop=2), LaneSlice(lane=2, start=0, stop=2)]
    """
    slices: list[LaneSlice] = []
    for lane, count in enumerate(counts):
        if max(0, start) < min(count, stop):
            slices.append(LaneSlice(lane, max(0, start), min(count, stop)))
        start, stop = start - count, stop - count
    return slices
