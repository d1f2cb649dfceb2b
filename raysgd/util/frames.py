"""Columns of data frames in shards: what `TorchMLDataset` and `TFMLDataset` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ShardedFrames:
    """Holds the data frames in shards, a `raysgd.util.data.MLDataset`, and the columns that are used of them.

    The arguments are those of the subclasses; `make_column` takes a name, a shape and a type, of which the last two may
    be None.

    Raises:
        AssertionError: A list has another length than `feature_columns`, or no column is named.
    """

    def __init__(
        self,
        make_column: Callable[[Any, Any, Any], Any],
        ds: Any,
        feature_columns: Any,
        feature_shapes: Any,
        feature_types: Any,
        label_column: Any,
        label_shape: Any,
        label_type: Any,
    ) -> None:
        names = [] if feature_columns is None else _listed(feature_columns)
        assert names, f"`feature_columns={feature_columns!r}`: name at least one column."
        assert label_column is not None, "`label_column=None`: name the column of labels."
        shapes = _one_each("feature_shapes", feature_shapes, len(names))
        types = _one_each("feature_types", feature_types, len(names))
        facts = [*zip(names, shapes, types, strict=True), (label_column, label_shape, label_type)]
        self._ds = ds
        self._columns = [make_column(*each) for each in facts]

    def set_num_shards(self, num_shards: int) -> None:
        """Divides the data again if there are not as many shards."""
        if num_shards != self._ds.num_shards():
            self._ds = self._ds.repartition(num_shards)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _one_each(name: str, given: Any, number: int) -> list[Any]:
    """Return one entry for each column; a tuple of numbers is the shape of a single one."""
    if given is None:
        return [None] * number
    is_shape = isinstance(given, tuple) and number == 1 and all(isinstance(size, int) for size in given)
    entries = [given] if is_shape else _listed(given)
    assert len(entries) == number, (
        f"`{name}` has {len(entries)} entries for {number} feature columns: give one for each."
    )
    return entries
