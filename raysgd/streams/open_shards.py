"""Shards that are open in one process: where lanes share one, it is read once for all of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

from raysgd.exceptions import StreamError
from raysgd.streams.lanes import LanePart, Lanes
from raysgd.streams.row_steps import DROPPED, warn_of_row
from raysgd.streams.stream import Shard, Stream

logger = logging.getLogger(__name__)

Numbered: TypeAlias = tuple[int, Any]
"""A row behind its number in the shard."""

_NUM_KEPT = 256
_MOST_TRIES = 4  # a row, and the next three
_MOST_READINGS = 4


def numbered_rows(
    open_shard: Callable[[str, int], Iterator[Any]], shard: Shard, start: int, skips: bool = False
) -> Iterator[Numbered]:
    """Yield the rows of a shard from one on, each behind its number; `DROPPED` for one that is left out.

    Args:
        open_shard: Opens a shard at a row, as `Stream.open`.
        shard: The shard.
        start: The number of the first row.
        skips: Whether to leave out what cannot be read: one row, or all others where the next ones cannot be read too.

    Raises:
        StreamError: The shard cannot be read, or has not as many rows as were said.
    """
    number, num_tries, said = start, 0, shard.num_rows
    while True:
        try:
            rows = iter(open_shard(shard.name, number))
            for row in rows:
                number, num_tries = number + 1, 0
                if number == said:
                    number += sum(1 for _ in rows)  # none, where the shard is what it was
                    if number > said:
                        break
                yield number - 1, row
            break
        except Exception as error:
            what = f"cannot be read from row {number} on"
            failed = StreamError(f"shard {shard.name!r} {what}: {type(error).__name__}: {error}")
            if not skips:
                raise failed from error
            warn_of_row(failed)
        yield number, DROPPED
        number, num_tries = number + 1, num_tries + 1
        if num_tries == _MOST_TRIES:
            logger.warning("left out of a stream: the rest of shard %r, from row %d on", shard.name, number)
            yield from ((left, DROPPED) for left in range(number, said or 0))
        if num_tries == _MOST_TRIES or number == said:
            return
    if said not in (None, number):
        raise StreamError(
            f"shard {shard.name!r} has {number} rows, and not {said} as it said before: the position in a stream "
            "counts rows, so its shards have to stay unchanged."
        )


class OpenShards:
    """Opens shards for the lanes of one process.

    Args:
        stream: Where rows come from.
        shards: Its shards.
        lanes: Which lane reads what.
        expected: The lanes that this process reads.
        block: How many rows a lane reads at a time.
        skips: Whether to leave out what cannot be read.
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
        self._readings: dict[int, list[_Reading]] = {}  # of shards that are shared; the last one was used last

    def rows(self, part: LanePart, start: int) -> Iterator[Numbered]:
        """Return the rows of a part of a lane, behind their numbers, from the row `start` of the shard on.

        Raises:
            StreamError: The shard cannot be read, or has not as many rows as were said.
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
        """Return a reading that comes to a row, or has kept it; what was passed by is read again."""
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
        # Others may be some rows behind this lane: by what they read at a time, and by their turn.
        start = max(0, (at // part.step - self._block) * part.step)
        num_kept = 2 * self._block + _NUM_KEPT
        reading = _Reading(part.step, start, readers, num_kept)

        def open_shard(name: str, number: int) -> Iterator[Any]:
            if self._skips:  # all workers have to come to the same rows that cannot be read
                return self._stream.open(name, number)
            return self._stream.open_some(name, number, reading.is_needed)

        reading.source = numbered_rows(open_shard, self._shards[part.shard], start, self._skips)
        return reading


class _Reading:
    """One reading of a shard. What is read on the way to a row waits for the lanes that it belongs to.

    Args:
        step: From each row of a lane to its next one.
        start: Where the reading begins.
        readers: The first rows of the lanes that rows may wait for.
        num_kept: How many may wait for a lane.

    Attributes:
        source: The rows from `start` on.
    """

    source: Iterator[Numbered]

    def __init__(self, step: int, start: int, readers: Collection[int], num_kept: int) -> None:
        self._step, self._num_kept = step, num_kept
        self._waiting: dict[int, deque[Numbered]] = {first: deque() for first in readers}
        self._next = start

    def is_needed(self, number: int) -> bool:
        """Tells whether a row is of one of these lanes."""
        return number % self._step in self._waiting

    def has(self, first: int, at: int) -> bool:
        """Tells whether this reading comes to the row `at` soon, or has kept it."""
        waiting = self._waiting.get(first)
        if waiting and waiting[0][0] <= at <= waiting[-1][0]:
            return True
        return self._next <= at <= self._next + self._num_kept * self._step

    def row(self, first: int, at: int) -> Numbered | None:
        """Return the row `at` of a lane; None behind the end."""
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
            del self._waiting[first]  # its lane is far behind
