"""Copies of tensors and objects that a batch may change, and digests of tensors."""

from __future__ import annotations

import enum
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.tensors import BITS


class TensorCopies:
    """Copies tensors, on the tensors' devices, and restores their values. Each batch reuses the copies' memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []  # original `.data` of each tensor; user code may replace it
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take_copies(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors over the previous copies, and free the memory that is no longer needed."""
        for index, tensor in enumerate(tensors):
            kinds = [(each.shape, each.dtype, each.device) for each in (tensor, *self._copies[index : index + 1])]
            if len({*kinds}) > 1 or len(kinds) == 1:
                self._copies[index : index + 1] = [torch.empty_like(tensor, requires_grad=False)]
        del self._copies[len(tensors) :]
        _copy(self._copies, tensors)
        self._tensors, self._data = tensors, [each.data for each in tensors]

    def differ(self, first: Sequence[torch.Tensor]) -> bool:
        """Return True if any tensor in `first` has changed since the last `take_copies`.

        Args:
            first: The first elements of the list that was passed to `take_copies`.
        """
        pairs = zip(first, self._copies, strict=False)
        return not all(torch.equal(each, copy) for each, copy in pairs)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the copied tensors. If user code replaced a tensor's `data`, first undo this."""
        for tensor, data in zip(self._tensors, self._data, strict=True):
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
        _copy(self._tensors, self._copies)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the values of `sources` to `targets`. On a GPU, tensors of the same dtype are copied together."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.device, None if target.is_cpu else target.dtype), []).append((target, source))
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor object to restore later: the tensor itself, or a copy if it is sparse."""
    return tensor.clone() if tensor is not None and tensor.layout != torch.strided else tensor


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if values can be written into a tensor, False if it is sparse or expanded."""
    if tensor.layout != torch.strided:
        return False
    return all(stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor, to detect changes later: the sums of its rows, with its bits read as integers.

    Nearly any change of the tensor also changes one of the sums.
    """
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten(-2 if bits.ndim else 0)
    size = bits.element_size()
    has_words = bits.ndim > 0 and bits.is_contiguous() and not bits.storage_offset() * size % 8
    kind = torch.int64 if has_words and not bits.shape[-1] * size % 8 else BITS[size]  # summing 8-byte words is faster
    return bits.view(kind).sum(-1, dtype=torch.int64)


_OPEN = (torch.optim.Optimizer, LRScheduler, Precision, torch.amp.GradScaler, types.SimpleNamespace)
"""Classes whose state is in their attributes, although they say how they are pickled."""
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, frozenset, enum.Enum, np.generic, np.dtype, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, logging.Logger, weakref.ref),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
"""Types of objects that do not change, or whose changes do not matter to training."""


class ObjectCopies:
    """Copies objects in optimizers, schedulers and callbacks, and collects the tensors in them.

    Copied are containers, NumPy arrays, random number generators, and objects whose whole state is in their attributes.

    Args:
        seen: IDs of objects to leave out.

    Attributes:
        tensors: The tensors in the objects. Their values are not copied here.
        unknown: Class of an object whose state cannot be copied, such as an open file or a lock. None if there is none.
    """

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen
        self._restore: list[Callable[[], object]] = []
        self.tensors: list[torch.Tensor] = []
        self.unknown: type | None = None

    def copy(self, value: Any) -> None:
        """Copy a nested value."""
        if isinstance(value, _CONSTANT) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            self._copy_each([*value.parameters(), *value.buffers()])
        elif isinstance(value, _OPEN):
            self.copy(vars(value))
        elif isinstance(value, dict | list | set | deque):
            self._restore.append(partial(_refill, value, value.copy()))
            self._copy_each(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._copy_each(value)
        elif isinstance(value, partial):
            self._copy_each([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            if value.flags.writeable:
                self._restore.append(partial(np.copyto, value, value.copy()))
        elif (restore := _restore_of_generator(value)) is not None:
            self._restore.append(restore)
        elif (attributes := _attributes_of(value)) is not None:
            self.copy(attributes)
        else:
            self.unknown = type(value)

    def _copy_each(self, values: Any) -> None:
        for each in values:
            self.copy(each)

    def restore(self) -> None:
        """Restore everything that was copied."""
        for restore in self._restore:
            restore()


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, dict):
        for name, value in content.items():  # without clearing the dict first: another thread may be reading it
            container[name] = value
        for name in container.keys() - content.keys():
            del container[name]
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def _restore_of_generator(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the present state of a random number generator; None for other objects."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object if they are its whole state. Return None for other objects.

    Objects of other kinds say how they are pickled, have slots, or are written in C, so that Python does not pickle
    them.
    """
    kind, methods = type(value), ("__reduce_ex__", "__reduce__", "__getstate__")
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in methods):
        return None
    if any(vars(each).get("__slots__") for each in kind.__mro__):
        return None
    try:
        value.__reduce_ex__(4)
    except TypeError:
        return None
    return getattr(value, "__dict__", {})
