"""`TorchPredictor`: predicts with a PyTorch model."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.air.checkpoint import Checkpoint
from raysgd.torch.data.ray_tensors import as_tensor
from raysgd.torch.objects.moving import to_device
from raysgd.train._torch.checkpoint import TorchCheckpoint
from raysgd.train.predictor import TensorPredictor


class TorchPredictor(TensorPredictor):
    """Predicts with a PyTorch model, in evaluation mode. Override `call_model` if calling the model is not all.

    Args:
        model: The model.
        preprocessor: A preprocessor of Ray Data that batches go through first; None for none.
        use_gpu: Whether the model goes to the first GPU.

    Raises:
        RuntimeError: `use_gpu=True`, and PyTorch sees no GPU.

    Examples:
        >>> import numpy as np
        >>> TorchPredictor(torch.nn.ReLU()).predict(np.array([-1.0, 2.0]))
        array([0., 2.], dtype=float32)
    """

    def __init__(self, model: torch.nn.Module, preprocessor: Any = None, use_gpu: bool = False) -> None:
        super().__init__(preprocessor)
        if use_gpu and not torch.cuda.is_available():
            raise RuntimeError("`use_gpu=True`, but PyTorch sees no GPU here: leave it out, or ask for GPUs.")
        self.use_gpu = use_gpu
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self.model = model.to(self._device).eval()

    @classmethod
    def from_checkpoint(  # type: ignore[override]  # a subclass takes what it needs
        cls, checkpoint: Checkpoint, model: torch.nn.Module | None = None, use_gpu: bool = False
    ) -> TorchPredictor:
        """Return a predictor with the model of a checkpoint.

        Args:
            checkpoint: A checkpoint with the key `model`, as `TorchCheckpoint` makes it.
            model: A model to load the state into. Not needed where the whole model was saved.
            use_gpu: See the class.

        Raises:
            RuntimeError: The checkpoint has no model, or one of another framework.
            ValueError: It has a state only, and `model` was not passed.
        """
        saved = TorchCheckpoint.from_checkpoint(checkpoint)
        return cls(saved.get_model(model), saved.get_preprocessor(), use_gpu)

    def call_model(self, inputs: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return what the model says: a tensor, or several by name. Safe to override."""
        found: torch.Tensor | dict[str, torch.Tensor] = self.model(inputs)
        return found

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return super()._predict_numpy(data, dtype)

    def _tensor(self, values: Any, dtype: Any) -> torch.Tensor:
        tensor: torch.Tensor = to_device(as_tensor(values), self._device)
        return tensor if dtype is None else tensor.to(dtype)

    def _array(self, tensor: torch.Tensor) -> Any:
        return tensor.cpu().numpy()
