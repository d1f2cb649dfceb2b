"""One worker's part of the global batches of a pass, from any position and in a group of any size.

If the length of a shard is not known, or a filter drops rows, only the reader of a lane sees where it ends. So one rank
watches each lane. After each global batch, all ranks exchange what they see of their lanes, so that all deal the same
rows. They also exchange the positions of their lanes, so that a lost rank takes no position with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from raysgd.streams.lane_reader import Place, StreamPass, StreamPosition
from raysgd.streams.lanes import ENDLESS, DealtRows, LanePosition, LaneSlice, deal, slices
from raysgd.streams.loaders import BatchLoader, BatchOrder, MadeBatches

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
StartSum: TypeAlias = Callable[[Numbers], Callable[[], Numbers]]
"""Starts a sum of numbers over all ranks. Returns a function that waits for the sums."""
_NUM_SHOWN = 2  # because batch normalization refuses a single row


def alone(numbers: Numbers) -> Callable[[], Numbers]:
    """Return the sums of a single rank: its own numbers."""
    return lambda: numbers


class LaneEnds:
    """The ends of lanes. They follow from the lengths of the shards, or the ranks see them and tell each other.

    What the ranks see may be some global batches old. Rows are then counted from where the pass was opened.

    Args:
        of_pass: The pass.
        begin: Its position.
        watched: The lanes that this rank watches.
        start_sum: Starts a sum over all ranks.

    Attributes:
        counts: Number of rows of each lane that were dealt, in the pass or since it was opened.
    """

    def __init__(self, of_pass: StreamPass, begin: StreamPosition, watched: range, start_sum: StartSum) -> None:
        num_lanes, self._is_known = of_pass.num_lanes, of_pass.is_known
        self._watched, self._start_sum = watched, start_sum
        self._num_rows, self._turn = begin.num_rows, begin.turn
        self.counts, self._seen_to = [0] * num_lanes, [0] * num_lanes  # rows of each lane that were dealt, and seen
        if self._is_known:
            self.counts, self._turn = of_pass.dealt(begin.num_rows)
            self._seen_to = of_pass.lengths
        self._is_dry = [self._is_known] * num_lanes  # True if a lane has no rows after those that were seen
        self._known_at: Sequence[int] = self.counts
        self._known = begin.lanes or (LanePosition(),) * num_lanes
        self._told: deque[tuple[Sequence[int], int, Callable[[], Numbers]]] = deque()

    @property
    def num_left(self) -> int | None:
        """Number of rows left in the pass; None if it is not known, and more than none."""
        return sum(self._seen_to) - sum(self.counts) if all(self._is_dry) else None

    def num_seen(self, num_rows: int) -> int:
        """Return how far to look in each lane to find so many rows in all; 0 if there is no need to look."""
        if self._is_known:
            return 0
        num_live = sum(not dry or seen > count for dry, seen, count in zip(*self._state, strict=True))
        return -(-num_rows // max(1, num_live)) + 1

    @property
    def _state(self) -> tuple[list[bool], list[int], list[int]]:
        return self._is_dry, self._seen_to, self.counts

    def see(self, counts: Sequence[int], num_rows: int, found: Sequence[tuple[int, LanePosition]]) -> None:
        """Report what this rank sees after a global batch. All ranks call this at the same place in the pass.

        Args:
            counts: Number of rows of each lane that were dealt up to there.
            num_rows: How far this rank looked in each lane that it watches.
            found: For each of these lanes, the number of rows left, up to `num_rows`, and its position.
        """
        numbers = np.zeros((len(self.counts), 1 + len(LanePosition._fields)), np.int64)
        for lane, (num_left, position) in zip(self._watched, found, strict=True):
            numbers[lane] = num_left, *position
        self._told.append((counts, num_rows, self._start_sum(numbers)))

    def hear(self) -> None:
        """Take in all reports. Waits for those of the other ranks."""
        while self._told:
            counts, num_rows, wait = self._told.popleft()
            num_left, *lanes = wait().T.tolist()
            for lane, (count, number) in enumerate(zip(counts, num_left, strict=True)):
                self._seen_to[lane] = max(self._seen_to[lane], count + number)
                self._is_dry[lane] |= number < num_rows
            if sum(counts) >= sum(self._known_at):
                self._known_at, self._known = counts, tuple(LanePosition(*each) for each in zip(*lanes, strict=True))

    def deal(self, num_rows: int, look: Callable[[int], None]) -> DealtRows:
        """Deal so many rows, or fewer at the end of the pass.

        Args:
            num_rows: How many rows to deal.
            look: Looks so many rows ahead in each lane and calls `see`. Needed if few lanes provide all rows.
        """
        self.hear()
        while True:
            left = [seen - count if dry else ENDLESS for dry, seen, count in zip(*self._state, strict=True)]
            dealt = deal(num_rows, left, self._turn)
            after = [count + more for count, more in zip(self.counts, dealt.counts, strict=True)]
            # Otherwise a lane may have fewer rows than it gave, or none after them. All ranks decide the same.
            if all(dry or count < seen for dry, seen, count in zip(self._is_dry, self._seen_to, after, strict=True)):
                break
            look(2 * max(dealt.counts) + 1)
            self.hear()
        self.counts, self._turn = after, dealt.turn
        self._num_rows += dealt.num_rows
        return dealt

    def position(self) -> StreamPosition:
        """Return the position of the pass, as far as the ranks have seen it."""
        return StreamPosition(self._num_rows, self._turn, None if self._is_known else tuple(self._lanes))

    @property
    def places(self) -> Sequence[Place]:
        """Place of each lane."""
        return self.counts if self._is_known else self._lanes

    @property
    def _lanes(self) -> list[LanePosition]:
        passed = (count - known for count, known in zip(self.counts, self._known_at, strict=True))
        return [lane._replace(skip=lane.skip + more) for lane, more in zip(self._known, passed, strict=True)]


class Shares(Protocol):
    """Divides global batches, like `raysgd.core.arrays.division.Division`."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    @property
    def global_size(self) -> int:
        """Number of rows of a full global batch."""

    def parts(self, num_samples: int, rank: int) -> Sequence[tuple[int, int, int]]:
        """Return start, end, and rows of all workers at the same time, for each batch of a worker."""


class StreamBatch(NamedTuple):
    """A worker's part of a global batch, or of one of several batches of it.

    Attributes:
        start: Its first row, counted from the start of the global batch.
        batch: The batch. A worker without rows repeats some, which do not count, or gets None.
        num_rows: Number of its rows that count.
        num_global: Number of rows of all workers at the same time.
        is_first: True if the global batch begins with it.
        is_last: True if the global batch ends with it.
        ends_pass: True if the global batch is known to be the last one.
        after: Position after the global batch.
    """

    start: int
    batch: Any
    num_rows: int
    num_global: int
    is_first: bool
    is_last: bool
    ends_pass: bool
    after: StreamPosition


class _GlobalBatch(NamedTuple):
    """A global batch that was dealt and ordered, but is not needed yet."""

    parts: Sequence[tuple[int, int, int]]
    counts: Sequence[int]
    num_seen: int
    ends_pass: bool
    after: StreamPosition


class GlobalReader:
    """Yields the batches of one worker.

    Args:
        of_pass: The pass.
        shares: Divides global batches.
        rank: Rank of the worker in this division.
        begin: Position of the pass.
        watched: The lanes that the worker watches.
        open_loading: Called when the first batch is needed. Returns a `BatchLoader`.
        start_sum: Starts a sum over all workers. Used if lengths are not known.
        pad: True if a worker without rows in a global batch repeats others, as in training.
    """

    _loading: BatchLoader

    def __init__(
        self,
        of_pass: StreamPass,
        shares: Shares,
        rank: int,
        begin: StreamPosition,
        watched: range,
        open_loading: Callable[[], BatchLoader],
        start_sum: StartSum = alone,
        pad: bool = True,
    ) -> None:
        self._stream, self._shares, self._rank, self._pad = of_pass.stream, shares, rank, pad
        self._open_loading = open_loading
        self._ends = LaneEnds(of_pass, begin, watched, start_sum)
        self._num_rows = begin.num_rows
        self._is_over = False
        self._has_rows, self._last_batch = False, None
        self._ordered: deque[_GlobalBatch] = deque()
        self._num_orders = 0  # orders without an answer
        self._made: deque[MadeBatches] = deque()

    def __iter__(self) -> Iterator[StreamBatch]:
        """Iterate over the rest of the pass."""
        self._loading = self._open_loading()
        with ExitStack() as last:
            last.callback(self._loading.end_loading)
            num_seen = self._ends.num_seen(self._rows_ahead)
            if num_seen:
                self._look(num_seen)
            while True:
                while not self._is_over and len(self._ordered) <= self._loading.num_ahead:
                    self._deal()
                if not self._ordered:
                    return
                whole, made = self._ordered.popleft(), self._next_made()
                if whole.num_seen:  # the sum runs while the worker trains
                    self._ends.see(whole.counts, whole.num_seen, made.found)
                if whole.ends_pass and self._stream.skips:  # the count of left-out rows is needed before the pass ends
                    self._ends.hear()
                    whole = whole._replace(after=self._ends.position())
                yield from self._batches(whole, made)

    @property
    def _rows_ahead(self) -> int:
        """Number of rows to look ahead after a global batch, which must last until the next look counts."""
        return self._shares.global_size * (1 + self._loading.num_ahead + self._stream.drop_last)

    def _deal(self) -> None:
        """Order the next global batch, if there is one."""
        stream, most, places = self._stream, self._shares.global_size, self._ends.places
        wanted = most if stream.limit is None else min(most, stream.limit - self._num_rows)
        dealt = self._ends.deal(wanted, self._look)
        is_full = dealt.num_rows == most
        if not dealt.num_rows or (stream.drop_last and not is_full):
            self._is_over = True
            return
        self._num_rows += dealt.num_rows
        self._is_over = not is_full or self._ends_here()
        num_seen = 0 if self._is_over and not stream.skips else self._ends.num_seen(self._rows_ahead)
        parts = self._shares.parts(dealt.num_rows, self._rank)
        self._order(BatchOrder([self._wanted(dealt, *part) for part in parts], dealt.counts, places, num_seen))
        after, counts = self._ends.position(), self._ends.counts
        self._ordered.append(_GlobalBatch(parts, counts, num_seen, self._is_over, after))

    def _ends_here(self) -> bool:
        """Return True if the last dealt global batch is known to be the last one of the pass."""
        stream, num_left = self._stream, self._ends.num_left
        if stream.limit is not None:
            of_limit = stream.limit - self._num_rows
            num_left = of_limit if num_left is None else min(num_left, of_limit)
        return num_left is not None and num_left < (self._shares.global_size if stream.drop_last else 1)

    def _wanted(self, dealt: DealtRows, start: int, stop: int, num_global: int) -> list[LaneSlice]:
        """Return the rows of a batch. If the worker never had a row, return some to show it their form."""
        if start == stop:
            if self._has_rows or not self._pad:
                return []
            start, stop = 0, min(_NUM_SHOWN, dealt.num_rows)
        self._has_rows = True
        return slices(dealt.counts, start, stop)

    def _order(self, order: BatchOrder) -> None:
        self._loading.order(order)
        self._num_orders += 1

    def _receive(self) -> MadeBatches:
        self._num_orders -= 1
        return self._loading.receive()

    def _next_made(self) -> MadeBatches:
        return self._made.popleft() if self._made else self._receive()

    def _look(self, num_rows: int) -> None:
        """Look ahead after all rows that were dealt."""
        counts, places = self._ends.counts, self._ends.places
        while self._num_orders:
            self._made.append(self._receive())
        self._order(BatchOrder((), [0] * len(counts), places, num_rows))
        self._ends.see(counts, num_rows, self._receive().found)

    def _batches(self, whole: _GlobalBatch, made: MadeBatches) -> Iterator[StreamBatch]:
        for number, (batch, (start, stop, num_global)) in enumerate(zip(made.batches, whole.parts, strict=True), 1):
            if batch is None and stop > start:
                raise TypeError("`collate` returned None: it has to return a batch. To skip rows, use `filter`.")
            if self._pad:
                batch = self._last_batch = self._last_batch if batch is None else batch
            place = number == 1, number == len(whole.parts)
            yield StreamBatch(start, batch, stop - start, num_global, *place, whole.ends_pass, whole.after)
