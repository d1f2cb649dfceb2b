from __future__ import annotations

import threading

import pytest

from raysgd.train._hand_off import Ended, HandOff


def start(function):  # type: ignore[no-untyped-def]
    """A hand-off whose function is given it."""
    holder: list[HandOff] = []
    hand_off = HandOff(lambda: function(holder[0]))
    holder.append(hand_off)
    hand_off.start()
    return hand_off


def test_messages_come_in_order_and_then_the_end_with_its_value() -> None:
    def function(hand_off: HandOff) -> str:
        for number in range(3):
            hand_off.offer(number)
        return "done"

    hand_off = start(function)
    assert [hand_off.take() for _ in range(4)] == [0, 1, 2, Ended("done")]
    assert hand_off.take() == Ended("done")


def test_the_function_never_runs_past_a_message_that_was_not_taken() -> None:
    passed: list[int] = []
    second_is_out = threading.Event()

    def function(hand_off: HandOff) -> None:
        hand_off.offer(0)
        passed.append(0)
        second_is_out.set()
        hand_off.offer(1)
        passed.append(1)

    hand_off = start(function)
    assert hand_off.take() == 0
    assert second_is_out.wait(5)
    assert passed == [0]
    assert hand_off.take() == 1
    assert hand_off.take() == Ended()
    assert passed == [0, 1]


def test_what_the_function_raises_comes_after_its_messages() -> None:
    def function(hand_off: HandOff) -> None:
        hand_off.offer("last words")
        raise KeyError("boom")

    hand_off = start(function)
    assert hand_off.take() == "last words"
    with pytest.raises(KeyError, match="boom"):
        hand_off.take()


def test_none_is_a_message_like_any_other() -> None:
    hand_off = start(lambda hand_off: hand_off.offer(None))
    assert hand_off.take() is None
    assert hand_off.take() == Ended()


def test_a_cancelled_function_ends_at_its_message_although_it_catches_exceptions() -> None:
    cleaned_up: list[bool] = []

    def function(hand_off: HandOff) -> None:
        try:
            while True:
                try:
                    hand_off.offer("again")
                except Exception:  # as careless user code does
                    continue
        finally:
            cleaned_up.append(True)

    hand_off = start(function)
    assert hand_off.take() == "again"
    assert hand_off.cancel(patience_s=5)
    assert cleaned_up == [True]


def test_a_function_that_comes_to_no_message_cannot_be_cancelled() -> None:
    go_on = threading.Event()
    hand_off = start(lambda hand_off: go_on.wait(5))
    assert not hand_off.cancel(patience_s=0.01)
    go_on.set()
    assert hand_off.cancel(patience_s=5)
