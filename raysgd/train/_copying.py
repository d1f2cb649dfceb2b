"""Copies a state where it is, so that it can be sent and written while the original is trained on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from raysgd._host_buffers import Bytes, HostBuffers

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ALIGNMENT = 64
_KEPT_BYTES = 1 << 20  # the memory for smaller copies is not worth keeping


class Copier:
    """Copies one state after the other. From the second large one on, what costs most is done: its memory is there.

    Memory is used again when nothing refers to the copy in it any more, and not before; for two copies it is kept.
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()

    def copied(self, value: Any) -> tuple[Any, int]:
        """A copy that shares no memory with `value`, and the bytes of its tensors and arrays.

        Tensors come out in host memory, which for those on a GPU is the only copy that is made. A model in
        `DistributedDataParallel` comes out without it, because the wrapper belongs to a group of processes.
        """
        sources = {id(source): source for source in _sources_in(value)}
        num_bytes = sum(_num_bytes(source) for source in sources.values())
        room = sum(_padded(_num_bytes(source)) for source in sources.values())
        memory = self._buffers.take(room) if room >= _KEPT_BYTES else np.empty(room, dtype=np.uint8)
        start, memo = 0, {}
        for identity, source in sources.items():
            size = _num_bytes(source)
            memo[identity] = _copied_into(memory[start : start + size], source)
            start += _padded(size)
        return _rebuilt(value, memo), num_bytes


def _sources_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays whose contents are their elements in memory, in containers and models."""
    value = unwrapped(value)
    if _is_tensor(value) or _is_array(value):
        yield value
    elif type(value) is dict or _is_ordered(value):
        for item in value.values():
            yield from _sources_in(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _sources_in(item)
    elif _is_module(value):
        yield from filter(_is_tensor, (*value.parameters(), *value.buffers()))


def _rebuilt(value: Any, memo: dict[int, Any]) -> Any:
    """The same structure with copies of everything in it; those of tensors and arrays are in `memo`."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) not in memo:
        memo[id(value)] = _rebuilt_once(value, memo)
    return memo[id(value)]


def _rebuilt_once(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) is dict:
        return {key: _rebuilt(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, memo) for item in value)
    if _is_ordered(value):
        made = type(value)((key, _rebuilt(item, memo)) for key, item in value.items())
        vars(made).update(vars(value))  # the versions in a module's state
        return made
    if _is_module(value):
        return _rebuilt_module(unwrapped(value), memo)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            raise ValueError(
                "The checkpoint holds this worker's part of a divided model or optimizer: save what "
                "`raysgd.train.torch.gather_state` returns of it, which all workers have to call."
            )
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _rebuilt_module(module: Any, memo: Mapping[int, Any]) -> Any:
    import torch

    own: dict[int, Any] = {}
    for tensor in filter(_is_tensor, (*module.parameters(), *module.buffers())):
        made = memo[id(tensor)]
        own[id(tensor)] = (
            torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made
        )
    return copy.deepcopy(module, own)


def _copied_into(memory: Bytes, source: Any) -> Any:
    """A copy of a tensor or an array in these bytes."""
    if isinstance(source, np.ndarray):
        array = memory.view(source.dtype).reshape(source.shape)
        np.copyto(array, source)
        return array
    import torch

    stride = torch.empty_like(source, device="meta").stride()
    tensor = torch.from_numpy(memory).view(source.dtype).as_strided(source.shape, stride)
    return tensor.copy_(source.detach())


def _num_bytes(source: Any) -> int:
    return int(source.nbytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    has_elements = value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)
    return has_elements and value.numel() > 0


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray and not value.dtype.hasobject and value.nbytes > 0


def _is_ordered(value: Any) -> bool:
    return hasattr(value, "items") and type(value).__name__ == "OrderedDict"


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def unwrapped(value: Any) -> Any:
    """A model without `DistributedDataParallel`; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.nn.parallel, "DistributedDataParallel"):
        return value
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value
