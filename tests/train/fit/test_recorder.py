"""What the driver writes down about a run, without workers."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import CheckpointConfig, RunConfig
from raysgd.air.result import Result
from raysgd.air.trial import TrialFolder, new_trial_folder
from raysgd.callbacks import JSONLogger
from raysgd.exceptions import CallbackError
from raysgd.train.fit.recorder import make_stop, number_of
from tests.train.fit.notes import CONFIG, Noting, begun_recorder, lines, make_folder, make_recorder, save


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    return make_folder(tmp_path)


def checkpoints_in(folder: TrialFolder) -> list[str]:
    return sorted(path.name for path in folder.trial.local_path.glob("checkpoint_*"))


def play(folder: TrialFolder, losses: list[float], first: int = 0, **options: Any) -> Result:
    """A run that saves with each report and ends well."""
    recorder = begun_recorder(folder, **options)
    for index, loss in enumerate(losses, start=first):
        recorder.record({"loss": loss}, save(folder, index))
    return recorder.end_run()


class TestARun:
    def test_has_the_metrics_of_its_last_report(self, folder: TrialFolder) -> None:
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
        recorder = begun_recorder(make_folder(tmp_path))
        result = recorder.end_run()
        assert (result.metrics, result.checkpoint, result.best_checkpoints) == (None, None, [])

    def test_stops_at_a_condition(self, folder: TrialFolder) -> None:
        recorder = begun_recorder(folder, stop={"training_iteration": 2})
        assert [recorder.record({}, None), recorder.record({}, None)] == [False, True]
        recorder.end_run()
        assert [line["done"] for line in lines(folder)] == [False, True]


class TestHooks:
    def test_are_called_in_the_order_of_ray_tune(self, folder: TrialFolder) -> None:
        noting = Noting()
        recorder = begun_recorder(folder, callbacks=[noting], stop={"loss": 99})
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
        recorder = begun_recorder(make_folder(tmp_path), callbacks=[noting])
        recorder.end_run(ValueError("x"))
        assert noting.calls[2:] == ["on_trial_error ERROR", "on_experiment_end"]

    def test_that_fail_leave_the_report_and_the_end_to_others(self, folder: TrialFolder) -> None:
        last = Noting()
        recorder = begun_recorder(folder, callbacks=[Noting(fails_in="on_trial_result"), last])
        with pytest.raises(CallbackError) as info:
            recorder.record({"loss": 1}, None)
        result = recorder.end_run(info.value)
        assert [line["loss"] for line in lines(folder)] == [1]
        assert last.calls[-2:] == ["on_trial_error ERROR", "on_experiment_end"]
        assert isinstance(result.error, CallbackError)
        assert "`Noting` failed in `on_trial_result`" in (folder.local_path / "error.txt").read_text()

    def test_that_fail_at_the_end_leave_a_whole_folder(self, folder: TrialFolder) -> None:
        recorder = begun_recorder(folder, callbacks=[Noting(fails_in="on_trial_complete")])
        with pytest.raises(CallbackError):
            recorder.end_run()
        assert json.loads(folder.experiment.read("run.json"))["status"] == "TERMINATED"


class TestRetention:
    @pytest.mark.parametrize(
        ("config", "best", "kept"),
        [
            (CheckpointConfig(2, "loss", "min"), [5.0, 3.0], [1, 3]),
            (CheckpointConfig(2, "loss", "max"), [5.0, 7.0], [2, 3]),
            (CheckpointConfig(1, "loss", "min"), [5.0, 3.0], [1, 3]),
            (CheckpointConfig(1, "loss", "max"), [5.0, 7.0], [2, 3]),
            (CheckpointConfig(2), [7.0, 5.0], [2, 3]),
            (CheckpointConfig(1), [5.0], [3]),
            (CheckpointConfig(2, "missing"), [7.0, 5.0], [2, 3]),
        ],
    )
    def test_on_disk(self, folder: TrialFolder, config: CheckpointConfig, best: list[float], kept: list[int]) -> None:
        result = play(folder, [float("nan"), 3.0, 7.0, 5.0], checkpoint_config=config)
        assert [metrics["loss"] for _, metrics in result.best_checkpoints] == best
        assert checkpoints_in(folder) == [f"checkpoint_{index:06d}" for index in kept]
        again = Result.from_path(str(result.path)).best_checkpoints
        assert [Path(checkpoint.path).name for checkpoint, _ in again] == checkpoints_in(folder)
        assert Path(result.checkpoint.path).name == "checkpoint_000003"

    def test_nested_scores_count(self, folder: TrialFolder) -> None:
        recorder = begun_recorder(folder, checkpoint_config=CheckpointConfig(1, "val/acc"))
        for index, accuracy in enumerate([0.5, 0.9, 0.1]):
            recorder.record({"val": {"acc": accuracy}}, save(folder, index))
        assert [metrics["val"]["acc"] for _, metrics in recorder.end_run().best_checkpoints] == [0.1, 0.9]

    @pytest.mark.parametrize(("metrics", "text"), [({}, "is missing"), ({"score": "high"}, "is 'high', not a number")])
    def test_a_score_that_is_none_is_logged_once(
        self, folder: TrialFolder, caplog: pytest.LogCaptureFixture, metrics: dict[str, Any], text: str
    ) -> None:
        recorder = begun_recorder(folder, checkpoint_config=CheckpointConfig(1, "score"))
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
        self, folder: TrialFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(folder.trial), "delete", lambda self: 1 / 0)
        play(folder, [1.0, 2.0], checkpoint_config=CheckpointConfig(1))
        assert "could not delete checkpoint_000000: ZeroDivisionError" in caplog.text


class TestFailures:
    def test_of_a_run_are_in_its_folder(self, folder: TrialFolder) -> None:
        recorder = begun_recorder(folder)
        error = KeyError("twice")
        recorder.fail(error)
        result = recorder.end_run(error)
        assert result.error is error
        assert (folder.local_path / "error.txt").read_text().count("Failure #") == 1
        assert pickle.loads((folder.local_path / "error.pkl").read_bytes()).args == ("twice",)
        assert json.loads(folder.experiment.read("run.json"))["status"] == "ERROR"

    def test_before_anything_started_are_in_its_folder_too(self, folder: TrialFolder) -> None:
        result = make_recorder(folder).end_run(ValueError("too few resources"))
        assert isinstance(result.error, ValueError)
        assert "too few resources" in (folder.local_path / "error.txt").read_text()


class TestContinuing:
    def test_a_later_process_goes_on_in_the_same_folder(self, folder: TrialFolder) -> None:
        first = begun_recorder(folder, checkpoint_config=CheckpointConfig(2, "loss", "min"))
        for index, loss in enumerate([3.0, 9.0, 5.0]):
            first.record({"loss": loss}, save(folder, index))
        first.end_run(ValueError("x"))
        later = TrialFolder(folder.experiment, folder.dir_name)
        assert later.next_index == 3
        noting = Noting()
        recorder = begun_recorder(later, checkpoint_config=CheckpointConfig(2, "loss", "min"), callbacks=[noting])
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
    def test_a_damaged_file_of_results_does_not_stop_it(self, folder: TrialFolder, damage: bytes) -> None:
        folder.make()
        save(folder, 0)
        (folder.local_path / "result.json").write_bytes(damage)
        later = TrialFolder(folder.experiment, folder.dir_name)
        recorder = begun_recorder(later)
        recorder.record({"loss": 1.0}, save(later, 1))
        result = recorder.end_run()
        assert result.metrics["iterations_since_restore"] == 1
        assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == [
            "checkpoint_000000",
            "checkpoint_000001",
        ]
        assert len(result.metrics_dataframe) >= 1

    def test_a_checkpoint_whose_report_was_not_written_counts_as_one(self, folder: TrialFolder) -> None:
        recorder = begun_recorder(folder)
        recorder.record({}, None)
        save(folder, 0)  # and the driver is killed
        with contextlib.suppress(ValueError):
            recorder.end_run(ValueError("killed"))
        later = begun_recorder(TrialFolder(folder.experiment, folder.dir_name))
        later.record({}, None)
        metrics = later.end_run().metrics
        assert metrics["training_iteration"] == 3

    def test_callbacks_find_their_state_again(self, folder: TrialFolder) -> None:
        class Counting(Noting):
            number = 0

            def get_state(self) -> dict[str, int]:
                return {"number": 7}

            def set_state(self, state: dict[str, int]) -> None:
                self.number = state["number"]

        play(folder, [1.0], callbacks=[Counting()])
        later = Counting()
        play(TrialFolder(folder.experiment, folder.dir_name), [1.0], first=1, callbacks=[later])
        assert later.number == 7

    def test_a_damaged_file_of_states_costs_only_the_states(
        self, folder: TrialFolder, caplog: pytest.LogCaptureFixture
    ) -> None:
        play(folder, [1.0])
        folder.experiment.write("callback_states.pkl", b"no pickle")
        result = play(TrialFolder(folder.experiment, folder.dir_name), [1.0], first=1)
        assert result.metrics["training_iteration"] == 2
        assert "the callbacks start without their former state" in caplog.text


class TestInAStore:
    def test_loggers_keep_what_was_reported_up_to_the_checkpoint(self, tmp_path: Path) -> None:
        folder, path = make_folder(tmp_path), tmp_path / "own.jsonl"
        first = begun_recorder(folder, callbacks=[JSONLogger(path)])
        for number in range(3):
            first.record({"epoch": number}, save(folder, 0) if number == 1 else None)
        first.end_run(ValueError("x"))
        later = begun_recorder(TrialFolder(folder.experiment, folder.dir_name), callbacks=[JSONLogger(path)])
        later.record({"epoch": 2}, None)
        later.end_run()
        written = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["epoch"], line["training_iteration"]) for line in written] == [(0, 1), (1, 2), (2, 3)]

    def test_logs_that_cannot_be_copied_stay(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = new_trial_folder(RunConfig(name="stuck", storage_path="memory://recorder"), "Mine")
        recorder = begun_recorder(folder)

        def refuse(self: object, source: Path) -> None:
            raise OSError("quota")

        monkeypatch.setattr(type(folder.trial), "upload", refuse)
        recorder.record({"loss": 1.0}, None)
        recorder.end_run()
        assert f"they stay in {folder.local_path}: quota" in caplog.text
        assert len(lines(folder)) == 1
        folder.remove_staging()


LINES = [
    (1, "running; results in"),
    (3, "report 1: loss=0.123457, val/acc=1"),
    (2, "checkpoint checkpoint_000000"),
    (2, "attempt 2"),
    (1, "finished after 1 reports"),
]
"""What is printed, and from which `verbose` on."""


@pytest.mark.parametrize("verbose", [None, 0, 1, 2, 3])
def test_a_run_says_what_it_does(
    folder: TrialFolder, verbose: int | None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = begun_recorder(folder, verbose=verbose, progress_reporter=object(), log_to_file=True)
    recorder.record({"loss": 0.123456789, "val": {"acc": 1}}, save(folder, 0))
    recorder.fail(ValueError("x"))
    recorder.begin_attempt()
    recorder.end_run()
    said = [text for least, text in LINES if least <= (verbose or 0)]
    for text, line in zip(said, capsys.readouterr().out.splitlines(), strict=True):
        assert text in line
    assert "`progress_reporter` shows the trials of a `Tuner`" in caplog.text
    assert "`log_to_file` is for the trials of a `Tuner`" in caplog.text


# ------------------------------------------------------------------------------------------ conditions that end a run


@pytest.mark.parametrize(
    ("stop", "stops_at"),
    [
        (None, None),
        ({"n": 2}, 2),
        ({"n": 2, "m": 1}, 2),
        ({"nested/n": 3}, 3),
        ({"missing": 1}, None),
        ({}, None),
        (lambda trial_id, result: result["n"] >= 3, 3),
        (lambda trial_id, result: result["n"] == 1, 1),
        (partial(lambda trial_id, result: True), 0),
        ([{"n": 3}, {"n": 1}], 1),
    ],
)
def test_conditions(stop: Any, stops_at: int | None) -> None:
    condition = make_stop(stop)
    met = [n for n in range(5) if condition("id", {"n": n, "nested": {"n": n}})]
    assert (met[0] if met else None) == stops_at


def test_a_stopper_of_ray_tune_is_asked_for_both() -> None:
    from ray.tune.stopper import MaximumIterationStopper, Stopper

    class AtOnce(Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return True

    assert make_stop(AtOnce())("id", {})
    condition = make_stop(MaximumIterationStopper(2))
    assert [condition("id", {}) for _ in range(3)] == [False, True, True]


def test_a_metric_that_is_never_reported_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    condition = make_stop({"accuracy": 0.9})
    for _ in range(3):
        condition("id", {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "`RunConfig(stop=...)` names the metric 'accuracy', which this report does not have. It has: loss"
    ]


@pytest.mark.parametrize(
    ("stop", "error", "text"),
    [
        ({"n": "2"}, ValueError, "the name of a metric and a number"),
        ({"n": float("nan")}, ValueError, "the name of a metric and a number"),
        ({1: 2}, ValueError, "the name of a metric and a number"),
        (lambda result: True, ValueError, "a function of two arguments"),
        ("n", TypeError, "need a dict of metrics"),
        (7, TypeError, "need a dict of metrics"),
        (dict, TypeError, "need a dict of metrics"),
    ],
)
def test_what_is_not_a_condition(stop: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_stop(stop)


def test_a_condition_gets_a_copy() -> None:
    def changing(trial_id: str, result: Any) -> bool:
        result["n"] = 7
        return False

    conditions: Callable[..., bool] = make_stop([changing])
    result = {"n": 1}
    conditions("id", result)
    assert result == {"n": 1}
