"""A stream as the data of one worker: its shards, and the worker's place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from raysgd._arguments.checks import is_integer
from raysgd.streams.dealing import ENDLESS
from raysgd.streams.joint_reader import Shares
from raysgd.streams.lanes import NUM_LANES, LanePosition
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
        digest: Of the names, lengths and versions of the shards.
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
        """The signature to compare across ranks."""
        digest = hashlib.blake2b("\n".join(self._texts).encode(), digest_size=8).hexdigest()
        return StreamSignature(len(self.shards), self.batch_size, digest)

    @property
    def _texts(self) -> list[str]:
        return [f"{shard.name}\t{shard.num_rows}\t{shard.version}" for shard in self.shards]

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What a saved position belongs to, as plain data: what orders rows, and four digits for each shard."""
        loader = self.loader
        return {
            "shuffle": [loader.buffer, loader.seed],
            "num_filters": sum(step.is_filter for step in loader.steps),
            "on_error": "skip" if loader.skips else "raise",
            "shards": "".join(hashlib.blake2b(text.encode(), digest_size=2).hexdigest() for text in self._texts),
            "digest": self.signature.digest,
        }

    def check_position(self, position: Mapping[str, Any]) -> None:
        """Refuse a position inside a pass that is not one in this stream. Between two passes any one will do.

        Raises:
            ValueError: The shards, or what orders their rows, are not those that it was saved with; it is damaged.
        """
        if not position["is_mid_pass"]:
            return
        then, now = position.get("stream"), self.origin
        if not isinstance(then, Mapping) or then.keys() != now.keys():
            raise _misfit("other data than a stream, or by another version")
        said = {"shuffle": "`shuffle({0[0]}, seed={0[1]})`", "num_filters": "{} filters", "on_error": "`on_error={!r}`"}
        for name, words in said.items():
            if then[name] != now[name]:
                raise _misfit(f"a stream with {words.format(then[name])}, which has {words.format(now[name])} now")
        if then["digest"] != now["digest"]:
            before, after = (
                [each["shards"][at : at + 4] for at in range(0, len(each["shards"]), 4)] for each in (then, now)
            )
            changed = [
                repr(each.name) for at, each in enumerate(self.shards) if before[at : at + 1] != after[at : at + 1]
            ]
            which = ", ".join(changed[:3]) or "some"
            raise _misfit(f"other shards ({len(before)} then, {len(after)} now; {which} changed)")
        lanes, turn, num_parts = position["lanes"], position["turn"], -(-len(self.shards) // NUM_LANES)
        end = self.loader.num_rows(self.shards) or self.loader.limit
        needs_lanes = bool(position["consumed"]) and not self.open_pass(0, 0).is_known
        if (
            not (is_integer(turn) and 0 <= turn < NUM_LANES)
            or position["consumed"] > (ENDLESS if end is None else end)
            or (needs_lanes if lanes is None else not isinstance(lanes, list | tuple) or len(lanes) != NUM_LANES)
            or not all(_is_place(lane, num_parts) for lane in lanes or ())
        ):
            raise ValueError("The state does not fit, nothing was loaded: its position in the stream is damaged.")

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


def _is_place(lane: Any, num_parts: int) -> bool:
    are_counts = isinstance(lane, list | tuple) and all(is_integer(each) and 0 <= each < ENDLESS for each in lane)
    return are_counts and len(lane) == len(LanePosition._fields) and lane[0] <= num_parts


def _misfit(what: str) -> ValueError:
    return ValueError(
        f"the state was saved inside an epoch over {what}. A position counts rows: bring back what it was saved with, "
        'or leave it out and begin an epoch, with `load(path, parts=["models", "optimizers"])` of a `TorchTrainer`.'
    )
