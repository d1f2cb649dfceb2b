"""Tensors on their way between host and device, and models on their way between processes."""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch.nn.utils import parametrize

_CAPTURING = "transformers.utils.output_capturing"


def to_device(value: Any, device: torch.device) -> Any:
    """Copy tensors in nested tuples, lists, dicts and dataclasses to `device`; do not wait if memory is pinned.

    What has a method `to`, such as the batches of `transformers`, is moved by that.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to") and not isinstance(value, type):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return _moved_dataclass(value, device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)  # whatever class of dict it is
        moved.update((key, to_device(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _moved_dataclass(value: Any, device: torch.device) -> Any:
    """A copy of a dataclass, made without its `__init__`: that of a user may compute what is there already."""
    moved = {field.name: to_device(getattr(value, field.name), device) for field in fields(value)}
    if isinstance(value, MutableMapping):  # an output of `transformers`, which is both
        remade: Any = replace(cast("Any", value), **moved)
        return remade
    copied = copy.copy(value)
    for name, item in moved.items():
        object.__setattr__(copied, name, item)  # also of a frozen one
    return copied


def read_tensors(tensors: list[torch.Tensor]) -> list[float]:
    """The values of tensors with one element, with one wait for the device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    values: list[float] = torch.stack([tensor.reshape(()).double() for tensor in tensors]).tolist()
    return values


def packed(model: torch.nn.Module) -> torch.nn.Module:
    """Make a copy of a model picklable, in place; `unpacked` completes it.

    PyTorch pickles no class that `torch.nn.utils.parametrize` made, so modules get the class that they had before. The
    hooks with which `transformers` collects outputs hold a variable of its module, which is pickled by its name.
    """
    for part in model.modules():
        if parametrize.is_parametrized(part):
            part.__class__ = parametrize.type_before_parametrizations(part)
    if variable := getattr(sys.modules.get(_CAPTURING), "_active_collector", None):
        copyreg.pickle(type(variable), lambda _: "_active_collector")
    return model


def unpacked(model: torch.nn.Module) -> torch.nn.Module:
    """Complete a model that was packed, perhaps in another process, in place.

    Modules get the classes that their parametrizations need, and `transformers` the outputs to collect: it forgets what
    it did not make in this process.
    """
    registry = getattr(sys.modules.get(_CAPTURING), "_CAN_RECORD_REGISTRY", {})
    parts: list[Any] = list(model.modules())
    for part in parts:
        if hasattr(part, "_can_record_outputs"):
            registry[part] = part._can_record_outputs
        if parametrize.is_parametrized(part):
            lists = part.parametrizations
            del part.parametrizations
            for name, each in lists.items():
                part.register_buffer(name, torch.empty(0))
                parametrize.register_parametrization(part, name, torch.nn.Identity(), unsafe=True)
                part.parametrizations[name] = each
    return model
