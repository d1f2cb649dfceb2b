"""The Ray 2.0 import path of `raysgd.air.integrations.wandb`: Weights & Biases logging for `fit()` runs."""

from __future__ import annotations

from raysgd.air.integrations.wandb import WandbLoggerCallback, setup_wandb

__all__ = ["WandbLoggerCallback", "setup_wandb"]
