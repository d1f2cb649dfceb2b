"""MLflow in runs of `fit()`: what `raysgd.air.integrations.mlflow` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.mlflow import __all__ as __all__
from raysgd.air.integrations.mlflow import __dir__ as __dir__
from raysgd.air.integrations.mlflow import __getattr__ as __getattr__
