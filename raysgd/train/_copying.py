"""Copies a state where it is, so that it can be sent and written while the original is trained on."""

from __future__ import annotations

import copy
import sys
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def copied(value: Any) -> tuple[Any, int]:
    """A copy that shares no memory with `value`, and the bytes of its tensors and arrays.

    Tensors come out in host memory, which for those on a GPU is the only copy that is made. A model in
    `DistributedDataParallel` comes out without it, because the wrapper belongs to a group of processes.
    """
    memo: dict[int, Any] = {}
    counter = [0]
    return _copied(value, memo, counter), counter[0]


def _copied(value: Any, memo: dict[int, Any], counter: list[int]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) not in memo:
        memo[id(value)] = _copied_once(value, memo, counter)
    return memo[id(value)]


def _copied_once(value: Any, memo: dict[int, Any], counter: list[int]) -> Any:
    if type(value) is dict:
        return {key: _copied(item, memo, counter) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, memo, counter) for item in value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        counter[0] += value.numel() * value.element_size()
        return value.detach().to("cpu", copy=True)
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        counter[0] += value.nbytes
        return value.copy()
    if torch is not None and isinstance(value, torch.nn.Module):
        return _copied_module(unwrapped(value), counter)
    if hasattr(value, "items") and type(value).__name__ == "OrderedDict":
        made = type(value)((key, _copied(item, memo, counter)) for key, item in value.items())
        vars(made).update(vars(value)) if hasattr(value, "__dict__") else None  # the versions in a module's state
        return made
    return copy.deepcopy(value)


def _copied_module(module: Any, counter: list[int]) -> Any:
    counter[0] += sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    return copy.deepcopy(module)


def unwrapped(value: Any) -> Any:
    """A model without `DistributedDataParallel`; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.nn.parallel, "DistributedDataParallel"):
        return value
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value
