"""MLflow: a logger for `RunConfig(callbacks=[...])`, and `setup_mlflow` for training functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.air.session import current_session, get_trial_name, get_world_rank
from raysgd.core.imports import require

require("mlflow", extra="mlflow", purpose="`raysgd.air.integrations.mlflow`")

from ray.air.integrations.mlflow import MLflowLoggerCallback  # noqa: E402
from ray.air.integrations.mlflow import setup_mlflow as _setup_of_ray  # noqa: E402

__all__ = ["MLflowLoggerCallback", "setup_mlflow"]


class NoLogging:
    """Replaces the `mlflow` module on ranks that do not log. Every attribute can be called, with no effect."""

    def __getattr__(self, name: str) -> NoLogging:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoLogging:
        return self

    def __enter__(self) -> NoLogging:
        return self

    def __exit__(self, *info: Any) -> None:
        return None


def setup_mlflow(config: Mapping[str, Any] | None = None, *, rank_zero_only: bool = True, **options: Any) -> Any:
    """Start an MLflow run in a training function and return the `mlflow` module.

    Args:
        config: Values to log as the run's parameters.
        rank_zero_only: True to log only on rank 0. Other ranks get an object on which every call does nothing.
        **options: Other arguments of `ray.air.integrations.mlflow.setup_mlflow`: `tracking_uri`, `experiment_name`,
            `create_experiment_if_not_exists`, `tags` and so on. `experiment_name` defaults to the trial's name.
            Functions that `Trainer.run` runs have no trial and must pass `experiment_name` or `experiment_id`.

    Raises:
        ValueError: The experiment does not exist, and `create_experiment_if_not_exists` is False, which is the default.
    """
    if current_session() is None:
        return _setup_of_ray(dict(config or {}), rank_zero_only=rank_zero_only, **options)
    if rank_zero_only and get_world_rank() != 0:
        return NoLogging()
    options["experiment_name"] = options.get("experiment_name") or get_trial_name()
    return _setup_of_ray(dict(config or {}), rank_zero_only=False, **options)
