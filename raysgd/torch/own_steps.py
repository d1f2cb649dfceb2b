"""Bounds for gradients, which act wherever an optimizer steps: in stock code, or in user code.

Why hooks do this is in docs/adr/0049-options-act-where-the-optimizer-steps.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from raysgd.torch.closures import Closures
from raysgd.torch.options import StepOptions
from raysgd.torch.precision import Precision


class Bounds(Protocol):
    """How gradients are clipped; an operator, whose methods users override."""

    def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        """Clips the norm of all of them together."""

    def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
        """Clips each number."""


class Watcher(Protocol):
    """Sees gradients before they are clipped."""

    @property
    def wants_gradients(self) -> bool:
        """Whether it is to be called."""

    def gradients(self, optimizer: Any) -> None:
        """Called before an optimizer steps."""


class OwnSteps:
    """Shows gradients to a watcher and clips them, right before an optimizer steps, once."""

    def __init__(
        self,
        precision: Precision,
        options: StepOptions,
        bounds: Bounds,
        closures: Closures,
        watcher: Watcher | None = None,
    ) -> None:
        self._watcher = watcher
        self._precision = precision
        self._closures = closures
        self._options = options
        self._bounds = bounds
        self._is_clipped = self._has_clipped = False
        self._num_optimizers = 0
        self._handles: list[Any] = []

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Lets the bounds act, or be missed, also where user code steps an optimizer by itself."""
        for handle in self._handles:
            handle.remove()
        self._num_optimizers = len(optimizers)
        hooked = [each for each in optimizers if hasattr(each, "register_step_pre_hook")]
        self._handles = [each.register_step_pre_hook(self._before_step) for each in hooked]

    def begin_call(self) -> None:
        """Begins a training call."""
        self._has_clipped = False
        self._precision.begin_call()

    @property
    def misses_clipping(self) -> bool:
        """Whether a bound was not used in this call, and user code may have stepped past it."""
        return self._options.clips and not self._has_clipped and len(self._handles) != self._num_optimizers

    def step(self, optimizer: Any) -> None:
        """Steps an optimizer whose gradients are clipped already."""
        self._is_clipped = True
        try:
            self._precision.step(optimizer)
        finally:
            self._is_clipped = False

    def clip(self, optimizer: Any) -> None:
        """Clips the gradients of an optimizer, which may be scaled."""
        if self._acts:
            self._precision.unscale(optimizer)
            self._clip(optimizer)

    @property
    def _acts(self) -> bool:
        return self._options.clips or (self._watcher is not None and self._watcher.wants_gradients)

    def _clip(self, optimizer: Any) -> None:
        if self._watcher is not None:
            self._watcher.gradients(optimizer)
        if not self._options.clips:
            return
        options, self._has_clipped = self._options, True
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            self._bounds.clip_grad_norm(parameters, options.clip_grad_norm)
        if options.clip_grad_value is not None:
            self._bounds.clip_grad_value(parameters, options.clip_grad_value)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in each step of an optimizer, from any caller."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check_gradients(optimizer)
            return None

        self._closures.check()

        def compute() -> Any:
            loss = self._closures.call(closure)
            self._check_gradients(optimizer)
            return loss

        return (optimizer, compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _check_gradients(self, optimizer: Any) -> None:
        if all(parameter.grad is None for parameter in self._precision.parameters(optimizer)):
            return  # such a step changes nothing: some programs take one ahead of a scheduler
        self._precision.check_use()
        if not self._is_clipped and self._acts:
            _unscale_for_step(optimizer)
            self._clip(optimizer)


def _unscale_for_step(optimizer: Any) -> None:
    """Brings gradients to their true size that a fused optimizer is to unscale in its step, as `GradScaler` told it."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    optimizer.grad_scale = None
