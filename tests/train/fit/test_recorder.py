"""What the driver writes down about a run, without workers."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import CheckpointConfig, RunConfig
from raysgd.air.result import Result
from raysgd.air.trial import TrialFolder, new_trial_folder
from raysgd.callbacks import JSONLogger
from raysgd.exceptions import CallbackError
from raysgd.train.fit.recorder import number_of
from tests.train.fit.notes import CONFIG, Noting, lines, make_folder, make_recorder, save


def checkpoints_in(folder: TrialFolder) -> list[str]:
    return sorted(path.name for path in folder.trial.local_path.glob("checkpoint_*"))


def play(folder: TrialFolder, losses: list[float], first: int = 0, **options: Any) -> Result:
    """A run that saves with each report and ends well."""
    recorder = make_recorder(folder, **options)
    recorder.begin_attempt()
    for index, loss in enumerate(losses, start=first):
        recorder.record({"loss": loss}, save(folder, index))
    return recorder.end_run()


class TestARun:
    def test_has_the_metrics_of_its_last_report(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        result = play(folder, [3.0, 2.0])
        assert (result.metrics["loss"], result.metrics["training_iteration"], result.metrics["done"]) == (2.0, 2, True)
        assert result.metrics["checkpoint_dir_name"] == "checkpoint_000001"
        assert result.metrics["should_checkpoint"] is True
        assert result.config == CONFIG
        assert result.error is None
        assert result.path == folder.trial.path
        assert [line["done"] for line in lines(folder)] == [False, False]
        assert list(result.metrics_dataframe["config/train_loop_config/lr"]) == [0.1, 0.1]

    def test_without_a_report_has_no_metrics(self, tmp_path: Path) -> None:
        recorder = make_recorder(make_folder(tmp_path))
        recorder.begin_attempt()
        result = recorder.end_run()
        assert (result.metrics, result.checkpoint, result.best_checkpoints) == (None, None, [])

    def test_stops_at_a_condition(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder, stop={"training_iteration": 2})
        recorder.begin_attempt()
        assert [recorder.record({}, None), recorder.record({}, None)] == [False, True]
        recorder.end_run()
        assert [line["done"] for line in lines(folder)] == [False, True]

    def test_leaves_no_thread(self, tmp_path: Path) -> None:
        before = {*threading.enumerate()}
        play(make_folder(tmp_path), [3.0, 2.0, 1.0], checkpoint_config=CheckpointConfig(num_to_keep=1))
        assert {*threading.enumerate()} - before == set()


class TestHooks:
    def test_are_called_in_the_order_of_ray_tune(self, tmp_path: Path) -> None:
        noting = Noting()
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder, callbacks=[noting], stop={"loss": 99})
        recorder.begin_attempt()
        recorder.record({"loss": 1}, None)
        recorder.record({"loss": 2}, save(folder, 0))
        recorder.fail(ValueError("x"))
        recorder.begin_attempt()
        recorder.record({"loss": 3}, save(folder, 1))
        recorder.end_run()
        assert noting.calls == [
            "setup 1 {'loss': 99}",
            "on_trial_start PENDING",
            "on_step_begin 0",
            "on_trial_result 1 after None",
            "on_step_end 1",
            "on_step_begin 1",
            "on_trial_result 2 after 1",
            "on_checkpoint checkpoint_000000 False",
            "on_trial_save checkpoint_000000",
            "on_step_end 2",
            "on_trial_recover 1",
            "on_trial_start RUNNING",
            "on_trial_restore checkpoint_000000",
            "on_step_begin 2",
            "on_trial_result 3 after 2",
            "on_checkpoint checkpoint_000001 True",
            "on_trial_save checkpoint_000001",
            "on_step_end 3",
            "on_trial_complete TERMINATED",
            "on_experiment_end",
        ]

    def test_of_a_failed_run(self, tmp_path: Path) -> None:
        noting = Noting()
        recorder = make_recorder(make_folder(tmp_path), callbacks=[noting])
        recorder.begin_attempt()
        recorder.end_run(ValueError("x"))
        assert noting.calls[2:] == ["on_trial_error ERROR", "on_experiment_end"]

    def test_that_fail_leave_the_report_and_the_end_to_others(self, tmp_path: Path) -> None:
        folder, last = make_folder(tmp_path), Noting()
        recorder = make_recorder(folder, callbacks=[Noting(fails_in="on_trial_result"), last])
        recorder.begin_attempt()
        with pytest.raises(CallbackError) as info:
            recorder.record({"loss": 1}, None)
        result = recorder.end_run(info.value)
        assert [line["loss"] for line in lines(folder)] == [1]
        assert last.calls[-2:] == ["on_trial_error ERROR", "on_experiment_end"]
        assert isinstance(result.error, CallbackError)
        assert "`Noting` failed in `on_trial_result`" in (folder.local_path / "error.txt").read_text()

    def test_that_fail_at_the_end_leave_a_whole_folder(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder, callbacks=[Noting(fails_in="on_trial_complete")])
        recorder.begin_attempt()
        with pytest.raises(CallbackError):
            recorder.end_run()
        assert json.loads(folder.experiment.read("run.json"))["status"] == "TERMINATED"


class TestRetention:
    @pytest.mark.parametrize(
        ("config", "best", "on_disk"),
        [
            (CheckpointConfig(2, "loss", "min"), [5.0, 3.0], [1, 3]),
            (CheckpointConfig(2, "loss", "max"), [5.0, 7.0], [2, 3]),
            (CheckpointConfig(1, "loss", "min"), [3.0], [1, 3]),
            (CheckpointConfig(2), [7.0, 5.0], [2, 3]),
            (CheckpointConfig(1), [5.0], [3]),
            (CheckpointConfig(2, "missing"), [7.0, 5.0], [2, 3]),
        ],
    )
    def test_on_disk(self, tmp_path: Path, config: CheckpointConfig, best: list[float], on_disk: list[int]) -> None:
        folder = make_folder(tmp_path)
        result = play(folder, [float("nan"), 3.0, 7.0, 5.0], checkpoint_config=config)
        assert [metrics["loss"] for _, metrics in result.best_checkpoints] == best
        assert checkpoints_in(folder) == [f"checkpoint_{index:06d}" for index in on_disk]
        assert Path(result.checkpoint.path).name == "checkpoint_000003"

    def test_nested_scores_count(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder, checkpoint_config=CheckpointConfig(1, "val/acc"))
        recorder.begin_attempt()
        for index, accuracy in enumerate([0.5, 0.9, 0.1]):
            recorder.record({"val": {"acc": accuracy}}, save(folder, index))
        assert [metrics["val"]["acc"] for _, metrics in recorder.end_run().best_checkpoints] == [0.9]

    @pytest.mark.parametrize(("metrics", "text"), [({}, "is missing"), ({"score": "high"}, "is 'high', not a number")])
    def test_a_score_that_is_none_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: dict[str, Any], text: str
    ) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder, checkpoint_config=CheckpointConfig(1, "score"))
        recorder.begin_attempt()
        for index in range(2):
            recorder.record(metrics, save(folder, index))
        recorder.end_run()
        assert caplog.text.count(f"`checkpoint_score_attribute='score'` {text}") == 1

    def test_a_checkpoint_has_the_number_of_its_folder_or_of_its_content(self, tmp_path: Path) -> None:
        folder, other = make_folder(tmp_path), tmp_path / "other"
        other.mkdir()
        saved = save(folder, 3)
        assert number_of(saved) == 3
        assert number_of(Checkpoint.from_directory(other)) == 0
        numbered = [Checkpoint.from_dict({"_current_checkpoint_id": value}) for value in (2, -1, "2", None)]
        assert [number_of(each) for each in numbered] == [2, 0, 0, 0]

    def test_a_checkpoint_that_cannot_be_deleted_is_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_folder(tmp_path)
        monkeypatch.setattr(type(folder.trial), "delete", lambda self: 1 / 0)
        play(folder, [1.0, 2.0], checkpoint_config=CheckpointConfig(1))
        assert "could not delete checkpoint_000000: ZeroDivisionError" in caplog.text


class TestFailures:
    def test_of_a_run_are_in_its_folder(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder)
        recorder.begin_attempt()
        error = KeyError("twice")
        recorder.fail(error)
        result = recorder.end_run(error)
        assert result.error is error
        assert (folder.local_path / "error.txt").read_text().count("Failure #") == 1
        assert pickle.loads((folder.local_path / "error.pkl").read_bytes()).args == ("twice",)
        assert json.loads(folder.experiment.read("run.json"))["status"] == "ERROR"

    def test_before_anything_started_are_in_its_folder_too(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        result = make_recorder(folder).end_run(ValueError("too few resources"))
        assert isinstance(result.error, ValueError)
        assert "too few resources" in (folder.local_path / "error.txt").read_text()


class TestContinuing:
    def test_a_later_process_goes_on_in_the_same_folder(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        first = make_recorder(folder, checkpoint_config=CheckpointConfig(2, "loss", "min"))
        first.begin_attempt()
        for index, loss in enumerate([3.0, 9.0, 5.0]):
            first.record({"loss": loss}, save(folder, index))
        first.end_run(ValueError("x"))
        later = TrialFolder(folder.experiment, folder.dir_name)
        assert later.next_index == 3
        noting = Noting()
        recorder = make_recorder(later, checkpoint_config=CheckpointConfig(2, "loss", "min"), callbacks=[noting])
        recorder.begin_attempt()
        assert noting.calls[1:] == ["on_trial_start PENDING", "on_trial_restore checkpoint_000002"]
        recorder.record({"loss": 4.0}, save(later, 3))
        result = recorder.end_run()
        assert (result.metrics["training_iteration"], result.metrics["iterations_since_restore"]) == (4, 1)
        assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [4.0, 3.0]
        assert checkpoints_in(folder) == ["checkpoint_000000", "checkpoint_000003"]
        assert [line["training_iteration"] for line in lines(folder)] == [1, 2, 3, 4]
        assert result.error is None

    @pytest.mark.parametrize(
        "damage",
        [
            b"",
            b"not json\n",
            b'{"training_iteration": 1, "loss": 3.0, "checkpoint_dir_name": "checkpoint_000000"}\n{"loss": 2.',
            b'[1, 2]\n"x"\n7\nnull\n',
            b'{"training_iteration": "x", "checkpoint_dir_name": ["checkpoint_000000"]}\n',
            b'{"checkpoint_dir_name": "../../etc"}\n',
            b"\xff\xfe\x00\n",
            b"[" * 100_000 + b"\n",
        ],
    )
    def test_a_damaged_file_of_results_does_not_stop_it(self, tmp_path: Path, damage: bytes) -> None:
        folder = make_folder(tmp_path)
        folder.make()
        save(folder, 0)
        (folder.local_path / "result.json").write_bytes(damage)
        later = TrialFolder(folder.experiment, folder.dir_name)
        recorder = make_recorder(later)
        recorder.begin_attempt()
        recorder.record({"loss": 1.0}, save(later, 1))
        result = recorder.end_run()
        assert result.metrics["iterations_since_restore"] == 1
        assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == [
            "checkpoint_000000",
            "checkpoint_000001",
        ]
        assert len(result.metrics_dataframe) >= 1

    def test_a_checkpoint_whose_report_was_not_written_counts_as_one(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        recorder = make_recorder(folder)
        recorder.begin_attempt()
        recorder.record({}, None)
        save(folder, 0)  # and the driver is killed
        with contextlib.suppress(ValueError):
            recorder.end_run(ValueError("killed"))
        later = make_recorder(TrialFolder(folder.experiment, folder.dir_name))
        later.begin_attempt()
        later.record({}, None)
        metrics = later.end_run().metrics
        assert metrics["training_iteration"] == 3

    def test_callbacks_find_their_state_again(self, tmp_path: Path) -> None:
        class Counting(Noting):
            number = 0

            def get_state(self) -> dict[str, int]:
                return {"number": 7}

            def set_state(self, state: dict[str, int]) -> None:
                self.number = state["number"]

        folder = make_folder(tmp_path)
        play(folder, [1.0], callbacks=[Counting()])
        later = Counting()
        play(TrialFolder(folder.experiment, folder.dir_name), [1.0], first=1, callbacks=[later])
        assert later.number == 7

    def test_a_damaged_file_of_states_costs_only_the_states(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = make_folder(tmp_path)
        play(folder, [1.0])
        folder.experiment.write("callback_states.pkl", b"no pickle")
        result = play(TrialFolder(folder.experiment, folder.dir_name), [1.0], first=1)
        assert result.metrics["training_iteration"] == 2
        assert "the callbacks start without their former state" in caplog.text


class TestInAStore:
    def test_loggers_keep_what_was_reported_up_to_the_checkpoint(self, tmp_path: Path) -> None:
        folder, path = make_folder(tmp_path), tmp_path / "own.jsonl"
        first = make_recorder(folder, callbacks=[JSONLogger(path)])
        first.begin_attempt()
        for number in range(3):
            first.record({"epoch": number}, save(folder, 0) if number == 1 else None)
        first.end_run(ValueError("x"))
        later = make_recorder(TrialFolder(folder.experiment, folder.dir_name), callbacks=[JSONLogger(path)])
        later.begin_attempt()
        later.record({"epoch": 2}, None)
        later.end_run()
        written = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["epoch"], line["training_iteration"]) for line in written] == [(0, 1), (1, 2), (2, 3)]

    def test_logs_that_cannot_be_copied_stay(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = new_trial_folder(RunConfig(name="stuck", storage_path="memory://recorder"), "Mine")
        recorder = make_recorder(folder)
        recorder.begin_attempt()

        def refuse(self: object, source: Path) -> None:
            raise OSError("quota")

        monkeypatch.setattr(type(folder.trial), "upload", refuse)
        recorder.record({"loss": 1.0}, None)
        recorder.end_run()
        assert f"they stay in {folder.local_path}: quota" in caplog.text
        assert len(lines(folder)) == 1
        folder.remove_staging()
