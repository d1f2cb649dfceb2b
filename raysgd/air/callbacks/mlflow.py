"""The Ray 2.0 import path of `raysgd.air.integrations.mlflow`: MLflow logging for `fit()` runs."""

from __future__ import annotations

from raysgd.air.integrations.mlflow import MLflowLoggerCallback, setup_mlflow

__all__ = ["MLflowLoggerCallback", "setup_mlflow"]
