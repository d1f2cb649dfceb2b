"""PyTorch models in checkpoints: `TorchCheckpoint`, which holds one, and `TorchPredictor`, which predicts with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.constants import MODEL_KEY, PREPROCESSOR_KEY
from raysgd.torch.data.ray_tensors import as_tensor
from raysgd.torch.objects.moving import to_device
from raysgd.train.predictor import TensorPredictor

logger = logging.getLogger(__name__)

_STATE_FILE = "model.pt"  # as Ray 2.7 and later name it
_WRAPPER_PREFIX = "module."


class TorchCheckpoint(Checkpoint):
    """A checkpoint with a model.

    Examples:
        >>> import torch
        >>> checkpoint = TorchCheckpoint.from_state_dict(torch.nn.Linear(2, 1).state_dict())
        >>> checkpoint.get_model(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: Any = None) -> TorchCheckpoint:
        """Make a checkpoint with a whole model. It is pickled, so its class must be importable when it is read.

        Args:
            model: The model, with or without its `DistributedDataParallel` wrapper.
            preprocessor: The preprocessor of the model's inputs.

        Raises:
            TypeError: `model` is no PyTorch module.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"`model={model!r:.200}`: need a `torch.nn.Module`. For its state: `from_state_dict`.")
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: model.module if is_wrapped else model})

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: Any = None) -> TorchCheckpoint:
        """Make a checkpoint with the state of a model.

        Args:
            state_dict: The result of `model.state_dict()`.
            preprocessor: The preprocessor of the model's inputs.

        Raises:
            TypeError: `state_dict` is no mapping.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"`state_dict={state_dict!r:.200}`: need what `model.state_dict()` returns.")
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: dict(state_dict)})

    def get_model(self, model: torch.nn.Module | None = None) -> Any:
        """Return the saved model, or `model` with the saved state.

        Args:
            model: A model to load the state into. Not needed, and not used, if the whole model was saved.

        Raises:
            RuntimeError: The checkpoint has no model.
            ValueError: The checkpoint only has a state, and `model` was not passed.
        """
        saved = self._saved()
        if isinstance(saved, torch.nn.Module):
            if model is not None:
                logger.warning("the checkpoint holds a whole model: `model` is not used")
            return saved
        if model is None:
            raise ValueError("`model=None`: the checkpoint holds the state of a model. Pass a model to load it into.")
        state = dict(saved)
        consume_prefix_in_state_dict_if_present(state, _WRAPPER_PREFIX)
        model.load_state_dict(state)
        return model

    def _saved(self) -> Any:
        content = self.to_dict()
        if MODEL_KEY not in content:
            with self.as_directory() as folder:
                if (file := Path(folder, _STATE_FILE)).exists():
                    return torch.load(file, map_location="cpu", weights_only=True)
            raise RuntimeError(
                f'The checkpoint has no "{MODEL_KEY}", but {sorted(content)}: make it with `from_model` or '
                "`from_state_dict`."
            )
        saved = content[MODEL_KEY]
        if not isinstance(saved, torch.nn.Module | Mapping):
            raise RuntimeError(
                f'The "{MODEL_KEY}" of the checkpoint is a `{type(saved).__name__}`, neither a model of PyTorch nor '
                "its state. For the weights of a Keras model use `TensorflowCheckpoint` and `TensorflowPredictor`."
            )
        return saved


class TorchPredictor(TensorPredictor):
    """Predicts with a PyTorch model in evaluation mode. Override `call_model` if just calling the model is not enough.

    Args:
        model: The model.
        preprocessor: A preprocessor of Ray Data for the batches; None for none.
        use_gpu: True to move the model to the first GPU.

    Raises:
        RuntimeError: `use_gpu=True`, but PyTorch sees no GPU.

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
    def from_checkpoint(  # type: ignore[override]  # each subclass takes its own arguments
        cls, checkpoint: Checkpoint, model: torch.nn.Module | None = None, use_gpu: bool = False
    ) -> TorchPredictor:
        """Return a predictor with the model of a checkpoint.

        Args:
            checkpoint: A checkpoint with the key `model`, as `TorchCheckpoint` makes it.
            model: A model to load the state into. Not needed if the whole model was saved.
            use_gpu: See the class.

        Raises:
            RuntimeError: The checkpoint has no model, or one of another framework.
            ValueError: The checkpoint only has a state, and `model` was not passed.
        """
        saved = TorchCheckpoint.from_checkpoint(checkpoint)
        return cls(saved.get_model(model), saved.get_preprocessor(), use_gpu)

    def call_model(self, inputs: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the model's output: a tensor, a dict of tensors, or a data frame of your own. Safe to override."""
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
