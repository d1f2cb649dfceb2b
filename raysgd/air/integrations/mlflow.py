"""MLflow in runs of `fit()`: a logger for `RunConfig(callbacks=[...])`, and `setup_mlflow` for training functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.air.integrations._mlflow import MLflowLoggerCallback, setup_mlflow

__all__ = ["MLflowLoggerCallback", "setup_mlflow"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.air.integrations._mlflow"))
