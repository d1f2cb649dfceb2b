"""Allocates and initializes models that are on PyTorch's meta device, all at once or part by part.

Tensors on the meta device have shapes but no memory. Their values are set by each module's method `reset_parameters`,
which PyTorch also calls when a module is constructed. Tensors stay the same Python objects, so optimizers that were
created earlier still refer to the model's parameters.

ADR 92 explains why users may register a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from raysgd.core.private_names import require_names
from raysgd.exceptions import InvalidRegistrationError

_RESETS = ("reset_parameters", "_reset_parameters")  # PyTorch's attention modules use the latter name


def is_empty(model: torch.nn.Module) -> bool:
    """Return True if any tensor of a model is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(model, recurse=True))


def fill(part: torch.nn.Module, device: torch.device) -> None:
    """Allocate and initialize those tensors of a model or submodule that are on the meta device.

    Args:
        part: Model or submodule. Tensors that already have memory are moved to `device`, unless they are sharded.
        device: Device on which to allocate the tensors.

    Raises:
        InvalidRegistrationError: A module with tensors on the meta device has no `reset_parameters`, or this method
            does not set one of the tensors.
    """
    empty = [(module, [each for each in _tensors(module, recurse=False) if each.is_meta]) for module in part.modules()]
    for tensor in chain.from_iterable(tensors for _, tensors in empty):
        if tensor.is_meta:  # several modules may share a tensor, which is then already allocated
            torch.utils.swap_tensors(tensor, _room_like(tensor, device))
    for module, tensors in reversed(empty):  # initialize submodules first, as when a model is constructed
        if tensors:
            _reset(module, tensors)
    for tensor in _tensors(part, recurse=True):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)


def refuse_states(optimizers: Iterable[Any]) -> None:
    """Check that no optimizer already has state for parameters on the meta device.

    Raises:
        InvalidRegistrationError: An optimizer has such state.
    """
    for optimizer in optimizers:
        entries = getattr(optimizer, "state", {}).values()
        if any(isinstance(value, torch.Tensor) and value.is_meta for entry in entries for value in entry.values()):
            raise InvalidRegistrationError(
                f"`register(optimizers=...)` got a `{type(optimizer).__name__}`, which has a state before its first "
                "step, for a model on the meta device. Use an optimizer that makes its state in its first step, such "
                "as Adam, or make the model outside of `torch.device('meta')`."
            )


def _tensors(module: torch.nn.Module, recurse: bool) -> Sequence[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _room_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an allocated tensor like a meta tensor. Floats are NaN, to detect later if a module did not set them."""
    room = torch.empty_like(tensor, device=device, requires_grad=False)
    if room.is_floating_point() or room.is_complex():
        room.fill_(float("nan"))
    return torch.nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else room


def _reset(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    reset: Callable[[], Any] | None = next(filter(None, (getattr(module, name, None) for name in _RESETS)), None)
    require_names(torch.Tensor, "_version")
    versions = [tensor._version for tensor in tensors]
    if reset is not None:
        reset()
    named = dict(chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)))
    names = {id(tensor): name for name, tensor in named.items()}
    missed = [
        names[id(tensor)]
        for tensor, version in zip(tensors, versions, strict=True)
        if id(tensor) in names and _is_untouched(tensor, version)
    ]
    if missed:
        kind = type(module).__name__
        raise InvalidRegistrationError(
            f"`register(models=...)` got a model on the meta device, but "
            f"{', '.join(f'`{name}`' for name in missed)} of its `{kind}` would stay uninitialized, because `{kind}` "
            f"{'has no' if reset is None else 'does not set that in its'} `reset_parameters`. Give `{kind}` a method "
            "of this name that sets all its own parameters and buffers, or make it outside of `torch.device('meta')`."
        )


def _is_untouched(tensor: torch.Tensor, version: int) -> bool:
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        return bool(tensor.isnan().all())  # `_room_like` set NaN; the version would not show a write through `.data`
    return bool(tensor.numel()) and tensor._version == version
