"""Datasets of Ray Data, divided over the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster"), RunIf(modules=["pandas", "pyarrow"])]


def read_twice() -> list[list[int]]:
    """As rows, and as batches of tensors, the way of the guides of Ray 1."""
    shard = train.get_dataset_shard("train")
    batches = shard.to_torch(label_column="id", feature_columns=["x"], batch_size=2)
    return [
        sorted(row["id"] for row in shard.iter_rows()),
        sorted(int(label) for features, labels in batches for label in labels if features.shape[1:] == (1,)),
    ]


def test_each_row_is_in_one_shard_and_can_be_read_again(tmp_path: Path) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items([{"id": number, "x": number / 2} for number in range(10)], override_num_blocks=3)
    trainer = Trainer(BackendConfig(), num_workers=2, logdir=tmp_path)
    trainer.start()
    try:
        returned: list[Any] = trainer.run(read_twice, dataset={"train": dataset})
    finally:
        trainer.shutdown()
    assert [[len(part) for part in parts] for parts in returned] == [[5, 5], [5, 5]]
    assert all(first == again for first, again in returned)
    assert sorted(returned[0][0] + returned[1][0]) == list(range(10))
