"""What a training function calls, under the name of `ray.air.session`: the functions of `raysgd.train.session`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.train.session import (
        get_checkpoint,
        get_dataset_shard,
        get_experiment_name,
        get_local_rank,
        get_local_world_size,
        get_metadata,
        get_node_rank,
        get_trial_dir,
        get_trial_id,
        get_trial_name,
        get_trial_resources,
        get_world_rank,
        get_world_size,
        report,
    )

__all__ = [
    "get_checkpoint",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_metadata",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "report",
]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.train.session"))
