"""Weights & Biases in runs of `fit()`: `raysgd.air.integrations.wandb` under its name in Ray 2.0."""

from __future__ import annotations

from raysgd.air.integrations.wandb import WandbLoggerCallback, setup_wandb

__all__ = ["WandbLoggerCallback", "setup_wandb"]
