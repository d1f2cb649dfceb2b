"""Data frames in shards, also as datasets of PyTorch and TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest

from raysgd.util.data import MLDataset, from_parallel_iter
from raysgd.util.iter import from_items, from_range


@dataclass
class Record:
    x: int
    y: float


def squares(n: int = 6, num_shards: int = 1, batch_size: int = 4) -> MLDataset:
    pairs = from_range(n, num_shards).for_each(lambda number: [number, number**2])
    return from_parallel_iter(pairs, batch_size=batch_size)


def values(frames: Any) -> list[Any]:
    return [frame.to_numpy().tolist() for frame in frames]


def test_records_become_frames_of_so_many_rows() -> None:
    frames = list(squares().get_shard(0))
    assert [list(frame.columns) for frame in frames] == [[0, 1], [0, 1]]
    assert values(frames) == [[[0, 0], [1, 1], [2, 4], [3, 9]], [[4, 16], [5, 25]]]


@pytest.mark.parametrize(
    ("record", "columns"),
    [(Record(1, 2.0), ["x", "y"]), ({"a": 1, "b": 2}, ["a", "b"]), ((1, 2.0), [0, 1]), (range(2), [0, 1])],
)
def test_records_of_several_kinds(record: Any, columns: list[Any]) -> None:
    [frame] = from_parallel_iter(from_items([record, record], 1)).get_shard(0)
    assert list(frame.columns) == columns
    assert len(frame) == 2


@pytest.mark.parametrize("record", [3, "text"])
def test_what_is_no_record(record: Any) -> None:
    with pytest.raises(ValueError, match="need a list or another iterable, a dict, or a dataclass"):
        from_parallel_iter(from_items([record], 1)).take(1)


def test_frames_can_be_there_already() -> None:
    frame = pd.DataFrame({"x": [1, 2]})
    dataset = from_parallel_iter(from_items([frame], 1), need_convert=False, repeated=True)
    assert dataset.take(1)[0] is frame
    assert dataset.repeated


def test_what_is_made_of_a_dataset_is_one() -> None:
    dataset = squares(num_shards=2, batch_size=2)
    for made in (dataset.repartition(3), dataset.union(dataset), dataset.select_shards([1]), dataset.batch(3)):
        assert isinstance(made, MLDataset)
    assert repr(dataset).startswith("MLDataset[from_parallel_iter")
    assert values(dataset.repartition(1).get_shard(0))[:2] == [[[0, 0], [1, 1]], [[3, 9], [4, 16]]]


def test_frames_of_another_size_have_the_same_rows() -> None:
    cut = squares(7, batch_size=3).batch(2)
    assert [len(frame) for frame in cut.get_shard(0)] == [2, 2, 2, 1]
    assert [row[0] for frame in values(cut.get_shard(0)) for row in frame] == list(range(7))
    assert cut.batch_size == 2


def test_a_repeatable_shard_begins_anew() -> None:
    shard = squares().get_repeatable_shard(0)
    assert values(shard) == values(shard) == values(squares().get_shard(0))


def test_a_shuffle_changes_the_order_of_frames_and_rows() -> None:
    dataset = squares(40, batch_size=4)
    shard = dataset.get_repeatable_shard(0, shuffle=True, shuffle_buffer_size=5, seed=3)
    frames = values(cloudpickle.loads(cloudpickle.dumps(shard)))
    assert frames == values(shard)
    firsts = [frame[0][0] // 4 for frame in frames]
    assert sorted(firsts) == list(range(10)) != firsts
    assert any(frame != sorted(frame) for frame in frames)
    assert sorted(row[0] for frame in frames for row in frame) == list(range(40))
    assert [frame.index.tolist() for frame in shard] == [[0, 1, 2, 3]] * 10


def test_a_shard_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="there are shards 0 to 0"):
        squares().get_repeatable_shard(1)


def test_it_is_made_into_datasets_of_pytorch() -> None:
    rows = list(squares().to_torch(feature_columns=[0], label_column=1).get_shard(0))
    assert [tuple(part.item() for part in row) for row in rows] == [(float(n), float(n**2)) for n in range(6)]


# ------------------------------------------------------------------------------------------------ TensorFlow

ROWS = [{"x": number, "pair": [float(number), -1.0], "y": 10 * number} for number in range(5)]


def frames(num_shards: int) -> MLDataset:
    """Two rows to a frame."""
    return from_parallel_iter(from_items(ROWS, num_shards), batch_size=2)


def rows_of(dataset: Any) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in dataset.as_numpy_iterator()]


def test_rows_of_a_shard_are_feature_and_label() -> None:
    dataset = frames(2).to_tf(["x"], label_column="y")
    assert rows_of(dataset.get_shard(0)) == [(0.0, 0.0), (2.0, 20.0), (4.0, 40.0)]
    shard = dataset.get_shard(1)
    assert rows_of(shard) == rows_of(shard) == [(1.0, 10.0), (3.0, 30.0)]
    shuffled = [rows_of(dataset.get_shard(0, shuffle=True, seed=seed)) for seed in range(5)]
    assert {tuple(sorted(rows)) for rows in shuffled} == {((0.0, 0.0), (2.0, 20.0), (4.0, 40.0))}
    assert len({tuple(rows) for rows in shuffled}) > 1
    assert len(rows_of(dataset.get_shard(-1))) == 5


def test_the_number_of_shards_is_changed_where_it_is_another_one() -> None:
    dataset = frames(2).to_tf("x", label_column="y")
    dataset.set_num_shards(3)
    assert rows_of(dataset.get_shard(1)) == [(4.0, 40.0)]


def test_several_columns_make_a_tuple_with_shapes_and_kinds() -> None:
    dataset = frames(1).to_tf(["x", "pair"], [None, [2]], [np.int64, np.float64], "y", 1, np.int32)
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
        frames(1).to_tf(**{"feature_columns": ["x", "pair"], "label_column": "y", **options})
