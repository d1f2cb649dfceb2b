"""One worker's rows of the joint batches of a pass, from any position and in a group of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from raysgd.streams.dealing import Deal, slices
from raysgd.streams.lane_ends import KnownEnds, LaneEnds, SharedEnds, StartSum, alone
from raysgd.streams.lanes import lanes_of
from raysgd.streams.open_lanes import OpenLanes
from raysgd.streams.stream_pass import StreamPass, StreamPosition


class Shares(Protocol):
    """Divides joint batches, as `raysgd.arrays.division.Division` does."""

    @property
    def world_size(self) -> int:
        """How many workers there are."""

    @property
    def joint_size(self) -> int:
        """Rows of a full joint batch."""

    def parts(self, num_samples: int, rank: int) -> Sequence[tuple[int, int, int]]:
        """Return start and end of each batch of a worker, and the rows that all workers take at the same time."""


class StreamBatch(NamedTuple):
    """What a worker does in a joint batch, or in one of several batches of it.

    Attributes:
        start: The first of the rows, counted from that of the joint batch.
        rows: The rows; where the worker has none some that it repeats, without one of them counting.
        num_rows: How many of them count.
        num_joint: Rows of all workers at the same time.
        is_first: Whether the joint batch begins with it.
        is_last: Whether the joint batch ends with it.
        ends_pass: Whether the joint batch is known to be the last one.
        after: The position behind the joint batch.
    """

    start: int
    rows: list[Any]
    num_rows: int
    num_joint: int
    is_first: bool
    is_last: bool
    ends_pass: bool
    after: StreamPosition


class JointReader:
    """Reads the rows of one worker.

    Args:
        of_pass: The pass.
        shares: How joint batches are divided.
        rank: The place of the worker.
        begin: Where the pass is.
        start_sum: Adds up over all workers, where lengths are not known.
        pad: Whether a worker without a row in a joint batch repeats others, as in training.

    Raises:
        ValueError: There are more workers than lanes.
    """

    def __init__(
        self,
        of_pass: StreamPass,
        shares: Shares,
        rank: int,
        begin: StreamPosition,
        start_sum: StartSum = alone,
        pad: bool = True,
    ) -> None:
        self._pass, self._shares, self._rank, self._pad = of_pass, shares, rank, pad
        watched = lanes_of(rank, shares.world_size, of_pass.num_lanes)
        self._lanes = OpenLanes(of_pass, watched, lambda lane: self._ends.position_of(lane))
        self._ends: LaneEnds = (
            KnownEnds(of_pass, begin)
            if of_pass.is_known
            else SharedEnds(begin, of_pass.num_lanes, watched, self._lanes.peek, start_sum)
        )
        self._num_rows = begin.num_rows
        self._last_rows: list[Any] = []

    def __iter__(self) -> Iterator[StreamBatch]:
        """Iterate over the rest of the pass."""
        is_last = False
        self._begin()
        while not is_last:
            dealt = self._ends.deal()
            self._num_rows += dealt.num_rows
            is_full = dealt.num_rows == self._shares.joint_size
            if not dealt.num_rows or (self._pass.stream.drop_last and not is_full):
                return
            is_last = not is_full or self._ends_here()
            batches = self._batches(dealt, is_last)
            if not is_last:
                self._begin()  # answered while the worker trains on these
            yield from batches

    def _begin(self) -> None:
        limit, most = self._pass.stream.limit, self._shares.joint_size
        num_rows = most if limit is None else min(most, limit - self._num_rows)
        self._ends.begin(num_rows, num_seen=num_rows + most * self._pass.stream.drop_last)

    def _ends_here(self) -> bool:
        """Whether no joint batch follows the one that was dealt last, as far as that is known."""
        stream, num_left = self._pass.stream, self._ends.num_left
        if stream.limit is not None:
            of_limit = stream.limit - self._num_rows
            num_left = of_limit if num_left is None else min(num_left, of_limit)
        return num_left is not None and num_left < (self._shares.joint_size if stream.drop_last else 1)

    def _batches(self, dealt: Deal, ends_pass: bool) -> list[StreamBatch]:
        parts = self._shares.parts(dealt.num_rows, self._rank)
        rows = [self._rows(dealt, start, stop) for start, stop, _ in parts]
        shown = self._shown(dealt, rows)
        self._lanes.end_batch(dealt.counts)
        after = self._ends.position()
        return [
            StreamBatch(start, own or shown, len(own), num_joint, number == 1, number == len(parts), ends_pass, after)
            for number, (own, (start, _, num_joint)) in enumerate(zip(rows, parts, strict=True), 1)
        ]

    def _shown(self, dealt: Deal, rows: list[list[Any]]) -> list[Any]:
        """Rows to repeat where there are none; two, because a batch norm refuses a single one."""
        if not self._pad:
            return []
        self._last_rows = next((each for each in reversed(rows) if each), self._last_rows)
        return self._last_rows[:2] or self._rows(dealt, 0, min(2, dealt.num_rows))

    def _rows(self, dealt: Deal, start: int, stop: int) -> list[Any]:
        taken = [row for wanted in slices(dealt.counts, start, stop) for row in self._lanes.take(wanted)]
        steps = self._pass.last_steps
        return [steps(each.row, each.origin) for each in taken]
