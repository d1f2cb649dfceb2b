"""Weights & Biases in runs of `fit()`: what `raysgd.train.integrations.wandb` has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.train.integrations.wandb import WandbLoggerCallback, setup_wandb

__all__ = ["WandbLoggerCallback", "setup_wandb"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.train.integrations.wandb"))
