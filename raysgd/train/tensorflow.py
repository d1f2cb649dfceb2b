"""TensorFlow in training functions: `TF_CONFIG` for its strategies, and shards of Ray Data for them.

After a failure all workers are new processes with a new `TF_CONFIG`, as `MultiWorkerMirroredStrategy` needs it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysgd._imports import lazy_names, require_installed
from raysgd.air.checkpoint import TensorflowCheckpoint
from raysgd.connections.tensorflow import cluster_of, keras_of_driver
from raysgd.tf.objects.datasets import prepare_dataset_shard
from raysgd.train.backend import Backend, BackendConfig
from raysgd.utils import find_free_port

if TYPE_CHECKING:
    from raysgd.train._tensorflow_predictor import TensorflowPredictor
    from raysgd.train.data_parallel_trainer import TensorflowTrainer
    from raysgd.train.worker_group import WorkerGroup

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
        "TensorflowPredictor": "raysgd.train._tensorflow_predictor",
        "TensorflowTrainer": "raysgd.train.data_parallel_trainer",
    },
)


@dataclass
class TensorflowConfig(BackendConfig):
    """Connects the workers by way of `TF_CONFIG`: make a `MultiWorkerMirroredStrategy` in the function."""

    @property
    def backend_cls(self) -> type[Backend]:
        return TensorflowBackend


class TensorflowBackend(Backend):
    """Sets `TF_CONFIG` in every worker, also in a single one; strategies of TensorFlow read it.

    Workers use the Keras that the driver has chosen with `TF_USE_LEGACY_KERAS` or `KERAS_BACKEND`.
    """

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        worker_group.execute(set_variables, keras_of_driver())
        ports = worker_group.execute(find_free_port)
        addresses = [
            f"{worker.metadata.node_ip}:{port}" for worker, port in zip(worker_group.workers, ports, strict=True)
        ]
        for rank in range(len(worker_group)):
            worker_group.execute_single(rank, set_variables, {"TF_CONFIG": cluster_of(addresses, rank)})

    @staticmethod
    def explain(error: Exception) -> Exception:
        is_keras_3 = getattr(sys.modules.get("keras"), "__version__", "").startswith("3")
        if not (is_keras_3 and isinstance(error, ValueError) and "PerReplica" in str(error)):
            return error
        return ValueError(
            "`fit` of Keras 3 cannot train under a strategy with several workers. Set `TF_USE_LEGACY_KERAS=1` in the "
            "driver and install `tf_keras`, so that `tf.keras` is Keras 2 in the workers. Or train the Keras 3 model "
            "with `raysgd.tf.TFTrainer`."
        )


def set_variables(variables: dict[str, str]) -> None:
    """Sets environment variables in this process."""
    os.environ.update(variables)
