"""Passes messages from the user's function to the driver, or to the trial that it runs in, in order.

Why functions may run ahead of their reports: ADR 94.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class RunCancelled(BaseException):
    """Ends the user's function from inside `report` or `save_checkpoint`, because its messages are not read any more.

    Not an `Exception`, so that user code which catches those does not stop it.
    """


@dataclass(frozen=True)
class FunctionEnded:
    """The function returned this value."""

    value: Any = None


class Mailbox:
    """Runs a function in its own thread, and holds the messages that it offers until the driver takes them.

    Args:
        function: The function.
        num_ahead: How many messages may wait while the function goes on.
        name: The name of the thread.

    Attributes:
        num_ahead: The same.
    """

    def __init__(self, function: Callable[[], Any], num_ahead: int = 0, name: str = "raysgd-function") -> None:
        self._function = function
        self.num_ahead = num_ahead
        self._changed = threading.Condition()
        self._messages: deque[Any] = deque()
        self._num_offered = self._num_taken = 0
        self._is_cancelled = False
        self._is_wanted = False
        self._told: Any = None
        self._answers: list[Any] = []
        self._is_asking = self._is_holding = False
        self._broken: BaseException | None = None
        self._ended: FunctionEnded | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the function."""
        self._thread.start()

    def _run(self) -> None:
        try:
            ended, error = FunctionEnded(self._function()), None
        except RunCancelled:
            ended, error = FunctionEnded(), None
        except BaseException as raised:
            ended, error = None, raised
        with self._changed:
            self._ended, self._error = ended, error
            self._changed.notify_all()

    def offer(self, message: Any, *, may_wait: bool = False) -> None:
        """From the function: leaves a message and waits until it is taken.

        Args:
            message: The message.
            may_wait: Whether the function goes on while the message waits, as long as not too many do.

        Raises:
            RunCancelled: It will not be taken.
        """
        with self._changed:
            self._messages.append(message)
            self._num_offered += 1
            enough = self._num_offered - (self.num_ahead if may_wait else 0)
            self._changed.notify_all()
            self._hold_until(lambda: self._num_taken >= enough)

    def note(self, message: Any) -> None:
        """From the function: leaves a message, and does not wait for it to be taken."""
        with self._changed:
            self._messages.append(message)
            self._num_offered += 1
            self._changed.notify_all()

    def _hold_until(self, is_over: Callable[[], bool]) -> None:
        """Holds the function until something is so."""
        self._is_holding = True
        self._changed.wait_for(lambda: self._is_cancelled or is_over())
        self._is_holding = False
        if self._is_cancelled:
            raise RunCancelled

    def await_request(self) -> Any:
        """From the function: waits until the driver wants the next message; returns what it said with that.

        Raises:
            RunCancelled: It will not be asked for.
        """
        with self._changed:
            self._hold_until(lambda: self._is_wanted and not self._messages)
            return self._told

    def ask(self, question: Any) -> Any:
        """From the function: leaves a question among the messages and waits for the answer.

        Raises:
            RunCancelled: There will be none.
        """
        with self._changed:
            self._is_asking = True
        self.offer(question)
        with self._changed:
            self._hold_until(lambda: bool(self._answers))
            return self._answers.pop()

    def answer(self, value: Any) -> None:
        """Answers the question that was taken last; where that was answered already, it does nothing."""
        with self._changed:
            if self._is_asking:
                self._is_asking = False
                self._answers.append(value)
                self._changed.notify_all()

    def take(self, told: Any = None) -> Any:
        """Waits for the next message and returns it; an `FunctionEnded` if the function has returned.

        Args:
            told: What the function may have to know to make its message; see `await_request`.

        Raises:
            BaseException: What the function raised, or `break_off` was given.
        """
        with self._changed:
            self._is_wanted, self._told = True, told
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._messages or self.is_over or self._broken)
            if self._messages:
                message = self._messages.popleft()
                self._num_taken += 1
                self._is_wanted = False
                self._changed.notify_all()
                return message
            if self._error is not None:
                raise self._error
            if self._ended is None and self._broken is not None:
                raise self._broken
            return self._ended

    def break_off(self, error: BaseException) -> None:
        """Ends all waiting for messages that are not there yet, until `mend`: the function cannot go on by itself."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def mend(self) -> None:
        """The function goes on."""
        with self._changed:
            self._broken = None

    @property
    def is_broken_off(self) -> bool:
        """True if that is so."""
        return self._broken is not None and not self.is_over

    @property
    def error(self) -> BaseException | None:
        """The exception of the function; None where it raised none."""
        return self._error

    @property
    def is_held(self) -> bool:
        """True if the function waits here, or is over."""
        return self._is_holding or self.is_over

    @property
    def has_more(self) -> bool:
        """True if `take` would return something at once."""
        with self._changed:
            return bool(self._messages) or self._ended is not None

    @property
    def is_over(self) -> bool:
        """True if the function has returned or raised."""
        return self._ended is not None or self._error is not None

    def cancel(self, timeout_s: float) -> bool:
        """Ends the function at its next message; returns whether it ended in time."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: self.is_over, timeout=timeout_s)
        if is_over:
            self._thread.join()
        return is_over
