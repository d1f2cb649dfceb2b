"""The lanes that are open in one worker, and how far each is in the present joint batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raysgd.streams.dealing import LaneSlice
from raysgd.streams.lane_reader import LaneReader
from raysgd.streams.lanes import LanePosition
from raysgd.streams.stream_pass import StreamPass

_NUM_NEIGHBORS = 2
_MOST_BEHIND = 4096


class OpenLanes:
    """Opens lanes when rows of them are needed.

    Args:
        of_pass: The pass.
        watched: The lanes that the worker watches. It reads some rows of their neighbors, too: where a share ends
            inside of a lane, two workers read it.
        position_of: Says where a lane is at the beginning of the joint batch dealt last.
    """

    def __init__(self, of_pass: StreamPass, watched: range, position_of: Callable[[int], LanePosition]) -> None:
        first, last = watched.start - _NUM_NEIGHBORS, watched.stop + _NUM_NEIGHBORS
        near = range(max(0, first), min(of_pass.num_lanes, last))
        self._pass, self._watched, self._position_of = of_pass, watched, position_of
        self._opened = of_pass.open_shards(near)
        self._readers: dict[int, LaneReader] = {}
        self._passed: dict[int, int] = {}  # rows of the present joint batch; negative for a lane that is behind

    def take(self, wanted: LaneSlice) -> Iterator[tuple[Any, str, int]]:
        """Yield some rows of the present joint batch, each ahead of the name of its shard and its number there.

        Of one lane those that come first have to be taken first.
        """
        reader = self._reader(wanted.lane)
        reader.skip(wanted.start - self._passed[wanted.lane])
        self._passed[wanted.lane] = wanted.stop
        names = reader.names
        return ((row, names[part], number) for part, number, row in reader.take(wanted.stop - wanted.start))

    def peek(self, lane: int, num_rows: int) -> tuple[int, LanePosition]:
        """Return how many rows a lane has left, up to a number, and where it is as a joint batch begins."""
        reader = self._reader(lane)
        reader.skip(-self._passed[lane])
        self._passed[lane] = 0
        return reader.peek(num_rows), reader.position

    def end_batch(self, counts: Sequence[int]) -> None:
        """Go on to the next joint batch.

        Args:
            counts: How many rows of each lane were in the last one.
        """
        for lane in list(self._readers):
            self._passed[lane] -= counts[lane]
            if self._passed[lane] < -_MOST_BEHIND and lane not in self._watched:
                del self._readers[lane], self._passed[lane]  # it is cheaper to open it again

    def _reader(self, lane: int) -> LaneReader:
        reader = self._readers.get(lane)
        if reader is None:
            reader = self._readers[lane] = self._pass.reader(lane, self._opened, self._position_of(lane))
            self._passed[lane] = 0
        return reader
