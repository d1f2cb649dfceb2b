"""Copies batches to a device, reads values from a device, and makes models picklable for other processes."""

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
    """Return nested tuples, lists, dicts and dataclasses with all tensors on `device`.

    An object with a method `to`, such as a batch of `transformers`, is moved by that method. Tensors in pinned memory
    are copied to a GPU asynchronously. Copies to the CPU are complete when the function returns.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type != "cpu")
    if hasattr(value, "to") and not isinstance(value, type):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return _moved_dataclass(value, device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)  # keeps the class of the mapping, such as `defaultdict`
        moved.update((key, to_device(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _moved_dataclass(value: Any, device: torch.device) -> Any:
    """Copy a dataclass with all tensors on `device`.

    Unless the dataclass is also a dict, its `__init__` is not called, because `__init__` may recompute values.
    """
    moved = {field.name: to_device(getattr(value, field.name), device) for field in fields(value)}
    if isinstance(value, MutableMapping):  # model outputs of `transformers` are both dataclasses and dicts
        remade: Any = replace(cast("Any", value), **moved)
        return remade
    copied = copy.copy(value)
    for name, item in moved.items():
        object.__setattr__(copied, name, item)  # unlike `setattr`, this also works for frozen dataclasses
    return copied


def read_tensors(tensors: list[torch.Tensor]) -> list[float]:
    """Return the values of one-element tensors. If all are on one device, wait only once for the device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.double() for tensor in tensors]
    values: list[float] = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return values


def packed(model: torch.nn.Module) -> torch.nn.Module:
    """Make a model picklable, in place, and return the model. The receiving process must call `unpacked` on it.

    Pass a copy of the model, because this function changes the classes of some modules. Two things cannot be pickled.
    Modules with a parametrization have a class that `torch.nn.utils.parametrize` created, so they get their original
    class back. Hooks of `transformers` that collect outputs refer to a global variable, which is pickled by its name.
    """
    for part in model.modules():
        if parametrize.is_parametrized(part):
            part.__class__ = parametrize.type_before_parametrizations(part)
    if variable := getattr(sys.modules.get(_CAPTURING), "_active_collector", None):
        copyreg.pickle(type(variable), lambda _: "_active_collector")
    return model


def unpacked(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `packed` on a model, in place, in the process that has received the model. Return the model.

    Modules with a parametrization get back the class that `torch.nn.utils.parametrize` creates. Modules of
    `transformers` are added to the registry in which `transformers` looks up which outputs to collect.
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
