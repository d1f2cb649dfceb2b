"""Reads one worker's part of each global batch of a stream, from any position and with any number of workers.

A lane is one of a fixed number of row sequences through the shards of a stream. For each global batch, the ranks decide
how many rows each lane contributes (they deal the rows). Each rank decides by itself, but all ranks must reach the same
decision.

If the lengths of shards are unknown, or a filter drops rows, only a rank that reads a lane can find its end.
Therefore, each lane has one rank that watches it: this rank looks ahead in the lane. After each global batch, the ranks
exchange how many rows they have found in the lanes that they watch. They also exchange the positions in these lanes, so
that no position is lost if a rank dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raysgd.core.arrays.division import BatchShare, Division
from raysgd.streams.lanes import ENDLESS, LanePosition, LaneSlice, Place, StreamPass, StreamPosition, deal, slices
from raysgd.streams.loaders import BatchLoader, BatchOrder, MadeBatches

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
StartSum: TypeAlias = Callable[[Numbers], Callable[[], Numbers]]
"""Function that starts to sum numbers over all ranks.

It returns a function that waits for the sums and returns them.
"""

# Number of rows in the padding batch of a worker that has not had any rows yet. Two, because batch normalization raises
# an error for a single row.
_NUM_SHOWN = 2


def alone(numbers: Numbers) -> Callable[[], Numbers]:
    """Stand in for the function that sums numbers over ranks if there is only one rank. The numbers stay unchanged."""
    return lambda: numbers


class GlobalBatch(NamedTuple):
    """The part that one worker has in a global batch.

    Attributes:
        parts: For each batch of the worker, which rows of the global batch it has, and how it counts.
        counts: Number of rows that global batches have taken from each lane so far.
        num_seen: Number of rows to look ahead after the global batch in each lane that the worker watches.
        ends_pass: True if it is known that the global batch is the last of the pass.
        after: Position in the pass after the global batch.
    """

    parts: Sequence[BatchShare]
    counts: Sequence[int]
    num_seen: int
    ends_pass: bool
    after: StreamPosition


class GlobalReader:
    """Yields the global batches of a pass over a stream, each with the batches that one worker has in it.

    It decides how many rows each lane contributes to a global batch (deals the rows), and finds out where lanes end. If
    the lengths of shards are unknown, each rank looks ahead in the lanes that it watches, and sends the other ranks
    what it has found. The other ranks sometimes receive this only several global batches later.

    Args:
        of_pass: The pass over the stream.
        shares: Splits global batches among workers.
        rank: Rank of the worker.
        begin: Position in the pass at which to start.
        loading: Makes the batches of the worker.
        start_sum: Function that starts to sum numbers over all ranks. Only used if the lengths of lanes are unknown.
        pad: Whether a worker without rows in a batch gets padding. Training requires this.
    """

    def __init__(
        self,
        of_pass: StreamPass,
        shares: Division,
        rank: int,
        begin: StreamPosition,
        loading: BatchLoader,
        start_sum: StartSum = alone,
        pad: bool = True,
    ) -> None:
        self._stream, self._shares, self._rank, self._pad = of_pass.stream, shares, rank, pad
        self._loading, self._start_sum = loading, start_sum
        num_lanes, self._is_known = of_pass.num_lanes, of_pass.is_known
        self._num_rows, self._turn = begin.num_rows, begin.turn
        # For each lane, the number of rows that global batches have taken, and of rows seen so far. They are counted
        # from the start of the pass if the lengths of lanes are known, and otherwise from `begin`.
        self._counts, self._seen_to = [0] * num_lanes, [0] * num_lanes
        if self._is_known:
            self._counts, self._turn = deal(begin.num_rows, of_pass.lengths, turn=0)
            self._seen_to = of_pass.lengths
        self._is_dry = [self._is_known] * num_lanes  # for each lane: True if it has no more rows than those seen
        self._known_at: Sequence[int] = self._counts
        self._known = begin.lanes or (LanePosition(),) * num_lanes
        self._told: deque[tuple[Sequence[int], int, Callable[[], Numbers]]] = deque()
        self._is_over = False
        self._has_rows, self._last_batch = False, None
        self._ordered: deque[GlobalBatch] = deque()
        self._made: deque[MadeBatches] = deque()  # answers for the first of these global batches

    def __iter__(self) -> Iterator[tuple[GlobalBatch, list[Any]]]:
        """Yield the global batches for the rest of the pass, each with the worker's collated batches.

        Where the worker has no rows in a batch, the batch is padding (repeated rows that do not count), or None if
        padding is not wanted.
        """
        try:
            if not self._is_known:
                self._look(self._num_to_see)
            while True:
                while not self._is_over and len(self._ordered) <= self._loading.num_ahead:
                    self._order()
                if not self._ordered:
                    return
                whole, made = self._ordered.popleft(), self._made.popleft() if self._made else self._loading.receive()
                if whole.num_seen:  # start the communication now, so that it runs while the worker trains
                    self._see(whole.counts, whole.num_seen, made)
                if whole.ends_pass and self._stream.skips:  # hear from all ranks, to include all skipped rows
                    self._hear()
                    whole = whole._replace(after=self._position())
                yield whole, self._padded(whole, made)
        finally:
            self._loading.end_loading()

    @property
    def _num_to_see(self) -> int:
        """Number of rows to look ahead after a global batch, in each lane. 0 if the lengths of lanes are known.

        What a rank finds reaches the other ranks only after more global batches were requested. The number is large
        enough for these global batches.
        """
        if self._is_known:
            return 0
        num_rows = self._shares.global_size * (1 + self._loading.num_ahead + self._stream.drop_last)
        return -(-num_rows // max(1, sum(num_left > 0 for num_left in self._left))) + 1

    @property
    def _left(self) -> list[int]:
        """For each lane, the number of rows that are left. `ENDLESS` if its end is unknown."""
        lanes = zip(self._is_dry, self._seen_to, self._counts, strict=True)
        return [seen - count if dry else ENDLESS for dry, seen, count in lanes]

    def _order(self) -> None:
        """Decide how many rows each lane contributes to the next global batch, and request this worker's rows.

        If the pass has ended, request nothing.
        """
        stream, most, places = self._stream, self._shares.global_size, self._places
        dealt = self._deal(self._limited(most))
        num_rows = sum(dealt)
        if not num_rows or (stream.drop_last and num_rows < most):
            self._is_over = True
            return
        self._is_over = num_rows < most or self._limited(sum(self._left)) < (most if stream.drop_last else 1)
        num_seen = 0 if self._is_over and not stream.skips else self._num_to_see
        parts = self._shares.parts(num_rows, self._rank)
        self._loading.order(
            BatchOrder([self._wanted(dealt, start, stop) for start, stop, _ in parts], dealt, places, num_seen)
        )
        self._ordered.append(GlobalBatch(parts, self._counts, num_seen, self._is_over, self._position()))

    def _limited(self, num_rows: int) -> int:
        """Return how many of the next `num_rows` rows are in the pass, which `take` may limit."""
        return num_rows if self._stream.limit is None else min(num_rows, self._stream.limit - self._num_rows)

    def _deal(self, num_rows: int) -> list[int]:
        """Decide how many rows each lane contributes to the next global batch, and return these numbers.

        If the end of a lane is unknown, and the lane must contribute all rows that the ranks have seen in it, or more,
        look further ahead.

        Args:
            num_rows: Number of rows in the global batch. The last global batch of the pass may have fewer rows.
        """
        self._hear()
        while True:
            dealt, turn = deal(num_rows, self._left, self._turn)
            after = [count + more for count, more in zip(self._counts, dealt, strict=True)]
            # Accept these numbers only if, for each lane, the end is known or a row beyond the lane's contribution was
            # seen. Otherwise, the lane may end within its contribution or right after it. All ranks have the same
            # information here, so they decide the same.
            if all(dry or count < seen for dry, seen, count in zip(self._is_dry, self._seen_to, after, strict=True)):
                break
            self._look(2 * max(dealt) + 1)
            self._hear()
        self._counts, self._turn = after, turn
        self._num_rows += sum(dealt)
        return dealt

    def _wanted(self, dealt: Sequence[int], start: int, stop: int) -> list[LaneSlice]:
        """Return which rows of each lane this worker reads for a batch.

        A worker without rows in the batch reads none, and repeats its last batch as padding. A worker that has not had
        rows yet reads some rows for padding.
        """
        if start == stop:
            if self._has_rows or not self._pad:
                return []
            start, stop = 0, min(_NUM_SHOWN, sum(dealt))
        self._has_rows = True
        return slices(dealt, start, stop)

    def _look(self, num_rows: int) -> None:
        """Look ahead in each lane that this worker watches, and send the other ranks how many rows are left.

        Args:
            num_rows: Number of rows to look ahead, after the rows of all global batches so far.
        """
        while len(self._made) < len(self._ordered):
            self._made.append(self._loading.receive())
        self._loading.order(BatchOrder((), [0] * len(self._counts), self._places, num_rows))
        self._see(self._counts, num_rows, self._loading.receive())

    def _see(self, counts: Sequence[int], num_rows: int, made: MadeBatches) -> None:
        """Send the other ranks how many rows are left in the lanes that this rank watches, and the positions there.

        All ranks must call this method after the same global batch.

        Args:
            counts: Number of rows that global batches have taken from each lane so far.
            num_rows: Number of rows by which this rank has looked ahead in each lane that it watches.
            made: The answer with what it has found.
        """
        numbers = np.zeros((len(self._counts), 1 + len(LanePosition._fields)), np.int64)
        for lane, (num_left, position) in zip(self._loading.watched, made.found, strict=True):
            numbers[lane] = num_left, *position
        self._told.append((counts, num_rows, self._start_sum(numbers)))

    def _hear(self) -> None:
        """Receive what the other ranks have sent in all calls to `_see` so far."""
        while self._told:
            counts, num_rows, wait = self._told.popleft()
            num_left, *lanes = wait().T.tolist()
            for lane, (count, number) in enumerate(zip(counts, num_left, strict=True)):
                self._seen_to[lane] = max(self._seen_to[lane], count + number)
                self._is_dry[lane] |= number < num_rows
            if sum(counts) >= sum(self._known_at):
                self._known_at, self._known = counts, tuple(LanePosition(*each) for each in zip(*lanes, strict=True))

    def _position(self) -> StreamPosition:
        """Return the position in the pass after the most recently dealt global batch.

        If the lengths of lanes are unknown, the position includes a position in each lane. These are computed from the
        positions that the ranks have exchanged.
        """
        if self._is_known:
            return StreamPosition(self._num_rows, self._turn)
        passed = (count - known for count, known in zip(self._counts, self._known_at, strict=True))
        lanes = (lane._replace(skip=lane.skip + more) for lane, more in zip(self._known, passed, strict=True))
        return StreamPosition(self._num_rows, self._turn, tuple(lanes))

    @property
    def _places(self) -> Sequence[Place]:
        """For each lane, the place after the most recently dealt global batch.

        This is the number of rows taken from the lane if the lengths of lanes are known, and otherwise a position.
        """
        return self._position().lanes or self._counts

    def _padded(self, whole: GlobalBatch, made: MadeBatches) -> list[Any]:
        batches = []
        for batch, (_, _, plan) in zip(made.batches, whole.parts, strict=True):
            if batch is None and not plan.is_padding:
                raise TypeError("`collate` returned None: it has to return a batch. To skip rows, use `filter`.")
            if self._pad:
                batch = self._last_batch = self._last_batch if batch is None else batch
            batches.append(batch)
        return batches
