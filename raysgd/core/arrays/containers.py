"""Converts the outputs of `predict` to the type of the user's data, for example to columns of a data frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from raysgd.core.arrays import trees

PREDICTION = "prediction"
"""Name under which a container stores a result of `predict_batch` that has no name."""

_BLOCK_BYTES = 2**20


class ArrayContainer:
    """Returns the outputs of `predict` as arrays, for data that consists of arrays.

    Args:
        leaf: Function that converts each NumPy array to the type that the user gets.
        is_dict: True to return a dict. An output that is not a dict is then stored under the key "prediction".
    """

    def __init__(self, leaf: Callable[[Any], Any] = trees.own, is_dict: bool = False) -> None:
        self._leaf, self._is_dict = leaf, is_dict

    def stream(self, outputs: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the outputs of each batch, converted to the type that the user gets."""
        return (self._shown(output) for output in outputs)

    def collect(self, outputs: Iterable[Any]) -> Any:
        """Concatenate the outputs of all batches. Each resulting array has one row for each row of the data."""
        collected = list(outputs)
        if not collected:
            return {} if self._is_dict else self._leaf(np.zeros(0, np.float32))
        return self._shown(trees.joined(collected))

    def _shown(self, output: Any) -> Any:
        if self._is_dict and not isinstance(output, Mapping):
            output = {PREDICTION: output}
        return trees.mapped(output, lambda leaf: leaf if isinstance(leaf, list) else self._leaf(leaf))


class DataFrameContainer:
    """Returns the outputs of `predict` as columns of a pandas data frame.

    Args:
        index: Index of the data frame passed to `predict`.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    def stream(self, outputs: Iterator[Any]) -> Iterator[Any]:
        """Yield a data frame for each batch."""
        start = 0
        for output in outputs:
            frame = self._frame(output, start)
            start += len(frame)
            yield frame

    def collect(self, outputs: Iterable[Any]) -> Any:
        """Return one data frame with the rows of all batches."""
        collected = list(outputs)
        return self._frame(trees.joined(collected) if collected else {}, 0)

    def _frame(self, output: Any, start: int) -> Any:
        import pandas as pd

        columns = {name: column for key, leaf in named(output) for name, column in _columns(key, leaf)}
        num_rows = len(next(iter(columns.values()), ()))
        return pd.DataFrame(columns, index=self._index[start : start + num_rows])


class RayDataContainer:
    """Returns the outputs of `predict` as a Ray Data dataset, in Ray's object store instead of the driver's memory."""

    def stream(self, outputs: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over dicts of arrays, one for each batch, like Ray Data's `iter_batches`."""
        return ({name: trees.own(leaf) for name, leaf in named(output)} for output in outputs)

    def collect(self, outputs: Iterable[Any]) -> Any:
        """Write the outputs of all batches to Ray's object store and return them as a Ray Data dataset."""
        import ray
        import ray.data

        blocks: list[Any] = [ray.put(_as_frame(trees.joined(group))) for group in _groups(outputs)]
        return ray.data.from_pandas_refs(blocks) if blocks else ray.data.from_items([])


Container: TypeAlias = ArrayContainer | DataFrameContainer | RayDataContainer
"""Converts the outputs of batches into the result of `predict`."""


def named(output: Any) -> Iterator[tuple[str, Any]]:
    """Yield a name and an array for each array in the output of `predict` for one batch.

    Names look like `prediction`, `prediction_0` or `box.x`.
    """
    if isinstance(output, Mapping):
        for key, part in output.items():
            yield from ((_inside(str(key), name), leaf) for name, leaf in named(part))
    elif isinstance(output, tuple):
        names = getattr(output, "_fields", range(len(output)))
        for name, part in zip(names, output, strict=True):
            outer = name if isinstance(name, str) else f"{PREDICTION}_{name}"
            yield from ((_inside(outer, inner), leaf) for inner, leaf in named(part))
    else:
        yield PREDICTION, output


def _inside(outer: str, inner: str) -> str:
    return outer if inner == PREDICTION else f"{outer}.{inner}"


def _columns(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Convert an output array to columns of a data frame. Yield the name and values of each column.

    A matrix becomes several columns, one for each of its columns. An array with more dimensions becomes a column of
    objects.
    """
    shape: Sequence[int] = getattr(leaf, "shape", (len(leaf),))
    if len(shape) == 2 and shape[1] > 1:
        yield from ((f"{name}_{index}", leaf[:, index]) for index in range(shape[1]))
    elif len(shape) == 2 and shape[1] == 1:
        yield name, leaf[:, 0]
    else:
        yield name, list(leaf) if len(shape) > 1 else leaf


def _as_frame(output: Any) -> Any:
    """Return the output as a data frame that can be a block of a Ray Data dataset.

    An array with several dimensions becomes a column of arrays, which Ray Data reads as tensors.
    """
    import pandas as pd

    return pd.DataFrame({name: leaf if np.ndim(leaf) < 2 else list(leaf) for name, leaf in named(output)})


def _groups(outputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the batches' outputs in lists, each large enough for one block of a Ray Data dataset."""
    group: list[Any] = []
    num_bytes = 0
    for output in outputs:
        group.append(output)
        num_bytes += trees.nbytes(output)
        if num_bytes >= _BLOCK_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
