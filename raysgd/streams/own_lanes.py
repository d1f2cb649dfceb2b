"""The rows of the lanes that one worker watches: each row of a stream is with one worker, and none waits for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raysgd.streams.lanes import LanePosition, lanes_of
from raysgd.streams.stream_pass import StreamPass


def rows_of_worker(of_pass: StreamPass, rank: int, world_size: int) -> Iterator[Any]:
    """Yield a worker's rows of a pass, from all of its lanes in turn."""
    watched = lanes_of(rank, world_size, of_pass.num_lanes)
    opened, steps = of_pass.open_shards(watched), of_pass.last_steps
    readers = [of_pass.reader(lane, opened, LanePosition()) for lane in watched]
    while readers:
        taken = [(reader, reader.take(1)) for reader in readers]
        yield from (steps(row.row, row.origin) for _, rows in taken for row in rows)
        readers = [reader for reader, rows in taken if rows]
