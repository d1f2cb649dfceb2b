"""PyTorch models in checkpoints: `TorchCheckpoint` holds a model, and `TorchPredictor` predicts with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.constants import MODEL_KEY, PREPROCESSOR_KEY
from raysgd.core.state.strict_reading import refusals_of
from raysgd.torch.checkpoints.checkpoint_file import load_plain
from raysgd.torch.data.batches import as_tensor
from raysgd.torch.objects.models import to_device
from raysgd.train.predictor import TensorPredictor

logger = logging.getLogger(__name__)

_STATE_FILE = "model.pt"  # the file in which Ray's own `TorchCheckpoint` (2.7 and later) stores the state dict
_WRAPPER_PREFIX = "module."


class TorchCheckpoint(Checkpoint):
    """A checkpoint that contains a PyTorch model or its state dict.

    Examples:
        >>> import torch
        >>> checkpoint = TorchCheckpoint.from_state_dict(torch.nn.Linear(2, 1).state_dict())
        >>> checkpoint.get_model(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: Any = None) -> TorchCheckpoint:
        """Create a checkpoint of a whole model.

        The model is pickled. The program that loads the checkpoint must be able to import the model's class.

        Args:
            model: The model, with or without its `DistributedDataParallel` wrapper.
            preprocessor: The preprocessor for the model's inputs.

        Raises:
            TypeError: `model` is not a PyTorch module.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"`model={model!r:.200}`: need a `torch.nn.Module`. For its state: `from_state_dict`.")
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: model.module if is_wrapped else model})

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: Any = None) -> TorchCheckpoint:
        """Create a checkpoint of a model's state dict.

        Args:
            state_dict: The result of `model.state_dict()`.
            preprocessor: The preprocessor for the model's inputs.

        Raises:
            TypeError: `state_dict` is not a mapping.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"`state_dict={state_dict!r:.200}`: need what `model.state_dict()` returns.")
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: dict(state_dict)})

    def get_model(self, model: torch.nn.Module | None = None) -> Any:
        """Return the saved model, or load the saved state dict into `model` and return `model`.

        Args:
            model: The model to load the state dict into. Ignored if the checkpoint contains a whole model.

        Raises:
            RuntimeError: The checkpoint has no model, or its state dict does not fit `model`.
            ValueError: The checkpoint contains only a state dict, and `model` was not passed. Or the state dict omits
                parameters of `model`, as saved states of a trainer with `excludes_frozen_from_state = True` do.
        """
        saved = self._saved()
        if isinstance(saved, torch.nn.Module):
            if model is not None:
                logger.warning("the checkpoint holds a whole model, so `model` is ignored")
            return saved
        if model is None:
            raise ValueError("`model=None`: the checkpoint holds the state of a model. Pass a model to load it into.")
        state = dict(saved)
        consume_prefix_in_state_dict_if_present(state, _WRAPPER_PREFIX)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            if missing := _missing_parameters(model, state):
                raise ValueError(_of_missing(model, missing)) from error
            raise
        return model

    def _saved(self) -> Any:
        content = self.to_dict()
        if MODEL_KEY not in content:
            with self.as_directory() as folder:
                if (file := Path(folder, _STATE_FILE)).exists():
                    with refusals_of(str(file)):
                        return load_plain(str(file), file.stat().st_size)
            raise RuntimeError(
                f'The checkpoint has no "{MODEL_KEY}". Available: {sorted(content)}. Create it with `from_model` or '
                "`from_state_dict`."
            )
        saved = content[MODEL_KEY]
        if not isinstance(saved, torch.nn.Module | Mapping):
            raise RuntimeError(
                f'The "{MODEL_KEY}" of the checkpoint is a `{type(saved).__name__}`, neither a model of PyTorch nor '
                "its state. For the weights of a Keras model use `TensorflowCheckpoint` and `TensorflowPredictor`."
            )
        return saved


def _missing_parameters(model: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the parameter names that a state dict omits, or [] if it also differs from the model in other ways."""
    names = model.state_dict().keys()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = [name for name in names if name not in state]
    return missing if state.keys() <= names and parameters.issuperset(missing) else []


def _of_missing(model: torch.nn.Module, missing: Sequence[str]) -> str:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"The state in the checkpoint omits parameters of `model` (`{type(model).__name__}`): `{missing[0]}`{more}. A "
        "trainer with `excludes_frozen_from_state = True` omits frozen parameters when it saves. Create the checkpoint "
        "with `TorchCheckpoint.from_model(trainer.get_model(to_cpu=True))`, or from a file that `trainer.save(path, "
        "frozen=True)` wrote. If `model` already has the right values for them, call `model.load_state_dict(state, "
        "strict=False)`, and pass `model` to `TorchPredictor`."
    )


class TorchPredictor(TensorPredictor):
    """Predicts with a PyTorch model in evaluation mode. Override `call_model` if calling the model is not enough.

    Args:
        model: Model to predict with. It is moved to the device and switched to evaluation mode.
        preprocessor: A Ray Data preprocessor for the batches, or None.
        use_gpu: True to move the model to PyTorch's current GPU.

    Raises:
        RuntimeError: `use_gpu=True`, but PyTorch does not detect a GPU.

    Examples:
        >>> import numpy as np
        >>> TorchPredictor(torch.nn.ReLU()).predict(np.array([-1.0, 2.0]))
        array([0., 2.], dtype=float32)
    """

    def __init__(self, model: torch.nn.Module, preprocessor: Any = None, use_gpu: bool = False) -> None:
        super().__init__(preprocessor)
        if use_gpu and not torch.cuda.is_available():
            raise RuntimeError(
                "`use_gpu=True`, but PyTorch sees no GPU in this process: omit `use_gpu`, or request GPUs."
            )
        self.use_gpu = use_gpu
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self.model = model.to(self._device).eval()

    @classmethod
    def from_checkpoint(  # type: ignore[override]  # each subclass takes its own arguments
        cls, checkpoint: Checkpoint, model: torch.nn.Module | None = None, use_gpu: bool = False
    ) -> TorchPredictor:
        """Return a predictor for the model in a checkpoint.

        Args:
            checkpoint: A checkpoint with the key `model`, such as a `TorchCheckpoint`.
            model: The model to load the state dict into. Not needed if the checkpoint contains a whole model.
            use_gpu: True to move the model to PyTorch's current GPU.

        Raises:
            RuntimeError: The checkpoint has no model, or a model of another framework.
            ValueError: The checkpoint contains only a state dict, and `model` was not passed. Or the state dict omits
                parameters of `model`, such as a frozen base.
        """
        saved = TorchCheckpoint.from_checkpoint(checkpoint)
        return cls(saved.get_model(model), saved.get_preprocessor(), use_gpu)

    def call_model(self, inputs: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the model's output: a tensor, or a dict of tensors by name.

        An override can also return a data frame, although the annotation does not include this type.
        """
        return self.model(inputs)

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return super()._predict_numpy(data, dtype)

    def _tensor(self, values: Any, dtype: Any) -> torch.Tensor:
        tensor: torch.Tensor = to_device(as_tensor(values), self._device)
        return tensor if dtype is None else tensor.to(dtype)

    def _array(self, tensor: torch.Tensor) -> Any:
        return tensor.cpu().numpy()
