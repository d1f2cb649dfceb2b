"""Notes of the state of objects, to put them back without replacing what stands there."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

_MOST_BYTES = 2**20  # of arrays that are put back
_PLAIN_VALUES = (type(None), bool, int, float, complex, str, bytes, range)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_OWN_ROOM = "raysgd._numbers."  # meters and timers, which users make, too

Undo = Callable[[], object]
"""Puts one object back."""


@dataclass
class StateNotes:
    """Notes of the state of objects, to put them back.

    Attributes:
        seen: Objects that need not be looked at again, by identity.
        undo_of: Notes how objects are that only the caller knows, such as tensors; None for any other.
        is_open: Whether to look into objects of a library's class, and of those derived from it.
        undos: What puts them back.
    """

    seen: set[int]
    undo_of: Callable[[Any], Undo | None]
    is_open: Callable[[type], bool]
    undos: list[Undo] = field(default_factory=list)

    def take(self, owner: Any) -> None:
        """Notes `owner` and what is inside it."""
        self.undos.append(partial(_refill_attributes, vars(owner), dict(vars(owner))))
        self.seen.add(id(owner))
        waiting = deque(vars(owner).values())
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _PLAIN_VALUES) or id(value) in self.seen:
                continue
            self.seen.add(id(value))
            undo = self.undo_of(value) or _undo_of_array(value)
            if undo is not None:
                self.undos.append(undo)
            else:
                waiting += self._inside(value)

    def _inside(self, value: Any) -> list[Any]:
        """Notes the value itself; returns what it holds."""
        kind = type(value)
        if kind in _MAPPINGS:
            return self._note(_refill_mapping, value, dict(value))
        if kind is list:
            return self._note(_refill_list, value, list(value))
        if kind in (set, deque):
            return self._note(_refill, value, list(value))
        if isinstance(value, tuple):
            return list(value)
        if hasattr(value, "__dict__") and all(_is_of_user(base) or self.is_open(base) for base in kind.__mro__[:-1]):
            return self._note(_refill_attributes, vars(value), dict(vars(value)))
        return []

    def _note(self, refill: Callable[[Any, Any], None], value: Any, content: Any) -> list[Any]:
        self.undos.append(partial(refill, value, content))
        return list(content.values()) if isinstance(content, dict) else content


def _undo_of_array(value: Any) -> Undo | None:
    if not isinstance(value, np.ndarray) or value.nbytes > _MOST_BYTES or not value.flags.writeable:
        return None
    return partial(np.copyto, value, value.copy())


def _refill_attributes(value: dict[str, Any], content: dict[str, Any]) -> None:
    """None of them is missing at any moment: another thread may read them."""
    value.update(content)
    for name in value.keys() - content.keys():
        del value[name]


def _refill_mapping(value: Any, content: dict[Any, Any]) -> None:
    value.clear()
    for key, item in content.items():
        value[key] = item


def _refill_list(value: list[Any], content: list[Any]) -> None:
    value[:] = content


def _refill(value: Any, content: list[Any]) -> None:
    value.clear()
    (value.extend if isinstance(value, deque) else value.update)(content)


def _is_of_user(kind: type) -> bool:
    """Tells whether no library defines the class. A library's may be anything: an open file, a client, a thread."""
    name = kind.__module__
    root = name.partition(".")[0]
    if name == "__main__" or name.startswith(_OWN_ROOM):
        return True
    if root in sys.stdlib_module_names or root == "raysgd":
        return False
    place = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in place and "dist-packages" not in place
