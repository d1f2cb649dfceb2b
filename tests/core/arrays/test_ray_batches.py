"""Datasets of Ray Data as batches: what is asked of Ray, and what becomes of rows.

What Ray makes of it is seen in `tests/data/test_ray_data_integration.py`. Covers `raysgd.torch.data.batches`, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.core.arrays.user_data import BatchForm, RayBatches, RayLoader, RayShare, ray_batches
from raysgd.core.engine.shared.types import World
from raysgd.torch.data.batches import as_batch, as_tensor
from raysgd.utils import BATCH_SIZE
from tests.core.arrays.rows import Rows


class OldRows(Rows):
    def repartition(self, *, target_num_rows_per_block: int) -> Rows:  # type: ignore[override]
        raise AssertionError("never reached")


def ids(share: RayShare) -> list[list[int]]:
    return [batch["id"].tolist() for batch in share.arrays()]


def test_every_row_is_in_one_batch_and_global_batches_are_in_order() -> None:
    shares = RayBatches(Rows(list(range(11))), batch_size=2).shares(2)
    assert [ids(share) for share in shares] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


def test_several_batches_may_be_dealt_at_a_time() -> None:
    shares = RayBatches(Rows(list(range(11))), batch_size=2, batches_per_block=2).shares(2)
    assert [ids(share) for share in shares] == [[[0, 1], [2, 3], [8, 9], [10]], [[4, 5], [6, 7]]]


def test_one_worker_reads_the_dataset_itself() -> None:
    [share] = RayBatches(Rows([1, 2, 3]), batch_size=2).shares(1)
    assert ids(share) == ids(share) == [[1, 2], [3]]


def test_the_batch_size_may_be_that_of_the_config() -> None:
    batches = RayBatches(Rows([]))
    assert batches.sized({"batch_size": 3}).batch_size == 3
    assert batches.sized({BATCH_SIZE: 4, "batch_size": 3}).batch_size == 4
    assert replace(batches, batch_size=2).sized({"batch_size": 3}).batch_size == 2
    with pytest.raises(ValueError, match=r"`raysgd.data.RayBatches\(dataset, batch_size=...\)`"):
        batches.sized({})


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(TypeError, match="`RayBatches` got a `list`"):
        RayBatches([1])
    with pytest.raises(ValueError, match="`batch_size=0`"):
        RayBatches(Rows([]), batch_size=0)
    with pytest.raises(ValueError, match="`batches_per_block=0`"):
        RayBatches(Rows([]), batches_per_block=0)
    with pytest.raises(ValueError, match="pass both"):
        RayBatches(Rows([]), label_column="y")
    with pytest.raises(RuntimeError, match=r'Run: pip install --upgrade "ray\[data\]>=2.55"'):
        RayBatches(OldRows([]), batch_size=1).shares(2)


def test_datasets_are_known_by_what_they_can_do() -> None:
    rows, batches = Rows([]), RayBatches(Rows([]), batch_size=1)
    assert ray_batches(batches) is batches
    assert ray_batches(rows) == RayBatches(rows)
    assert ray_batches([1]) is ray_batches(None) is None


def as_lists(arrays: Mapping[str, Any], form: BatchForm) -> Any:
    return arrays["id"].tolist()


def test_a_loader_waits_for_its_share_unless_it_is_alone() -> None:
    batches = RayBatches(Rows([1, 2, 3]), batch_size=2)
    alone = RayLoader(batches, World(0, 1), as_lists)
    assert list(alone) == list(alone) == [[1, 2], [3]]
    shared = RayLoader(batches, World(1, 2), as_lists)
    with pytest.raises(RuntimeError, match="has no shard of the Ray Data dataset yet"):
        iter(shared)
    shared.iterator = batches.shares(2)[1].iterator
    assert list(shared) == [[3]]


ARRAYS = {
    "x": np.array([1.0, 2.0]),
    "z": np.array([[3, 4], [5, 6]]),
    "y": np.array([0, 1]),
    "text": np.array(["a", "b"]),
}


def form(**options: Any) -> BatchForm:
    return RayBatches(Rows([]), batch_size=2, **options).form


class TestTensors:
    def test_all_columns_by_name(self) -> None:
        batch = as_batch(ARRAYS, form())
        assert {name: batch[name].tolist() for name in ("x", "y")} == {"x": [1, 2], "y": [0, 1]}
        assert batch["text"].tolist() == ["a", "b"]

    def test_features_and_label(self) -> None:
        x, y = as_batch(ARRAYS, form(feature_columns="x", label_column="y"))
        assert (x.tolist(), y.tolist()) == ([1, 2], [0, 1])
        both, y = as_batch(ARRAYS, form(feature_columns=["x", "z"], label_column=["y"]))
        assert (both.tolist(), y.tolist()) == ([[1, 3, 4], [2, 5, 6]], [[0], [1]])

    def test_a_function_of_ones_own_comes_last(self) -> None:
        batch = as_batch(ARRAYS, form(feature_columns="x", label_column="y", transform=lambda batch: batch[1]))
        assert batch.tolist() == [0, 1]

    def test_a_column_that_there_is_not(self) -> None:
        with pytest.raises(ValueError, match=r"no column 'w'\. Available: \['text', 'x', 'y', 'z'\]"):
            as_batch(ARRAYS, form(feature_columns="w", label_column="y"))

    @pytest.mark.parametrize(
        ("values", "kind"),
        [
            (np.array([1.5]), torch.float32),
            (np.array([1.5], np.float32), torch.float32),
            (np.array([1]), torch.int64),
            (np.array([True]), torch.bool),
            (torch.tensor([1.5], dtype=torch.bfloat16), torch.bfloat16),
            (torch.tensor([1.5], dtype=torch.float64), torch.float32),
            (torch.tensor([1], dtype=torch.int32), torch.int32),
        ],
    )
    def test_kinds_of_numbers(self, values: Any, kind: torch.dtype) -> None:
        assert as_tensor(values).dtype == kind

    def test_arrays_in_rows_become_one_tensor(self) -> None:
        rows = np.empty(2, object)
        rows[:] = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
        assert as_tensor(rows).tolist() == [[1, 2], [3, 4]]

    def test_a_tensor_has_memory_of_its_own(self) -> None:
        values = np.array([1.0, 2.0], np.float32)
        values.flags.writeable = False
        as_tensor(values).add_(1)
        assert values.tolist() == [1, 2]
        tensor = torch.tensor([1.0, 2.0])
        as_tensor(tensor).add_(1)
        assert tensor.tolist() == [1, 2]
