"""Plans of batches, made before user code sees them: how a batch counts, and where its step starts and ends."""

from __future__ import annotations

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
        sync_gradients: True if a step of the optimizer ends with this batch.
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
    sync_gradients: bool = True
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
    """

    batch: Any
    plan: BatchPlan = BETWEEN_BATCHES
    ends_pass: bool | None = None


NO_BATCH = object()
"""Placeholder for the batch of a step in which this rank has no samples. The call still counts the step."""
