from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import Checkpoint, Result
from raysgd.storage import open_folder

CONFIG = {"train_loop_config": {"lr": 0.1}}


def kept(scores: list[Any]) -> list[tuple[Checkpoint, dict[str, Any]]]:
    return [(Checkpoint.from_dict({"step": step}), {"loss": score}) for step, score in enumerate(scores)]


def step_of(checkpoint: Checkpoint) -> Any:
    return checkpoint.to_dict()["step"]


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    """The folder of a trial that reported three times, twice with a checkpoint."""
    reports = [
        {"loss": 3.0, "checkpoint_dir_name": "checkpoint_000000", "config": CONFIG},
        {"loss": 1.0, "checkpoint_dir_name": None, "config": CONFIG},
        {"loss": 2.0, "checkpoint_dir_name": "checkpoint_000001", "val": {"loss": 4.0}, "config": CONFIG},
    ]
    for step in range(2):
        Checkpoint.from_dict({"step": step}).to_directory(tmp_path / f"checkpoint_00000{step}")
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "result.json").write_text("".join(json.dumps(report) + "\n" for report in reports))
    return tmp_path


class TestResult:
    def test_it_has_the_attributes_of_both_generations(self, trial: Path) -> None:
        result = Result({"loss": 2.0, "config": CONFIG}, None, folder=open_folder(trial))
        assert result.path == str(trial)
        assert result.log_dir == trial
        assert result.filesystem.type_name == "local"
        assert result.config == CONFIG
        assert result.error is None

    def test_without_a_folder_there_is_no_path(self) -> None:
        result = Result(None, None, ValueError("no"))
        assert (result.path, result.log_dir, result.filesystem, result.config) == (None, None, None, None)
        assert len(result.metrics_dataframe) == 0

    def test_a_folder_of_a_store_is_no_path_of_this_machine(self) -> None:
        result = Result(None, None, folder=open_folder("memory://air/trial"))
        assert result.log_dir is None
        assert result.path is not None

    def test_reports_are_a_data_frame(self, trial: Path) -> None:
        frame = Result({}, None, folder=open_folder(trial)).metrics_dataframe
        assert list(frame["loss"]) == [3.0, 1.0, 2.0]
        assert list(frame["config/train_loop_config/lr"]) == [0.1] * 3
        assert math.isnan(frame["val/loss"][0])

    def test_it_pickles(self, trial: Path) -> None:
        result = pickle.loads(pickle.dumps(Result.from_path(trial)))
        assert step_of(result.checkpoint) == 1
        assert result.path == str(trial)


class TestBestCheckpoint:
    @pytest.mark.parametrize(
        ("scores", "mode", "best"),
        [
            ([3.0, 1.0, 2.0], "min", 1),
            ([3.0, 1.0, 2.0], "max", 0),
            ([1.0, 1.0], "min", 1),
            ([1.0, math.nan], "min", 0),
            ([math.nan, 1.0], "max", 1),
            ([math.nan], "max", 0),
            ([1.0, "high"], "max", 0),
        ],
    )
    def test_the_best_is_found_and_of_equals_the_newer_one(self, scores: list[Any], mode: str, best: int) -> None:
        result = Result({}, None, best_checkpoints=kept(scores))
        assert step_of(result.get_best_checkpoint("loss", mode)) == best

    def test_slashes_lead_into_nested_metrics(self, trial: Path) -> None:
        assert step_of(Result.from_path(trial).get_best_checkpoint("val/loss", "min")) == 1

    @pytest.mark.parametrize(
        ("checkpoints", "metric", "mode", "error", "words"),
        [
            (kept([1.0]), "loss", "best", ValueError, "`mode='best'`"),
            ([], "loss", "min", RuntimeError, "retained no checkpoint"),
            (kept([1.0]), "acc", "min", RuntimeError, r"`metric='acc'`.*\['loss'\]"),
        ],
    )
    def test_what_there_is_not_is_said(
        self, checkpoints: Any, metric: str, mode: str, error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            Result({}, None, best_checkpoints=checkpoints).get_best_checkpoint(metric, mode)


class TestReading:
    def test_a_folder_tells_what_became_of_its_trial(self, trial: Path) -> None:
        result = Result.from_path(str(trial))
        assert result.metrics["loss"] == 2.0
        assert result.checkpoint is not None
        assert step_of(result.checkpoint) == 1
        assert [(step_of(each), metrics["loss"]) for each, metrics in result.best_checkpoints] == [(0, 3.0), (1, 2.0)]
        assert result.error is None
        assert result.config == CONFIG

    def test_a_line_that_a_kill_cut_short_is_left_out(self, trial: Path) -> None:
        with open(trial / "result.json", "a") as file:
            file.write('{"loss": 1.')
        assert len(Result.from_path(trial).metrics_dataframe) == 3

    def test_a_trial_that_never_reported_has_no_metrics(self, tmp_path: Path) -> None:
        (tmp_path / "result.json").touch()
        result = Result.from_path(tmp_path)
        assert (result.metrics, result.checkpoint, result.best_checkpoints) == (None, None, [])

    def test_a_failed_trial_has_its_error(self, trial: Path) -> None:
        (trial / "error.txt").write_text("Traceback: why")
        assert str(Result.from_path(trial).error) == "Traceback: why"
        (trial / "error.pkl").write_bytes(pickle.dumps(KeyError("why")))
        assert isinstance(Result.from_path(trial).error, KeyError)
        (trial / "error.pkl").write_bytes(b"cno_such_module\nError\n.")
        assert isinstance(Result.from_path(trial).error, RuntimeError)

    def test_a_folder_without_a_trial_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(RuntimeError, match=r"there is no `result.json`. Pass the folder of a trial"):
                Result.from_path(path)
