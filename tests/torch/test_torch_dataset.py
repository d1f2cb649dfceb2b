"""`TorchMLDataset`: shards of data frames as datasets of PyTorch."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from raysgd.torch.torch_dataset import TorchMLDataset
from raysgd.util.data import MLDataset, from_parallel_iter
from raysgd.util.iter import from_range


def record(number: int) -> dict[str, Any]:
    return {
        "x": number,
        "pair": [number, -number],
        "image": np.full((2, 2), number),
        "y": number % 2,
    }


def frames(num_shards: int = 1) -> MLDataset:
    return from_parallel_iter(from_range(6, num_shards).for_each(record), batch_size=4)


def test_a_row_is_a_tuple_of_features_and_label() -> None:
    shard = TorchMLDataset(frames(), feature_columns="x", label_column="y").get_shard(0)
    assert isinstance(shard, IterableDataset)
    rows = list(shard)
    assert [(x.tolist(), y.tolist()) for x, y in rows] == [([float(n)], [float(n % 2)]) for n in range(6)]
    assert rows[0][0].dtype == rows[0][1].dtype == torch.float


def test_shapes_and_types_are_as_asked_for() -> None:
    dataset = TorchMLDataset(
        frames(), ["x", "pair", "image"], [1, 2, (1, 2, 2)], [torch.long, torch.float, torch.double], "y", 0, torch.long
    )
    x, pair, image, y = next(iter(dataset.get_shard(0)))
    assert [part.dtype for part in (x, pair, image, y)] == [torch.long, torch.float, torch.double, torch.long]
    assert [tuple(part.shape) for part in (x, pair, image, y)] == [(1,), (2,), (1, 2, 2), (1,)]


def test_a_loader_makes_batches_of_a_shard() -> None:
    dataset = TorchMLDataset(frames(2), ["x"], label_column="y")
    dataset.set_num_shards(3)
    batches = list(DataLoader(dataset.get_shard(2), batch_size=2))
    assert [tuple(x.shape) for x, _ in batches] == [(x.shape[0], 1) for x, _ in batches]
    everything = [row[0].item() for index in range(3) for row in dataset.get_shard(index)]
    assert sorted(everything) == list(range(6))


def test_a_shard_travels_and_begins_anew() -> None:
    shard = TorchMLDataset(frames(), "x", label_column="y").get_shard(0, shuffle=True, shuffle_buffer_size=2, seed=1)
    again = cloudpickle.loads(cloudpickle.dumps(shard))
    orders = [[row[0].item() for row in each] for each in (shard, shard, again)]
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_columns": None}, "`feature_columns=None`"),
        ({"label_column": None}, "`label_column=None`"),
        ({"feature_columns": ["x", "pair"], "feature_shapes": [1]}, "`feature_shapes` has 1 entries for 2"),
        ({"feature_types": [torch.float, torch.float]}, "`feature_types` has 2 entries for 1"),
        ({"feature_types": "float"}, r"need a `torch.dtype`"),
        ({"label_type": float}, r"need a `torch.dtype`"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        TorchMLDataset(frames(), **{"feature_columns": ["x"], "label_column": "y", **options})


def test_objects_that_are_no_numbers_are_named() -> None:
    texts = from_parallel_iter(from_range(2, 1).for_each(lambda number: {"x": {number}, "y": 1}))
    with pytest.raises(TypeError, match="Column 'x' has a `set`"):
        list(TorchMLDataset(texts, "x", label_column="y").get_shard(0))
