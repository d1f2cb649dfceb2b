"""Calls of callbacks: by name, in their order, and what follows where one fails."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd._numbers.results import CallProgress
from raysgd.callbacks import Callback, Run, WorkerCallback
from raysgd.callbacks.calling import CallbackCalls, Dispatcher, checked
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


def test_without_advice_errors_come_as_they_are() -> None:
    with pytest.raises(KeyError, match="lr"):
        Dispatcher([Hooks(KeyError("lr"))], advice=None).on("on_start", "here")


@pytest.mark.parametrize("advice", ["Mend it.", None])
def test_the_end_is_for_all_and_raises_the_first_failure(advice: str | None, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [Hooks(OSError("first")), Hooks(OSError("second")), Hooks()]
    with pytest.raises((OSError, CallbackError), match="first"):
        Dispatcher(callbacks, advice).finish(["on_end"], has_failed=False)
    assert [each.calls for each in callbacks] == [[(False,)]] * 3
    [message] = caplog.messages
    assert message.startswith("the callback `Hooks` failed at the end: ")
    assert "second" in message


def test_the_end_of_a_run_that_has_failed_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Dispatcher([Hooks(OSError("disk full"))]).finish(["on_end"], has_failed=True)
    assert "the callback `Hooks` failed at the end" in caplog.text
    assert "disk full" in caplog.text


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

    def test_raises_the_first_failure_after_all_were_called(self, caplog: pytest.LogCaptureFixture) -> None:
        noted: list[tuple[Any, ...]] = []
        calls = calls_of(Noting(noted, "a", "end"), Noting(noted, "b", "end"))
        calls.begin_run()
        with pytest.raises(CallbackError, match="on_run_end"):
            calls.end_run(None)
        assert [call[:2] for call in noted[2:]] == [("a", "end"), ("b", "end")]
        assert "`Noting` failed in `on_run_end`" in caplog.text

    def test_hides_no_error_of_the_run(self, caplog: pytest.LogCaptureFixture) -> None:
        calls = calls_of(Noting([], fails_in="end"))
        calls.begin_run()
        calls.end_run(RuntimeError("the run"))
        assert "`Noting` failed in `on_run_end`" in caplog.text


class TestProgress:
    NEWS = CallProgress(1, 2, 0, None, None)

    def test_is_only_asked_for_if_someone_listens(self) -> None:
        assert not calls_of(Callback()).wants("on_progress")
        assert calls_of(Callback(), Noting([])).wants("on_progress")

    def test_keeps_an_error_until_the_epoch_is_over_and_calls_no_more(self) -> None:
        noted: list[tuple[Any, ...]] = []
        calls = calls_of(Noting(noted, fails_in="progress"))
        calls.progress(self.NEWS)
        calls.progress(self.NEWS)
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
        callback, in_worker = Callback(), WorkerCallback()
        assert checked(iter([in_worker, callback])) == ([callback], [in_worker])
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

    def test_other_objects_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"`callbacks` has 7: need objects of subclasses of `raysgd\.callbacks"):
            checked([7])
