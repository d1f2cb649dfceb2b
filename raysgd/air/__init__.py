"""The values of a run that `fit` makes: configs, checkpoints and results, under the names of `ray.air`.

What it guarantees: one class stands behind each name, whether you write `raysgd.air` or `raysgd.train`, and none of
them starts Ray or imports a framework. What it leaves to others: the trainers read them, storage holds the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports import lazy_names
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import CheckpointConfig, DatasetConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig

if TYPE_CHECKING:
    from raysgd.air.result import Result

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "DatasetConfig",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
]

lazy_names(__name__, {"Result": "raysgd.air.result"})
