"""Copies the objects that a batch may change, besides the values of tensors, and restores them."""

from __future__ import annotations

import enum
import functools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from raysgd.torch.objects.precision import Precision

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
            self._restore.append(functools.partial(_refill, value, value.copy()))
            self._copy_each(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._copy_each(value)
        elif isinstance(value, functools.partial):
            self._copy_each([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            if value.flags.writeable:
                self._restore.append(functools.partial(np.copyto, value, value.copy()))
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
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
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
