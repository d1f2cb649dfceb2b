"""The ends and places of lanes: by arithmetic, or by what ranks tell each other.

Where a shard's length is not known, or a filter leaves rows out, only who reads a lane sees that it runs dry. Each lane
is watched by one rank. Behind each joint batch that is read all ranks add up what they see of their lanes, so that all
of them deal alike. They also tell where their lanes are: a rank that is lost takes no position with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raysgd.streams.dealing import ENDLESS, DealtRows, deal
from raysgd.streams.lanes import LanePosition
from raysgd.streams.stream_pass import Place, StreamPass, StreamPosition

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
StartSum: TypeAlias = Callable[[Numbers], Callable[[], Numbers]]
"""Begins to add up numbers over all ranks; returns what waits for the sums."""


def alone(numbers: Numbers) -> Callable[[], Numbers]:
    """Add up the numbers of a single rank."""
    return lambda: numbers


class LaneView(NamedTuple):
    """A rank's view of the lanes that it watches, behind a joint batch.

    Attributes:
        counts: How many rows of each lane were dealt up to there.
        num_rows: How far it looked in each lane.
        lanes: The lanes that it watches.
        found: How many rows are left in each of them, up to `num_rows`, and where it is.
    """

    counts: Sequence[int]
    num_rows: int
    lanes: Sequence[int]
    found: Sequence[tuple[int, LanePosition]]


class LaneEnds:
    """The ends of lanes: known from the lengths of the shards, or seen by the ranks, which tell each other.

    What they see may be some joint batches old: rows are then counted from where the pass was opened.

    Args:
        of_pass: The pass.
        begin: Where it is.
        start_sum: Adds up over all ranks.

    Attributes:
        counts: The rows of each lane that were dealt so far, in the pass or since it was opened.
    """

    def __init__(self, of_pass: StreamPass, begin: StreamPosition, start_sum: StartSum) -> None:
        num_lanes, self._is_known = of_pass.num_lanes, of_pass.is_known
        self._start_sum = start_sum
        self._num_rows, self._turn = begin.num_rows, begin.turn
        self.counts, self._seen_to = [0] * num_lanes, [0] * num_lanes  # so many rows of each lane were seen
        if self._is_known:
            self.counts, self._turn = of_pass.dealt(begin.num_rows)
            self._seen_to = of_pass.lengths
        self._is_dry = [self._is_known] * num_lanes  # whether none is behind them
        self._known_at: Sequence[int] = self.counts
        self._known = begin.lanes or (LanePosition(),) * num_lanes
        self._told: deque[tuple[Sequence[int], int, Callable[[], Numbers]]] = deque()

    @property
    def num_left(self) -> int | None:
        """The number of rows of the pass that are left; None if that is not known, and more than none."""
        return sum(self._seen_to) - sum(self.counts) if all(self._is_dry) else None

    def num_seen(self, num_rows: int) -> int:
        """Return how far to look in each lane for so many joint rows; 0 where nothing has to be seen."""
        if self._is_known:
            return 0
        num_live = sum(not dry or seen > count for dry, seen, count in zip(*self._state, strict=True))
        return -(-num_rows // max(1, num_live)) + 1

    @property
    def _state(self) -> tuple[list[bool], list[int], list[int]]:
        return self._is_dry, self._seen_to, self.counts

    def see(self, sight: LaneView) -> None:
        """Called by all ranks at the same place in the pass, with what each of them sees."""
        numbers = np.zeros((len(self.counts), 1 + len(LanePosition._fields)), np.int64)
        for lane, (num_left, position) in zip(sight.lanes, sight.found, strict=True):
            numbers[lane] = num_left, *position
        self._told.append((sight.counts, sight.num_rows, self._start_sum(numbers)))

    def hear(self) -> None:
        """Take in all that was seen so far, which all ranks wait for."""
        while self._told:
            counts, num_rows, wait = self._told.popleft()
            num_left, *lanes = wait().T.tolist()
            for lane, (count, number) in enumerate(zip(counts, num_left, strict=True)):
                self._seen_to[lane] = max(self._seen_to[lane], count + number)
                self._is_dry[lane] |= number < num_rows
            if sum(counts) >= sum(self._known_at):
                self._known_at, self._known = counts, tuple(LanePosition(*each) for each in zip(*lanes, strict=True))

    def deal(self, num_rows: int, look: Callable[[int], LaneView]) -> DealtRows:
        """DealtRows so many rows, or fewer at the end of the pass.

        Args:
            num_rows: How many.
            look: Looks further, so many rows in each lane; needed where a few lanes give all rows.
        """
        self.hear()
        while True:
            left = [seen - count if dry else ENDLESS for dry, seen, count in zip(*self._state, strict=True)]
            dealt = deal(num_rows, left, self._turn)
            after = [count + more for count, more in zip(self.counts, dealt.counts, strict=True)]
            # Else a lane may have fewer rows than it gave, or none behind them. All ranks come to the same.
            if all(dry or count < seen for dry, seen, count in zip(self._is_dry, self._seen_to, after, strict=True)):
                break
            self.see(look(2 * max(dealt.counts) + 1))
            self.hear()
        self.counts, self._turn = after, dealt.turn
        self._num_rows += dealt.num_rows
        return dealt

    def position(self) -> StreamPosition:
        """Return where the pass is, as far as that was seen."""
        return StreamPosition(self._num_rows, self._turn, None if self._is_known else tuple(self._lanes))

    @property
    def places(self) -> Sequence[Place]:
        """The place of each lane."""
        return self.counts if self._is_known else self._lanes

    @property
    def _lanes(self) -> list[LanePosition]:
        passed = (count - known for count, known in zip(self.counts, self._known_at, strict=True))
        return [lane._replace(skip=lane.skip + more) for lane, more in zip(self._known, passed, strict=True)]
