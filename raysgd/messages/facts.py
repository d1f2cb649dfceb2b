"""Facts about a replica that was set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.arrays.ray_batches import RayBatches


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """The facts about a replica that the driver wants to know.

    Attributes:
        num_models: How many models are registered, and so on.
        seed: Where this rank would take the order of the data from.
        train_data: What all ranks must agree on; None for data that are not divided.
        validation_data: The same for validation.
        keeps_own_state: Whether the operator has its own state, which evaluation may change.
        epoch_obstacle: Why an epoch can only start over, in any case; None when it can continue.
        ray_batches: What is registered of Ray Data, for the driver to divide; rank 0 says it for all.
        has_validation: Whether there is data to validate on, or a `validate` of the user's, which may need none.
        keeps_global_batch: Whether the global batch does not depend on the number of workers.
        batch_size: How many samples a train loader of one worker has in a batch; None where that is not known.
    """

    num_models: int
    num_optimizers: int
    seed: int
    train_data: Any
    validation_data: Any
    keeps_own_state: bool
    epoch_obstacle: str | None = None
    ray_batches: Mapping[str, RayBatches] = field(default_factory=dict)
    has_validation: bool = False
    keeps_global_batch: bool = False
    batch_size: int | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of things of each kind that a state has to hold."""
        return {"models": self.num_models, "optimizers": self.num_optimizers}
