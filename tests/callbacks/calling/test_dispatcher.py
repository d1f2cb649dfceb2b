from __future__ import annotations

from typing import Any

import pytest

from raysgd.callbacks.calling.dispatcher import Dispatcher
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


class Adapter:
    """Stands for a callback of the user."""

    def __init__(self, adapted: Any) -> None:
        self.adapted = adapted

    def on_start(self) -> None:
        self.adapted.on_start("here")


def test_hooks_get_what_they_take_and_those_that_are_missing_are_left_out() -> None:
    hooks = Hooks()
    dispatcher = Dispatcher([object(), hooks])
    dispatcher.on("on_start", "here", lr=0.1, epochs=3)
    dispatcher.on("on_all", lr=0.1, epochs=3)
    dispatcher.on("on_something_else", lr=0.1)
    assert hooks.calls == [("here", 0.1), ({"lr": 0.1, "epochs": 3},)]


def test_one_that_fails_is_named_with_the_advice_and_those_after_it_are_not_called() -> None:
    last = Hooks()
    dispatcher = Dispatcher([Adapter(Hooks(KeyError("lr"))), last], advice="Leave it out.")
    words = r"^The callback `Hooks` failed in `on_start`: KeyError: 'lr'\. The run ends\. Leave it out\.$"
    with pytest.raises(CallbackError, match=words) as info:
        dispatcher.on("on_start")
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
