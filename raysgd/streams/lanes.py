"""Lanes: a fixed number of row sequences into which the rows of a stream are divided.

The lanes do not depend on the number of workers. Shards are assigned to lanes in rounds, one shard per lane and round.
If fewer shards than lanes are left for the last round, neighboring lanes share a shard, and each takes every k-th row.
Each lane therefore has rows even if there are fewer shards than lanes.

A global batch takes its rows from the lanes in turn, one row per lane (the rows are dealt). The lane with turn 0
contributes the first row of a pass.

A `StreamPass` defines the lanes, and computes positions in them. A `LaneReader` reads, filters and shuffles the rows of
a lane in one process, from any position. If several lanes take rows from the same shard, the process reads this shard
once for all of them.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from raysgd.core.numbers.seeds import digest
from raysgd.exceptions import StreamError
from raysgd.streams.stream import DROPPED, FAILED, Pipeline, RowSteps, Shard, total, warn_of_row

logger = logging.getLogger(__name__)

NUM_LANES = 64
ENDLESS = 2**62
"""Stands for the number of rows left in a lane whose end is unknown."""

_NUM_KEPT = 256
_MOST_TRIES = 4  # number of consecutive unreadable rows after which the rest of a shard is skipped
_MOST_READINGS = 4
_MOST_SKIPPED = 256  # number of rows that are read at a time in order to skip them


class LanePart(NamedTuple):
    """The rows that a lane takes from one shard.

    Attributes:
        shard: Index of the shard.
        first: Number of the first row that the lane takes.
        step: Distance between two rows that the lane takes. 1 if the lane has the whole shard.
    """

    shard: int
    first: int = 0
    step: int = 1

    def num_rows(self, of_shard: int) -> int:
        """Return how many rows the lane takes if the shard has `of_shard` rows."""
        return max(0, -(-(of_shard - self.first) // self.step))

    def next_row(self, row: int) -> int:
        """Return the number of the first row at or after `row` that the lane takes."""
        return max(self.first, row + (self.first - row) % self.step)


class LanePosition(NamedTuple):
    """A position in a lane.

    Attributes:
        part: Index of the part of the lane (its rows from one shard) that contains the position.
        row: Number of the row in that shard at which reading starts.
        skip: Number of rows to skip from there on. Rows that a filter drops are not counted, and rows are counted in
            shuffled order.
        left_out: Number of rows of the lane before `row` that were left out because of errors.
    """

    part: int = 0
    row: int = 0
    skip: int = 0
    left_out: int = 0


Place: TypeAlias = int | LanePosition
"""A place in a lane.

If the lengths of lanes are known, this is the number of rows used from the lane so far. Otherwise, it is a
`LanePosition`.
"""


@dataclass(frozen=True)
class StreamPosition:
    """The position in a pass after a global batch. It is valid for any number of workers.

    Attributes:
        num_rows: Number of rows in all global batches of the pass so far.
        turn: Number of the turn that comes next. The lanes take turns contributing rows, in a fixed order.
        lanes: The position in each lane, or None if these positions can be computed from `num_rows`.
    """

    num_rows: int = 0
    turn: int = 0
    lanes: tuple[LanePosition, ...] | None = None

    @property
    def left_out(self) -> int:
        """Number of rows of the pass so far that were skipped because of errors."""
        return sum(lane.left_out for lane in self.lanes or ())


@dataclass(frozen=True)
class StreamPass:
    """One pass over a stream.

    Attributes:
        stream: The stream, with its steps and its options for shuffling.
        shards: The shards of the stream.
        pass_index: Index of the pass, from 0.
        seed: Seed for shuffling and for seeded steps, unless the user has passed a seed to `Stream.shuffle`.
        num_lanes: Number of lanes.
    """

    stream: Pipeline
    shards: Sequence[Shard]
    pass_index: int = 0
    seed: int = 0
    num_lanes: int = NUM_LANES

    @property
    def block(self) -> int:
        """Number of consecutive rows of a lane that are shuffled together. 1 if the stream is not shuffled."""
        return 1 if self.stream.buffer == 1 else max(2, -(-self.stream.buffer // self.num_lanes))

    @property
    def is_known(self) -> bool:
        """True if the number of rows in each lane is known without reading the rows."""
        return self.stream.keeps_rows and total(self.shards) is not None

    @cached_property
    def parts(self) -> list[list[LanePart]]:
        """The parts of each lane, in the order of reading. A part is the rows that the lane takes from one shard.

        If the stream is shuffled, the shards are assigned to lanes in a random order. Of lanes that share a shard, the
        lane whose turn comes first takes the first row, so that the rows of a shared shard stay in order.
        """
        num_lanes, order = self.num_lanes, list(range(len(self.shards)))
        turns = [turn for _, turn in sorted(zip(spread_order(num_lanes), range(num_lanes), strict=True))]
        if self.stream.buffer > 1:
            chance = random.Random(digest(self._seed))
            chance.shuffle(order)
            # Without random turns, lanes would divide the rows of a shared shard in the same way in every pass. A small
            # batch takes rows from only a few lanes, so the same rows would often be in one batch.
            turns = list(range(num_lanes))
            chance.shuffle(turns)
        num_left = len(order) % num_lanes
        begin = len(order) - num_left
        parts = [[LanePart(shard) for shard in order[lane:begin:num_lanes]] for lane in range(num_lanes)]
        for place in range(num_left):  # neighboring lanes share each of the shards that are left
            start, stop = (-(-each * num_lanes // num_left) for each in (place, place + 1))
            for first, lane in enumerate(sorted(range(start, stop), key=turns.__getitem__)):
                parts[lane].append(LanePart(order[begin + place], first, stop - start))
        return parts

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows in each lane. Can only be used if `is_known`."""
        return [sum(part.num_rows(self._of_shards[part.shard]) for part in parts) for parts in self.parts]

    def position(self, lane: int, place: Place) -> LanePosition:
        """Convert a place in a lane, which is a number of rows or a position, to a position.

        The position for a number of rows is the start of a block of rows that are shuffled together, and the number of
        rows to skip in this block.
        """
        if isinstance(place, LanePosition):
            return place
        skip = place % self.block
        left = place - skip
        for number, part in enumerate(self.parts[lane]):
            num_rows = part.num_rows(self._of_shards[part.shard])
            if left < num_rows:
                return LanePosition(number, part.first + left * part.step, skip)
            left -= num_rows
        return LanePosition(len(self.parts[lane]))

    @property
    def first_steps(self) -> RowSteps:
        """The `map` and `filter` steps up to the last filter. With `on_error="skip"`, all steps."""
        steps = self.stream.steps[: self.stream.num_to_count]
        return RowSteps(steps, self._seed, skips=self.stream.skips)

    @property
    def last_steps(self) -> RowSteps:
        """The `map` steps after the last filter.

        They run only for rows on which this worker trains. Earlier steps also run for other rows, because they decide
        which rows remain. With `on_error="skip"`, there are only earlier steps, because any step may drop a row.
        """
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


def lanes_of(rank: int, world_size: int, num_lanes: int) -> range:
    """Return the lanes that a worker watches. The worker looks ahead in these lanes to find out where they end.

    Exactly one worker watches each lane. A worker trains on rows of the lanes that it watches, and on rows of a few
    other lanes.

    Args:
        rank: Rank of the worker.
        world_size: Number of workers.
        num_lanes: Number of lanes.

    Raises:
        ValueError: There are more workers than lanes.
    """
    if world_size > num_lanes:
        raise ValueError(f"{world_size} workers for a stream with {num_lanes} lanes: need at least as many lanes.")
    first, after = (each * num_lanes // world_size for each in (rank, rank + 1))
    return range(first, after)


@functools.cache
def spread_order(num_lanes: int) -> list[int]:
    """Return the lane indices in order of turns: the order in which the lanes contribute rows to global batches.

    Lanes with consecutive turns have distant indices. A global batch with few rows therefore takes these rows from
    lanes of all workers, so that each worker mostly reads the lanes that it watches.

    >>> spread_order(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    num_digits = (num_lanes - 1).bit_length()
    return sorted(range(num_lanes), key=lambda lane: f"{lane:0{num_digits}b}"[::-1])


def deal(num_rows: int, left: Sequence[int], turn: int) -> tuple[list[int], int]:
    """Return how many rows a global batch takes from each lane, and the turn with which the next global batch starts.

    The lanes contribute one row each, in turn. Lanes without rows are left out.

    Args:
        num_rows: Number of rows in the global batch. Fewer rows are taken only if the lanes have fewer rows left.
        left: Number of rows left in each lane.
        turn: Number of the turn with which to start.

    >>> deal(5, left=[9, 9, 1, 9], turn=0)
    ([2, 1, 1, 1], 1)
    """
    order = spread_order(len(left))
    order = order[turn:] + order[:turn]
    counts = [0] * len(left)
    after = 0
    while num_rows:
        live = [(place, lane) for place, lane in enumerate(order) if counts[lane] < left[lane]]
        if not live:
            break
        # In each iteration of this loop, deal as many whole rounds as possible before a lane runs out of rows. If a
        # whole round would be more than `num_rows`, deal a part of a round.
        rounds = min(num_rows // len(live), *(left[lane] - counts[lane] for _, lane in live))
        dealt = live if rounds else live[:num_rows]
        for _, lane in dealt:
            counts[lane] += rounds or 1
        num_rows -= len(dealt) * (rounds or 1)
        after = 0 if rounds else dealt[-1][0] + 1
    return counts, (turn + after) % len(left)


class LaneSlice(NamedTuple):
    """Some consecutive rows of one lane in a global batch.

    Attributes:
        lane: Index of the lane.
        start: Number of the first row, counted from the first row that the global batch takes from this lane.
        stop: Number of the last row, plus one.
    """

    lane: int
    start: int
    stop: int


def slices(counts: Sequence[int], start: int, stop: int) -> list[LaneSlice]:
    """Return from which lanes the rows `start` to `stop` of a global batch come.

    In a global batch, the rows are sorted by lane.

    Args:
        counts: Number of rows that the global batch takes from each lane.
        start: Index of the first row in the global batch.
        stop: Index of the last row, plus one.

    >>> slices([2, 0, 3, 1], start=1, stop=4)
    [LaneSlice(lane=0, start=1, stop=2), LaneSlice(lane=2, start=0, stop=2)]
    """
    slices: list[LaneSlice] = []
    for lane, count in enumerate(counts):
        if max(0, start) < min(count, stop):
            slices.append(LaneSlice(lane, max(0, start), min(count, stop)))
        start, stop = start - count, stop - count
    return slices


Numbered: TypeAlias = tuple[int, Any]
"""The number of a row in its shard, and the row."""


def numbered_rows(
    open_shard: Callable[[str, int], Iterator[Any]], shard: Shard, start: int, skips: bool = False
) -> Iterator[Numbered]:
    """Yield the rows of a shard, each with its number in the shard. In place of a skipped row, yield `FAILED`.

    Args:
        open_shard: Function that opens a shard at a row, such as `Stream.open`.
        shard: The shard to read.
        start: Number of the first row to yield.
        skips: Whether to skip rows that cannot be read. After several such rows in succession, the rest of the shard is
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
                    number += _count_left(rows, skips)  # if the shard has changed, it has surplus rows
                    if number > said:
                        break
                yield number - 1, row
                if number == said:
                    break
            break
        except Exception as error:  # a user's stream may raise any exception
            what = f"cannot be read from row {number} on"
            failed = StreamError(f"shard {shard.name!r} {what}: {type(error).__name__}: {error}")
            if not skips:
                raise failed from error
            warn_of_row(failed)
        yield number, FAILED
        number, num_tries = number + 1, num_tries + 1
        if num_tries == _MOST_TRIES:
            logger.warning("skipped in a stream: the rest of shard %r, from row %d on", shard.name, number)
            yield from ((left, FAILED) for left in range(number, said or 0))
        if num_tries == _MOST_TRIES or number == said:
            return
    if said not in (None, number):
        raise StreamError(
            f"shard {shard.name!r} has {number} rows instead of the {said} that it had before. The position in a "
            "stream counts rows, so its shards must not change."
        )


def _count_left(rows: Iterator[Any], skips: bool) -> int:
    """Count the rows that an iterator still yields. With `skips`, an error ends the count instead of being raised."""
    number = 0
    with suppress(Exception) if skips else nullcontext():
        for number, _ in enumerate(rows, start=1):  # noqa: B007
            pass
    return number


class OpenShards:
    """Opens shards for the lanes that one process reads. Lanes that take rows from the same shard read it together.

    Args:
        of_pass: The pass over the stream.
        expected: The lanes that this process will read.
    """

    def __init__(self, of_pass: StreamPass, expected: Collection[int]) -> None:
        self._pass, self._expected = of_pass, expected
        # For each shard that several lanes read: its open readings, with the most recently used reading last.
        self._readings: dict[int, list[_Reading]] = {}

    def rows(self, part: LanePart, start: int) -> Iterator[Numbered]:
        """Return the rows that a lane takes from one shard, each with its number in the shard.

        Args:
            part: The part of the lane: its rows from this shard.
            start: Leave out rows of the shard before this number.

        Raises:
            StreamError: The shard cannot be read, or its number of rows differs from `Shard.num_rows`.
        """
        if part.step == 1:
            stream = self._pass.stream
            return numbered_rows(stream.source.open, self._pass.shards[part.shard], start, stream.skips)
        return self._dealt(part, part.next_row(start))

    def _dealt(self, part: LanePart, at: int) -> Iterator[Numbered]:
        reading = self._reading(part, at)
        while (row := reading.row(part.first, at)) is not None:
            yield row
            at = row[0] + part.step
            if not reading.has(part.first, at):
                reading = self._reading(part, at)

    def _reading(self, part: LanePart, at: int) -> _Reading:
        """Return a `_Reading` of the shard of `part`. Its buffer has row `at`, or it will reach this row soon.

        If no open `_Reading` meets this condition, open the shard again.
        """
        readings = self._readings.setdefault(part.shard, [])
        reading = next((each for each in reversed(readings) if each.has(part.first, at)), None)
        if reading is None:
            ends = [self._pass.parts[lane][-1] for lane in self._expected]
            reading = _Reading(self._pass, part, at, {each.first for each in ends if each.shard == part.shard})
            del readings[: 1 - _MOST_READINGS]
        else:
            readings.remove(reading)
        readings.append(reading)
        return reading


class _Reading:
    """Reads a shard from a row on, for several lanes that take rows from this shard.

    Rows are kept in a buffer until their lanes need them.

    Args:
        of_pass: The pass over the stream.
        part: The rows that one of these lanes takes from the shard.
        at: Number of the row that this lane needs now. Reading begins some rows before it, because the lanes take turns
            and each reads many rows at a time, so that the other lanes may still need earlier rows.
        readers: The lanes for which rows are kept. A lane is identified by the number of its first row in the shard.
    """

    def __init__(self, of_pass: StreamPass, part: LanePart, at: int, readers: Collection[int]) -> None:
        self._stream, self._step = of_pass.stream.source, part.step
        self._num_kept = 2 * of_pass.block + _NUM_KEPT  # for each lane
        self._next = max(0, (at // part.step - of_pass.block) * part.step)
        self._waiting: dict[int, deque[Numbered]] = {first: deque() for first in readers}
        # To skip rows, read all of them (with `open`), so that all workers find the same rows unreadable.
        skips = of_pass.stream.skips
        opens = self._stream.open if skips else self._open_some
        self._source = numbered_rows(opens, of_pass.shards[part.shard], self._next, skips)

    def _open_some(self, name: str, number: int) -> Iterator[Any]:
        return self._stream.open_some(name, number, lambda row: row % self._step in self._waiting)

    def has(self, first: int, at: int) -> bool:
        """Return True if a row is in the buffer of this object, or if reading will reach the row soon.

        Args:
            first: Number of the first row of the lane in the shard, which identifies the lane.
            at: Number of the row.
        """
        waiting = self._waiting.get(first)
        if waiting and waiting[0][0] <= at <= waiting[-1][0]:
            return True
        return self._next <= at <= self._next + self._num_kept * self._step

    def row(self, first: int, at: int) -> Numbered | None:
        """Return a row of the shard for a lane. Return None at the end of the shard.

        Args:
            first: Number of the first row of the lane in the shard, which identifies the lane.
            at: Number of the row.
        """
        waiting = self._waiting.setdefault(first, deque())
        while waiting and waiting[0][0] < at:
            waiting.popleft()
        if waiting:
            return waiting.popleft()
        for row in self._source:
            self._next = row[0] + 1
            own = row[0] % self._step
            if row[0] >= at and own == first:
                return row
            if own in self._waiting:
                self._waiting[own].append(row)
                if len(self._waiting[own]) > self._num_kept:
                    del self._waiting[own]  # keep no more rows for this lane, because it is too far behind
        return None


LaneRow: TypeAlias = tuple[int, int, Any]
"""A row of a lane: the index of the lane's part to which it belongs, its number in the shard, and the row itself."""


class LaneReader:
    """Reads the rows of one lane.

    To shuffle, blocks of consecutive rows are read and shuffled. Within a pass, the rows of a block and their order
    depend only on the row at which the block starts. Reading a block again thus gives the same rows in the same order.
    Without shuffling, blocks may have any size.

    Args:
        of_pass: The pass over the stream.
        lane: Index of the lane.
        opened: Opens the shards for this process.
        position: Position in the lane at which to start.

    Attributes:
        names: For each part of the lane (its rows from one shard), the name of the shard.
        passed: Number of rows of the current global batch that were read. Negative if rows of earlier global batches,
            which other workers have used, must still be skipped.
    """

    passed = 0

    def __init__(self, of_pass: StreamPass, lane: int, opened: OpenShards, position: LanePosition) -> None:
        self._parts, self._opened, self._block = of_pass.parts[lane], opened, of_pass.block
        self.names = [of_pass.shards[part.shard].name for part in self._parts]
        self._steps = of_pass.first_steps
        self._left_out = position.left_out
        self._waiting: deque[LaneRow] = deque()
        # Start and length of each block that still has waiting rows.
        self._blocks: deque[tuple[LanePosition, int]] = deque()
        self._num_taken = 0  # number of rows that were already taken from the first of these blocks
        self._next_block = position._replace(skip=0)
        self._counted = self._from(self._next_block)
        self.skip(position.skip)

    @property
    def position(self) -> LanePosition:
        """Position of the next row in the lane."""
        return self._blocks[0][0]._replace(skip=self._num_taken) if self._blocks else self._next_block

    def peek(self, num_rows: int) -> int:
        """Return how many rows are left in the lane, at most `num_rows`. To find out, read and keep these rows."""
        while (num_wanted := num_rows - len(self._waiting)) > 0 and self._read_block(num_wanted):
            pass
        return min(len(self._waiting), num_rows)

    def read(self, num_rows: int) -> list[LaneRow]:
        """Return the next `num_rows` rows of the lane, or fewer rows at its end."""
        num_rows = self.peek(num_rows)
        self._num_taken += num_rows
        while self._blocks and self._num_taken >= self._blocks[0][1]:
            self._num_taken -= self._blocks.popleft()[1]
        return [self._waiting.popleft() for _ in range(num_rows)]

    def skip(self, num_rows: int) -> None:
        """Skip the next `num_rows` rows of the lane."""
        while num_rows and (num_passed := len(self.read(min(num_rows, _MOST_SKIPPED)))):
            num_rows -= num_passed

    def _read_block(self, num_wanted: int) -> bool:
        """Read the next block of rows, shuffle it if the stream is shuffled, and keep its rows for `read`.

        Return False at the end of the lane.

        Args:
            num_wanted: Number of rows to read if the stream is not shuffled.
        """
        num_rows = num_wanted if self._block == 1 else self._block
        rows, begin = list(islice(self._counted, num_rows)), self._next_block
        part, after = (rows[-1][0], rows[-1][1] + 1) if len(rows) == num_rows else (len(self._parts), 0)
        self._next_block = LanePosition(part, after, left_out=self._left_out)
        if not rows:
            return False
        self._blocks.append((begin, len(rows)))
        if self._block > 1:
            first_part, first_row, _ = rows[0]
            where = f"{self._steps.seed}/{self.names[first_part]}/{first_row}"
            random.Random(digest(where)).shuffle(rows)
        self._waiting.extend(rows)
        return True

    def _from(self, position: LanePosition) -> Iterator[LaneRow]:
        """Yield the rows of the lane that pass the filters, from a position on, in the order of reading."""
        start, has_steps = position.row, bool(self._steps.steps)
        for number in range(position.part, len(self._parts)):
            for at, row in self._opened.rows(self._parts[number], start):
                counted = self._steps(row, self.names[number], at) if has_steps and row is not FAILED else row
                self._left_out += counted is FAILED
                if counted is not FAILED and counted is not DROPPED:
                    yield number, at, counted
            start = 0
