"""The rows of one lane, from any position: through filters, and mixed with their neighbors."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from raysgd._numbers.seeds import digest
from raysgd.streams.lanes import LanePart, LanePosition
from raysgd.streams.row_steps import DROPPED, Origin, RowSteps


class LaneRow(NamedTuple):
    """A row of a lane.

    Attributes:
        row: What was read.
        origin: Where it is from.
        position: Where it is in the lane.
    """

    row: Any
    origin: Origin
    position: LanePosition


class LaneReader:
    """Reads one lane, row by row.

    Rows are mixed block by block, so a block is read again as it was: its content and its order follow from where it
    begins.

    Args:
        parts: What the lane reads.
        names: The name of the shard of each part.
        open_part: Opens a part at a row of its shard.
        steps: The steps up to the last filter.
        block: How many rows are mixed with each other.
        position: Where to begin.
    """

    def __init__(
        self,
        parts: Sequence[LanePart],
        names: Sequence[str],
        open_part: Callable[[LanePart, int], Iterator[tuple[int, Any]]],
        steps: RowSteps,
        block: int,
        position: LanePosition,
    ) -> None:
        self._parts, self._names, self._open_part = parts, names, open_part
        self._steps, self._block = steps, block
        self._waiting: deque[LaneRow] = deque()
        self._next_block = position._replace(skip=0)
        self._counted = self._from(self._next_block)
        self.skip(position.skip)

    @property
    def position(self) -> LanePosition:
        """Where the next row is."""
        return self._waiting[0].position if self._waiting else self._next_block

    def peek(self, num_rows: int) -> int:
        """Return how many rows are left, up to `num_rows`."""
        while len(self._waiting) < num_rows and self._read_block():
            pass
        return min(len(self._waiting), num_rows)

    def take(self, num_rows: int) -> list[LaneRow]:
        """Return the next rows; fewer at the end of the lane."""
        return [self._waiting.popleft() for _ in range(self.peek(num_rows))]

    def skip(self, num_rows: int) -> None:
        """Pass over the next rows."""
        while num_rows and (num_passed := len(self.take(min(num_rows, self._block)))):
            num_rows -= num_passed

    def _read_block(self) -> bool:
        """Read some more rows; return whether there were any."""
        begin = self._next_block
        found = list(islice(self._counted, self._block))
        if not found:
            self._next_block = LanePosition(len(self._parts))
            return False
        part, last, _ = found[-1]
        self._next_block = LanePosition(part, last + 1)
        if self._block > 1:
            first_part, first_row, _ = found[0]
            where = f"{self._steps.seed}/{self._names[first_part]}/{first_row}"
            random.Random(digest(where)).shuffle(found)
        self._waiting.extend(
            LaneRow(row, Origin(self._names[part], number), begin._replace(skip=skip))
            for skip, (part, number, row) in enumerate(found)
        )
        return True

    def _from(self, position: LanePosition) -> Iterator[tuple[int, int, Any]]:
        """Yield each row that filters leave, behind its part and its number there."""
        start = position.row
        for part in range(position.part, len(self._parts)):
            for number, row in self._open_part(self._parts[part], start):
                counted = self._steps(row, Origin(self._names[part], number))
                if counted is not DROPPED:
                    yield part, number, counted
            start = 0
