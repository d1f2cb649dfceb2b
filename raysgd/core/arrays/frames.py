"""The base class of `TorchMLDataset` and `TFMLDataset`, which select columns of sharded data frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Column = tuple[Any, Any, Any]
"""A column's name, its shape in a row, and its type. None stands for the framework's default shape or type."""


class ShardedFrames(ABC):
    """Holds sharded data frames (a `raysgd.util.data.MLDataset`) and the columns to use as model inputs and label.

    The docstrings of the subclasses explain the arguments.

    Raises:
        AssertionError: `feature_columns` or `label_column` is missing, or the length of `feature_shapes` or
            `feature_types` differs from that of `feature_columns`.
    """

    def __init__(
        self,
        ds: Any = None,
        feature_columns: Any = None,
        feature_shapes: Any = None,
        feature_types: Any = None,
        label_column: Any = None,
        label_shape: Any = None,
        label_type: Any = None,
    ) -> None:
        names = [] if feature_columns is None else _listed(feature_columns)
        assert names, f"`feature_columns={feature_columns!r}`: name at least one column."
        assert label_column is not None, "`label_column=None`: name the column of labels."
        shapes = _one_each("feature_shapes", feature_shapes, len(names))
        types = _one_each("feature_types", feature_types, len(names))
        self._ds = ds
        self._columns: list[Column] = [*zip(names, shapes, types, strict=True), (label_column, label_shape, label_type)]
        for each in self._columns:
            self._check(*each)

    @abstractmethod
    def _check(self, name: Any, shape: Any, kind: Any) -> None:
        """Raise an error for a column that the framework (PyTorch or TensorFlow) cannot convert to a tensor."""

    def set_num_shards(self, num_shards: int) -> None:
        """Repartition the data frames if their number of shards differs from `num_shards`."""
        if num_shards != self._ds.num_shards():
            self._ds = self._ds.repartition(num_shards)


def _listed(columns: Any) -> list[Any]:
    return list(columns) if isinstance(columns, list | tuple) else [columns]


def _one_each(name: str, values: Any, number: int) -> list[Any]:
    """Return a list with one entry per feature column, from an argument such as `feature_shapes`.

    If there is a single feature column, a tuple of integers is the shape of that column.
    """
    if values is None:
        return [None] * number
    is_shape = isinstance(values, tuple) and number == 1 and all(isinstance(size, int) for size in values)
    found = [values] if is_shape else _listed(values)
    assert len(found) == number, f"`{name}` has {len(found)} entries for {number} feature columns: give one for each."
    return found
