"""Optimizers in training functions: with mixed precision they step through the gradient scaler."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from raysgd.torch.objects.precision import Precision
from raysgd.train._torch.accelerator import accelerator_of

_SCALED = "_goes_through_scaler"


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Gets an optimizer ready, in place: with mixed precision its `step` goes through the gradient scaler.

    With `elastic=True`, `step` does nothing in a batch that failed because a worker was lost; the batch is repeated.

    Schedulers may be attached to it before or after that.

    Raises:
        SessionMisuseError: Outside of a training function.
        ValueError: It was made before its model was divided, and so steps parameters that are not trained.
    """
    accelerator = accelerator_of("prepare_optimizer")
    if any(accelerator.has_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            'The optimizer has the parameters from before `prepare_model(..., "fsdp")`: create it afterwards.'
        )
    if accelerator.precision.scaler is not None and not hasattr(optimizer.step, _SCALED):
        _step_by_way_of(accelerator.precision, optimizer)
    if accelerator.steps is not None:
        accelerator.steps.take(optimizer)
    return optimizer


def prepare_state(*parts: Any) -> None:
    """Lets workers that step in later take over the states of these, beside those of what you have prepared.

    Schedulers, averages of weights, counters: anything with `state_dict` and `load_state_dict`. All workers have to
    name the same parts, in the same order.

    Args:
        parts: The parts.

    Raises:
        SessionMisuseError: Outside of a training function.
        TypeError: Something else.
    """
    for part in parts:
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TypeError(f"`prepare_state({part!r:.200})`: need something with `state_dict` and `load_state_dict`.")
    steps = accelerator_of("prepare_state").steps
    if steps is not None:
        steps.share(*parts)


def _step_by_way_of(precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    """Replaces `optimizer.step` in place, so that there is no other way to step it."""
    own = optimizer.step  # perhaps that of a scheduler, which counts the steps

    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("`closure`: a step with scaled gradients cannot use one.")
        present = self.step
        self.step = own  # for the scaler, which calls it unless gradients have overflowed
        try:
            precision.step(self)
        finally:
            self.step = present

    setattr(step, _SCALED, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers wrap methods only


def backward(tensor: torch.Tensor) -> None:
    """Computes the gradients of a loss, scaled if the precision of the run asks for it.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    accelerator_of("backward").precision.backward(tensor, None)
