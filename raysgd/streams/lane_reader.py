"""Reads the rows of lanes in one process, from any position. Reads each shard once, filters and mixes the rows.

A pass defines the lanes and their positions after some rows, and opens a reader for each lane.
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
"""The number of a row in its shard, and the row."""

_NUM_KEPT = 256
_MOST_TRIES = 4  # a row, and the next three
_MOST_READINGS = 4
_MOST_SKIPPED = 256  # rows that are held at a time while others are skipped


def numbered_rows(
    open_shard: Callable[[str, int], Iterator[Any]], shard: Shard, start: int, skips: bool = False
) -> Iterator[Numbered]:
    """Yield the rows of a shard from `start` on, each with its number; `DROPPED` for a row that is left out.

    Args:
        open_shard: Opens a shard at a row, like `Stream.open`.
        shard: The shard.
        start: The number of the first row.
        skips: True to leave out a row that cannot be read, or the rest of the shard if the next rows cannot be read
            either.

    Raises:
        StreamError: The shard cannot be read, or does not have the number of rows that it claimed.
    """
    number, num_tries, said = start, 0, shard.num_rows
    while True:
        try:
            rows = iter(open_shard(shard.name, number))
            for row in rows:
                number, num_tries = number + 1, 0
                if number == said:
                    number += sum(1 for _ in rows)  # none, unless the shard has changed
                    if number > said:
                        break
                yield number - 1, row
            break
        except Exception as error:  # a stream of the user may raise anything
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
    """Opens shards for the lanes of one process.

    Args:
        stream: The source of the rows.
        shards: Its shards.
        lanes: Defines what each lane reads.
        expected: The lanes that this process reads.
        block: Number of rows that a lane reads at a time.
        skips: True to leave out rows that cannot be read.
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
        self._readings: dict[int, list[_Reading]] = {}  # of shared shards; the last one was used most recently

    def rows(self, part: LanePart, start: int) -> Iterator[Numbered]:
        """Return the rows of a part of a lane, with their numbers, from row `start` of the shard on.

        Raises:
            StreamError: The shard cannot be read, or does not have the number of rows that it claimed.
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
        """Return a reading that will reach a row soon, or has kept it; if there is none, read the shard again."""
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
        # Other lanes may be some rows behind this one, because of the rows read at a time and of their turns.
        start = max(0, (at // part.step - self._block) * part.step)
        num_kept = 2 * self._block + _NUM_KEPT
        reading = _Reading(part.step, start, readers, num_kept)

        def open_shard(name: str, number: int) -> Iterator[Any]:
            if self._skips:  # so that all workers find the same rows unreadable
                return self._stream.open(name, number)
            return self._stream.open_some(name, number, reading.is_needed)

        reading.source = numbered_rows(open_shard, self._shards[part.shard], start, self._skips)
        return reading


class _Reading:
    """One reading of a shard. Rows that are read on the way to another one wait for their lanes.

    Args:
        step: Distance between two rows of a lane.
        start: Where the reading begins.
        readers: The first rows of the lanes for which rows wait.
        num_kept: How many rows may wait for a lane.

    Attributes:
        source: The rows from `start` on.
    """

    source: Iterator[Numbered]

    def __init__(self, step: int, start: int, readers: Collection[int], num_kept: int) -> None:
        self._step, self._num_kept = step, num_kept
        self._waiting: dict[int, deque[Numbered]] = {first: deque() for first in readers}
        self._next = start

    def is_needed(self, number: int) -> bool:
        """Return True if a row belongs to one of these lanes."""
        return number % self._step in self._waiting

    def has(self, first: int, at: int) -> bool:
        """Return True if this reading will reach row `at` soon, or has kept it."""
        waiting = self._waiting.get(first)
        if waiting and waiting[0][0] <= at <= waiting[-1][0]:
            return True
        return self._next <= at <= self._next + self._num_kept * self._step

    def row(self, first: int, at: int) -> Numbered | None:
        """Return row `at` of a lane; None after the end."""
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
            del self._waiting[first]  # that lane is far behind


LaneRow: TypeAlias = tuple[int, int, Any]
"""The number of the part of a row, its number in the shard, and the row."""


class LaneReader:
    """Reads one lane, row by row.

    Rows are mixed block by block. The content and order of a block follow from its first row, so a block that is read
    again is the same. Without mixing, a block is whatever is needed next.

    Args:
        parts: The parts of the lane.
        names: Name of the shard of each part.
        open_part: Opens a part at a row of its shard.
        steps: The steps up to the last filter.
        block: Number of rows that are mixed with each other.
        position: Where to begin.
        skips: True to leave out rows for which a step fails.

    Attributes:
        names: As in the arguments.
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
        self._blocks: deque[tuple[LanePosition, int]] = deque()  # start and length of each block with waiting rows
        self._num_taken = 0  # rows of the first of these blocks
        self._next_block = position._replace(skip=0)
        self._counted = self._from(self._next_block)
        self.skip(position.skip)

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return self._blocks[0][0]._replace(skip=self._num_taken) if self._blocks else self._next_block

    def peek(self, num_rows: int) -> int:
        """Return how many rows are left, up to `num_rows`."""
        while (num_wanted := num_rows - len(self._waiting)) > 0 and self._read_block(num_wanted):
            pass
        return min(len(self._waiting), num_rows)

    def read(self, num_rows: int) -> list[LaneRow]:
        """Return the next rows; fewer at the end of the lane."""
        num_rows = self.peek(num_rows)
        self._num_taken += num_rows
        while self._blocks and self._num_taken >= self._blocks[0][1]:
            self._num_taken -= self._blocks.popleft()[1]
        return [self._waiting.popleft() for _ in range(num_rows)]

    def skip(self, num_rows: int) -> None:
        """Skip the next rows."""
        while num_rows and (num_passed := len(self.read(min(num_rows, _MOST_SKIPPED)))):
            num_rows -= num_passed

    def _read_block(self, num_wanted: int) -> bool:
        """Read more rows. Return False if there were none."""
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
        """Yield each row that passes the filters."""
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
"""The place of a lane: the number of its rows that were dealt, if its position follows from it, or the position."""


@dataclass(frozen=True)
class StreamPosition:
    """The position of a pass, after a global batch. It is valid for any number of workers.

    Attributes:
        num_rows: Number of rows in the global batches so far.
        turn: The next turn, which says from which lane to deal.
        lanes: Position of each lane; None if they follow from `num_rows`.
    """

    num_rows: int = 0
    turn: int = 0
    lanes: tuple[LanePosition, ...] | None = None

    @property
    def left_out(self) -> int:
        """Number of rows that could not be read and were left out."""
        return sum(lane.left_out for lane in self.lanes or ())


@dataclass(frozen=True)
class StreamPass:
    """One pass over a stream.

    Attributes:
        stream: The stream.
        shards: Its shards.
        pass_index: Index of the pass, from 0.
        seed: Seed of the training.
        num_lanes: Number of lanes.
    """

    stream: Pipeline
    shards: Sequence[Shard]
    pass_index: int = 0
    seed: int = 0
    num_lanes: int = NUM_LANES

    @property
    def block(self) -> int:
        """Number of rows of a lane that are mixed with each other."""
        return 1 if self.stream.buffer == 1 else max(2, -(-self.stream.buffer // self.num_lanes))

    @property
    def is_known(self) -> bool:
        """True if the number of rows of each lane is known in advance."""
        return self.stream.keeps_rows and total(self.shards) is not None

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes, and what each of them reads."""
        order, turns = list(range(len(self.shards))), list(range(self.num_lanes))
        if self.stream.buffer == 1:
            return Lanes(order, self.num_lanes)
        chance = random.Random(digest(self._seed))
        chance.shuffle(order)
        chance.shuffle(turns)  # otherwise a small batch would have rows of the same lanes in each pass
        return Lanes(order, self.num_lanes, turns)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows of each lane. Only if lengths are known."""
        return self.lanes.lengths(self._of_shards)

    def dealt(self, num_rows: int) -> DealtRows:
        """Return what the lanes have given after so many rows. Only if lengths are known."""
        return deal(num_rows, self.lengths, turn=0)

    def position(self, lane: int, place: Place) -> LanePosition:
        """Return the position of a lane at a place."""
        if isinstance(place, LanePosition):
            return place
        return self.lanes.position(lane, place, self._of_shards, self.block)

    def open_shards(self, expected: Collection[int]) -> OpenShards:
        """Return an `OpenShards` for these lanes. Opens no shard yet."""
        return OpenShards(self.stream.source, self.shards, self.lanes, expected, self.block, self.stream.skips)

    def reader(self, lane: int, opened: OpenShards, position: LanePosition) -> LaneReader:
        """Return a reader of a lane."""
        parts = self.lanes.all_parts[lane]
        names = [self.shards[part.shard].name for part in parts]
        steps = RowSteps(self.stream.steps[: self.stream.num_to_count], self._seed)
        return LaneReader(parts, names, opened.rows, steps, self.block, position, self.stream.skips)

    @property
    def last_steps(self) -> RowSteps:
        """The steps after the last filter. They run only on rows that are used."""
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
