"""A run of `fit` whose results are in a store."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.storage import StorageError, open_folder
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def count_up(config: dict[str, Any]) -> None:
    """Saves a folder with one file of each rank in every epoch; in the third, rank 1 fails at first."""
    rank, start = train.get_context().get_world_rank(), 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            assert {path.name for path in Path(folder).glob("rank_*")} == {"rank_0", "rank_1"}
            start = int(Path(folder, "epoch").read_text()) + 1
    for epoch in range(start, 4):
        if epoch == 2 and start == 0 and rank == 1:
            raise ValueError("bad sample")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank_{rank}").write_text(f"{rank} in {epoch}")
            Path(folder, "epoch").write_text(str(epoch))
            train.report({"epoch": epoch, "start": start}, checkpoint=train.Checkpoint.from_directory(folder))


def trainer(uri: str, **options: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        count_up,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="run", storage_path=uri, **options),
    )


def test_workers_store_checkpoints_and_the_driver_commits_them(s3_server: S3Server) -> None:
    uri = s3_server.uri("fit")
    options = {
        "failure_config": train.FailureConfig(max_failures=1),
        "checkpoint_config": train.CheckpointConfig(num_to_keep=2),
    }
    result = trainer(uri, **options).fit()
    assert result.error is None
    assert (result.metrics["epoch"], result.metrics["start"]) == (3, 2)
    run = open_folder(uri) / "run"
    [name] = [name for name in run.names() if name.startswith("DataParallelTrainer_")]
    trial = run / name
    assert trial.committed() == ["checkpoint_000002", "checkpoint_000003"]
    assert [each for each in trial.names() if each.startswith("checkpoint_")] == trial.committed()
    newest = trial / "checkpoint_000003"
    assert [newest.read(f"rank_{rank}") for rank in range(2)] == [b"0 in 3", b"1 in 3"]
    lines = trial.read("result.json").decode().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "epoch").read_text() == "3"


def test_a_store_that_takes_nothing_is_named_before_workers_start(s3_server: S3Server) -> None:
    nowhere = s3_server.uri("fit").replace(f"@{BUCKET}/", "@no-such-bucket/")
    with pytest.raises(StorageError, match="no-such-bucket/fit") as caught:
        trainer(nowhere).fit()
    assert "a-secret" not in str(caught.value)


def test_memory_that_workers_do_not_see_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`storage_path='memory://fit.*only this process sees"):
        trainer("memory://fit").fit()
