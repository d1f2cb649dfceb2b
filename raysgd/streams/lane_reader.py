"""The rows of one lane, from any position: through filters, and mixed with their neighbors."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

from raysgd._numbers.seeds import digest
from raysgd.exceptions import StreamError
from raysgd.streams.lanes import LanePart, LanePosition
from raysgd.streams.row_steps import DROPPED, RowSteps, warn_of_row

LaneRow: TypeAlias = tuple[int, int, Any]
"""A row behind the number of its part, and its number in the shard."""

_MOST_SKIPPED = 256  # rows that are kept at a time


class LaneReader:
    """Reads one lane, row by row.

    Rows are mixed block by block, so a block is read again as it was: its content and its order follow from where it
    begins. Where nothing is mixed, a block is what is needed next.

    Args:
        parts: What the lane reads.
        names: The name of the shard of each part.
        open_part: Opens a part at a row of its shard.
        steps: The steps up to the last filter.
        block: How many rows are mixed with each other.
        position: Where to begin.
        skips: Whether rows are left out that a step fails for.

    Attributes:
        names: See above.
    """

    def __init__(
        self,
        parts: Sequence[LanePart],
        names: Sequence[str],
        open_part: Callable[[LanePart, int], Iterator[tuple[int, Any]]],
        steps: RowSteps,
        block: int,
        position: LanePosition,
        skips: bool = False,
    ) -> None:
        self.names = names
        self._parts, self._open_part = parts, open_part
        self._steps, self._block, self._skips = steps, block, skips
        self._left_out = position.left_out
        self._waiting: deque[LaneRow] = deque()
        self._blocks: deque[tuple[LanePosition, int]] = deque()  # where each begins that has waiting rows, and its rows
        self._num_taken = 0  # of the first of them
        self._next_block = position._replace(skip=0)
        self._counted = self._from(self._next_block)
        self.skip(position.skip)

    @property
    def position(self) -> LanePosition:
        """The position of the next row."""
        return self._blocks[0][0]._replace(skip=self._num_taken) if self._blocks else self._next_block

    def peek(self, num_rows: int) -> int:
        """Return how many rows are left, up to `num_rows`."""
        while (num_wanted := num_rows - len(self._waiting)) > 0 and self._read_block(num_wanted):
            pass
        return min(len(self._waiting), num_rows)

    def take(self, num_rows: int) -> list[LaneRow]:
        """Return the next rows; fewer at the end of the lane."""
        num_rows = self.peek(num_rows)
        self._num_taken += num_rows
        while self._blocks and self._num_taken >= self._blocks[0][1]:
            self._num_taken -= self._blocks.popleft()[1]
        return [self._waiting.popleft() for _ in range(num_rows)]

    def skip(self, num_rows: int) -> None:
        """Pass over the next rows."""
        while num_rows and (num_passed := len(self.take(min(num_rows, _MOST_SKIPPED)))):
            num_rows -= num_passed

    def _read_block(self, num_wanted: int) -> bool:
        """Read some more rows; return whether there were any."""
        num_rows = num_wanted if self._block == 1 else self._block
        found, begin = list(islice(self._counted, num_rows)), self._next_block
        part, after = (found[-1][0], found[-1][1] + 1) if len(found) == num_rows else (len(self._parts), 0)
        self._next_block = LanePosition(part, after, left_out=self._left_out)
        if not found:
            return False
        self._blocks.append((begin, len(found)))
        if self._block > 1:
            first_part, first_row, _ = found[0]
            where = f"{self._steps.seed}/{self.names[first_part]}/{first_row}"
            random.Random(digest(where)).shuffle(found)
        self._waiting.extend(found)
        return True

    def _from(self, position: LanePosition) -> Iterator[LaneRow]:
        """Yield each row that filters leave."""
        start, has_steps = position.row, bool(self._steps.steps)
        for number in range(position.part, len(self._parts)):
            for at, row in self._open_part(self._parts[number], start):
                self._left_out += row is DROPPED
                counted = self._counted_row(row, self.names[number], at) if has_steps and row is not DROPPED else row
                if counted is not DROPPED:
                    yield number, at, counted
            start = 0

    def _counted_row(self, row: Any, name: str, number: int) -> Any:
        try:
            return self._steps(row, name, number)
        except StreamError as error:
            if not self._skips:
                raise
            warn_of_row(error)
            self._left_out += 1
            return DROPPED
