"""A stream as the data of one worker: its shards, and the worker's place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from raysgd.streams.joint_reader import Shares
from raysgd.streams.lanes import NUM_LANES
from raysgd.streams.pipeline import Pipeline
from raysgd.streams.stream import Shard, Stream, check_shards
from raysgd.streams.stream_pass import StreamPass

Divide: TypeAlias = Callable[[int, int], Shares]
"""Makes what divides joint batches, of the size of one and the number of workers."""


@dataclass(frozen=True)
class StreamSignature:
    """All that must be equal on all ranks for them to read the same stream.

    Attributes:
        num_shards: How many shards there are.
        batch_size: Rows in a joint batch.
        digest: Of the names and lengths of the shards.
    """

    num_shards: int
    batch_size: int
    digest: str


@dataclass(frozen=True)
class StreamData:
    """A stream that all workers read together.

    Attributes:
        loader: The stream.
        shards: Its shards.
        divide: How joint batches are divided.
        is_training: Whether a worker without a row in a joint batch repeats some.
    """

    loader: Pipeline
    shards: Sequence[Shard]
    divide: Divide
    is_training: bool

    @property
    def batch_size(self) -> int:
        """Rows in a joint batch."""
        assert self.loader.batch_size is not None, "checked when the stream was registered"
        return self.loader.batch_size

    @property
    def num_rows(self) -> int | None:
        """Rows in the joint batches of a pass; None if that is not known."""
        num_rows = self.loader.num_rows(self.shards)
        if num_rows is None or not self.loader.drop_last:
            return num_rows
        return num_rows - num_rows % self.batch_size

    @cached_property
    def signature(self) -> StreamSignature:
        """The signature to compare across ranks, and with a saved position."""
        text = "\n".join(f"{shard.name}\t{shard.num_rows}" for shard in self.shards)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return StreamSignature(len(self.shards), self.batch_size, digest)

    def open_pass(self, pass_index: int, seed: int) -> StreamPass:
        """Return a pass over the stream."""
        return StreamPass(self.loader, self.shards, pass_index, seed)


def stream_data(stream: Stream, name: str, divide: Divide, world_size: int) -> StreamData:
    """Look at the shards of a stream that was registered.

    Args:
        stream: The stream.
        name: What it was registered as: "train" or "validation".
        divide: How joint batches are divided.
        world_size: How many workers there are.

    Raises:
        ValueError: It has no batch size, or no shards; there are more workers than lanes.
    """
    stream = check_batched(stream, f"the {name} stream")
    if world_size > NUM_LANES:
        raise ValueError(
            f"{world_size} workers for a stream, which has {NUM_LANES} lanes: at most one worker for each."
        )
    data = StreamData(stream, check_shards(stream), divide, name == "train")
    if name != "train" and stream.limit is not None and data.num_rows is None:
        raise ValueError(
            f"the {name} stream has a `take` and no known length: in an evaluation each worker reads its own rows, so "
            "none of them knows when all have taken enough. Leave `take` out, or give it shards that say their lengths."
        )
    return data


def check_batched(stream: Stream, what: str) -> Pipeline:
    """Return a stream that was put in batches.

    Raises:
        ValueError: It was not.
    """
    if not isinstance(stream, Pipeline) or stream.batch_size is None:
        raise ValueError(
            f"{what} has no batch size: end it with `.batch(size)`, the number of rows that all workers take together "
            "in a step."
        )
    return stream


def check_stream_of_call(stream: Stream, name: str, obstacle: str | None) -> None:
    """Check a stream that a call brings along.

    Args:
        stream: The stream.
        name: What the argument is called.
        obstacle: Why the trainer cannot use one; None if it can.

    Raises:
        ValueError: It cannot be used.
    """
    if obstacle is not None:
        raise ValueError(f"`{name}=` got {obstacle}")
    check_batched(stream, f"the stream in `{name}=`")


def check_same_shards(before: Sequence[Any], data: StreamData) -> None:
    """Refuse a position in other shards.

    Args:
        before: The number of shards, their digest, and their lengths, if all of them were known, of a saved position.
        data: What it is a position in.

    Raises:
        ValueError: Shards differ.
    """
    num_shards, digest, lengths = before
    now = data.signature
    if digest == now.digest:
        return
    if num_shards == now.num_shards:
        for shard, length in zip(data.shards, lengths or (), strict=False):
            if shard.num_rows != length:
                raise ValueError(
                    f"shard {shard.name!r} had {length} rows when the state was saved, and has {shard.num_rows} now: "
                    "the position in a stream counts rows, so its shards have to stay unchanged."
                )
    raise ValueError(
        f"the stream has other shards than when the state was saved ({num_shards} then, {now.num_shards} now; names or "
        "lengths differ): the position in a stream counts rows, so its shards have to stay unchanged."
    )
