"""Division of one global batch over workers by uneven shares: arithmetic on counts, without any data.

A global batch of any size goes over any number of workers. Each worker has one run of its samples, lower ranks first.
Above a cap a worker takes its run in several batches, whose gradients add up to one step. No batch has a single sample
where another split exists, because layers such as batch norms cannot train on one.

Why the global batch stays what it is: ADR 98.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


class BatchShare(NamedTuple):
    """One batch of one worker, as a piece of a global batch.

    Attributes:
        start: First of its samples, counted from the first one of the global batch.
        stop: After its last sample; the same as `start` where it has none.
        num_together: Samples in the batches that all workers take at the same time.
    """

    start: int
    stop: int
    num_together: int


@dataclass(frozen=True)
class ShardedGlobalBatch:
    """A global batch of logical shards, which are cut alike for any number of workers.

    Attributes:
        global_size: Samples of a full global batch.
        world_size: How many workers there are.
        num_shards: How many shards. Each worker takes a run of them, one after the other.
        cap: The most samples in a shard; None without a limit.

    Examples:
        >>> [len(ShardedGlobalBatch(16, world_size=3, num_shards=4).parts(16, rank)) for rank in range(3)]
        [2, 1, 1]
    """

    global_size: int
    world_size: int
    num_shards: int
    cap: int | None = None

    def num_batches(self, num_samples: int) -> int:
        """Return how many batches a worker takes at most, one after the other."""
        return -(-self.num_shards // self.world_size)

    def parts(self, num_samples: int, rank: int, speeds: Sequence[float] = ()) -> list[BatchShare]:
        """Return the shards that `rank` takes of a global batch: those with samples, or else one without any.

        Workers have as many of those with samples as of all, or fewer: there is room for the gradients of each.
        """
        stops = accumulate(even_shares(num_samples, self.num_shards, self.cap), initial=0)
        parts = [BatchShare(start, stop, num_samples) for start, stop in pairwise(stops) if start < stop]
        counts = even_counts(len(parts), self.world_size)
        first = sum(counts[:rank])
        return parts[first : first + counts[rank]] or [BatchShare(0, 0, num_samples)]


def even_counts(num_samples: int, num_shares: int) -> list[int]:
    """Shares that differ by one sample at most, the larger ones first.

    >>> even_counts(18, 7)
    [3, 3, 3, 3, 2, 2, 2]
    """
    base, num_larger = divmod(num_samples, num_shares)
    return [base + 1] * num_larger + [base] * (num_shares - num_larger)


def even_shares(num_samples: int, num_shares: int, most: int | None = None) -> list[int]:
    """Return the same, but without shares of a single sample where another split exists: a batch norm refuses one.

    Args:
        num_samples: What is divided.
        num_shares: How many shares; the last ones may be empty.
        most: The most samples in a share; None without a limit.

    >>> even_shares(5, 3), even_shares(5, 3, most=2)
    ([3, 2, 0], [2, 2, 1])
    """
    num_pairs = num_samples // 2
    is_possible = 0 < num_pairs < num_shares and (most is None or num_samples <= num_pairs * most)
    num_used = num_pairs if is_possible else num_shares
    return even_counts(num_samples, num_used) + [0] * (num_shares - num_used)


def proportional_counts(num_samples: int, speeds: Sequence[float], most: int | None = None) -> list[int]:
    """Shares that are proportional to speeds, as nearly as whole samples can be.

    Args:
        num_samples: What is divided.
        speeds: Of each worker, in any unit; positive.
        most: What a worker can take. What is too much for one goes to the others, by their speeds.

    Raises:
        ValueError: A speed is no positive number, or all workers together cannot take so many.

    >>> proportional_counts(18, [2.0, 1.0])
    [12, 6]
    >>> proportional_counts(18, [2.0, 1.0], most=10)
    [10, 8]
    """
    check_speeds(speeds)
    most = num_samples if most is None else most
    if most * len(speeds) < num_samples:
        raise ValueError(f"`most={most}`: {len(speeds)} workers cannot take {num_samples} samples then.")
    exact = _exact_shares(num_samples, speeds, most)
    counts = [math.floor(share + 1e-9) for share in exact]  # 1e-9: 12 may have become 11.999999999999998
    by_rest = sorted(range(len(speeds)), key=lambda rank: (counts[rank] - exact[rank], rank))
    by_rest = [rank for rank in by_rest if counts[rank] < most]
    for rank in by_rest[: num_samples - sum(counts)]:
        counts[rank] += 1
    return counts


def _exact_shares(num_samples: int, speeds: Sequence[float], most: int) -> list[float]:
    """Shares that are proportional, but for those that are as large as they may be."""
    full: set[int] = set()
    while True:
        left = num_samples - most * len(full)
        together = sum(speed for rank, speed in enumerate(speeds) if rank not in full)
        shares = [float(most) if rank in full else left * speed / together for rank, speed in enumerate(speeds)]
        more = {rank for rank, share in enumerate(shares) if rank not in full and share > most}
        if not more:
            return shares
        full |= more


def check_speeds(speeds: Sequence[float]) -> None:
    """Refuses what are no speeds.

    Raises:
        ValueError: One is zero, negative, infinite or NaN, or there is none.
    """
    if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"`speeds={list(speeds)}`: need a positive number for each worker.")


@dataclass(frozen=True)
class Division:
    """The division of global batches.

    Attributes:
        global_size: Samples of a full global batch, all workers together.
        world_size: How many workers there are.
        cap: The most samples in a batch of one worker; None without a limit.

    Examples:
        >>> Division(global_size=18, world_size=7).counts(18)
        [3, 3, 3, 3, 2, 2, 2]
        >>> Division(global_size=18, world_size=2, cap=5).parts(18, rank=1)
        [BatchShare(start=9, stop=14, num_together=10), BatchShare(start=14, stop=18, num_together=8)]
    """

    global_size: int
    world_size: int
    cap: int | None = None

    def num_batches(self, num_samples: int) -> int:
        """Return how many batches, one after the other, each worker takes for a global batch; at least 1.

        It depends on the sizes only: shares by speed keep to it.
        """
        largest = -(-num_samples // self.world_size)
        return 1 if self.cap is None else max(1, -(-largest // self.cap))

    def counts(self, num_samples: int, speeds: Sequence[float] = ()) -> list[int]:
        """Return each worker's samples of a global batch; by speed, where speeds are given, else evenly."""
        return list(map(sum, self._batches(num_samples, speeds)))

    def parts(self, num_samples: int, rank: int, speeds: Sequence[float] = ()) -> list[BatchShare]:
        """Return the batches that `rank` takes for a global batch, one after the other: as many as any other rank."""
        batches = self._batches(num_samples, speeds)
        together = map(sum, zip(*batches, strict=True))
        stops = accumulate(batches[rank], initial=sum(map(sum, batches[:rank])))
        return [BatchShare(*bounds, number) for bounds, number in zip(pairwise(stops), together, strict=True)]

    def _batches(self, num_samples: int, speeds: Sequence[float]) -> list[list[int]]:
        """Return the samples in each batch of each worker.

        Speeds make no difference in a global batch of less than two samples for each worker.
        """
        num_batches = self.num_batches(num_samples)
        if speeds and num_samples >= 2 * self.world_size:
            counts = self._counts_by_speed(num_samples, speeds)
            return [even_shares(count, num_batches, self.cap) for count in counts]
        shares = even_shares(num_samples, self.world_size * num_batches, self.cap)
        return [shares[rank :: self.world_size] for rank in range(self.world_size)]

    def _counts_by_speed(self, num_samples: int, speeds: Sequence[float]) -> list[int]:
        """Return shares by speed, of two samples at least: a worker without any could not be measured any more."""
        unit = 2 if self.cap == 2 and num_samples % 2 == 0 else 1  # pairs, so that no batch has a single sample
        most = None if self.cap is None else self.cap * self.num_batches(num_samples) // unit
        counts = [unit * count for count in proportional_counts(num_samples // unit, speeds, most)]
        while min(counts) < 2:
            counts[counts.index(max(counts))] -= unit
            counts[counts.index(min(counts))] += unit
        return counts
