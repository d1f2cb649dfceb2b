"""Weights & Biases: a logger for `RunConfig(callbacks=[...])`, and `setup_wandb` for training functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.air.session import current_session, get_experiment_name, get_trial_id, get_trial_name, get_world_rank
from raysgd.core.imports import require

wandb = require("wandb", extra="wandb", purpose="`raysgd.air.integrations.wandb`")

from ray.air.integrations.wandb import WandbLoggerCallback  # noqa: E402
from ray.air.integrations.wandb import setup_wandb as _setup_of_ray  # noqa: E402

__all__ = ["WandbLoggerCallback", "setup_wandb"]


def setup_wandb(config: Mapping[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Start a Weights & Biases run in a training function and return the run.

    Args:
        config: Values to log as the run's config.
        rank_zero_only: True to log only on rank 0. Other ranks get a disabled run.
        **options: `api_key`, `api_key_file`, and the arguments of `wandb.init`. By default, the run gets the trial's
            name and id, and the experiment's name as its group.
    """
    if current_session() is not None:
        if rank_zero_only and get_world_rank() != 0:
            return wandb.init(mode="disabled")
        names = {"trial_id": get_trial_id(), "trial_name": get_trial_name(), "group": get_experiment_name()}
        options = {**names, **options}
    return _setup_of_ray(dict(config or {}), rank_zero_only=rank_zero_only, **options)
