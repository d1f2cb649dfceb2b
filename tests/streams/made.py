"""Streams of numbers for tests, and workers that read them together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from raysgd.core.arrays.division import BatchPlan, Division
from raysgd.streams.global_reader import GlobalReader, Numbers, StartSum, alone
from raysgd.streams.lanes import StreamPass, StreamPosition, lanes_of
from raysgd.streams.loaders import BatchMaker
from raysgd.streams.stream import Pipeline, Shard, Stream, check_shards

START = StreamPosition()


class MadeStream(Stream):
    """Rows are pairs of shard and number.

    Attributes:
        num_read: How many rows were read of each shard.
        opened: How often each shard was opened.
    """

    def __init__(self, lengths: Sequence[int], is_known: bool = True) -> None:
        self._lengths = {f"shard-{number}": length for number, length in enumerate(lengths)}
        self._is_known = is_known
        self.num_read: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()

    def shards(self) -> list[Shard]:
        return [Shard(name, length if self._is_known else None) for name, length in self._lengths.items()]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        self.opened[shard] += 1
        for number in range(start, self._lengths[shard]):
            self.num_read[shard] += 1
            yield shard, number


def pass_of(stream: Stream, pass_index: int = 0, seed: int = 0, num_lanes: int = 64) -> StreamPass:
    pipeline = stream if isinstance(stream, Pipeline) else Pipeline(stream)
    return StreamPass(pipeline, check_shards(pipeline), pass_index, seed, num_lanes)


class Sums:
    """Adds up what some threads bring, round by round."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rounds: list[list[Numbers]] = []
        self._changed = threading.Condition()

    def of_rank(self) -> StartSum:
        rounds = iter(range(10**9))

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            number = next(rounds)
            with self._changed:
                if len(self._rounds) == number:
                    self._rounds.append([])
                self._rounds[number].append(numbers)
                self._changed.notify_all()
            return lambda: self._sum(number)

        return start

    def _sum(self, number: int) -> Numbers:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._rounds[number]) == self._num_ranks, timeout=60)
            return np.sum(self._rounds[number], axis=0)


def division(global_size: int, world_size: int, cap: int | None = None) -> Division:
    return Division(global_size, world_size, cap)


def reader(
    of_pass: StreamPass,
    shares: Division,
    rank: int,
    begin: StreamPosition = START,
    start_sum: StartSum = alone,
    num_ahead: int = 0,
    pad: bool = True,
) -> GlobalReader:
    loading = BatchMaker(of_pass, lanes_of(rank, shares.world_size, of_pass.num_lanes), list)
    loading.num_ahead = num_ahead
    return GlobalReader(of_pass, shares, rank, begin, loading, start_sum, pad)


class Taken(NamedTuple):
    """A batch of one rank, with what its global batch says."""

    batch: Any
    plan: BatchPlan
    ends_pass: bool
    after: StreamPosition


def read_together(
    of_pass: StreamPass,
    world_size: int,
    begin: StreamPosition = START,
    num_steps: int | None = None,
    cap: int | None = None,
    num_ahead: int = 0,
) -> list[list[list[Taken]]]:
    """For each step what each rank does in it."""
    shares = division(of_pass.stream.batch_size or 8, world_size, cap)
    sums = Sums(world_size)

    def read(rank: int) -> list[list[Taken]]:
        steps: list[list[Taken]] = []
        for whole, batches in reader(of_pass, shares, rank, begin, sums.of_rank(), num_ahead):
            if len(steps) == num_steps:
                break
            own = zip(batches, whole.parts, strict=True)
            steps.append([Taken(batch, plan, whole.ends_pass, whole.after) for batch, (_, _, plan) in own])
        return steps

    with ThreadPoolExecutor(world_size) as pool:
        of_ranks = list(pool.map(read, range(world_size)))
    return [list(ranks) for ranks in zip(*of_ranks, strict=True)]


def joint(step: Sequence[Sequence[Taken]]) -> list[Any]:
    """The rows of a global batch, in its order."""
    return [row for batches in step for batch in batches for row in (batch.batch or [])[: batch.plan.num_samples]]


def counts(step: Sequence[Sequence[Taken]]) -> list[int]:
    """The rows of each rank in a global batch."""
    return [sum(batch.plan.num_samples or 0 for batch in batches) for batches in step]
