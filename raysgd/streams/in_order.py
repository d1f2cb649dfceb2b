"""Rows of a stream in the order of its shards, as a prediction needs them: read in one process, and never mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from raysgd.streams.open_shards import numbered_rows
from raysgd.streams.row_steps import DROPPED, RowSteps
from raysgd.streams.stream import Stream, check_shards


class BatchesInOrder:
    """Batches of all rows; `drop_last` has no effect, so that no row is lost.

    Args:
        stream: The stream.
        size: Says how many rows a batch has, of the number that the stream says, if it says one.
        collate: Makes a batch of a list of rows.

    Attributes:
        num_batches: How many there are; None if that is not known.

    Raises:
        ValueError: The stream is shuffled.
    """

    def __init__(self, stream: Stream, size: Callable[[int | None], int], collate: Callable[[list[Any]], Any]) -> None:
        self._stream = stream._pipeline()
        if self._stream.buffer > 1:
            raise ValueError(
                "`predict` got a shuffled stream, so you could not tell which row a result belongs to. Pass the stream "
                "without `shuffle`."
            )
        self._size = size(self._stream.batch_size)
        self._collate = self._stream.collate or collate
        self._shards = check_shards(self._stream)
        num_rows = self._stream.num_rows(self._shards)
        self.num_batches = None if num_rows is None else -(-num_rows // self._size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
        rows = islice(self._rows(), self._stream.limit)
        while own := list(islice(rows, self._size)):
            yield self._collate(own)

    def _rows(self) -> Iterator[Any]:
        steps = RowSteps(self._stream.steps, seed=f"{self._stream.seed or 0}/0")
        for shard in self._shards:
            for number, row in numbered_rows(self._stream.source.open, shard, 0):
                made = steps(row, shard.name, number)
                if made is not DROPPED:
                    yield made
