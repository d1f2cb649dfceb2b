"""`TensorflowPredictor`: predicts with a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.air.checkpoint import Checkpoint, TensorflowCheckpoint
from raysgd.tf.data.ray_dataset import as_array
from raysgd.train.predictor import TensorPredictor


class TensorflowPredictor(TensorPredictor):
    """Predicts with a Keras model. Override `call_model` if calling the model is not all.

    Args:
        model_definition: A function or a class that makes the model; or the model itself.
        preprocessor: A preprocessor of Ray Data that batches go through first; None for none.
        model_weights: What `get_weights` of such a model returned; None to leave the model as it was made.
        use_gpu: Whether the model is made on the first GPU.
        model: The model itself, as later versions of Ray name it.

    Raises:
        RuntimeError: `use_gpu=True`, and TensorFlow sees no GPU.
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
            raise RuntimeError("`use_gpu=True`, but TensorFlow sees no GPU here: leave it out, or ask for GPUs.")
        self.use_gpu = use_gpu
        self._device = "GPU:0" if use_gpu else "CPU:0"
        given = model if model is not None else model_definition
        with tf.device(self._device):
            self._model: Any = given if hasattr(given, "set_weights") and not isinstance(given, type) else given()
            if model_weights is not None:
                self._model.set_weights(model_weights)

    @classmethod
    def from_checkpoint(  # type: ignore[override]  # a subclass takes what it needs
        cls, checkpoint: Checkpoint, model_definition: Callable[[], Any] | Any, use_gpu: bool = False
    ) -> TensorflowPredictor:
        """Return a predictor with the weights of a checkpoint.

        Args:
            checkpoint: A checkpoint with the key `model`, as `TensorflowCheckpoint` makes it.
            model_definition: A function or a class that makes the model; or a model.
            use_gpu: See the class.

        Raises:
            RuntimeError: The checkpoint has no weights, or a model of another framework.
        """
        saved = TensorflowCheckpoint.from_checkpoint(checkpoint)
        return cls(model_definition, saved.get_preprocessor(), saved.get_model_weights(), use_gpu)

    def call_model(self, inputs: Any) -> Any:
        """Return what the model says: a tensor, or several by name. Safe to override."""
        return self._model(inputs, training=False)

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        import tensorflow as tf

        with tf.device(self._device):
            return super()._predict_numpy(data, dtype)

    def _tensor(self, values: Any, dtype: Any) -> Any:
        import tensorflow as tf

        found = tf.convert_to_tensor(as_array(values))
        return found if dtype is None else tf.cast(found, dtype)

    def _array(self, tensor: Any) -> Any:
        return tensor.numpy()
