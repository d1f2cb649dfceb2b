"""`TFMLDataset`: shards of data frames as `tf.data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysgd.tf import TFMLDataset


class Frames:
    """Rows in shards, two rows to a frame; shuffled by reversal."""

    def __init__(self, rows: pd.DataFrame, num_shards: int) -> None:
        self.rows, self._num_shards = rows, num_shards

    def num_shards(self) -> int:
        return self._num_shards

    def repartition(self, num_shards: int) -> Frames:
        return Frames(self.rows, num_shards)

    def get_repeatable_shard(
        self, index: int, batch_ms: int, num_async: int, shuffle: bool, shuffle_buffer_size: int, seed: int | None
    ) -> Iterator[pd.DataFrame]:
        rows = self.rows.iloc[index :: self._num_shards]
        rows = rows.iloc[::-1] if shuffle else rows
        return (rows.iloc[start : start + 2] for start in range(0, len(rows), 2))

    def gather_async(self, batch_ms: int, num_async: int) -> Iterator[pd.DataFrame]:
        return iter([self.rows])


ROWS = pd.DataFrame(
    {
        "x": range(5),
        "pair": [[float(number), -1.0] for number in range(5)],
        "y": [10 * number for number in range(5)],
    }
)


def rows_of(dataset: Any) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in dataset.as_numpy_iterator()]


def test_rows_of_a_shard_are_feature_and_label() -> None:
    dataset = TFMLDataset(Frames(ROWS, 2), ["x"], label_column="y")
    assert rows_of(dataset.get_shard(0)) == [(0.0, 0.0), (2.0, 20.0), (4.0, 40.0)]
    shard = dataset.get_shard(1)
    assert rows_of(shard) == rows_of(shard) == [(1.0, 10.0), (3.0, 30.0)]
    assert rows_of(dataset.get_shard(1, shuffle=True)) == [(3.0, 30.0), (1.0, 10.0)]
    assert len(rows_of(dataset.get_shard(-1))) == 5


def test_the_number_of_shards_is_changed_where_it_is_another_one() -> None:
    dataset = TFMLDataset(Frames(ROWS, 2), "x", label_column="y")
    dataset.set_num_shards(5)
    assert rows_of(dataset.get_shard(4)) == [(4.0, 40.0)]


def test_several_columns_make_a_tuple_with_shapes_and_kinds() -> None:
    dataset = TFMLDataset(Frames(ROWS, 1), ["x", "pair"], [None, [2]], [np.int64, np.float64], "y", 1, np.int32)
    (x, pair), y = dataset.get_shard(0).element_spec
    assert (x.shape, x.dtype.name) == ((), "int64")
    assert (pair.shape, pair.dtype.name) == ((2,), "float64")
    assert (y.shape, y.dtype.name) == ((1,), "int32")
    (number, values), label = list(dataset.get_shard(0).as_numpy_iterator())[3]
    assert (number, values.tolist(), label.tolist()) == (3, [3.0, -1.0], [30])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_shapes": [()]}, "`feature_shapes` has 1 entries for 2 feature columns"),
        ({"feature_types": [np.float32] * 3}, "`feature_types` has 3 entries"),
        ({"feature_shapes": (1, 2, 3)}, "`feature_shapes` has 3 entries for 2 feature columns"),
        ({"label_column": None}, "`label_column=None`"),
        ({"feature_columns": []}, r"`feature_columns=\[\]`: name at least one"),
    ],
)
def test_lists_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        TFMLDataset(Frames(ROWS, 1), **{"feature_columns": ["x", "pair"], "label_column": "y", **options})
