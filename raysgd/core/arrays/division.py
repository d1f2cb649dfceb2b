"""Splits a global batch across workers, possibly unevenly. The classes only compute counts and do not touch the data.

A global batch of any size can be split across any number of workers. Each worker gets consecutive samples, lower ranks
first. If a worker's part is larger than a cap, the worker processes it in several batches and accumulates their
gradients into one step. No batch has a single sample if another split exists, because layers such as batch
normalization cannot train on one sample.

ADR 98 explains why the global batch keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from raysgd.core.numbers.seeds import seed_of

_WHEN_TRAINED = 2


class BatchPlan(NamedTuple):
    """Says how one batch of this rank counts, and whether the optimizer steps after it.

    A global batch is the batch of all ranks together. A rank trains on its share as one batch, or splits the share into
    several micro-batches. A step of the optimizer has one global batch, or several whose gradients are accumulated.

    Attributes:
        num_samples: Number of this rank's samples; 0 for padding, None if unknown.
        total_samples: Number of samples in the batches on which all ranks train at the same time; None if unknown. With
            logical shards (`deterministic=True`), the number of samples in the entire global batch.
        weight: Factor for this rank's gradient in the mean over the ranks, if the batch is alone in its step. The
            weights of batches on which the ranks train at the same time average to 1, and are exactly 1.0 if these
            batches have the same size. With logical shards, the sums of each rank's weights in the step average to 1.
        starts_global_batch, ends_global_batch: True if the global batch starts or ends with this batch.
        starts_step: True if a step of the optimizer starts with this batch.
        ends_step: True if a step of the optimizer ends with this batch.
        seeds: With logical shards, the seeds for the random numbers in the batch and after the step.
        is_padding: True if no sample counts: the rank trains on the batch only to take part in the others' collectives.
        sample_weights: With Keras, this rank's sum of sample weights, and the sum over all ranks; 0 without such
            weights.
    """

    num_samples: int | None = None
    total_samples: int | None = None
    weight: float = 1.0
    starts_global_batch: bool = True
    ends_global_batch: bool = True
    starts_step: bool = True
    ends_step: bool = True
    seeds: tuple[int, int] | None = None
    is_padding: bool = False
    sample_weights: tuple[float, float] = (0.0, 0.0)


BETWEEN_BATCHES = BatchPlan()
"""For backward passes and steps that belong to no batch, such as those between two calls."""


def plan_of(
    num_samples: int, total_samples: int, world_size: int = 1, starts: bool = True, ends: bool = True
) -> BatchPlan:
    """Return the plan of a batch whose number of samples is known. A batch without samples is padding.

    Args:
        num_samples: Number of this rank's samples.
        total_samples: Number of samples of all ranks.
        world_size: Number of ranks.
        starts: Whether the global batch starts with the batch.
        ends: Whether the global batch ends with the batch.
    """
    weight = num_samples * world_size / total_samples if total_samples else 0.0
    return BatchPlan(num_samples, total_samples, weight, starts, ends, is_padding=not num_samples)


def with_seeds(plan: BatchPlan, seed: int, pass_index: int, first: int, start: int) -> BatchPlan:
    """Return the plan of a logical shard with its seeds. The second one is the same on all ranks.

    Args:
        plan: How the shard counts.
        seed: Seed of all passes.
        pass_index: Index of the pass.
        first: Position in the pass of the first sample of the global batch.
        start: Index of the shard's first sample in the global batch.
    """
    own, of_step = (seed_of(seed, pass_index, at, _WHEN_TRAINED) for at in (first + start, first))
    return plan._replace(seeds=(own, of_step))


class PlannedBatch(NamedTuple):
    """A batch as a source yields it.

    Attributes:
        batch: The batch, or `NO_BATCH` if this rank has no samples in a step of an evaluation.
        plan: How the batch counts. Each global batch is planned as a step of its own; `planned` then combines them.
        ends_pass: True if the pass ends with this batch. None if that is unknown before the next one is drawn.
        used_after: Number of samples of the pass that all ranks have used after this global batch; 0 if unknown.
    """

    batch: Any
    plan: BatchPlan = BETWEEN_BATCHES
    ends_pass: bool | None = None
    used_after: int = 0


NO_BATCH = object()
"""Placeholder for the batch of a step in which this rank has no samples. The call still counts the step."""


class BatchShare(NamedTuple):
    """One worker's batch, as a range of samples in the global batch.

    Attributes:
        start: Index of the first sample in the global batch.
        stop: Index after the last sample. Equal to `start` if the batch is empty.
        plan: How the batch counts.
    """

    start: int
    stop: int
    plan: BatchPlan


def _planned(bounds: Sequence[tuple[int, int]], totals: Sequence[int], world_size: int) -> list[BatchShare]:
    """Return the batches of one worker in a global batch, with their plans."""
    last, numbered = len(bounds) - 1, enumerate(zip(bounds, totals, strict=True))
    return [
        BatchShare(start, stop, plan_of(stop - start, total, world_size, index == 0, index == last))
        for index, ((start, stop), total) in numbered
    ]


def even_counts(num_samples: int, num_shares: int) -> list[int]:
    """Split a number of samples into counts that differ by at most one, larger counts first.

    >>> even_counts(18, 7)
    [3, 3, 3, 3, 2, 2, 2]
    """
    base, num_larger = divmod(num_samples, num_shares)
    return [base + 1] * num_larger + [base] * (num_shares - num_larger)


def even_shares(num_samples: int, num_shares: int, most: int | None = None) -> list[int]:
    """Split a number of samples into shares of nearly equal size. Avoid shares of one sample if possible.

    Layers such as batch normalization cannot train on a single sample.

    Args:
        num_samples: Number of samples to split.
        num_shares: Number of shares. The last shares may be empty.
        most: Largest number of samples in a share; None for no limit. Set `num_shares` high enough for this limit.

    >>> even_shares(5, 3), even_shares(5, 3, most=2)
    ([3, 2, 0], [2, 2, 1])
    """
    num_pairs = num_samples // 2
    is_possible = 0 < num_pairs < num_shares and (most is None or num_samples <= num_pairs * most)
    num_used = num_pairs if is_possible else num_shares
    return even_counts(num_samples, num_used) + [0] * (num_shares - num_used)


@dataclass(frozen=True)
class Division:
    """Splits global batches across workers.

    Attributes:
        global_size: Number of samples of a full global batch, all workers together.
        world_size: Number of workers.
        cap: Largest number of samples in a batch of one worker; None for no limit.
        num_shards: Number of shards of a global batch that stay the same if the number of workers changes, in a
            `ShardedGlobalBatch`; otherwise 0.

    Examples:
        >>> parts = Division(global_size=18, world_size=2, cap=5).parts(18, rank=1)
        >>> [(part.start, part.stop, part.plan.total_samples) for part in parts]
        [(9, 14, 10), (14, 18, 8)]
    """

    global_size: int
    world_size: int
    cap: int | None = None
    num_shards: int = 0

    def num_batches(self, num_samples: int) -> int:
        """Return how many batches each worker processes, one after the other, for one global batch: at least 1."""
        largest = -(-num_samples // self.world_size)
        return 1 if self.cap is None else max(1, -(-largest // self.cap))

    def parts(self, num_samples: int, rank: int) -> list[BatchShare]:
        """Return the batches that rank `rank` processes for one global batch with `num_samples` samples.

        All ranks have the same number of batches.
        """
        batches = self._batches(num_samples)
        stops = accumulate(batches[rank], initial=sum(map(sum, batches[:rank])))
        return _planned([*pairwise(stops)], [*map(sum, zip(*batches, strict=True))], self.world_size)

    def _batches(self, num_samples: int) -> list[list[int]]:
        """Return a list for each worker: the sizes of the batches that it processes for one global batch."""
        shares = even_shares(num_samples, self.world_size * self.num_batches(num_samples), self.cap)
        return [shares[rank :: self.world_size] for rank in range(self.world_size)]


@dataclass(frozen=True)
class ShardedGlobalBatch(Division):
    """Splits global batches into a fixed number of shards, which stay the same if the number of workers changes.

    Each worker processes consecutive shards, one after the other. `cap` limits the samples in a shard, so `num_shards`
    must be high enough for it.

    Examples:
        >>> [len(ShardedGlobalBatch(16, world_size=3, num_shards=4).parts(16, rank)) for rank in range(3)]
        [2, 1, 1]
    """

    def num_batches(self, num_samples: int) -> int:
        """Return the largest number of shards that any worker processes for one global batch of any size.

        Each shard is one batch.
        """
        return -(-self.num_shards // self.world_size)

    def parts(self, num_samples: int, rank: int) -> list[BatchShare]:
        """Return the shards that rank `rank` processes for one global batch with `num_samples` samples.

        Empty shards are left out, unless the rank has no other shard: it then gets one empty shard. No rank gets more
        than `num_batches` shards, so `num_batches` gradient buffers always suffice.
        """
        stops = accumulate(even_shares(num_samples, self.num_shards, self.cap), initial=0)
        bounds = [(start, stop) for start, stop in pairwise(stops) if start < stop]
        counts = even_counts(len(bounds), self.world_size)
        first = sum(counts[:rank])
        own = bounds[first : first + counts[rank]] or [(0, 0)]
        return _planned(own, [num_samples] * len(own), self.world_size)
