"""`RunnerFacts`: what a replica reports to the driver after its setup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.arrays.ray_batches import RayBatches


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """What a replica reports to the driver after its setup.

    Attributes:
        num_models: Number of registered models.
        num_optimizers: Number of registered optimizers.
        seed: This rank's seed for the data order.
        train_data: Properties of the train data that must be identical on all ranks; None if the data is not sharded.
        validation_data: The corresponding properties of the validation data.
        keeps_own_state: True if the operator has custom state, which validation or prediction may change.
        epoch_obstacle: Reason why an epoch must start over after an interruption; None if it can continue.
        ray_batches: Registered Ray Data, which the driver shards among the workers. Rank 0 reports it for all ranks.
        has_validation: True if validation data is registered, or if the user overrides `validate`, which may not
            need data.
        keeps_global_batch: True if the global batch does not depend on the number of workers.
        batch_size: Number of samples in a batch of one worker's train loader; None if unknown.
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
        """The number of models and of optimizers that a state dict must contain so that it can be loaded."""
        return {"models": self.num_models, "optimizers": self.num_optimizers}
