"""Callbacks of runs: what they are told, and what they write.

Covers `raysgd.train.callbacks.logging`: what holds for all callbacks is tested with those that write logs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.callbacks.calling import call_with_known
from raysgd.train.callbacks import (
    JsonLoggerCallback,
    MLflowLoggerCallback,
    PrintCallback,
    TBXLoggerCallback,
    TorchTensorboardProfilerCallback,
    TrainingCallback,
)
from raysgd.train.callbacks.logging import LogdirManager
from raysgd.train.callbacks.results_preprocessors import IndexedResultsPreprocessor
from raysgd.train.constants import PYTORCH_PROFILER_KEY, TRAINING_ITERATION
from tests.helpers.run_if import RunIf
from tests.train.fit.notes import events

Results = list[dict[str, Any]]


def result(step: int = 1, **metrics: Any) -> dict[str, Any]:
    return {TRAINING_ITERATION: step, "_timestamp": 5, **metrics}


def play(callback: TrainingCallback, logdir: Path, *steps: Results, error: bool = False) -> None:
    """What a run does with a callback."""
    call_with_known(callback.start_training, logdir=str(logdir), config={"lr": 0.1})
    for step in steps:
        callback.process_results(step)
    callback.finish_training(error=error)


class TestTheBaseClass:
    class Recorder(TrainingCallback):
        def __init__(self) -> None:
            self.seen: list[Results] = []

        def handle_result(self, results: Results, **info: Any) -> None:
            self.seen.append(results)

    def test_does_nothing_by_itself(self, tmp_path: Path) -> None:
        play(TrainingCallback(), tmp_path, [result()])
        assert list(tmp_path.iterdir()) == []

    def test_preprocesses_and_hides_what_belongs_to_others(self) -> None:
        recorder = self.Recorder()
        recorder.results_preprocessor = IndexedResultsPreprocessor([1])
        given = [{"a": 1, PYTORCH_PROFILER_KEY: []}, {"a": 2, PYTORCH_PROFILER_KEY: []}]
        for _ in range(2):
            recorder.process_results(given)
        assert recorder.seen == [[{"a": 2}], [{"a": 2}]]
        assert PYTORCH_PROFILER_KEY in given[0]

    def test_shows_a_callback_its_own_keys(self) -> None:
        class Own(self.Recorder):  # type: ignore[name-defined, misc]
            RESERVED_KEYS = frozenset({PYTORCH_PROFILER_KEY})

        recorder = Own()
        recorder.process_results([{PYTORCH_PROFILER_KEY: 1}])
        assert recorder.seen == [[{PYTORCH_PROFILER_KEY: 1}]]

    def test_an_override_of_an_earlier_version_gets_what_it_knows(self) -> None:
        class Old(TrainingCallback):
            def start_training(self, logdir: str) -> None:  # type: ignore[override]
                self.logdir = logdir

        old = Old()
        call_with_known(old.start_training, logdir="here", config={})
        assert old.logdir == "here"


class TestTheFolder:
    def test_is_that_of_the_run_unless_another_was_given(self, tmp_path: Path) -> None:
        assert LogdirManager().setup_logdir(tmp_path / "run") == tmp_path / "run"
        assert LogdirManager(str(tmp_path / "own")).setup_logdir(tmp_path / "run") == tmp_path / "own"
        assert (tmp_path / "own").is_dir()

    def test_is_not_known_beforehand(self) -> None:
        with pytest.raises(RuntimeError, match="before `start_training`"):
            _ = LogdirManager().logdir_path

    def test_that_is_a_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError):
            LogdirManager(tmp_path / "file").setup_logdir(tmp_path)

    def test_is_made_only_if_it_may_be(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is not a folder"):
            LogdirManager(tmp_path / "none", create_logdir=False).setup_logdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [0]), ({"workers_to_log": [2, 0]}, [2, 0]), ({"workers_to_log": None, "filename": "own.json"}, [0, 1, 2])],
)
def test_json_is_written_of_the_workers_that_are_chosen(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    callback = JsonLoggerCallback(**options)
    play(callback, tmp_path, [{"rank": rank} for rank in range(3)])
    assert callback.log_path == tmp_path / options.get("filename", "results.json")
    [found] = json.loads(callback.log_path.read_text())
    assert [each["rank"] for each in found] == expected


def test_a_second_run_begins_a_new_file_in_the_chosen_folder(tmp_path: Path) -> None:
    callback = JsonLoggerCallback(str(tmp_path))
    for _ in range(2):
        play(callback, tmp_path / "run", [{"a": 1}])
        assert json.loads((tmp_path / "results.json").read_text()) == [[{"a": 1}]]


def test_print_prints_all_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(PrintCallback(), tmp_path, [{"a": 1}, {"a": np.int64(2)}])
    assert json.loads(capsys.readouterr().out) == [{"a": 1}, {"a": 2}]


@RunIf(modules=["tensorboardX"])
class TestTensorBoard:
    def test_scalars_of_one_worker_are_written_with_their_step(self, tmp_path: Path) -> None:
        steps = [[result(step, loss=step / 2, nested={"a": step}), result(step, loss=9)] for step in (1, 2)]
        play(TBXLoggerCallback(), tmp_path, *steps)
        assert list(events(tmp_path)) == [
            ("ray/train/loss", 1, 0.5),
            ("ray/train/nested/a", 1, 1.0),
            ("ray/train/loss", 2, 1.0),
            ("ray/train/nested/a", 2, 2.0),
        ]

    def test_lists_are_histograms_and_nan_is_left_out(self, tmp_path: Path) -> None:
        play(TBXLoggerCallback(worker_to_log=1), tmp_path, [result(), result(w=[1.0, 2.0], loss=float("nan"))])
        assert list(events(tmp_path)) == [("ray/train/w", 1, "histo")]

    def test_what_cannot_be_shown_is_named_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        play(TBXLoggerCallback(), tmp_path, [result(1, note="text", names=["a"])], [result(2, note="text")])
        assert [record.getMessage() for record in caplog.records] == [
            "`ray/train/note` is not written for TensorBoard, because its value is a str",
            "`ray/train/names` is not written for TensorBoard, because its value is a list",
        ]

    @pytest.mark.parametrize("ranks", [[], [0, 1]])
    def test_it_is_one_worker(self, ranks: list[int]) -> None:
        with pytest.raises(ValueError, match="the rank of one worker"):
            TBXLoggerCallback(worker_to_log=ranks)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the rank of one worker"):
            TBXLoggerCallback(worker_to_log="0")  # type: ignore[arg-type]


@RunIf(modules=["mlflow"])
class TestMLflow:
    @pytest.fixture(autouse=True)
    def forget(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import mlflow

        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
            monkeypatch.setenv(name, "")  # MLflow and we set them; so they are taken away again
            monkeypatch.delenv(name)
        yield
        mlflow.set_tracking_uri(None)

    def runs_in(self, folder: Path) -> list[Any]:
        import mlflow

        client = mlflow.tracking.MlflowClient(str(folder))
        experiment = client.get_experiment_by_name("test")
        return list(client.search_runs([experiment.experiment_id]))

    def test_a_run_is_kept_with_its_config_and_metrics(self, tmp_path: Path) -> None:
        import mlflow

        steps = [[result(step, loss=step / 2, note="text")] for step in (1, 2, 3)]
        play(MLflowLoggerCallback(experiment_name="test"), tmp_path, *steps, error=True)
        [run] = self.runs_in(tmp_path / "mlruns")
        assert run.data.params == {"lr": "0.1"}
        assert (run.data.metrics["loss"], run.data.metrics[TRAINING_ITERATION]) == (1.5, 3)
        assert run.info.status == "FAILED"
        history = mlflow.tracking.MlflowClient(str(tmp_path / "mlruns")).get_metric_history(run.info.run_id, "loss")
        assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]

    def test_each_run_has_a_store_in_its_own_folder(self, tmp_path: Path) -> None:
        for name in ("first", "second"):
            play(MLflowLoggerCallback(experiment_name="test"), tmp_path / name, [result(1, loss=0.5)])
        assert [len(self.runs_in(tmp_path / name / "mlruns")) for name in ("first", "second")] == [1, 1]

    @pytest.mark.parametrize("way", ["variable", "function", "argument"])
    def test_a_store_of_the_users_choice_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        import mlflow

        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        chosen, other = str(tmp_path / "chosen"), str(tmp_path / "other")
        if way == "function":
            mlflow.set_tracking_uri(chosen)
        else:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", chosen if way == "variable" else other)
        uri = chosen if way == "argument" else None
        play(MLflowLoggerCallback(uri, experiment_name="test"), tmp_path / "run", [result(1, loss=0.5)])
        assert len(self.runs_in(tmp_path / "chosen")) == 1
        assert not (tmp_path / "run" / "mlruns").exists()

    def test_artifacts_that_cannot_be_sent_leave_no_run_open(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        import mlflow

        callback = MLflowLoggerCallback(experiment_name="test", save_artifact=True)
        callback.start_training(str(tmp_path), {})
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "checkpoint_000001").symlink_to(tmp_path / "gone")
        callback.finish_training()
        assert mlflow.active_run() is None
        assert [run.info.status for run in self.runs_in(tmp_path / "mlruns")] == ["FINISHED"]
        assert "MLflowLoggerCallback: could not write" in caplog.text

    def test_a_run_that_did_not_start_ends_no_run_of_the_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mlflow

        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(str(tmp_path / "mlruns"))
        callback = MLflowLoggerCallback()
        with mlflow.start_run():
            with pytest.raises(ValueError, match="`experiment_name`"):
                callback.start_training(str(tmp_path), {})
            callback.finish_training(error=True)
            assert mlflow.active_run() is not None


def test_a_missing_mlflow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r'pip install "mlflow-skinny>='):
        MLflowLoggerCallback()


def test_traces_of_the_profiler_become_files(tmp_path: Path) -> None:
    traces = [{PYTORCH_PROFILER_KEY: [(f"worker_{rank}.json", f"trace {rank}")]} for rank in range(2)]
    play(TorchTensorboardProfilerCallback(), tmp_path, [*traces], [{"loss": 1}, {"loss": 1}])
    folder = tmp_path / "pytorch_profiler"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "worker_0.json": "trace 0",
        "worker_1.json": "trace 1",
    }
