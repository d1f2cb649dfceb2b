"""Batches of NumPy arrays made of the rows of a stream, and of other batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class ArrayCollate:
    """Stacks what rows have in the same place: of tuples, lists and dicts, also nested.

    Args:
        as_array: Makes a column of its values.
    """

    def __init__(self, as_array: Callable[[Any], Any] = np.asarray) -> None:
        self._as_array = as_array

    def __call__(self, rows: list[Any]) -> Any:
        return _built(rows, self._as_array)

    def join(self, batches: list[Any]) -> Any:
        """Return one batch of one or several."""
        return batches[0] if len(batches) == 1 else _built(batches, np.concatenate)

    def begin_process(self) -> None:
        """Nothing is to be done."""


def _built(parts: list[Any], leaf: Callable[[Any], Any]) -> Any:
    """The same structure as that of each part, with a leaf made of theirs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _built([part[name] for part in parts], leaf) for name in first}
    if isinstance(first, tuple | list):
        columns = [_built(list(column), leaf) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return leaf(parts)
