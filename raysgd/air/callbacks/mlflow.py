"""MLflow in runs of `fit()`: what `raysgd.air.integrations.mlflow` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.mlflow import MLflowLoggerCallback, setup_mlflow

__all__ = ["MLflowLoggerCallback", "setup_mlflow"]
