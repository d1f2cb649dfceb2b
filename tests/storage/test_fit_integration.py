"""A run of `fit` whose results are in a store."""

from __future__ import annotations

import json
import logging
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.callbacks import HTMLReport
from raysgd.storage import StorageError, open_folder
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.helpers.s3_server import BUCKET, S3Server
from tests.helpers.store_damage import alter

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


def test_workers_store_checkpoints_and_the_driver_commits_them(s3_server: S3Server, tmp_path: Path) -> None:
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
    for rank in range(2):  # each worker has uploaded a list of checksums
        alter(newest, f"rank_{rank}", at=0)
        with pytest.raises(StorageError, match=f"checkpoint_000003/rank_{rank}.*altered"):
            newest.without_retries().download(tmp_path)
        alter(newest, f"rank_{rank}", at=0)


def test_a_store_that_takes_nothing_is_named_before_workers_start(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    nowhere = s3_server.uri("fit").replace(f"@{BUCKET}/", "@no-such-bucket/")
    with pytest.raises(StorageError, match="no-such-bucket/fit") as caught:
        trainer(nowhere).fit()
    assert "a-secret" not in str(caught.value)


def test_a_store_that_died_is_not_waited_for_again(
    own_server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "1")
    job = trainer(own_server.uri("fit"))._make_job(None)

    def die() -> None:
        job.recorder.begin_attempt()
        own_server.kill()
        job.folder.trial.write("last", b"words")

    with pytest.raises(StorageError, match=r"could not write .*/last"):
        job.run(die)
    assert "could not complete the record of the run" in caplog.text
    again = [line for line in caplog.text.splitlines() if "trying again" in line]
    assert again
    assert [line for line in again if "/last?" not in line] == []
    job.folder.remove_staging()


def fail_at_the_store() -> None:
    """Saves a folder, then reads what is not there, from a place whose address the error names."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epoch").write_text("0")
        train.report({"epoch": 0}, checkpoint=train.Checkpoint.from_directory(folder))
    train.get_context().get_storage().read("nothing")


def test_a_run_that_fails_shows_the_keys_of_its_store_nowhere(
    s3_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    uri = s3_server.uri("secrets").replace("a-secret", "planted-secret")
    first = open_folder(uri) / "first"
    first.write("epoch", b"0")
    failing = DataParallelTrainer(
        fail_at_the_store,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="run", storage_path=uri, verbose=3, callbacks=[HTMLReport(tmp_path / "report.html")]
        ),
        resume_from_checkpoint=train.Checkpoint(first),
    )
    with pytest.raises(FileNotFoundError, match="restore") as caught:
        failing.fit()
    run = open_folder(uri) / "run"
    [trial] = [run / name for name in run.names() if name.startswith("DataParallelTrainer_")]
    result = train.Result.from_path(trial.uri)
    with pytest.raises(ValueError, match="no run to restore") as missing:
        DataParallelTrainer.restore(uri)
    texts = [*map(str, (failing, failing.run_config, result, result.checkpoint, first, result.metrics))]
    texts += [line for error in (caught, missing) for line in (str(error.value), repr(error.value), shown(error.value))]
    texts += [caplog.text, (tmp_path / "report.html").read_text()]
    run.download(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"trainer.pkl", "run.json", "error.txt", "error.pkl", "result.json"} <= {path.name for path in files}
    assert [text for text in texts if "planted" in text] == []
    assert [path.name for path in files if b"planted" in path.read_bytes()] == []


def shown(error: BaseException) -> str:
    """What Python prints of an error, without the lines of the program."""
    found = traceback.TracebackException.from_exception(error)
    return "".join(
        line for each in (found, found.__cause__) if each is not None for line in each.format_exception_only()
    )


def test_memory_that_workers_do_not_see_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`storage_path='memory://fit.*only this process sees"):
        trainer("memory://fit").fit()
