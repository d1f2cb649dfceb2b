"""Plans of batches for tests that hold no source of data."""

from __future__ import annotations

from raysgd.core.arrays.division import BatchPlan
from raysgd.torch.parallel.leg import Leg


def begin_next(
    leg: Leg, num_samples: int, total: int, *, weight: float = 1.0, is_last: bool = True, number: int = 1
) -> None:
    """Begin the batch that has a number in its step, counted from 1: the first one, unless the step before goes on."""
    starts_step = leg.plan.ends_step
    ends_step = is_last or number >= leg.rules.num_batches
    ends = {"starts_step": starts_step, "ends_step": ends_step}
    leg.begin_batch(BatchPlan(num_samples, total, weight, is_padding=not num_samples, **ends))
