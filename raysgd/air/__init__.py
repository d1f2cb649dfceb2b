"""The configs, checkpoints and results of trainers with a `fit()` method, named as in `ray.air`.

`raysgd.train` exports the same classes, except `DatasetConfig`. Importing the classes neither starts Ray nor imports a
framework. `raysgd.storage` stores the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import CheckpointConfig, DatasetConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig
from raysgd.core.imports import lazy_names

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
