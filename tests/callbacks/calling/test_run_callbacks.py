from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from raysgd.air.trial import FitTrialView
from raysgd.callbacks.calling.run_callbacks import RunCallbacks
from raysgd.exceptions import CallbackError
from raysgd.train.callbacks import JsonLoggerCallback, TrainingCallback
from tests.train.fit.notes import CONFIG, Noting, make_folder


@pytest.fixture
def trial(tmp_path: Path) -> FitTrialView:
    folder = make_folder(tmp_path)
    folder.make()
    return FitTrialView(folder, CONFIG)


def filled(**metrics: Any) -> dict[str, Any]:
    return {**metrics, "training_iteration": 1, "timestamp": 2, "time_this_iter_s": 0.5, "config": CONFIG}


class TestWhatIsACallback:
    @pytest.mark.parametrize("callback", [7, "x", object(), print, Noting, TrainingCallback])
    def test_other_objects_are_refused(self, callback: Any, trial: FitTrialView) -> None:
        with pytest.raises(TypeError, match=r"need objects of subclasses of `ray\.tune\.Callback`"):
            RunCallbacks([callback], trial)

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
        callbacks.end(has_failed=False)
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
            RunCallbacks([Noting(fails_in=hook), last], trial).end(has_failed=False)
        assert [call.split()[0] for call in last.calls] == ["on_trial_complete", "on_experiment_end"]

    def test_at_the_end_of_a_failed_run_are_logged(self, trial: FitTrialView, caplog: pytest.LogCaptureFixture) -> None:
        RunCallbacks([Noting(fails_in="on_trial_error")], trial).end(has_failed=True)
        assert "`Noting` failed in `on_trial_error`" in caplog.text

    def test_of_a_training_callback_name_its_class(self, trial: FitTrialView) -> None:
        class Broken(TrainingCallback):
            def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
                raise KeyError("loss")

        with pytest.raises(CallbackError, match="`Broken` failed in `on_result`: KeyError: 'loss'"):
            RunCallbacks([Broken()], trial).report(filled())


class TestTrainingCallbacks:
    def test_see_the_reports_of_rank_0_under_their_keys(self, trial: FitTrialView) -> None:
        seen: list[Any] = []

        class Mine(TrainingCallback):
            def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
                seen.append((logdir, config))

            def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
                seen.append(results)

            def finish_training(self, error: bool = False, **info: Any) -> None:
                seen.append(error)

        callbacks = RunCallbacks([Mine()], trial)
        for _ in range(2):
            callbacks.start(after_failure=False, restores=False)
        callbacks.report(filled(loss=1))
        callbacks.end(has_failed=True)
        [started, [report], has_failed] = seen
        assert started == (trial.local_path, {"lr": 0.1})
        assert report["loss"] == 1
        assert (report["_training_iteration"], report["_timestamp"], report["_time_this_iter_s"]) == (1, 2, 0.5)
        assert has_failed is True

    def test_write_where_the_run_writes(self, trial: FitTrialView) -> None:
        callbacks = RunCallbacks([JsonLoggerCallback()], trial)
        callbacks.start(after_failure=False, restores=False)
        callbacks.report(filled(loss=1))
        callbacks.end(has_failed=False)
        assert '"loss": 1' in Path(trial.local_path, "results.json").read_text()


class TestRayTune:
    def test_its_default_loggers_are_known_also_as_base_classes(self, trial: FitTrialView) -> None:
        from ray.tune.logger import CSVLoggerCallback
        from ray.tune.logger import JsonLoggerCallback as TuneJson

        class MyTable(CSVLoggerCallback):
            pass

        callbacks = RunCallbacks([MyTable(), TuneJson(), JsonLoggerCallback()], trial)
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
