"""How many rows the lanes still have, and where they are: by arithmetic, or by what ranks tell each other.

Where a shard's length is not known, or a filter leaves rows out, only who reads a lane sees that it runs dry. Each lane
is watched by one rank. Ahead of a joint batch all ranks add up what they see of their lanes, so that all of them deal
alike. They also tell where their lanes are: a rank that is lost takes no position with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from raysgd.streams.dealing import ENDLESS, Deal, deal
from raysgd.streams.lanes import LanePosition
from raysgd.streams.stream_pass import StreamPass, StreamPosition

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
StartSum: TypeAlias = Callable[[Numbers], Callable[[], Numbers]]
"""Begins to add up numbers over all ranks; returns what waits for the sums."""


def alone(numbers: Numbers) -> Callable[[], Numbers]:
    """Add up the numbers of a single rank."""
    return lambda: numbers


class LaneEnds(Protocol):
    """Says what is left in the lanes."""

    def begin(self, num_rows: int, num_seen: int) -> None:
        """Called by all ranks when the rows before a joint batch are read.

        Args:
            num_rows: How many rows the joint batch has at most.
            num_seen: How far to look, to know where the pass ends.
        """

    def deal(self) -> Deal:
        """Return the rows of that joint batch."""

    @property
    def num_left(self) -> int | None:
        """How many rows of the pass are left behind it; None if that is not known, and more than none."""

    def position(self) -> StreamPosition:
        """Return where the pass is after the joint batch dealt last."""

    def position_of(self, lane: int) -> LanePosition:
        """Return where a lane is before that joint batch."""


class KnownEnds:
    """Arithmetic on the lengths of the shards."""

    def __init__(self, of_pass: StreamPass, begin: StreamPosition) -> None:
        self._pass = of_pass
        self._num_rows, self._to_deal = begin.num_rows, 0
        self._before, self._turn = of_pass.dealt(begin.num_rows)
        self._dealt = Deal([0] * of_pass.num_lanes, self._turn)

    def begin(self, num_rows: int, num_seen: int) -> None:
        self._to_deal = num_rows

    @property
    def num_left(self) -> int:
        return sum(self._pass.lengths) - self._num_rows

    def deal(self) -> Deal:
        before = zip(self._before, self._dealt.counts, strict=True)
        self._before = [count + last for count, last in before]
        left = [length - count for length, count in zip(self._pass.lengths, self._before, strict=True)]
        self._dealt = deal(self._to_deal, left, self._dealt.turn)
        self._num_rows += self._dealt.num_rows
        return self._dealt

    def position(self) -> StreamPosition:
        return StreamPosition(self._num_rows, self._dealt.turn)

    def position_of(self, lane: int) -> LanePosition:
        return self._pass.position(lane, self._before[lane])


class SharedEnds:
    """What the ranks see and tell each other.

    Args:
        begin: Where the pass is.
        num_lanes: How many lanes there are.
        watched: The lanes that this rank watches.
        peek: Says of a lane how many rows are left, up to a number, and where it is.
        start_sum: Adds up over all ranks.
    """

    def __init__(
        self,
        begin: StreamPosition,
        num_lanes: int,
        watched: Sequence[int],
        peek: Callable[[int, int], tuple[int, LanePosition]],
        start_sum: StartSum,
    ) -> None:
        self._watched, self._peek, self._start_sum = watched, peek, start_sum
        self._lanes = begin.lanes or (LanePosition(),) * num_lanes
        self._num_rows, self._to_deal = begin.num_rows, 0
        self._dealt = Deal([0] * num_lanes, begin.turn)
        self._num_live = num_lanes
        self.num_left: int | None = None
        self._asked: tuple[int, Callable[[], Numbers]] | None = None

    def begin(self, num_rows: int, num_seen: int) -> None:
        self._to_deal = num_rows
        self._ask(num_ahead=-(-num_seen // max(1, self._num_live)) + 1)

    def _ask(self, num_ahead: int) -> None:
        numbers = np.zeros((len(self._lanes), 4), np.int64)
        for lane in self._watched:
            num_left, position = self._peek(lane, num_ahead)
            numbers[lane] = num_left, *position
        self._asked = num_ahead, self._start_sum(numbers)

    def deal(self) -> Deal:
        while True:
            assert self._asked is not None, "asked ahead"
            (num_ahead, wait), self._asked = self._asked, None
            num_left, *lanes = wait().T.tolist()
            left = [number if number < num_ahead else ENDLESS for number in num_left]
            dealt = deal(self._to_deal, left, self._dealt.turn)
            if max(dealt.counts) < num_ahead:  # else a lane may have fewer rows than it gave; all ranks see that
                break
            self._ask(2 * num_ahead)
        self._lanes = tuple(LanePosition(*each) for each in zip(*lanes, strict=True))
        self.num_left = None if ENDLESS in left else sum(left) - dealt.num_rows
        self._num_live = sum(map(bool, num_left))
        self._num_rows += dealt.num_rows
        self._dealt = dealt
        return dealt

    def position(self) -> StreamPosition:
        counts = self._dealt.counts
        lanes = (lane._replace(skip=lane.skip + count) for lane, count in zip(self._lanes, counts, strict=True))
        return StreamPosition(self._num_rows, self._dealt.turn, tuple(lanes))

    def position_of(self, lane: int) -> LanePosition:
        return self._lanes[lane]
