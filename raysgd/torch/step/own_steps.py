"""Bounds, callbacks and accumulation of gradients, which act wherever an optimizer steps: in stock code or user code.

Why hooks do this is in docs/adr/0023-users-keep-their-objects.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.step import BatchStep, accept
from raysgd.worker.worker_callbacks import InstalledCallbacks


class GradientBounds(Protocol):
    """The clipping of gradients by an operator, whose methods users override."""

    def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        """Clips the norm of all of them together."""

    def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
        """Clips each number."""


class OwnSteps:
    """Shows gradients to callbacks and clips them right before an optimizer steps, once; notes that it has stepped.

    Attributes:
        check_labels: Refuses gradients of a loss whose labels do not count as its samples do.
    """

    def __init__(
        self,
        precision: Precision,
        options: StepOptions,
        bounds: GradientBounds,
        step: BatchStep,
        callbacks: InstalledCallbacks,
    ) -> None:
        self._callbacks = callbacks
        self._precision = precision
        self._options, self._clips = options, options.clips
        self._bounds = bounds
        self._step = step
        self._is_clipped = self._has_clipped = False
        self._optimizers: Sequence[Any] = ()
        self._sees_all = True
        self.check_labels: Callable[[], None] = accept
        self._undo: list[Callable[[], None]] = []
        self._about_to_step: set[int] = set()  # by identity: those with gradients

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Lets the bounds act, or be missed, also where user code steps an optimizer by itself."""
        for undo in self._undo:
            undo()
        self._optimizers = optimizers
        hooked = list(filter(tells_of_steps, optimizers))
        self._sees_all = len(hooked) == len(optimizers)
        handles = [each.register_step_pre_hook(self._before_step) for each in hooked]
        handles += [each.register_step_post_hook(self._after_step) for each in hooked]
        self._undo = [each.remove for each in handles]

    def sees(self, optimizer: Any) -> bool:
        """Tells whether each step of an optimizer is noted here."""
        return tells_of_steps(optimizer) and any(each is optimizer for each in self._optimizers)

    def begin_call(self) -> None:
        """Begins a training call, of which it is known how many batches a step has."""
        self._has_clipped = False
        self._precision.begin_call()

    @property
    def misses_clipping(self) -> bool:
        """True if a bound was not used in this call, and user code may have stepped past it."""
        return self._clips and not self._has_clipped and not self._sees_all

    def step(self, optimizer: Any) -> None:
        """Clips the gradients of an optimizer, which may be scaled, and steps it."""
        if self._clips or self._callbacks.wants_gradients:
            self._precision.unscale(optimizer)
            self._clip(optimizer)
        self._is_clipped = True
        try:
            self._precision.step(optimizer)
        finally:
            self._is_clipped = False

    def _clip(self, optimizer: Any) -> None:
        if self._callbacks.wants_gradients:
            self._callbacks.gradients(optimizer)
        if not self._clips:
            return
        options, self._has_clipped = self._options, True
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            self._bounds.clip_grad_norm(parameters, options.clip_grad_norm)
        if options.clip_grad_value is not None:
            self._bounds.clip_grad_value(parameters, options.clip_grad_value)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in each step of an optimizer, from any caller."""
        self._about_to_step.discard(id(optimizer))
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if not self._is_clipped or self._callbacks.wants_steps or self._precision.is_mixed:
                self._check_gradients(optimizer)
            return None

        self._check_closure(optimizer)

        def compute() -> Any:
            self._step.stepped(optimizer)  # each call of the closure begins with no gradients
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return (optimizer, compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _check_closure(self, optimizer: Any) -> None:
        """Refuse a closure, which computes a whole step, where a step takes other ranks or several batches."""
        name = type(optimizer).__name__
        if self._step.is_joint:
            raise ValueError(
                f"`{name}.step` was given a closure, which an optimizer calls as often as this worker's loss makes "
                "it, and the workers would step differently: use one worker, or an optimizer that needs no closure, "
                "and call `self.backward(loss)` and `self.optimizer_step()`."
            )
        if self._step.window > 1 or self._step.shards is not None:
            raise ValueError(
                f"`{name}.step` was given a closure, which computes the gradients of a whole step, and here a step has "
                "several batches: omit `accumulate_grad_batches`, `max_batch_per_worker` or `deterministic=True`."
            )

    def _check_gradients(self, optimizer: Any) -> None:
        if all(parameter.grad is None for parameter in self._precision.parameters(optimizer)):
            return  # such a step changes nothing: some programs take one ahead of a scheduler
        if not self._is_clipped and self._step.window > 1 and self._step.adds_to(optimizer):
            raise ValueError(
                f"`{self._step.option}`: your code calls `step` of `{type(optimizer).__name__}`, and its gradients "
                "wait for more batches: call `self.optimizer_step()` for every batch instead."
            )
        self._about_to_step.add(id(optimizer))
        if not self._is_clipped:
            self.check_labels()
        self._precision.check_use()
        if not self._is_clipped and (self._clips or self._callbacks.wants_gradients):
            _unscale_for_step(optimizer)
            self._clip(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Runs after each step of an optimizer, from any caller."""
        if not self._is_clipped:  # else the library says so, also of a step that was left out
            self._step.stepped(optimizer)
        if not self._callbacks.wants_steps or id(optimizer) not in self._about_to_step:
            return
        overflow = getattr(optimizer, "found_inf", None)  # of a fused optimizer, which skips its step by itself
        if overflow is None or not overflow.item():
            self._callbacks.stepped(optimizer)


def tells_of_steps(optimizer: Any) -> bool:
    """Tells whether an optimizer has hooks for its steps, as those of PyTorch do."""
    return hasattr(optimizer, "register_step_post_hook") and hasattr(optimizer, "register_step_pre_hook")


def _unscale_for_step(optimizer: Any) -> None:
    """Brings gradients to their true size that a fused optimizer is to unscale in its step, as `GradScaler` told it."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    optimizer.grad_scale = None
