from __future__ import annotations

import threading

import pytest

from raysgd.train._mailbox import Ended, Mailbox


def start(function):  # type: ignore[no-untyped-def]
    """A hand-off whose function is given it."""
    holder: list[Mailbox] = []
    mailbox = Mailbox(lambda: function(holder[0]))
    holder.append(mailbox)
    mailbox.start()
    return mailbox


def test_messages_come_in_order_and_then_the_end_with_its_value() -> None:
    def function(mailbox: Mailbox) -> str:
        for number in range(3):
            mailbox.offer(number)
        return "done"

    mailbox = start(function)
    assert [mailbox.take() for _ in range(4)] == [0, 1, 2, Ended("done")]
    assert mailbox.take() == Ended("done")


def test_the_function_never_runs_past_a_message_that_was_not_taken() -> None:
    passed: list[int] = []
    second_is_out = threading.Event()

    def function(mailbox: Mailbox) -> None:
        mailbox.offer(0)
        passed.append(0)
        second_is_out.set()
        mailbox.offer(1)
        passed.append(1)

    mailbox = start(function)
    assert mailbox.take() == 0
    assert second_is_out.wait(5)
    assert passed == [0]
    assert mailbox.take() == 1
    assert mailbox.take() == Ended()
    assert passed == [0, 1]


def test_what_the_function_raises_comes_after_its_messages() -> None:
    def function(mailbox: Mailbox) -> None:
        mailbox.offer("last words")
        raise KeyError("boom")

    mailbox = start(function)
    assert mailbox.take() == "last words"
    with pytest.raises(KeyError, match="boom"):
        mailbox.take()


def test_none_is_a_message_like_any_other() -> None:
    mailbox = start(lambda mailbox: mailbox.offer(None))
    assert mailbox.take() is None
    assert mailbox.take() == Ended()


def test_a_cancelled_function_ends_at_its_message_although_it_catches_exceptions() -> None:
    cleaned_up: list[bool] = []

    def function(mailbox: Mailbox) -> None:
        try:
            while True:
                try:
                    mailbox.offer("again")
                except Exception:  # as careless user code does
                    continue
        finally:
            cleaned_up.append(True)

    mailbox = start(function)
    assert mailbox.take() == "again"
    assert mailbox.cancel(timeout_s=5)
    assert cleaned_up == [True]


def test_a_function_that_comes_to_no_message_cannot_be_cancelled() -> None:
    go_on = threading.Event()
    mailbox = start(lambda mailbox: go_on.wait(5))
    assert not mailbox.cancel(timeout_s=0.01)
    go_on.set()
    assert mailbox.cancel(timeout_s=5)
