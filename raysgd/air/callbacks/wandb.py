"""Weights & Biases in runs of `fit()`: what `raysgd.air.integrations.wandb` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.wandb import WandbLoggerCallback, setup_wandb

__all__ = ["WandbLoggerCallback", "setup_wandb"]
