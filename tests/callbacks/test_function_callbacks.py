"""Callbacks while a training function runs: in `Trainer.run` and in `RunConfig`, beside those of Ray Tune.

Covers `FunctionCalls` and `RunCallbacks` of `raysgd.callbacks.calling`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from raysgd.air.trial import FitTrialView
from raysgd.callbacks import Callback, GradientNorms, Run
from raysgd.callbacks.calling import RunCallbacks
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.exceptions import CallbackError
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
        callbacks.setup(None)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report({"loss": 1.0, "training_iteration": 1, "pid": 7})
        assert not callbacks.is_stopping
        callbacks.watch(lambda: [LOSS])
        callbacks.start(after_failure=True, restores=False)
        callbacks.report({"loss": 0.5, "training_iteration": 2})
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

    def test_one_of_ray_train_says_how_tune_sees_a_run(self, trial: FitTrialView) -> None:
        class OfRayTrain:
            def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None: ...

        with pytest.raises(TypeError, match=r"pass the trainer to `raysgd\.tune\.Tuner`, or call `ray\.tune\.report"):
            RunCallbacks([OfRayTrain()], trial)

    def test_their_state_is_kept_beside_checkpoints(self, trial: FitTrialView) -> None:
        before, after = Notes(), Notes()
        callbacks = RunCallbacks([before], trial)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report({"loss": 1.0, "training_iteration": 1})
        RunCallbacks([after], trial).restore_states(callbacks.states())
        assert after.state == 1


def test_functions_take_their_steps_themselves(trial: FitTrialView) -> None:
    words = "`GradientNorms` runs in the workers, around each step, and a training function"
    for make in (TrainerCallbacks, lambda given: RunCallbacks(given, trial)):
        with pytest.raises(TypeError, match=words):
            make([GradientNorms()])


def filled(**metrics: Any) -> dict[str, Any]:
    return {**metrics, "training_iteration": 1, "timestamp": 2, "time_this_iter_s": 0.5, "config": CONFIG}


class TestWhatIsACallback:
    @pytest.mark.parametrize("callback", [7, "x", object(), print, Noting, TrainingCallback])
    def test_other_objects_are_refused(self, callback: Any, trial: FitTrialView) -> None:
        with pytest.raises(TypeError, match=r"need objects of subclasses of `ray\.tune\.Callback`"):
            RunCallbacks([callback], trial)

    def test_one_of_ray_train_1_belongs_elsewhere(self, trial: FitTrialView) -> None:
        with pytest.raises(TypeError, match=r"A `TrainingCallback` is for `raysgd\.train\.Trainer\.run"):
            RunCallbacks([TrainingCallback()], trial)

    def test_a_class_is_told_how_to_make_an_object(self, trial: FitTrialView) -> None:
        with pytest.raises(TypeError, match=r"did you mean `Noting\(\)`"):
            RunCallbacks([Noting], trial)

    def test_an_object_may_have_some_hooks_only(self, trial: FitTrialView) -> None:
        class OnlyResults:
            seen: ClassVar[list[float]] = []

            def on_trial_result(self, result: dict[str, Any]) -> None:
                self.seen.append(result["loss"])

        callbacks = RunCallbacks([OnlyResults()], trial)
        callbacks.setup(None)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report(filled(loss=1.5))
        callbacks.end_run(None)
        assert OnlyResults.seen == [1.5]


def test_a_callback_cannot_change_what_is_kept(trial: FitTrialView) -> None:
    class Changing:
        def on_trial_result(self, result: dict[str, Any]) -> None:
            result["loss"] = "changed"

    result = filled(loss=1.5)
    RunCallbacks([Changing()], trial).report(result)
    assert result["loss"] == 1.5


class TestFailures:
    @pytest.mark.parametrize("hook", ["on_trial_start", "on_trial_result", "on_step_begin"])
    def test_name_the_callback_and_the_hook(self, hook: str, trial: FitTrialView) -> None:
        callbacks = RunCallbacks([Noting(fails_in=hook)], trial)

        def play() -> None:
            callbacks.start(after_failure=False, restores=False)
            callbacks.report(filled(loss=1))

        with pytest.raises(CallbackError, match=rf"`Noting` failed in `{hook}`: ZeroDivisionError: by mistake") as info:
            play()
        assert isinstance(info.value.__cause__, ZeroDivisionError)

    @pytest.mark.parametrize("hook", ["on_trial_complete", "on_experiment_end"])
    def test_at_the_end_come_after_all_were_called(self, hook: str, trial: FitTrialView) -> None:
        last = Noting()
        with pytest.raises(CallbackError, match=hook):
            RunCallbacks([Noting(fails_in=hook), last], trial).end_run(None)
        assert [call.split()[0] for call in last.calls] == ["on_trial_complete", "on_experiment_end"]

    def test_at_the_end_of_a_failed_run_are_logged(self, trial: FitTrialView, caplog: pytest.LogCaptureFixture) -> None:
        RunCallbacks([Noting(fails_in="on_trial_error")], trial).end_run(OSError())
        assert "`Noting` failed in `on_trial_error`" in caplog.text


class TestRayTune:
    def test_its_default_loggers_are_known_also_as_base_classes(self, trial: FitTrialView) -> None:
        from ray.tune.logger import CSVLoggerCallback
        from ray.tune.logger import JsonLoggerCallback as TuneJson

        class MyTable(CSVLoggerCallback):
            pass

        callbacks = RunCallbacks([MyTable(), TuneJson()], trial)
        assert callbacks.replaced_loggers == {"CSVLoggerCallback", "JsonLoggerCallback"}

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
