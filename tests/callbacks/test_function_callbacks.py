"""Callbacks while a training function runs: in `Trainer.run` and in `RunConfig`, beside those of Ray Tune.

Covers `FunctionCalls` and `RunCallbacks` of `raysgd.callbacks.calling`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.trial import FitTrialView
from raysgd.callbacks import Callback, GradientNorms, Run
from raysgd.callbacks.calling import RunCallbacks
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.exceptions import CallbackError
from raysgd.storage import open_folder
from raysgd.train.callbacks import TrainingCallback
from raysgd.train.trainer import TrainerCallbacks
from tests.train.fit.notes import CONFIG, Noting, make_folder


class Notes(Callback):
    """Notes all calls."""

    def __init__(self, stops_at: int = 0, fails_at: int = 0) -> None:
        self.calls: list[Any] = []
        self.stops_at, self.fails_at = stops_at, fails_at
        self.run: Run | None = None
        self.state = 0

    def on_run_begin(self, run: Run) -> None:
        self.run = run
        self.calls.append(("begin", run.name, run.config, run.folder))

    def on_epoch_begin(self, run: Run) -> None:
        raise AssertionError("a function has no epochs")

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.state += 1
        self.calls.append(("result", result["loss"], run.epoch))
        if run.epoch == self.stops_at:
            run.stop("enough")
        if run.epoch == self.fails_at:
            raise OSError("disk full")

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self.calls.append(("event", event.kind))

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.calls.append(("checkpoint", checkpoint))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.calls.append(("end", error))

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


LOSS = GroupEvent("continued", 2, 1, 0.1, "rank 1 died")


class TestInTrainerRun:
    """`Trainer.run(callbacks=[...])` of `raysgd.train`."""

    def test_callbacks_see_reports_checkpoints_and_losses(self, tmp_path: Path) -> None:
        notes = Notes()
        callbacks = TrainerCallbacks([notes])
        with callbacks.around(tmp_path, {"lr": 1}):
            callbacks.process([{"loss": 1.0, "_timestamp": 5}, {"loss": 3.0}])
            callbacks.process([{"loss": 0.5}], [LOSS], "somewhere")
            callbacks.process([{"loss": 0.4}], [LOSS], "somewhere")
        begin = ("begin", "train", {"lr": 1}, tmp_path)
        results = [("event", "continued"), ("result", 0.5, 2), ("checkpoint", "somewhere"), ("result", 0.4, 3)]
        assert notes.calls == [begin, ("result", 1.0, 1), *results, ("end", None)]
        assert notes.run.history["loss"] == [1.0, 0.5, 0.4]
        assert "_timestamp" not in notes.run.history.metrics

    def test_they_hear_what_ended_the_run(self, tmp_path: Path) -> None:
        notes, error = Notes(), KeyError("bad sample")
        with pytest.raises(KeyError), TrainerCallbacks([notes]).around(tmp_path, None):
            raise error
        assert notes.calls[-1] == ("end", error)

    def test_they_cannot_stop_the_function_and_are_told_so(self, tmp_path: Path) -> None:
        callbacks = TrainerCallbacks([Notes(stops_at=1)])
        words = r"`Notes` failed in `on_result`.*`run\.stop` cannot end a run of"
        with pytest.raises(CallbackError, match=words), callbacks.around(tmp_path, None):
            callbacks.process([{"loss": 1.0}])


@pytest.fixture
def trial(tmp_path: Path) -> FitTrialView:
    folder = make_folder(tmp_path)
    folder.make()
    return FitTrialView(folder, CONFIG)


class TestInRunConfig:
    """`RunConfig(callbacks=[...])`."""

    def test_callbacks_see_reports_and_losses_and_stop_the_run(self, trial: FitTrialView) -> None:
        notes = Notes(stops_at=2)
        callbacks = RunCallbacks([notes], trial)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report({"loss": 1.0, "training_iteration": 1, "pid": 7})
        assert not callbacks.is_stopping
        callbacks.start(after_failure=True, restores=False)
        callbacks.report({"loss": 0.5, "training_iteration": 2}, [LOSS])
        callbacks.end_run(None)
        begin = ("begin", trial.trainable_name, {"lr": 0.1}, Path(trial.local_path))
        results = [("result", 1.0, 1), ("event", "continued"), ("result", 0.5, 2)]
        assert notes.calls == [begin, *results, ("end", None)]
        assert callbacks.is_stopping
        assert "pid" not in notes.run.history.metrics

    def test_one_that_fails_is_named_once_and_the_others_hear_of_the_end(self, trial: FitTrialView) -> None:
        first, last = Notes(), Notes(fails_at=1)
        callbacks = RunCallbacks([first, last], trial)
        callbacks.start(after_failure=False, restores=False)
        with pytest.raises(
            CallbackError, match=r"^The callback `Notes` failed in `on_result`: OSError: disk full"
        ) as info:
            callbacks.report({"loss": 1.0, "training_iteration": 1})
        callbacks.end_run(info.value)
        assert first.calls[-1] == last.calls[-1] == ("end", info.value)

    def test_their_state_is_kept_beside_checkpoints(self, trial: FitTrialView) -> None:
        before, after = Notes(), Notes()
        callbacks = RunCallbacks([before], trial)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report({"loss": 1.0, "training_iteration": 1})
        RunCallbacks([after], trial).restore_states(callbacks.states())
        assert after.state == 1


@pytest.mark.parametrize(
    ("checkpoint", "places"),
    [
        (Checkpoint("/kept"), ["/kept"]),
        (Checkpoint(uri="memory://bucket/kept"), ["memory://bucket/kept"]),
        (Checkpoint.from_dict({"epoch": 1}), []),
    ],
)
def test_a_checkpoint_has_a_path_or_a_uri(trial: FitTrialView, checkpoint: Checkpoint, places: list[str]) -> None:
    notes = Notes()
    RunCallbacks([notes], trial).save(checkpoint)
    assert notes.calls == [("checkpoint", place) for place in places]


def test_callbacks_that_run_last_are_called_after_the_others(trial: FitTrialView) -> None:
    called: list[str] = []

    class Named(Callback):
        def __init__(self, name: str, runs_last: bool) -> None:
            self.name, self.runs_last = name, runs_last

        def on_result(self, run: Run, result: dict[str, Any]) -> None:
            called.append(self.name)

    callbacks = RunCallbacks([Named("saving", True), Named("adding", False)], trial)
    callbacks.start(after_failure=False, restores=False)
    callbacks.report({"loss": 1.0, "training_iteration": 1})
    assert called == ["adding", "saving"]


def test_functions_take_their_steps_themselves(trial: FitTrialView) -> None:
    words = "`GradientNorms` runs in the workers, around each step, and a training function"
    for make in (TrainerCallbacks, lambda given: RunCallbacks(given, trial)):
        with pytest.raises(TypeError, match=words):
            make([GradientNorms()])


class OfRayTrain:
    """Has the hooks of callbacks of Ray Train."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (object(), ""),
        (print, ""),
        (Noting, r"did you mean `Noting\(\)`"),
        (TrainingCallback(), r"A `TrainingCallback` is for `raysgd\.train\.Trainer\.run"),
        (OfRayTrain(), r"pass the trainer to `raysgd\.tune\.Tuner`, or call `ray\.tune\.report"),
    ],
)
def test_other_objects_are_refused(callback: Any, words: str, trial: FitTrialView) -> None:
    with pytest.raises(TypeError, match=rf"need objects of subclasses of `ray\.tune\.Callback`.*{words}"):
        RunCallbacks([callback], trial)


def test_an_object_with_some_hooks_is_a_callback_and_cannot_change_what_is_kept(trial: FitTrialView) -> None:
    class Changing:
        def on_trial_result(self, result: dict[str, Any]) -> None:
            result["loss"] = "changed"

    result = {"loss": 1.5, "training_iteration": 1}
    RunCallbacks([Changing()], trial).report(result)
    assert result["loss"] == 1.5


class TestRayTune:
    def test_its_default_loggers_are_known_also_as_base_classes(self, trial: FitTrialView) -> None:
        from ray.tune.logger import CSVLoggerCallback
        from ray.tune.logger import JsonLoggerCallback as TuneJson

        class MyTable(CSVLoggerCallback):
            pass

        callbacks = RunCallbacks([MyTable(), TuneJson()], trial)
        assert callbacks.replaced_loggers == {"CSVLoggerCallback", "JsonLoggerCallback"}

    def test_at_the_end_of_a_failed_run_it_hides_no_error(
        self, trial: FitTrialView, caplog: pytest.LogCaptureFixture
    ) -> None:
        RunCallbacks([Noting(fails_in="on_trial_error")], trial).end_run(OSError("the run"))
        assert "`Noting` failed in `on_trial_error`" in caplog.text

    def test_its_hooks_are_ours(self) -> None:
        """No hook of Ray is missing, and those we call exist there."""
        from ray.tune import Callback

        theirs = {name for name in vars(Callback) if name.startswith("on_") or name == "setup"}
        assert {name for name in vars(Noting) if name.startswith("on_") or name == "setup"} == theirs

    def test_states_go_back_to_the_callback_at_their_place(self, trial: FitTrialView) -> None:
        from ray.tune import Callback

        class Counting(Callback):
            def __init__(self, number: int) -> None:
                self.number = number

            def get_state(self) -> dict[str, int] | None:
                return {"number": self.number} if self.number else None

            def set_state(self, state: dict[str, int]) -> None:
                self.number = state["number"]

        states = RunCallbacks([Noting(), Counting(7), Counting(0)], trial).states()
        assert states == {1: {"number": 7}}
        later = [Noting(), Counting(1), Counting(2)]
        RunCallbacks(later, trial).restore_states(states)
        assert [callback.number for callback in later[1:] if isinstance(callback, Counting)] == [7, 2]


# ------------------------------------------------------------------------------- callbacks of `Trainer.run` alone


class OfTrainer(TrainingCallback):
    """Notes its calls, and raises in one of them if it is to."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str, fails_in: str = "", error: Any = None) -> None:
        self.calls, self.name, self.fails_in, self.error = calls, name, fails_in, error

    def _note(self, what: str, *call: Any) -> None:
        self.calls.append((self.name, what, *call))
        if what == self.fails_in:
            raise self.error

    def start_training(self, logdir: str, config: Any, **info: Any) -> None:
        self._note("start", logdir, config)

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        self._note("results", results)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self._note("finish", error)


def test_callbacks_of_trainers_are_called_in_their_order_hear_of_a_failed_run_and_do_not_hide_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[tuple[Any, ...]] = []
    first, second = (
        OfTrainer(calls, "a", "finish", OSError("disk full")),
        OfTrainer(calls, "b", "results", KeyError("bad")),
    )
    callbacks = TrainerCallbacks([first, second])
    with pytest.raises(KeyError), callbacks.around(Path("run"), None):
        callbacks.process([{"loss": 1}])
    assert calls == [
        ("a", "start", "run", {}),
        ("b", "start", "run", {}),
        ("a", "results", [{"loss": 1}]),
        ("b", "results", [{"loss": 1}]),
        ("a", "finish", True),
        ("b", "finish", True),
    ]
    assert "the callback `OfTrainer` failed at the end: disk full" in caplog.text


def test_the_first_failure_at_the_end_is_raised_and_the_next_one_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsAtTheEnd(Callback):
        def on_run_end(self, run: Run, error: BaseException | None) -> None:
            raise KeyError("gone")

    callbacks = TrainerCallbacks([OfTrainer([], "a", "finish", OSError("disk full")), FailsAtTheEnd()])
    with pytest.raises(OSError, match="disk full"), callbacks.around(tmp_path, None):
        pass
    assert "`FailsAtTheEnd` failed in `on_run_end`" in caplog.text


class Reading(TrainingCallback):
    """Writes a file at the start, and notes the checkpoints at the end."""

    def __init__(self, reads_checkpoints: bool) -> None:
        self.reads_checkpoints = reads_checkpoints
        self.found: list[str] | None = None

    def start_training(self, logdir: str, **info: Any) -> None:
        self.logdir = Path(logdir)
        (self.logdir / "log").write_text("started")

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.found = sorted(str(path.relative_to(self.logdir)) for path in self.logdir.rglob("*") if path.is_file())


@pytest.mark.parametrize("reads_checkpoints", [True, False])
def test_with_a_store_callbacks_have_a_folder_of_this_machine(
    reads_checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    run_dir = open_folder(f"memory://run-callbacks/{reads_checkpoints}")
    callback = Reading(reads_checkpoints)
    with TrainerCallbacks([callback]).around(run_dir, None):
        (run_dir / "checkpoints").write("checkpoint_000001", b"1")
    assert callback.found == ["checkpoints/checkpoint_000001", "log"][not reads_checkpoints :]
    assert run_dir.read("log") == b"started"
    assert run_dir.names() == ["checkpoints", "log"]


def test_only_callbacks_of_the_library_wait_for_checkpoints() -> None:
    assert not TrainerCallbacks([OfTrainer([], "a")]).are_told_of_checkpoints
    assert TrainerCallbacks([OfTrainer([], "a"), Callback()]).are_told_of_checkpoints


def test_without_callbacks_no_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    with TrainerCallbacks(None).around(open_folder("memory://run-callbacks/none"), None):
        pass
    assert list(tmp_path.iterdir()) == []
