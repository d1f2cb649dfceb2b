"""Reads, filters and shuffles the rows of lanes in one process, from any position.

A lane is one of the fixed row sequences through the stream's shards; see `raysgd.streams.lanes`. A `StreamPass` defines
the lanes, computes positions in them, and opens a reader for each lane. Lanes that share a shard share one reading of
it.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

from raysgd.core.numbers.seeds import digest
from raysgd.exceptions import StreamError
from raysgd.streams.lanes import NUM_LANES, DealtRows, LanePart, LanePosition, Lanes, deal
from raysgd.streams.stream import DROPPED, Pipeline, RowSteps, Shard, Stream, total, warn_of_row

logger = logging.getLogger(__name__)

Numbered: TypeAlias = tuple[int, Any]
"""A row's number in its shard, and the row."""

_NUM_KEPT = 256
_MOST_TRIES = 4  # number of consecutive unreadable rows after which the rest of a shard is skipped
_MOST_READINGS = 4
_MOST_SKIPPED = 256  # number of rows to read at a time while skipping


def numbered_rows(
    open_shard: Callable[[str, int], Iterator[Any]], shard: Shard, start: int, skips: bool = False
) -> Iterator[Numbered]:
    """Yield a shard's rows from row `start` on with their numbers. Yield `DROPPED` in place of a skipped row.

    Args:
        open_shard: Opens a shard at a row, like `Stream.open`.
        shard: The shard to read.
        start: Number of the first row.
        skips: Whether to skip unreadable rows. After several consecutive unreadable rows, the rest of the shard is
            skipped.

    Raises:
        StreamError: The shard cannot be read, or its number of rows differs from `shard.num_rows`.
    """
    number, num_tries, said = start, 0, shard.num_rows
    while True:
        try:
            rows = iter(open_shard(shard.name, number))
            for row in rows:
                number, num_tries = number + 1, 0
                if number == said:
                    number += sum(1 for _ in rows)  # count excess rows; there are none unless the shard has changed
                    if number > said:
                        break
                yield number - 1, row
            break
        except Exception as error:  # a user's stream may raise any exception
            what = f"cannot be read from row {number} on"
            failed = StreamError(f"shard {shard.name!r} {what}: {type(error).__name__}: {error}")
            if not skips:
                raise failed from error
            warn_of_row(failed)
        yield number, DROPPED
        number, num_tries = number + 1, num_tries + 1
        if num_tries == _MOST_TRIES:
            logger.warning("skipped in a stream: the rest of shard %r, from row %d on", shard.name, number)
            yield from ((left, DROPPED) for left in range(number, said or 0))
        if num_tries == _MOST_TRIES or number == said:
            return
    if said not in (None, number):
        raise StreamError(
            f"shard {shard.name!r} has {number} rows instead of the {said} that it had before. The position in a "
            "stream counts rows, so its shards must not change."
        )


class OpenShards:
    """Opens shards for the lanes that one process reads. Lanes that share a shard also share its reader.

    Args:
        stream: Source of the rows.
        shards: The shards of `stream`.
        lanes: Defines the parts of each lane. A part is the rows that a lane reads from one shard.
        expected: The lanes that this process will read.
        block: Number of rows that a lane reads at a time.
        skips: Whether to skip unreadable rows.
    """

    def __init__(
        self,
        stream: Stream,
        shards: Sequence[Shard],
        lanes: Lanes,
        expected: Collection[int],
        block: int,
        skips: bool = False,
    ) -> None:
        self._stream, self._shards, self._skips = stream, shards, skips
        self._lanes, self._expected, self._block = lanes, expected, block
        self._readings: dict[int, list[_Reading]] = {}  # readings of each shared shard, most recently used last

    def rows(self, part: LanePart, start: int) -> Iterator[Numbered]:
        """Return a lane part's rows with their row numbers, from the shard's row `start` on.

        Raises:
            StreamError: The shard cannot be read, or its number of rows differs from `Shard.num_rows`.
        """
        if part.step == 1:
            return numbered_rows(self._stream.open, self._shards[part.shard], start, self._skips)
        return self._dealt(part, part.next_row(start))

    def _dealt(self, part: LanePart, at: int) -> Iterator[Numbered]:
        reading = self._reading(part, at)
        while (row := reading.row(part.first, at)) is not None:
            yield row
            at = row[0] + part.step
            if not reading.has(part.first, at):
                reading = self._reading(part, at)

    def _reading(self, part: LanePart, at: int) -> _Reading:
        """Return a reading that has buffered row `at` or will reach it soon. Otherwise, reopen the shard."""
        readings = self._readings.setdefault(part.shard, [])
        found = next((each for each in reversed(readings) if each.has(part.first, at)), None)
        if found is None:
            found = self._new(part, at)
            del readings[: 1 - _MOST_READINGS]
        else:
            readings.remove(found)
        readings.append(found)
        return found

    def _new(self, part: LanePart, at: int) -> _Reading:
        ends = [parts[-1] for parts in map(self._lanes.all_parts.__getitem__, self._expected)]
        readers = {each.first for each in ends if each.shard == part.shard}
        # Start some rows earlier than requested, because the other lanes of this shard may be behind: lanes read whole
        # blocks and take turns.
        start = max(0, (at // part.step - self._block) * part.step)
        num_kept = 2 * self._block + _NUM_KEPT
        reading = _Reading(part.step, start, readers, num_kept)

        def open_shard(name: str, number: int) -> Iterator[Any]:
            if self._skips:  # `open_some` may not read all rows, but all workers must find the same rows unreadable
                return self._stream.open(name, number)
            return self._stream.open_some(name, number, reading.is_needed)

        reading.source = numbered_rows(open_shard, self._shards[part.shard], start, self._skips)
        return reading


class _Reading:
    """One sequential reading of a shard that several lanes share. Rows are buffered until their lanes need them.

    Args:
        step: Distance between consecutive rows of a lane.
        start: Row number at which the reading begins.
        readers: The lanes for which to buffer rows, identified by their first row in the shard.
        num_kept: Maximum number of buffered rows per lane.

    Attributes:
        source: The shard's rows from row `start` on.
    """

    source: Iterator[Numbered]

    def __init__(self, step: int, start: int, readers: Collection[int], num_kept: int) -> None:
        self._step, self._num_kept = step, num_kept
        self._waiting: dict[int, deque[Numbered]] = {first: deque() for first in readers}
        self._next = start

    def is_needed(self, number: int) -> bool:
        """Return True if the row belongs to a lane for which rows are buffered."""
        return number % self._step in self._waiting

    def has(self, first: int, at: int) -> bool:
        """Return True if this reading has buffered row `at` of the lane, or will reach it soon."""
        waiting = self._waiting.get(first)
        if waiting and waiting[0][0] <= at <= waiting[-1][0]:
            return True
        return self._next <= at <= self._next + self._num_kept * self._step

    def row(self, first: int, at: int) -> Numbered | None:
        """Return row `at` of the shard for the lane whose first row is `first`. Return None at the end of the shard."""
        waiting = self._waiting.setdefault(first, deque())
        while waiting and waiting[0][0] < at:
            waiting.popleft()
        return waiting.popleft() if waiting else self._read_to(first, at)

    def _read_to(self, first: int, at: int) -> Numbered | None:
        for row in self.source:
            self._next = row[0] + 1
            if row[0] >= at and row[0] % self._step == first:
                return row
            self._keep(row)
        return None

    def _keep(self, row: Numbered) -> None:
        first = row[0] % self._step
        waiting = self._waiting.get(first)
        if waiting is None:
            return
        waiting.append(row)
        if len(waiting) > self._num_kept:
            del self._waiting[first]  # the lane is too far behind, so stop buffering rows for it


LaneRow: TypeAlias = tuple[int, int, Any]
"""Index of the row's part in the lane, the row's number in the shard, and the row."""


class LaneReader:
    """Reads one lane, row by row.

    Rows are shuffled in blocks of consecutive rows. A block's content and order depend only on its first row, so
    rereading a block gives the same rows in the same order. Without shuffling, blocks have arbitrary sizes.

    Args:
        parts: The parts of the lane.
        names: The shard name of each part.
        open_part: Opens a part at a row of its shard.
        steps: The stream's `map` and `filter` steps up to the last filter.
        block: Number of rows that are shuffled together. 1 to leave the order unchanged.
        position: Position at which to start.
        skips: Whether to skip rows for which a step fails.

    Attributes:
        names: The shard name of each part.
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
        self._blocks: deque[tuple[LanePosition, int]] = deque()  # start and length of each block with buffered rows
        self._num_taken = 0  # number of rows already taken from the first of these blocks
        self._next_block = position._replace(skip=0)
        self._counted = self._from(self._next_block)
        self.skip(position.skip)

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return self._blocks[0][0]._replace(skip=self._num_taken) if self._blocks else self._next_block

    def peek(self, num_rows: int) -> int:
        """Buffer up to `num_rows` rows and return how many were left in the lane, at most `num_rows`."""
        while (num_wanted := num_rows - len(self._waiting)) > 0 and self._read_block(num_wanted):
            pass
        return min(len(self._waiting), num_rows)

    def read(self, num_rows: int) -> list[LaneRow]:
        """Return the next `num_rows` rows, or fewer at the end of the lane."""
        num_rows = self.peek(num_rows)
        self._num_taken += num_rows
        while self._blocks and self._num_taken >= self._blocks[0][1]:
            self._num_taken -= self._blocks.popleft()[1]
        return [self._waiting.popleft() for _ in range(num_rows)]

    def skip(self, num_rows: int) -> None:
        """Skip the next `num_rows` rows."""
        while num_rows and (num_passed := len(self.read(min(num_rows, _MOST_SKIPPED)))):
            num_rows -= num_passed

    def _read_block(self, num_wanted: int) -> bool:
        """Read and buffer the next block. Return False at the end of the lane."""
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
        """Yield the rows from `position` on that pass the filters, in reading order."""
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


Place: TypeAlias = int | LanePosition
"""A place in a lane.

It is the number of rows used from the lane so far if shard lengths are known, and a `LanePosition` otherwise.
"""


@dataclass(frozen=True)
class StreamPosition:
    """A position in a pass, after a global batch. It is valid for any number of workers.

    Attributes:
        num_rows: Number of rows in all global batches so far.
        turn: The next turn. Lanes take turns in a fixed order, so it determines which lane provides the next row.
        lanes: The position in each lane, or None if the positions can be computed from `num_rows`.
    """

    num_rows: int = 0
    turn: int = 0
    lanes: tuple[LanePosition, ...] | None = None

    @property
    def left_out(self) -> int:
        """Number of rows that were skipped because of errors."""
        return sum(lane.left_out for lane in self.lanes or ())


@dataclass(frozen=True)
class StreamPass:
    """One pass over a stream.

    Attributes:
        stream: The stream, including its steps and its options for shuffling.
        shards: The stream's shards.
        pass_index: Index of the pass, from 0.
        seed: Seed for shuffling, unless `Stream.shuffle` was called with a seed.
        num_lanes: Number of lanes.
    """

    stream: Pipeline
    shards: Sequence[Shard]
    pass_index: int = 0
    seed: int = 0
    num_lanes: int = NUM_LANES

    @property
    def block(self) -> int:
        """Number of consecutive rows in a lane that are shuffled together; 1 if the stream is not shuffled."""
        return 1 if self.stream.buffer == 1 else max(2, -(-self.stream.buffer // self.num_lanes))

    @property
    def is_known(self) -> bool:
        """True if each lane's number of rows is known in advance."""
        return self.stream.keeps_rows and total(self.shards) is not None

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes and their parts, in shuffled order if the stream is shuffled."""
        order, turns = list(range(len(self.shards))), list(range(self.num_lanes))
        if self.stream.buffer == 1:
            return Lanes(order, self.num_lanes)
        chance = random.Random(digest(self._seed))
        chance.shuffle(order)
        chance.shuffle(turns)  # otherwise, small batches would take rows from the same lanes in each pass
        return Lanes(order, self.num_lanes, turns)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows in each lane. Requires known shard lengths."""
        return self.lanes.lengths(self._of_shards)

    def dealt(self, num_rows: int) -> DealtRows:
        """Return how many of the first `num_rows` rows come from each lane. Requires known shard lengths."""
        return deal(num_rows, self.lengths, turn=0)

    def position(self, lane: int, place: Place) -> LanePosition:
        """Convert a place in a lane, which is a number of rows or already a position, to a position."""
        if isinstance(place, LanePosition):
            return place
        return self.lanes.position(lane, place, self._of_shards, self.block)

    def open_shards(self, expected: Collection[int]) -> OpenShards:
        """Return an `OpenShards` for the given lanes. Shards are opened on first use."""
        return OpenShards(self.stream.source, self.shards, self.lanes, expected, self.block, self.stream.skips)

    def reader(self, lane: int, opened: OpenShards, position: LanePosition) -> LaneReader:
        """Return a reader for a lane that starts at `position`."""
        parts = self.lanes.all_parts[lane]
        names = [self.shards[part.shard].name for part in parts]
        steps = RowSteps(self.stream.steps[: self.stream.num_to_count], self._seed)
        return LaneReader(parts, names, opened.rows, steps, self.block, position, self.stream.skips)

    @property
    def last_steps(self) -> RowSteps:
        """The `map` steps after the last filter, which run only on rows that the worker uses."""
        first = self.stream.num_to_count
        return RowSteps(self.stream.steps[first:], self._seed, first)

    @property
    def _seed(self) -> str:
        seed = self.seed if self.stream.seed is None else self.stream.seed
        return f"{seed}/{self.pass_index}"

    @cached_property
    def _of_shards(self) -> list[int]:
        lengths: list[Any] = [shard.num_rows for shard in self.shards]
        assert self.is_known, "asked for only where lengths are known"
        return lengths
