"""Reads one worker's part of each global batch in a pass, from any position and in a group of any size.

A lane is one of the fixed row sequences through a stream's shards. To deal means to decide how many rows each lane
contributes to a global batch. All ranks deal independently and must get the same result. If shard lengths are unknown,
or a filter drops rows, only a rank that reads a lane knows where the lane ends. Therefore, each lane is watched by one
rank, which looks ahead in it. After each global batch, all ranks all-reduce how many rows they found in their watched
lanes. The ranks also share the lanes' positions, so that no position is lost if a rank dies.
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
"""Function that starts an all-reduce sum, and returns a function that waits for the result and returns it."""
_NUM_SHOWN = 2  # number of padding rows; two, because batch normalization raises an error for a single row


def alone(numbers: Numbers) -> Callable[[], Numbers]:
    """Stand in for an all-reduce if there is only one rank: return the rank's numbers unchanged."""
    return lambda: numbers


class LaneEnds:
    """Tracks how many rows were dealt from each lane, and where lanes end.

    If shard lengths are unknown, each rank looks ahead in the lanes that it watches and shares what it sees. A rank may
    receive this information several global batches later.

    Args:
        of_pass: The pass over the stream.
        begin: Position at which reading starts.
        watched: The lanes that this rank watches.
        start_sum: Starts an all-reduce sum.

    Attributes:
        counts: Number of dealt rows per lane. Counted from the start of the pass if lengths are known, otherwise from
            `begin`.
    """

    def __init__(self, of_pass: StreamPass, begin: StreamPosition, watched: range, start_sum: StartSum) -> None:
        num_lanes, self._is_known = of_pass.num_lanes, of_pass.is_known
        self._watched, self._start_sum = watched, start_sum
        self._num_rows, self._turn = begin.num_rows, begin.turn
        self.counts, self._seen_to = [0] * num_lanes, [0] * num_lanes  # number of dealt and of seen rows per lane
        if self._is_known:
            self.counts, self._turn = of_pass.dealt(begin.num_rows)
            self._seen_to = of_pass.lengths
        self._is_dry = [self._is_known] * num_lanes  # True for a lane without rows beyond those that were seen
        self._known_at: Sequence[int] = self.counts
        self._known = begin.lanes or (LanePosition(),) * num_lanes
        self._told: deque[tuple[Sequence[int], int, Callable[[], Numbers]]] = deque()

    @property
    def num_left(self) -> int | None:
        """Number of rows left in the pass. None if the number is unknown but at least 1."""
        return sum(self._seen_to) - sum(self.counts) if all(self._is_dry) else None

    def num_seen(self, num_rows: int) -> int:
        """Return how many rows to look ahead per lane to find `num_rows` rows in total, or 0 if lengths are known."""
        if self._is_known:
            return 0
        num_live = sum(not dry or seen > count for dry, seen, count in zip(*self._state, strict=True))
        return -(-num_rows // max(1, num_live)) + 1

    @property
    def _state(self) -> tuple[list[bool], list[int], list[int]]:
        return self._is_dry, self._seen_to, self.counts

    def see(self, counts: Sequence[int], num_rows: int, found: Sequence[tuple[int, LanePosition]]) -> None:
        """Share how many rows this rank found left in its watched lanes. All ranks must call this at the same point.

        Args:
            counts: Number of rows dealt from each lane up to this point.
            num_rows: Number of rows that this rank looked ahead in each watched lane.
            found: For each watched lane, the number of rows left, up to `num_rows`, and the lane's position.
        """
        numbers = np.zeros((len(self.counts), 1 + len(LanePosition._fields)), np.int64)
        for lane, (num_left, position) in zip(self._watched, found, strict=True):
            numbers[lane] = num_left, *position
        self._told.append((counts, num_rows, self._start_sum(numbers)))

    def hear(self) -> None:
        """Wait for the results of all pending calls to `see`, and process the results."""
        while self._told:
            counts, num_rows, wait = self._told.popleft()
            num_left, *lanes = wait().T.tolist()
            for lane, (count, number) in enumerate(zip(counts, num_left, strict=True)):
                self._seen_to[lane] = max(self._seen_to[lane], count + number)
                self._is_dry[lane] |= number < num_rows
            if sum(counts) >= sum(self._known_at):
                self._known_at, self._known = counts, tuple(LanePosition(*each) for each in zip(*lanes, strict=True))

    def deal(self, num_rows: int, look: Callable[[int], None]) -> DealtRows:
        """Decide which lanes provide the next `num_rows` rows, or fewer rows at the end of the pass.

        Args:
            num_rows: Number of rows in the global batch.
            look: Looks ahead in each watched lane by a given number of rows and calls `see`. Called if a lane must
                provide more rows than any rank has seen in the lane.
        """
        self.hear()
        while True:
            left = [seen - count if dry else ENDLESS for dry, seen, count in zip(*self._state, strict=True)]
            dealt = deal(num_rows, left, self._turn)
            after = [count + more for count, more in zip(self.counts, dealt.counts, strict=True)]
            # Accept the deal only if each lane's end is known or more of its rows were seen. Otherwise, a lane may end
            # within or right after the dealt rows. All ranks have the same information and decide the same.
            if all(dry or count < seen for dry, seen, count in zip(self._is_dry, self._seen_to, after, strict=True)):
                break
            look(2 * max(dealt.counts) + 1)
            self.hear()
        self.counts, self._turn = after, dealt.turn
        self._num_rows += dealt.num_rows
        return dealt

    def position(self) -> StreamPosition:
        """Return the position after the rows dealt so far, computed from the lane positions that `hear` received."""
        return StreamPosition(self._num_rows, self._turn, None if self._is_known else tuple(self._lanes))

    @property
    def places(self) -> Sequence[Place]:
        """For each lane, the number of rows dealt so far if lengths are known, otherwise the lane's position."""
        return self.counts if self._is_known else self._lanes

    @property
    def _lanes(self) -> list[LanePosition]:
        passed = (count - known for count, known in zip(self.counts, self._known_at, strict=True))
        return [lane._replace(skip=lane.skip + more) for lane, more in zip(self._known, passed, strict=True)]


class Shares(Protocol):
    """Splits global batches among workers, like `raysgd.core.arrays.division.Division`."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    @property
    def global_size(self) -> int:
        """Number of rows in a full global batch."""

    def parts(self, num_samples: int, rank: int) -> Sequence[tuple[int, int, int]]:
        """Return a worker's batches in a global batch of `num_samples` rows.

        Each batch is `(start, stop, total)`. `start` and `stop` limit the worker's rows within the global batch.
        `total` is the number of rows that all workers process at the same time as this batch.
        """


class StreamBatch(NamedTuple):
    """A batch of one worker: the worker's whole part of a global batch, or a micro-batch of that part.

    Attributes:
        start: Index of the first row in the global batch.
        batch: The collated batch. If the worker has no rows in the global batch, this is padding, made of repeated rows
            that do not count; or None without padding.
        num_rows: Number of rows that count, which excludes padding.
        num_global: Number of rows that all workers process at the same time.
        is_first: True for the worker's first batch of the global batch.
        is_last: True for the worker's last batch of the global batch.
        ends_pass: True if the global batch is known to be the pass's last.
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
    """A global batch that was dealt and requested from the loader, but not yielded yet."""

    parts: Sequence[tuple[int, int, int]]
    counts: Sequence[int]
    num_seen: int
    ends_pass: bool
    after: StreamPosition


class GlobalReader:
    """Yields the batches of one worker.

    Args:
        of_pass: The pass over the stream.
        shares: Splits global batches among workers.
        rank: The worker's rank in this split.
        begin: Position at which to start.
        watched: The lanes that the worker watches.
        open_loading: Returns a `BatchLoader`. Called when the first batch is needed.
        start_sum: Starts an all-reduce sum. Used only if lengths are unknown.
        pad: Whether a worker without rows in a global batch gets padding. True in training.
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
        self._num_orders = 0  # number of requests that the loader has not answered yet
        self._made: deque[MadeBatches] = deque()

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the worker's batches for the rest of the pass."""
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
                if whole.num_seen:  # start the all-reduce now, so that it runs while the worker trains
                    self._ends.see(whole.counts, whole.num_seen, made.found)
                if whole.ends_pass and self._stream.skips:  # the final position must count all skipped rows
                    self._ends.hear()
                    whole = whole._replace(after=self._ends.position())
                yield from self._batches(whole, made)

    @property
    def _rows_ahead(self) -> int:
        """Number of rows to look ahead after a global batch.

        It covers the batches dealt until the next result arrives.
        """
        return self._shares.global_size * (1 + self._loading.num_ahead + self._stream.drop_last)

    def _deal(self) -> None:
        """Decide how many rows each lane adds to the next global batch, and request them, unless the pass has ended."""
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
        """Return True if the most recently dealt global batch is known to be the pass's last."""
        stream, num_left = self._stream, self._ends.num_left
        if stream.limit is not None:
            of_limit = stream.limit - self._num_rows
            num_left = of_limit if num_left is None else min(num_left, of_limit)
        return num_left is not None and num_left < (self._shares.global_size if stream.drop_last else 1)

    def _wanted(self, dealt: DealtRows, start: int, stop: int, num_global: int) -> list[LaneSlice]:
        """Return the rows of a batch as lane slices. If the worker has never had rows, return some rows for padding."""
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
        """Look ahead in each watched lane, beyond all dealt rows, and share how many rows are left."""
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
