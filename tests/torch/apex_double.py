"""A stand-in for `apex.amp` that refuses what the real one refuses.

Written by the rules of Apex (`frontend`, `_initialize`, `_process_optimizer`, `handle`): what it takes, in which
order, what it puts on an optimizer, when it skips a step. It computes in fp32, and its device can be the CPU.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

OPT_LEVELS = ("O0", "O1", "O2", "O3")


class StrictAmp:
    """As much of `apex.amp` as there is to call; anything else is an `AttributeError`.

    Args:
        device_type: Where models have to be; "cuda" for the real one.
        scale: The first loss scale.
    """

    def __init__(self, device_type: str = "cpu", scale: float = 8.0) -> None:
        self._device_type, self._scale, self._unskipped = device_type, scale, 0
        self._is_initialized = False
        self.options: dict[str, Any] = {}

    def initialize(
        self,
        models: Any,
        optimizers: Any = None,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: Any = None,
        patch_torch_functions: Any = None,
        keep_batchnorm_fp32: Any = None,
        master_weights: Any = None,
        loss_scale: Any = None,
        cast_model_outputs: Any = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: Any = None,
        max_loss_scale: float = 2.0**24,
    ) -> tuple[Any, Any]:
        if opt_level not in OPT_LEVELS:
            raise RuntimeError(f"Unexpected optimization level {opt_level}.")
        if not isinstance(models, torch.nn.Module | list):
            raise TypeError("models must be either a single model or a list of models.")
        if not isinstance(optimizers, torch.optim.Optimizer | list):
            raise TypeError("optimizers must be either a single optimizer or a list of optimizers.")
        for model in models if isinstance(models, list) else [models]:
            if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
                raise RuntimeError("Parallel wrappers should only be applied AFTER amp.initialize.")
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point() and tensor.dtype == torch.float16:
                    raise RuntimeError(f"Found param {name} of half: do not call .half() on your model.")
                if tensor.is_floating_point() and tensor.device.type != self._device_type:
                    raise RuntimeError(f"Found param {name} with type {tensor.type()}, expected torch.cuda.FloatTensor")
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self._adopt(optimizer)
        self._is_initialized = True
        self.options = {"opt_level": opt_level, "num_losses": num_losses, "verbosity": verbosity}
        return models, optimizers

    def _adopt(self, optimizer: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RuntimeError("optimizers must be bare instances of ordinary PyTorch optimizers")
        if hasattr(optimizer, "_amp_stash"):
            raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
        optimizer._amp_stash = types.SimpleNamespace(already_patched=False, has_scaled=False)
        step, zero_grad = optimizer.step, optimizer.zero_grad

        def new_step() -> Any:  # no closure
            assert not optimizer._amp_stash.has_scaled, "the gradients are still scaled"
            return step()

        def new_zero_grad() -> None:  # no `set_to_none`
            zero_grad()

        optimizer.step, optimizer.zero_grad = new_step, new_zero_grad

    @contextmanager
    def scale_loss(
        self,
        loss: torch.Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[torch.Tensor]:
        if not self._is_initialized:
            raise RuntimeError("Invoked `with amp.scale_loss`, but internal Amp state has not been initialized.")
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        parameters = [each for optimizer in optimizers for each in self.master_params(optimizer)]
        stashed = [None if delay_unscale else each.grad for each in parameters]
        if not delay_unscale:
            for parameter in parameters:
                parameter.grad = None
        yield loss.float() * self._scale
        for optimizer in optimizers:
            optimizer._amp_stash.has_scaled = delay_unscale
        if delay_unscale:
            return
        has_overflow = False
        for parameter, earlier in zip(parameters, stashed, strict=True):
            if parameter.grad is None:
                parameter.grad = earlier
                continue
            has_overflow |= not bool(torch.isfinite(parameter.grad).all())
            parameter.grad.div_(self._scale)
            if earlier is not None:
                parameter.grad.add_(earlier)
        self._update(has_overflow, optimizers)

    def _update(self, has_overflow: bool, optimizers: Any) -> None:
        self._unskipped = 0 if has_overflow else self._unskipped + 1
        if not has_overflow:
            return
        self._scale /= 2
        for optimizer in optimizers:
            if not optimizer._amp_stash.already_patched:
                self._skip_next(optimizer)

    def _skip_next(self, optimizer: Any) -> None:
        step = optimizer.step

        def skip_step(closure: Any = None) -> None:
            if closure is not None:
                raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
            optimizer.step, optimizer._amp_stash.already_patched = step, False

        optimizer.step, optimizer._amp_stash.already_patched = skip_step, True

    def master_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        for group in optimizer.param_groups:
            yield from group["params"]

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self._scale, "unskipped": self._unskipped}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        unexpected = [key for key in state_dict if "loss_scaler" not in key]
        if unexpected:
            raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {unexpected}")
        entry = next(iter(state_dict.values()))
        self._scale, self._unskipped = entry["loss_scale"], entry["unskipped"]
