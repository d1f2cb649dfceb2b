"""One pass over a stream: its order, and where lanes are after some rows."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from raysgd._numbers.seeds import digest
from raysgd.streams.dealing import DealtRows, deal
from raysgd.streams.lane_reader import LaneReader
from raysgd.streams.lanes import NUM_LANES, LanePosition, Lanes
from raysgd.streams.open_shards import OpenShards
from raysgd.streams.pipeline import Pipeline
from raysgd.streams.row_steps import RowSteps
from raysgd.streams.stream import Shard, total

Place: TypeAlias = int | LanePosition
"""Where a lane is: how many of its rows were dealt, if all else follows from that."""


@dataclass(frozen=True)
class StreamPosition:
    """The position of a pass, behind a joint batch. It means the same for any number of workers.

    Attributes:
        num_rows: Rows in the joint batches so far.
        turn: Which lane is dealt from next: its place in the order of turns.
        lanes: Where each lane is; None where that follows from `num_rows`.
    """

    num_rows: int = 0
    turn: int = 0
    lanes: tuple[LanePosition, ...] | None = None

    @property
    def left_out(self) -> int:
        """Rows that could not be read and were left out."""
        return sum(lane.left_out for lane in self.lanes or ())


@dataclass(frozen=True)
class StreamPass:
    """One pass.

    Attributes:
        stream: What is read.
        shards: Its shards.
        pass_index: The number of the pass, from 0.
        seed: That of the training.
        num_lanes: How many lanes there are.
    """

    stream: Pipeline
    shards: Sequence[Shard]
    pass_index: int = 0
    seed: int = 0
    num_lanes: int = NUM_LANES

    @property
    def block(self) -> int:
        """The number of rows of a lane that are mixed with each other."""
        return 1 if self.stream.buffer == 1 else max(2, -(-self.stream.buffer // self.num_lanes))

    @property
    def is_known(self) -> bool:
        """True if the number of rows in each lane is known beforehand."""
        return self.stream.keeps_rows and total(self.shards) is not None

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes and what each reads."""
        order, turns = list(range(len(self.shards))), list(range(self.num_lanes))
        if self.stream.buffer == 1:
            return Lanes(order, self.num_lanes)
        chance = random.Random(digest(self._seed))
        chance.shuffle(order)
        chance.shuffle(turns)  # else a small batch would be of the same lanes, and so of the same rows, in each pass
        return Lanes(order, self.num_lanes, turns)

    @cached_property
    def lengths(self) -> list[int]:
        """The rows in each lane, where they are known."""
        return self.lanes.lengths(self._of_shards)

    def dealt(self, num_rows: int) -> DealtRows:
        """Return what the lanes have given after some rows, where lengths are known."""
        return deal(num_rows, self.lengths, turn=0)

    def position(self, lane: int, place: Place) -> LanePosition:
        """Return where a lane is."""
        if isinstance(place, LanePosition):
            return place
        return self.lanes.position(lane, place, self._of_shards, self.block)

    def open_shards(self, expected: Collection[int]) -> OpenShards:
        """Open no shard yet, but for these lanes."""
        return OpenShards(self.stream.source, self.shards, self.lanes, expected, self.block, self.stream.skips)

    def reader(self, lane: int, opened: OpenShards, position: LanePosition) -> LaneReader:
        """Return a reader of a lane."""
        parts = self.lanes.all_parts[lane]
        names = [self.shards[part.shard].name for part in parts]
        steps = RowSteps(self.stream.steps[: self.stream.num_to_count], self._seed)
        return LaneReader(parts, names, opened.rows, steps, self.block, position, self.stream.skips)

    @property
    def last_steps(self) -> RowSteps:
        """The steps behind the last filter, which only rows go through that are trained on."""
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
