"""The hand-off from the user's function to the driver, or to the trial that it runs in.

Messages are taken in order; large checkpoints wait beside them until they are fetched.

Why functions may run ahead of their reports: ADR 94.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from raysgd.exceptions import OnFailure
from raysgd.train._worker.messages import FunctionEnded


class RunCancelled(BaseException):
    """Ends the user's function from inside `report` or `save_checkpoint`, because its messages are not read any more.

    Not an `Exception`, so that user code which catches those does not stop it.
    """


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
        """Start the function."""
        self._thread.start()

    def _run(self) -> None:
        try:
            ended, error = FunctionEnded(self._function()), None
        except RunCancelled:
            ended, error = FunctionEnded(), None
        except BaseException as raised:  # whatever it is: the driver gets it with the next message
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

    def post(self, message: Any) -> None:
        """From the function: leaves a message, and does not wait for it to be taken."""
        with self._changed:
            self._messages.append(message)
            self._num_offered += 1
            self._changed.notify_all()

    def _hold_until(self, is_over: Callable[[], bool]) -> None:
        """Hold the function until something is so."""
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
        """Answer the question that was taken last; where that was answered already, it does nothing."""
        with self._changed:
            if self._is_asking:
                self._is_asking = False
                self._answers.append(value)
                self._changed.notify_all()

    def next_message(self, told: Any = None) -> Any:
        """Wait for the next message and return it; an `FunctionEnded` if the function has returned.

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
        """End all waiting for messages that are not there yet, until `mend`: the function cannot go on by itself."""
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
        """True if `next_message` would return something at once."""
        with self._changed:
            return bool(self._messages) or self._ended is not None

    @property
    def is_over(self) -> bool:
        """True if the function has returned or raised."""
        return self._ended is not None or self._error is not None

    def cancel(self, timeout_s: float) -> bool:
        """End the function at its next message; return whether it ended in time."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: self.is_over, timeout=timeout_s)
        if is_over:
            self._thread.join()
        return is_over


class PendingCheckpoints:
    """Checkpoints in this worker that wait for the driver.

    The driver always fetches those of rank 0, so they are copied at once. A checkpoint that another rank reports is
    copied only if the driver asks for it because no lower rank has one; the function waits until that is decided.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: dict[int, Any] = {}
        self._open: set[int] = set()
        self._wanted: dict[int, Any] = {}
        self._num = 0

    def keep(self, copy: Any) -> int:
        """Keep a copy until it is fetched; return the token to fetch it with."""
        with self._changed:
            self._num += 1
            self._copies[self._num] = copy
            return self._num

    def announce(self) -> int:
        """Return the token of a copy that is made only if the driver asks for it."""
        with self._changed:
            self._num += 1
            self._open.add(self._num)
            return self._num

    def settle(self, token: int, make_copy: Callable[[Any], Any]) -> None:
        """From the function: waits until the driver decides about an announced copy, and makes it if it is wanted.

        Args:
            token: What `announce` returned.
            make_copy: Makes it; gets what the driver said with `fetch`.
        """
        with self._changed:
            self._changed.wait_for(lambda: token in self._wanted or token not in self._open)
            if token not in self._open:
                return
            told = self._wanted[token]
        with OnFailure(partial(self.refuse, token)):
            copy = make_copy(told)
        with self._changed:
            self._copies[token] = copy
            self._changed.notify_all()

    def refuse(self, token: int) -> None:
        """From another thread: the announced copy will not be fetched."""
        with self._changed:
            self._open.discard(token)
            self._changed.notify_all()

    def fetch(self, token: int, told: Any = None) -> Any:
        """Return the copy of `token`, once. Called from another thread, while the function continues.

        Args:
            token: Which one.
            told: What the function has to know to make an announced one.

        Raises:
            KeyError: There is no such copy any more.
        """
        with self._changed:
            self._wanted[token] = told
            self._changed.notify_all()
            self._changed.wait_for(lambda: token in self._copies or token not in self._open)
            del self._wanted[token]
            self._open.discard(token)
            return self._copies.pop(token)

    def clear(self) -> None:
        """Drop all copies; they will not be fetched."""
        with self._changed:
            self._copies.clear()
            self._open.clear()
            self._changed.notify_all()
