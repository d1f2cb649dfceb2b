"""MLflow in runs of `fit()`: `raysgd.air.integrations.mlflow` under its name in Ray 2.0."""

from __future__ import annotations

from raysgd.air.integrations.mlflow import MLflowLoggerCallback, setup_mlflow

__all__ = ["MLflowLoggerCallback", "setup_mlflow"]
