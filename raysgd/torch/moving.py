"""Tensors on their way between host and device."""

from __future__ import annotations

import copy
from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """Copies tensors in nested tuples, lists and dicts to `device`, without waiting where memory is pinned."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        moved = copy.copy(value)  # whatever class of dict it is
        moved.update((key, to_device(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def read_tensors(tensors: list[torch.Tensor]) -> list[float]:
    """The values of tensors with one element, with one wait for the device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    values: list[float] = torch.stack([tensor.reshape(()).double() for tensor in tensors]).tolist()
    return values
