"""Callbacks that write metrics, into files and for services.

Covers `raysgd.core.writers.services`.
"""

from __future__ import annotations

import csv
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import (
    Callback,
    CometLogger,
    CSVLogger,
    JSONLogger,
    MLflowLogger,
    Run,
    TensorBoardLogger,
    WandbLogger,
)
from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.helpers.processes import wait_until
from tests.helpers.run_if import RunIf
from tests.train.fit.notes import events

Make = Callable[..., TorchTrainer]


def play(
    callback: Callback,
    folder: Path,
    *results: dict[str, Any],
    epoch: int = 0,
    step: int = 0,
    error: BaseException | None = None,
    config: dict[str, Any] | None = None,
) -> Run:
    """What a run does with a logger."""
    run = Run(name="digits", config=config or {"lr": 0.1, "model": {"width": 4}}, folder=folder)
    run.epoch, run.step = epoch, step
    callback.on_run_begin(run)
    for result in results:
        run.epoch += 1
        callback.on_result(run, dict(result))
    callback.on_run_end(run, error)
    return run


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class TestFiles:
    def test_have_a_row_for_each_epoch(self, make_local: Make, tmp_path: Path) -> None:
        loggers = [CSVLogger(), JSONLogger(tmp_path / "own" / "log.jsonl")]
        history = make_local().fit(2, callbacks=loggers, folder=tmp_path)
        assert [loggers[0].path, loggers[1].path] == [tmp_path / "metrics.csv", tmp_path / "own" / "log.jsonl"]
        lines = lines_of(tmp_path / "own" / "log.jsonl")
        assert [line["val_loss"] for line in lines] == history["val_loss"]
        assert [line.keys() for line in lines] == [row.keys() for row in history]
        rows = rows_of(tmp_path / "metrics.csv")
        assert [float(row["val_loss"]) for row in rows] == history["val_loss"]
        assert [row["epoch"] for row in rows] == ["1", "2"]

    @pytest.mark.parametrize(("logger", "read"), [(CSVLogger, rows_of), (JSONLogger, lines_of)])
    def test_of_steps_are_beside_those_of_epochs_and_go_on_behind_a_checkpoint(
        self, make_local: Make, tmp_path: Path, logger: Any, read: Callable[[Path], Any]
    ) -> None:
        first, later = make_local(), make_local()
        first.fit(1, callbacks=[logger(tmp_path / "log.x")], log_every_n_steps=2)
        first.save(tmp_path / "state")
        first.fit(1, callbacks=[logger(tmp_path / "log.x")], log_every_n_steps=2)
        later.fit(3, callbacks=[logger(tmp_path / "log.x")], resume_from=tmp_path / "state", log_every_n_steps=5)
        steps = [(int(row["epoch"]), int(row["step"])) for row in read(tmp_path / "log.steps.x")]
        assert steps == [(1, 2), (1, 4), (2, 10), (3, 15)]
        assert [int(row["epoch"]) for row in read(tmp_path / "log.x")] == [1, 2, 3]
        make_local().fit(1, callbacks=[logger(tmp_path / "log.x")], log_every_n_steps=0)
        assert (len(read(tmp_path / "log.x")), len(read(tmp_path / "log.steps.x"))) == (1, 0)

    @pytest.mark.parametrize(("logger", "read"), [(CSVLogger, rows_of), (JSONLogger, lines_of)])
    def test_with_a_name_alone_are_in_the_current_folder_and_go_on_there_behind_the_checkpoint(
        self, tmp_path: Path, logger: Any, read: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        play(logger("log"), tmp_path, {"a": 1}, {"a": 2, "later": 1}, {"a": 3})
        play(logger("log"), tmp_path, {"a": 9, "b": 1}, epoch=2)
        rows = [(str(row["epoch"]), str(row["a"])) for row in read(tmp_path / "log")]
        assert rows == [("1", "1"), ("2", "2"), ("3", "9")]

    @pytest.mark.parametrize(("logger", "read"), [(CSVLogger, rows_of), (JSONLogger, lines_of)])
    def test_that_fail_for_a_while_miss_only_that(
        self, tmp_path: Path, logger: Any, read: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, away = tmp_path / "mounted", tmp_path / "away"
        writing, run = logger(folder / "log"), Run(name="run", folder=tmp_path)
        writing.on_run_begin(run)
        for run.epoch, result in enumerate([{"a": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 1}, {"a": 4, "b": 1}], start=1):
            if run.epoch == 2:
                folder.rename(away)
            if run.epoch == 4:
                away.rename(folder)
            writing.on_result(run, result)
        writing.on_run_end(run, None)
        assert [str(row["a"]) for row in read(folder / "log")] == ["1", "4"]
        assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
            f"{logger.__name__}: could not write"
        ]

    def test_are_files_of_this_machine(self) -> None:
        with pytest.raises(ValueError, match="need a path on a local or mounted disk"):
            JSONLogger("s3://bucket/log.jsonl")

    @pytest.mark.parametrize("logger", [CSVLogger, JSONLogger, TensorBoardLogger])
    @pytest.mark.parametrize(("path", "error"), [("", ValueError), (3, TypeError)])
    def test_have_a_path(self, logger: Any, path: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"={path!r}`: need a path"):
            logger(path)


@RunIf(modules=["tensorboardX"])
def test_tensorboard_is_shown_numbers_by_epoch(tmp_path: Path) -> None:
    play(TensorBoardLogger(), tmp_path, {"epoch": 1, "a": 1.0}, {"epoch": 2, "a": 0.5, "nested": {"b": 3}})
    assert list(events(tmp_path / "tensorboard")) == [("a", 1, 1.0), ("a", 2, 0.5), ("nested/b", 2, 3.0)]


@RunIf(modules=["tensorboardX"])
def test_two_tensorboard_loggers_have_two_folders(make_local: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two `TensorBoardLogger` that write to the folder.*pass another `folder`"):
        make_local().fit(1, callbacks=[TensorBoardLogger(), TensorBoardLogger()], folder=tmp_path)


@RunIf(modules=["tensorboardX"])
def test_a_training_of_one_epoch_is_a_curve(make_local: Make, tmp_path: Path) -> None:
    [row] = make_local().fit(1, callbacks=[TensorBoardLogger()], folder=tmp_path, log_every_n_steps=1)
    losses = [(step, value) for name, step, value in events(tmp_path / "tensorboard") if name == "steps/train_loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    assert sum(value for _, value in losses) / 5 == pytest.approx(row["train_loss"])


@RunIf(modules=["mlflow"])
class TestMLflow:
    @pytest.fixture(autouse=True)
    def is_not_set_up(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import mlflow

        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
            monkeypatch.setenv(name, "")  # MLflow and we set them; so they are taken away again
            monkeypatch.delenv(name)
        yield
        mlflow.set_tracking_uri(None)

    def client(self, tmp_path: Path) -> Any:
        import mlflow

        return mlflow.MlflowClient(str(tmp_path / "mlruns"))

    def test_a_run_has_parameters_and_metrics_and_one_that_resumes_goes_on_with_it(self, tmp_path: Path) -> None:
        import mlflow

        first, later = MLflowLogger(tags={"team": "a"}), MLflowLogger()
        odd: dict[Any, Any] = {"lr": 0.1, "": 1, "long": "x" * 10_000, 3: 4}
        play(first, tmp_path, {"": 1.0, "loss": 2.0, "text": object()}, config=odd, error=KeyboardInterrupt())
        found = self.client(tmp_path).get_run(first.run_id)
        assert (found.info.run_name, found.info.status, found.data.tags["team"]) == ("digits", "FAILED", "a")
        assert (found.data.params["lr"], found.data.metrics) == ("0.1", {"_": 1.0, "loss": 2.0})
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        play(later, tmp_path, {"loss": 1.0}, epoch=1)
        assert later.run_id == first.run_id
        assert self.client(tmp_path).get_run(first.run_id).info.status == "FINISHED"
        history = self.client(tmp_path).get_metric_history(first.run_id, "loss")
        assert [(each.step, each.value) for each in history] == [(1, 2.0), (2, 1.0)]
        assert mlflow.active_run() is None

    def test_a_run_that_resumes_inside_its_first_epoch_goes_on_with_it_and_a_new_one_does_not(
        self, tmp_path: Path
    ) -> None:
        first, later = MLflowLogger(), MLflowLogger()
        play(first, tmp_path)
        later.load_state_dict(first.state_dict())
        play(later, tmp_path, step=3)
        assert later.run_id == first.run_id
        play(later, tmp_path)
        assert later.run_id != first.run_id

    def test_a_run_that_is_active_is_used_and_left_open_and_a_parameter_with_another_value_costs_no_metric(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        import mlflow

        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(str(tmp_path / "mlruns"))
        with mlflow.start_run() as active:
            mlflow.log_param("lr", "0.5")
            logger = MLflowLogger()
            play(logger, tmp_path, {"loss": 1.0}, config={"lr": 0.1, "width": 4})
            assert logger.run_id == active.info.run_id
            assert mlflow.active_run() is not None
        found = self.client(tmp_path).get_run(active.info.run_id).data
        assert (found.params, found.metrics) == ({"lr": "0.5", "width": "4"}, {"loss": 1.0})
        assert caplog.text.count("MLflow rejected some parameters") == 1

    def test_names_that_mlflow_does_not_allow_become_others(self, tmp_path: Path) -> None:
        logger = MLflowLogger()
        play(logger, tmp_path, {"top@5": 0.5, "loss": {"a": 0.25}}, config={BATCH_SIZE: 64, "lr": 0.1})
        found = self.client(tmp_path).get_run(logger.run_id).data
        assert found.params == {"_batch_size": "64", "lr": "0.1"}
        assert found.metrics == {"top_5": 0.5, "loss/a": 0.25}

    def test_a_store_that_refuses_costs_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("")
        play(MLflowLogger(tracking_uri=str(tmp_path / "file" / "runs")), tmp_path, {"loss": 2.0})
        assert "MLflowLogger: could not write" in caplog.text


@RunIf(modules=["wandb"])
class TestWandb:
    SETTINGS: Mapping[str, Any] = {"silent": True, "x_service_wait": 240.0, "init_timeout": 240.0}

    @pytest.fixture(autouse=True)
    def ends_its_service(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import wandb

        monkeypatch.setenv("WANDB_SERVICE", "")
        monkeypatch.delenv("WANDB_SERVICE")
        yield
        wandb.teardown()

    def test_a_mode_is_one_of_the_service(self) -> None:
        with pytest.raises(ValueError, match=r"`mode='off'`: allowed are \"online\""):
            WandbLogger(mode="off")

    def test_offline_runs_are_on_the_disk_and_one_that_resumes_goes_on_with_it(self, tmp_path: Path) -> None:
        first, later = (WandbLogger("digits", mode="offline", settings=self.SETTINGS) for _ in range(2))
        play(first, tmp_path, {"loss": 2.0, "text": "x"}, {"loss": 1.0})
        [found] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        assert first.run_id in found.name
        wait_until(lambda: written(found, "loss") == [2.0, 1.0])  # the process of wandb may still be writing
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        play(later, tmp_path / "later", {"loss": 1.0}, epoch=2)
        [found] = (tmp_path / "later").glob("wandb/offline-run-*/run-*.wandb")
        assert (later.run_id, found.stem) == (first.run_id, f"run-{first.run_id}")


@RunIf(modules=["comet_ml"])
class TestComet:
    QUIET: Mapping[str, Any] = {
        **dict.fromkeys(["log_code", "log_git_metadata", "log_git_patch", "log_env_details"], False),
        **{"auto_output_logging": False, "display_summary_level": 0},
    }

    @pytest.fixture(autouse=True)
    def reports_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMET_INTERNAL_SENTRY_DSN", "")  # comet_ml would send its own errors to its makers

    def test_experiments_that_are_not_sent_are_archives_and_a_run_that_resumes_goes_on_with_one(
        self, tmp_path: Path
    ) -> None:
        first, later = (CometLogger("digits", online=False, **self.QUIET) for _ in range(2))
        play(first, tmp_path, {"loss": 2.0, "text": "x"}, {"loss": 1.0})
        assert logged(tmp_path, "loss") == [(1, 2.0), (2, 1.0)]
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        play(later, tmp_path / "later", {"loss": 0.5}, epoch=2)
        assert later.run_id == first.run_id
        assert logged(tmp_path / "later", "loss") == [(3, 0.5)]

    def test_an_active_experiment_is_used_and_left_open(self, tmp_path: Path) -> None:
        import comet_ml

        active = comet_ml.OfflineExperiment(offline_directory=str(tmp_path), **self.QUIET)
        logger = CometLogger()
        play(logger, tmp_path, {"loss": 2.0})
        assert logger.run_id == active.get_key()
        assert comet_ml.get_running_experiment() is active
        active.end()
        assert logged(tmp_path, "loss") == [(1, 2.0)]


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric in the only archive of a folder."""
    [archive] = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line)["payload"] for line in opened.read("messages.json").splitlines()]
    metrics = [message["metric"] for message in messages if "metric" in message]
    return [(each["step"], each["metricValue"]) for each in metrics if each["metricName"] == name]


def written(path: Path, name: str) -> list[float]:
    """The values of a metric in the file of a run."""
    from wandb.proto import wandb_internal_pb2

    values = []
    for record in map(wandb_internal_pb2.Record.FromString, records_in(path.read_bytes())):
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        values += [json.loads(items[name])] if name in items else []
    return values


def records_in(content: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB, in blocks, at whose ends a record may be cut in two."""
    block, header = 32768, 7
    place, record = header, b""
    while place + header <= len(content):
        if block - place % block < header:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + header])
        record += content[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # a whole one, or the last part of one
            yield record
            record = b""


@pytest.mark.parametrize(
    ("logger", "module", "command"),
    [
        (TensorBoardLogger, "tensorboardX", 'pip install "tensorboardX>='),
        (MLflowLogger, "mlflow", 'pip install "mlflow-skinny>='),
        (WandbLogger, "wandb", 'pip install "wandb>='),
        (CometLogger, "comet_ml", 'pip install "comet_ml>='),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    logger: Any, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as error:
        logger()
    assert command in str(error.value)
    assert f"`{logger.__name__}`" in str(error.value)
