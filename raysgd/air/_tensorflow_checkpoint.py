"""`TensorflowCheckpoint`: a checkpoint that holds the weights of a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.constants import MODEL_KEY, PREPROCESSOR_KEY


class TensorflowCheckpoint(Checkpoint):
    """A checkpoint with the weights of a Keras model."""

    @classmethod
    def from_model(cls, model: Any, *, preprocessor: Any = None) -> TensorflowCheckpoint:
        """A checkpoint with the weights of a model.

        Args:
            model: The Keras model, built.
            preprocessor: What its data goes through first.

        Raises:
            TypeError: It is no Keras model.
        """
        if not hasattr(model, "get_weights"):
            raise TypeError(f"`model={model!r:.200}`: need a Keras model.")
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: model.get_weights()})

    def get_model_weights(self) -> list[Any]:
        """The weights that were saved: NumPy arrays, in the order of `model.get_weights()`.

        Raises:
            RuntimeError: The checkpoint has no weights, or a model of another framework.
        """
        content = self.to_dict()
        if MODEL_KEY not in content:
            raise RuntimeError(
                f'The checkpoint has no "{MODEL_KEY}", but {sorted(content)}: make it with `from_model`.'
            )
        weights = content[MODEL_KEY]
        if not isinstance(weights, list | tuple):
            raise RuntimeError(
                f'The "{MODEL_KEY}" of the checkpoint is a `{type(weights).__name__}`, not the weights of a Keras '
                "model. For a model of PyTorch use `TorchCheckpoint` and `TorchPredictor`."
            )
        return list(weights)

    def get_model(self, model: Any | Callable[[], Any]) -> Any:
        """A model with the weights that were saved.

        Args:
            model: A Keras model, built; or a function that makes one.

        Raises:
            RuntimeError: The checkpoint has no weights.
        """
        made = model if hasattr(model, "set_weights") and not isinstance(model, type) else model()
        made.set_weights(self.get_model_weights())
        return made
