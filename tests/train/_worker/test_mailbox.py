from __future__ import annotations

import threading

import pytest

from raysgd.train._worker.messages import FunctionEnded, Mailbox, PendingCheckpoints, Request


def start(function, num_ahead: int = 0):  # type: ignore[no-untyped-def]
    """A hand-off whose function is given it."""
    holder: list[Mailbox] = []
    mailbox = Mailbox(lambda: function(holder[0]), num_ahead)
    holder.append(mailbox)
    mailbox.start()
    return mailbox


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
    assert mailbox.next_message() == "again"
    assert mailbox.cancel(timeout_s=60)
    assert cleaned_up == [True]


def test_a_function_that_comes_to_no_message_cannot_be_cancelled() -> None:
    go_on = threading.Event()
    mailbox = start(lambda mailbox: go_on.wait(60))
    assert not mailbox.cancel(timeout_s=0.01)
    go_on.set()
    assert mailbox.cancel(timeout_s=60)


# -------------------------------------------------------------------------------- functions that run ahead


def test_no_more_messages_wait_than_may() -> None:
    is_full, passed = threading.Event(), []

    def function(mailbox: Mailbox) -> None:
        for number in range(9):
            if number == 2:
                is_full.set()
            mailbox.offer(number, may_wait=True)
            passed.append(number)

    mailbox = start(function, num_ahead=2)
    assert is_full.wait(60)
    assert not mailbox.cancel(0) or passed == [0, 1]
    assert passed == [0, 1]


def test_a_message_that_may_not_wait_is_taken_before_the_function_goes_on() -> None:
    passed: list[str] = []

    def function(mailbox: Mailbox) -> None:
        mailbox.offer("report", may_wait=True)
        mailbox.offer("checkpoint")
        passed.append("checkpoint")

    mailbox = start(function, num_ahead=9)
    assert mailbox.next_message() == "report"
    assert not passed
    assert mailbox.next_message() == "checkpoint"
    assert mailbox.next_message() == FunctionEnded()
    assert passed == ["checkpoint"]


def test_what_a_function_raises_comes_after_all_messages_that_wait() -> None:
    def function(mailbox: Mailbox) -> None:
        for number in range(3):
            mailbox.offer(number, may_wait=True)
        raise KeyError("boom")

    mailbox = start(function, num_ahead=9)
    assert [mailbox.next_message() for _ in range(3)] == [0, 1, 2]
    assert not mailbox.has_more
    with pytest.raises(KeyError, match="boom"):
        mailbox.next_message()


def test_a_question_waits_among_the_messages_and_the_function_for_its_answer() -> None:
    def function(mailbox: Mailbox) -> list[bytes]:
        mailbox.offer(0, may_wait=True)
        answers = []
        for question in ("first", "second"):
            mailbox.offer(question)
            answers.append(mailbox.await_request().answer)
        return answers

    mailbox = start(function, num_ahead=5)
    assert [mailbox.next_message(), mailbox.next_message()] == [0, "first"]
    assert mailbox.next_message(Request(answer=b"one")) == "second"
    assert mailbox.next_message(Request(answer=b"two")) == FunctionEnded([b"one", b"two"])


def test_a_question_that_is_not_answered_ends_with_the_run() -> None:
    def function(mailbox: Mailbox) -> None:
        mailbox.offer("first")
        mailbox.await_request()

    mailbox = start(function)
    assert mailbox.next_message() == "first"
    assert mailbox.cancel(60)


# ------------------------------------------------------------------------------ checkpoints that wait to be fetched


def test_what_is_dropped_holds_nobody_up() -> None:
    pending = PendingCheckpoints()
    kept, announced = pending.keep("a"), pending.announce()
    pending.clear()
    pending.copy_if_fetched(announced, lambda told: pytest.fail("it is not made"))
    for token in (kept, announced):
        with pytest.raises(KeyError):
            pending.fetch(token)


def test_a_copy_that_fails_ends_the_wait_of_the_driver() -> None:
    pending, raised = PendingCheckpoints(), list[Exception]()
    token = pending.announce()

    def copy() -> None:
        try:
            pending.copy_if_fetched(token, lambda names: {}[names])
        except KeyError as error:
            raised.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    with pytest.raises(KeyError):
        pending.fetch(token, "some name")
    thread.join(60)
    assert raised[0].args == ("some name",)
