"""Supports TensorFlow in training functions: sets `TF_CONFIG` for its strategies, shards Ray Data, and predicts.

After a failure, all workers are new processes with a new `TF_CONFIG`, because `MultiWorkerMirroredStrategy` requires
it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.air.checkpoint import Checkpoint, TensorflowCheckpoint
from raysgd.core.connections.tensorflow import GROWTH, cluster_of, keras_of_driver
from raysgd.core.imports import lazy_names, require_installed
from raysgd.tf.data.sources import as_array
from raysgd.tf.objects.datasets import prepare_dataset_shard
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.predictor import TensorPredictor
from raysgd.utils import find_free_port

if TYPE_CHECKING:
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

lazy_names(__name__, {"TensorflowTrainer": "raysgd.train.data_parallel_trainer"})


@dataclass
class TensorflowConfig(BackendConfig):
    """Connects the workers through `TF_CONFIG`. Create a `MultiWorkerMirroredStrategy` in the function."""

    @property
    def backend_cls(self) -> type[Backend]:
        return TensorflowBackend


class TensorflowBackend(Backend):
    """The plug-in that `TensorflowConfig` selects. It sets `TF_CONFIG` in every worker, even in a single worker.

    Workers use the Keras version and backend that the driver selected with `TF_USE_LEGACY_KERAS` and `KERAS_BACKEND`.
    """

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        shares_gpu = 0 < worker_group.num_gpus_per_worker < 1
        worker_group.execute(set_variables, {**keras_of_driver(), **(GROWTH if shares_gpu else {})})
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
    """Set environment variables in this worker process."""
    os.environ.update(variables)


class TensorflowPredictor(TensorPredictor):
    """Predicts with a Keras model. Override `call_model` if calling the model is not enough.

    Args:
        model_definition: A function or class that creates the model; or the model itself.
        preprocessor: A Ray Data preprocessor for the batches, or None.
        model_weights: The result of the model's `get_weights`; None to leave the model's weights unchanged.
        use_gpu: True to run the model on the first GPU, False to run it on the CPU.
        model: Alias of `model_definition`, from later versions of Ray.

    Raises:
        RuntimeError: `use_gpu=True`, but TensorFlow does not detect a GPU.
    """

    def __init__(
        self,
        model_definition: Callable[[], Any] | Any = None,
        preprocessor: Any = None,
        model_weights: Any = None,
        use_gpu: bool = False,
        *,
        model: Any = None,
    ) -> None:
        import tensorflow as tf

        super().__init__(preprocessor)
        if use_gpu and not tf.config.list_physical_devices("GPU"):
            raise RuntimeError(
                "`use_gpu=True`, but TensorFlow sees no GPU in this process: omit `use_gpu`, or request GPUs."
            )
        self.use_gpu = use_gpu
        self._device = "GPU:0" if use_gpu else "CPU:0"
        source = model if model is not None else model_definition
        with tf.device(self._device):
            self._model: Any = source if hasattr(source, "set_weights") and not isinstance(source, type) else source()
            if model_weights is not None:
                self._model.set_weights(model_weights)

    @classmethod
    def from_checkpoint(  # type: ignore[override]  # each subclass takes its own arguments
        cls, checkpoint: Checkpoint, model_definition: Callable[[], Any] | Any, use_gpu: bool = False
    ) -> TensorflowPredictor:
        """Return a predictor for a model, with the weights and the preprocessor from a checkpoint.

        Args:
            checkpoint: A checkpoint with the key `model`, such as a `TensorflowCheckpoint`.
            model_definition: A function or class that creates the model; or the model itself.
            use_gpu: See the class.

        Raises:
            RuntimeError: The checkpoint has no weights, or has a model of another framework. Or `use_gpu=True`, but
                TensorFlow does not detect a GPU.
        """
        saved = TensorflowCheckpoint.from_checkpoint(checkpoint)
        return cls(model_definition, saved.get_preprocessor(), saved.get_model_weights(), use_gpu)

    def call_model(self, inputs: Any) -> Any:
        """Return the model's output. An override may return a tensor, a dict of tensors, or a data frame."""
        return self._model(inputs, training=False)

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        import tensorflow as tf

        with tf.device(self._device):
            return super()._predict_numpy(data, dtype)

    def _tensor(self, values: Any, dtype: Any) -> Any:
        import tensorflow as tf

        tensor = tf.convert_to_tensor(as_array(values))
        return tensor if dtype is None else tf.cast(tensor, dtype)

    def _array(self, tensor: Any) -> Any:
        return tensor.numpy()
