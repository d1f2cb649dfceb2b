"""TensorFlow in training functions: `TF_CONFIG` for its strategies, and shards of Ray Data for them.

After a loss all workers are new processes with a new `TF_CONFIG`, as `MultiWorkerMirroredStrategy` needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysgd._imports import lazy_names, require_installed
from raysgd.air.checkpoint import TensorflowCheckpoint
from raysgd.tf.objects.datasets import prepare_dataset_shard
from raysgd.train._tensorflow.cluster import TensorflowBackend
from raysgd.train.backend import Backend, BackendConfig

if TYPE_CHECKING:
    from raysgd.train._fit_trainers import TensorflowTrainer
    from raysgd.train._tensorflow.predictor import TensorflowPredictor

require_installed("tensorflow", extra="tf", purpose="`raysgd.train.tensorflow`")

__all__ = [
    "TensorflowCheckpoint",
    "TensorflowConfig",
    "TensorflowPredictor",
    "TensorflowTrainer",
    "prepare_dataset_shard",
]

lazy_names(
    __name__,
    {
        "TensorflowPredictor": "raysgd.train._tensorflow.predictor",
        "TensorflowTrainer": "raysgd.train._fit_trainers",
    },
)


@dataclass
class TensorflowConfig(BackendConfig):
    """Connects the workers by way of `TF_CONFIG`: make a `MultiWorkerMirroredStrategy` in the function."""

    @property
    def backend_cls(self) -> type[Backend]:
        return TensorflowBackend
