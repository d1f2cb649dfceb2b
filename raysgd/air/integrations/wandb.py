"""Weights & Biases in runs of `fit()`: a logger for `RunConfig`, and `setup_wandb` for training functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.air.integrations._wandb import WandbLoggerCallback, setup_wandb

__all__ = ["WandbLoggerCallback", "setup_wandb"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.air.integrations._wandb"))
