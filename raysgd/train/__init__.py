"""Function-based distributed training: raysgd starts and connects the workers, and your function does the training.

Guarantees:

* The function runs once in each worker, connected to the other workers. The workers' reports arrive together, step by
  step, in rank order.
* Saving a checkpoint costs the function one copy of its state. The copy is sent and written while training continues,
  and a checkpoint file is always complete.
* If a worker dies, only the work since the last checkpoint is lost: the function restarts from that checkpoint, on as
  many workers as are available.

The function itself is responsible for the training loop, the data, and the decision when to save a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)
from raysgd.air.constants import TRAIN_DATASET_KEY
from raysgd.air.reports import (
    CheckpointUploadMode,
    PreemptionInfo,
)
from raysgd.core.imports import lazy_names
from raysgd.exceptions import TrainingFailedError

if TYPE_CHECKING:
    from raysgd.air.result import Result
    from raysgd.train.backend import BackendConfig
    from raysgd.train.callbacks.callback import TrainingCallback
    from raysgd.train.checkpoint import CheckpointStrategy
    from raysgd.train.fit.data import DataConfig
    from raysgd.train.session import (
        TrainContext,
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        load_checkpoint,
        local_rank,
        report,
        save_checkpoint,
        world_rank,
        world_size,
    )
    from raysgd.train.trainer import Trainer, TrainingIterator, TrainWorkerGroup

    from . import collective, horovod, lightning, tensorflow, torch  # noqa: F401

__all__ = [
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStrategy",
    "CheckpointUploadMode",
    "DataConfig",
    "FailureConfig",
    "PreemptionInfo",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
    "TRAIN_DATASET_KEY",
    "TrainContext",
    "Trainer",
    "TrainingCallback",
    "TrainingFailedError",
    "TrainingIterator",
    "TrainWorkerGroup",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

lazy_names(
    __name__,
    {
        "BackendConfig": "raysgd.train.backend",
        "CheckpointStrategy": "raysgd.train.checkpoint",
        "DataConfig": "raysgd.train.fit.data",
        "Result": "raysgd.air.result",
        "Trainer": "raysgd.train.trainer",
        "TrainingCallback": "raysgd.train.callbacks.callback",
        "TrainingIterator": "raysgd.train.trainer",
        "TrainWorkerGroup": "raysgd.train.trainer",
        "TrainContext": "raysgd.train.session",
        **dict.fromkeys(filter(str.islower, __all__), "raysgd.train.session"),  # all lower-case names are functions
    },
)
