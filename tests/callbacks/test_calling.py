"""What callbacks are shown of a run; their calls, by name and in their order, and what follows where one fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import Callback, Run, WorkerCallback, callback
from raysgd.callbacks.calling import CallbackCalls, Dispatcher, checked
from raysgd.core.numbers.results import CallProgress
from raysgd.exceptions import CallbackError


class Hooks:
    """Notes its calls, and raises if it is to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def on_start(self, place: str, lr: float = 0.0) -> None:
        self._note(place, lr)

    def on_all(self, **info: Any) -> None:
        self._note(info)

    def on_end(self, *, has_failed: bool = False) -> None:
        self._note(has_failed)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error


def test_hooks_get_what_they_take_and_those_that_are_missing_are_left_out() -> None:
    hooks = Hooks()
    dispatcher = Dispatcher([object(), hooks])
    dispatcher.on("on_start", "here", lr=0.1, epochs=3)
    dispatcher.on("on_all", lr=0.1, epochs=3)
    dispatcher.on("on_something_else", lr=0.1)
    assert hooks.calls == [("here", 0.1), ({"lr": 0.1, "epochs": 3},)]


def test_one_that_fails_is_named_with_the_advice_and_those_after_it_are_not_called() -> None:
    last = Hooks()
    dispatcher = Dispatcher([Hooks(KeyError("lr")), last], advice="Leave it out.")
    words = r"^The callback `Hooks` failed in `on_start`: KeyError: 'lr'\. The run ends\. Leave it out\.$"
    with pytest.raises(CallbackError, match=words) as info:
        dispatcher.on("on_start", "here")
    assert isinstance(info.value.__cause__, KeyError)
    assert last.calls == []


@pytest.mark.parametrize("advice", ["Mend it.", None])
def test_the_end_is_for_all_and_raises_the_first_failure(advice: str | None, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [Hooks(OSError("first")), Hooks(OSError("second")), Hooks()]
    with pytest.raises((OSError, CallbackError), match="first"):
        Dispatcher(callbacks, advice).finish(["on_end"], has_failed=False)
    assert [each.calls for each in callbacks] == [[(False,)]] * 3
    [message] = caplog.messages
    assert message.startswith("the callback `Hooks` failed at the end: ")
    assert "second" in message


class Noting(Callback):
    """Notes its calls, and raises in one of them if it is to."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str = "", fails_in: str = "") -> None:
        self.calls, self.name, self.fails_in = calls, name, fails_in
        self.loaded: Any = None

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((self.name, method, *args))
        if method == self.fails_in:
            raise KeyError("gone")

    def on_run_begin(self, run: Run) -> None:
        self._note("begin")

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        self._note("progress", progress.num_steps)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        result[self.name] = len(result)
        self._note("result", dict(result))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._note("end", error)

    def state_dict(self) -> Any:
        return {"name": self.name}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def calls_of(*callbacks: Callback) -> CallbackCalls:
    return CallbackCalls(callbacks, Run(name="line"))


def test_all_are_called_in_their_order_and_see_what_those_before_have_added() -> None:
    noted: list[tuple[Any, ...]] = []
    calls = calls_of(Noting(noted, "a"), Noting(noted, "b"))
    calls.tell("on_result", {"loss": 1.0})
    assert noted == [("a", "result", {"loss": 1.0, "a": 1}), ("b", "result", {"loss": 1.0, "a": 1, "b": 2})]


class TestTheEnd:
    def test_is_for_all_that_have_begun_also_the_one_that_failed(self) -> None:
        noted: list[tuple[Any, ...]] = []
        calls = calls_of(Noting(noted, "a"), Noting(noted, "b", fails_in="begin"), Noting(noted, "c"))
        with pytest.raises(CallbackError):
            calls.begin_run()
        error = RuntimeError("the run")
        calls.end_run(error)
        assert noted == [("a", "begin"), ("b", "begin"), ("a", "end", error), ("b", "end", error)]

    def test_of_a_run_that_failed_raises_nothing_else(self, caplog: pytest.LogCaptureFixture) -> None:
        calls = calls_of(Noting([], fails_in="end"))
        calls.begin_run()
        calls.end_run(RuntimeError("the run"))
        assert "`Noting` failed in `on_run_end`" in caplog.text

    @pytest.mark.parametrize("error", [None, RuntimeError("the run")])
    def test_is_told_to_all_though_ctrl_c_is_pressed_over_it(
        self, error: RuntimeError | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        class PressesCtrlC(Callback):
            def on_run_end(self, run: Run, error: BaseException | None) -> None:
                raise KeyboardInterrupt

        noted: list[tuple[Any, ...]] = []
        calls = calls_of(Noting(noted, "a", fails_in="end"), PressesCtrlC(), Noting(noted, "b", fails_in="end"))
        calls.begin_run()
        with pytest.raises(KeyboardInterrupt):
            calls.end_run(error)
        assert noted[2:] == [("a", "end", error), ("b", "end", error)]
        assert caplog.text.count("`Noting` failed in `on_run_end`") == 2


class TestProgress:
    NEWS = CallProgress(1, 2, 0, None, None)

    def test_is_only_asked_for_if_someone_listens(self) -> None:
        assert not calls_of(Callback()).wants("on_progress")
        assert calls_of(Callback(), Noting([])).wants("on_progress")

    def test_keeps_an_error_until_the_epoch_is_over_and_calls_no_more(self) -> None:
        noted: list[tuple[Any, ...]] = []
        calls = calls_of(Noting(noted, fails_in="progress"))
        calls.tell_inside("on_progress", self.NEWS)
        calls.tell_inside("on_progress", self.NEWS)
        assert len(noted) == 1
        with pytest.raises(CallbackError, match="on_progress"):
            calls.check_progress()


class TestStates:
    def test_go_to_callbacks_of_the_same_class_in_their_order(self) -> None:
        states = calls_of(Noting([], "a"), Callback(), Noting([], "b")).states()
        assert [entry["name"] for entry in states] == ["Noting", "Callback", "Noting"]
        first, second, third = Noting([]), Noting([]), Noting([])
        calls_of(first, second, third).load_states(states)
        assert [each.loaded for each in (first, second, third)] == [{"name": "a"}, {"name": "b"}, None]


class TestWhatIsGiven:
    def test_may_be_any_iterable(self) -> None:
        own, in_worker = Callback(), WorkerCallback()
        assert checked(iter([in_worker, own])) == ([own], [in_worker])
        assert checked(None) == ([], [])

    @pytest.mark.parametrize("given", [Callback(), "EarlyStopping", 3])
    def test_has_to_be_a_list(self, given: Any) -> None:
        with pytest.raises(TypeError, match="need a list of callbacks"):
            checked(given)

    def test_has_each_object_once(self) -> None:
        for twice in (Callback(), WorkerCallback()):
            with pytest.raises(ValueError, match=r"`callbacks` has .* twice.*: pass each object once"):
                checked([twice, Noting([]), twice])
        assert len(checked([Callback(), Callback()])[0]) == 2

    def test_a_class_is_met_with_a_guess(self) -> None:
        with pytest.raises(TypeError, match=r"Did you mean `Noting\(\)`\?"):
            checked([Noting])

    @pytest.mark.parametrize(
        ("module", "name", "line"),
        [
            (
                "lightning.pytorch.callbacks.early_stopping",
                "EarlyStopping",
                'Write `raysgd.callbacks.EarlyStopping("val',
            ),
            ("pytorch_lightning.callbacks", "ModelCheckpoint", 'Write `raysgd.callbacks.Checkpointing("checkpoints")`'),
            (
                "transformers.trainer_callback",
                "EarlyStoppingCallback",
                'Write `raysgd.callbacks.EarlyStopping("val_loss',
            ),
            ("keras.src.callbacks.early_stopping", "EarlyStopping", 'config={"fit_config": {"callbacks": [...]}}'),
            ("lightning.pytorch.loggers.tensorboard", "TensorBoardLogger", "raysgd.callbacks.TensorBoardLogger("),
            ("lightning.pytorch.callbacks.timer", "Timer", "Write what it does in a subclass of one of these"),
            ("mine", "EarlyStopping", "need objects of subclasses of"),
        ],
    )
    def test_one_of_another_library_is_met_with_ours(self, module: str, name: str, line: str) -> None:
        given = type(name, (), {"__module__": module})
        for each in (given(), given):
            with pytest.raises(TypeError, match=re.escape(line)):
                checked([each])


class TestTheFolderOfARun:
    def test_is_made_when_it_is_first_read(self, tmp_path: Path) -> None:
        run = Run(name="line", folder=tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()
        assert run.folder == tmp_path / "a" / "b"
        assert run.folder.is_dir()

    def test_is_a_new_one_for_each_run_without_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(callback, "RESULTS_FOLDER", tmp_path)
        runs = [Run(name="line"), Run(name="line")]
        for run in runs:
            run.started_at = 0.0
        monkeypatch.setattr(Path, "exists", lambda path: False)  # as if others looked at the same time
        folders = {run.folder for run in runs}
        assert len(folders) == 2
        assert all(folder.parent == tmp_path and folder.name.startswith("line_19") for folder in folders)


class TestStopping:
    def test_keeps_the_first_reason(self) -> None:
        run = Run(name="line")
        assert not run.is_stopping
        run.stop("enough")
        run.stop("too late")
        assert run.is_stopping
        assert run.history.stop_reason == "enough"

    def test_says_so_where_nothing_can_stop_the_run(self) -> None:
        run = Run(name="line", obstacle_to_stop="the function decides")
        with pytest.raises(NotImplementedError, match="the function decides"):
            run.stop("enough")
        assert not run.is_stopping


def test_only_class_based_trainers_can_be_saved() -> None:
    with pytest.raises(NotImplementedError, match="a training function saves its own checkpoints"):
        Run(name="line").save("last.pt")


@pytest.mark.parametrize(("base", "name"), [(Callback, "on_epoch_end"), (WorkerCallback, "on_result")])
def test_an_event_that_there_is_not_is_warned_of(base: type[Any], name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = type("Mine", (base,), {name: lambda self: None, "on_epoch_begin": lambda self, run: None, "once": 1})
    [record] = caplog.records
    assert f"`Mine.{name}` is never called: `{base.__name__}` has the events on_" in record.getMessage()
    type("Derived", (made,), {name: lambda self: None})
    assert len(caplog.records) == 1, "one warning for each name"


def test_methods_of_another_base_class_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def on_disk(self) -> None: ...

    class Both(Callback, Other):
        def on_disk(self) -> None: ...

    assert Both
    assert caplog.records == []
