"""`RunnerFacts`: what a worker reports to the driver after it has created its training operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.arrays.ray_batches import RayBatches


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """The report of a worker to the driver after it has created its training operator and run the user's `setup`.

    Attributes:
        num_models: Number of registered models.
        num_optimizers: Number of registered optimizers.
        seed: Seed of this rank for the random order of samples.
        train_data: Properties of the training data that must be identical on all ranks. None if the library does not
            divide the data over the workers.
        validation_data: The same properties of the validation data.
        keeps_own_state: True if the user's class overrides `state_dict`. A validation or a prediction can change the
            state that this method returns.
        epoch_obstacle: Reason why an interrupted epoch must start over, or None if it can continue.
        ray_batches: Ray Data that the operator registered, under the keys "train" and "validation". Rank 0 reports it
            for all ranks, and the driver divides it over the workers.
        has_validation: True if validation data is registered, or if the user overrides `validate`. An override can work
            without registered data.
        keeps_global_batch: True if the size of the global batch does not depend on the number of workers.
        batch_size: Number of samples in a batch of this worker's training data, or None if unknown.
        is_synchronous: True if all ranks take part in every optimizer step.
        is_sharded: True if models are sharded, so that all ranks must take part in reading a model.
        plateau_metrics: Names of the epoch metrics that `ReduceLROnPlateau` schedulers need.
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
    is_synchronous: bool = True
    is_sharded: bool = False
    plateau_metrics: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of models and optimizers that a state dict for this operator must have."""
        return {"models": self.num_models, "optimizers": self.num_optimizers}
