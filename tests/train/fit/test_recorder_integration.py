"""What real runs write down: files, callbacks of Ray and of users, MLflow, an S3 server."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.air.result import Result
from raysgd.exceptions import TrainingFailedError
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.fit import recorder
from tests.helpers.run_if import RunIf
from tests.helpers.s3_server import S3Server
from tests.train.fit import loops
from tests.train.fit.notes import Noting, events, lines_in

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def make_trainer(place: Path | str, flags: Path, loop: Any = loops.count_epochs, **options: Any) -> DataParallelTrainer:
    """A trainer for two workers that count epochs. `config` is for the loop; other options are for `RunConfig`."""
    config = {"num_epochs": 3, "flag": flags / "flag", "losses": [3.0, 7.0, 5.0, 1.0], **options.pop("config", {})}
    return DataParallelTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=place, **options),
    )


def reports_in(result: Result) -> list[dict[str, Any]]:
    assert result.log_dir is not None
    return lines_in(result.log_dir)


@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"):
        monkeypatch.setenv(name, "")  # MLflow sets some of them; so they are taken away again
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield str(tmp_path / "mlruns")
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


class TestFiles:
    def test_of_a_run_with_a_failure(self, tmp_path: Path) -> None:
        trainer = make_trainer(
            tmp_path,
            tmp_path,
            config={"fails_at": 1},
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(1, "loss", "min"),
            verbose=1,
        )
        result = trainer.fit()
        reports = reports_in(result)
        assert [report["epoch"] for report in reports] == [0, 1, 2]
        assert [report["training_iteration"] for report in reports] == [1, 2, 3]
        assert [report["iterations_since_restore"] for report in reports] == [1, 1, 2]
        assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [5.0, 3.0]
        names = {path.name for path in result.log_dir.iterdir()}
        assert {"checkpoint_000000", "checkpoint_000002", "recovered_errors.txt"} <= names
        assert not {"checkpoint_000001", "error.txt", "error.pkl"} & names
        assert ("ray/tune/loss", 3, 5.0) in list(events(result.log_dir))
        found = Result.from_path(str(result.path))
        assert found.error is None
        assert list(found.metrics_dataframe["epoch"]) == [0, 1, 2]

    def test_of_a_driver_that_is_killed_have_all_that_it_had_recorded(self, tmp_path: Path) -> None:
        program = (
            "import itertools, pathlib, sys\n"
            "from tests.train.fit.notes import begun_recorder, make_folder\n"
            "recorder = begun_recorder(make_folder(pathlib.Path(sys.argv[1])))\n"
            "for number in itertools.count():\n"
            "    recorder.record({'number': number}, None)\n"
            "    print(number, flush=True)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            seen = [driver.stdout.readline() for _ in range(50)]
            driver.kill()
            seen += driver.stdout.readlines()
        num_recorded = len([line for line in seen if line.endswith("\n")])
        [file] = tmp_path.glob("run/*/result.json")
        lines = file.read_text().splitlines()[:num_recorded]
        assert [json.loads(line)["number"] for line in lines] == list(range(num_recorded))


class TestCallbacks:
    def test_of_ray_and_of_users_see_a_run_with_a_failure(self, tmp_path: Path, mlflow_folder: str) -> None:
        import mlflow
        from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback

        from raysgd.air.integrations.mlflow import MLflowLoggerCallback

        class Mine(LoggerCallback):
            """As in the guide of the old library: prints the result before, and writes a file of its own."""

            def __init__(self) -> None:
                self.seen: list[Any] = []

            def log_trial_start(self, trial: Any) -> None:
                self.seen.append("start")

            def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
                self.seen.append((trial.last_result.get("epoch"), result["epoch"]))
                Path(trial.logdir, "mine.txt").write_text(str(trial.config["train_loop_config"]["num_epochs"]))

            def log_trial_end(self, trial: Any, failed: bool = False) -> None:
                self.seen.append((trial.status, failed, Path(trial.checkpoint.path).name))

        mine = Mine()
        callbacks = [
            JsonLoggerCallback(),
            CSVLoggerCallback(),
            MLflowLoggerCallback(tracking_uri=mlflow_folder, experiment_name="fit", save_artifact=False),
            mine,
        ]
        result = make_trainer(
            tmp_path,
            tmp_path,
            config={"fails_at": 2},
            failure_config=FailureConfig(max_failures=1),
            callbacks=callbacks,
        ).fit()
        assert mine.seen == [
            "start",
            (None, 0),
            (0, 1),
            "start",
            (1, 2),
            ("TERMINATED", False, "checkpoint_000002"),
        ]
        assert [report["epoch"] for report in reports_in(result)] == [0, 1, 2]  # written by Ray's logger
        assert result.log_dir is not None
        assert (result.log_dir / "mine.txt").read_text() == "3"
        with open(result.log_dir / "progress.csv", newline="") as table:
            assert [row["epoch"] for row in csv.DictReader(table)] == ["0", "1", "2"]
        [run] = mlflow.search_runs(experiment_names=["fit"], output_format="list")
        assert run.info.status == "FINISHED"
        assert (run.data.metrics["epoch"], run.data.metrics["training_iteration"]) == (2.0, 3.0)
        assert run.data.params["train_loop_config/num_epochs"] == "3"

    def test_of_mlflow_in_the_workers_log_on_rank_0(self, tmp_path: Path, mlflow_folder: str) -> None:
        import mlflow

        make_trainer(tmp_path, tmp_path, loops.log_with_mlflow, config={"folder": mlflow_folder}).fit()
        mlflow.set_tracking_uri(mlflow_folder)
        [run] = mlflow.search_runs(experiment_names=["in_workers"], output_format="list")
        assert run.data.metrics == {"rank": 0.0}
        assert run.data.params["num_epochs"] == "3"


@RunIf(modules=["tensorflow"])
class TestKeras:
    @pytest.mark.parametrize("is_legacy", [False, pytest.param(True, marks=pytest.mark.soak)])
    def test_reports_and_saves_by_its_events(self, tmp_path: Path, is_legacy: bool) -> None:
        config = {"num_epochs": 2, "frequency": 2, "is_legacy": is_legacy}
        trainer = make_trainer(tmp_path, tmp_path, loops.fit_with_keras, config=config)
        trainer.scaling_config = ScalingConfig(num_workers=1)
        result = trainer.fit()
        reports = reports_in(result)
        assert [sorted(set(report) & {"loss", "error", "epochs_seen"}) for report in reports] == [
            ["loss"],
            ["loss"],
            ["error"],
            ["error"],
        ]
        assert [report["checkpoint_dir_name"] for report in reports] == [
            "checkpoint_000000",
            "checkpoint_000001",
            None,
            "checkpoint_000002",
        ]
        from raysgd.train.tensorflow import TensorflowCheckpoint

        assert result.checkpoint is not None
        [kernel, bias] = TensorflowCheckpoint.from_checkpoint(result.checkpoint).get_model_weights()
        assert (kernel.shape, bias.shape) == ((1, 1), (1,))


class TestGoingOn:
    def test_a_run_whose_driver_was_killed_goes_on(self, tmp_path: Path) -> None:
        import ray

        program = (
            "import pathlib, ray, sys\n"
            "from tests.train.fit.test_recorder_integration import make_trainer\n"
            "ray.init(log_to_driver=False)\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "make_trainer(folder, folder, config={'stays_at': 0}).fit()\n"
        )
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        driver = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment)
        try:
            while driver.poll() is None and not list(tmp_path.glob("run/*/checkpoint_000000")):
                time.sleep(0.02)
        finally:
            driver.kill()
            driver.wait()
        result = DataParallelTrainer.restore(tmp_path / "run").fit()
        assert [report["epoch"] for report in reports_in(result)][-1] == 2
        assert len(result.best_checkpoints) == 3
        assert result.metrics["training_iteration"] == 3
        assert result.metrics["iterations_since_restore"] == 2


class TestInAStore:
    def test_a_run_fails_and_is_restored(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_server: S3Server
    ) -> None:
        monkeypatch.setattr(recorder, "_UPLOAD_EVERY_S", 0.0)  # a copy of the logs is always under way
        place = s3_server.uri("recorded")
        with pytest.raises(TrainingFailedError):
            make_trainer(place, tmp_path, config={"fails_at": 1, "kind": "folder"}, callbacks=[Noting()]).fit()
        experiment = s3_server.uri("recorded/run")
        assert DataParallelTrainer.can_restore(experiment)
        result = DataParallelTrainer.restore(experiment).fit()
        assert (result.metrics["training_iteration"], result.metrics["epoch"]) == (3, 2)
        assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2]
        with result.checkpoint.as_directory() as folder:
            assert Path(folder, "epoch").read_text() == "2"
        names = result.folder.names()
        assert {"result.json", "progress.csv", "params.json", "recovered_errors.txt"} <= set(names)
        assert "error.txt" not in names
        assert [path for path in os.listdir(os.environ["TMPDIR"]) if path.startswith("raysgd-fit-")] == []
