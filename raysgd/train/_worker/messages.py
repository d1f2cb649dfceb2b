"""Messages between the driver and the training functions in the workers, and the mailbox that passes them.

Messages are read in order. Large checkpoints are stored separately until the driver fetches them.

ADR 94 explains why functions may run ahead of their reports.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any

from raysgd.exceptions import OnFailure

BROADCAST = "broadcast_from_rank_zero"
PREEMPTION = "get_preemption_info"
"""Questions that functions ask the driver. Each has the name of the function that users call."""


class TrainingResultType(Enum):
    """Type of a `FunctionMessage`: a report of metrics, or a checkpoint."""

    REPORT = auto()
    CHECKPOINT = auto()


@dataclass(frozen=True)
class TrainingResult:
    """A training function's message, as `BackendExecutor` returns it."""

    type: TrainingResultType
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint in a function's message to the driver: its content, or how to get the content.

    Attributes:
        score: Value by which the checkpoint is ranked; None if it has no score.
        data: The encoded checkpoint, if it is small and comes from rank 0, whose checkpoint is always used.
        token: Number with which to fetch the checkpoint from the worker, if it was not sent in `data`.
        files: Names of the checkpoint's files, if the worker itself writes them to storage and nothing is sent. If
            there is a token too, the worker first waits until the driver sends the names that lower ranks also use.
    """

    score: Any = None
    data: Any = None
    token: int | None = None
    files: tuple[str, ...] | None = None

    @property
    def is_stored(self) -> bool:
        """True if the worker itself writes the checkpoint to storage."""
        return self.files is not None


@dataclass(frozen=True)
class FunctionMessage:
    """A message from a training function to the driver: metrics, a checkpoint, or metrics with a checkpoint."""

    kind: TrainingResultType
    data: Any = None
    checkpoint_ref: CheckpointRef | None = None


@dataclass(frozen=True)
class Question:
    """A question that the functions of all ranks ask the driver at the same point.

    The answer comes with the driver's next `Request`.

    Attributes:
        name: Name of the library function that asks the question, such as `broadcast_from_rank_zero`.
        data: This rank's argument, pickled.
    """

    name: str
    data: bytes = b""


@dataclass(frozen=True)
class RanksMet:
    """A message to the driver: all ranks of a group report from now on, including workers that were added later.

    Attributes:
        number: Number of the group: how many groups came before it since the function started.
    """

    number: int


@dataclass(frozen=True)
class FunctionEnded:
    """The last message of a training function, with its return value."""

    value: Any = None


Message = FunctionMessage | FunctionEnded | Question | RanksMet


def is_mere_report(message: Any) -> bool:
    """Return True if the message contains metrics but no checkpoint."""
    return (
        isinstance(message, FunctionMessage)
        and message.kind is TrainingResultType.REPORT
        and message.checkpoint_ref is None
    )


@dataclass(frozen=True)
class FunctionSpec:
    """A training function, with everything that a worker needs to run it.

    Attributes:
        function: The user's function, with its config bound.
        encode: The plug-in's `encode_data`, which prepares reports and checkpoints before they leave the worker.
        score_attribute: Key in a checkpoint whose value ranks the checkpoint.
        is_detailed: True if reports include host, process and time.
        is_muted: True to discard reports, so that the function does not wait until they are read.
        explain: Converts the function's exception to the exception to raise.
        make_session: Creates the function's session from the arguments of `Session`; None to use `Session`.
        num_ahead: Number of reports that may wait for the driver before the function is blocked.
        is_elastic: True if the function continues in place when other workers are lost.
        steps_in: True in a standby worker, which will join a group that is already running the function.
        has_parts: True if the function's data was sharded at the start, so that a lost worker's shard is lost.
    """

    function: Callable[[], Any]
    encode: Callable[[dict[str, Any]], Any]
    score_attribute: str
    is_detailed: bool = False
    is_muted: bool = False
    explain: Callable[[Exception], Exception] | None = None
    make_session: Callable[..., Any] | None = None
    num_ahead: int = 0
    is_elastic: bool = False
    steps_in: bool = False
    has_parts: bool = False


@dataclass(frozen=True)
class Request:
    """The driver's request for the next message of a function.

    Attributes:
        index: Number for the next checkpoint, if the workers themselves write checkpoints to storage.
        answer: Answer to the question that was the function's last message, pickled.
    """

    index: int = 0
    answer: bytes = b""


NO_WORDS = Request()
"""A request in which the driver tells the function nothing."""


class RunCancelled(BaseException):
    """Raised inside `report` or `save_checkpoint` to stop the user's function. Its messages are not read anymore.

    It is not an `Exception`, so that `except Exception` in user code does not catch it.
    """


class Mailbox:
    """Runs a function in a thread, and stores its messages until the driver takes them.

    Args:
        function: Function to run, such as the user's training function with its config bound.
        num_ahead: Number of messages that may wait for the driver before the function is blocked.
        name: Name of the thread.

    Attributes:
        num_ahead: Number of messages that may wait for the driver before the function is blocked.
        error: The exception that the function has raised; None if it has not raised one.
    """

    def __init__(self, function: Callable[[], Any], num_ahead: int = 0, name: str = "raysgd-function") -> None:
        self._function = function
        self.num_ahead = num_ahead
        self._changed = threading.Condition()
        self._messages: deque[Any] = deque()
        self._num_offered = self._num_taken = 0
        self._is_cancelled = False
        self._is_wanted = False
        self._told = NO_WORDS
        self._is_holding = False
        self._broken: BaseException | None = None
        self._ended: FunctionEnded | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the function in its thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            ended, error = FunctionEnded(self._function()), None
        except RunCancelled:
            ended, error = FunctionEnded(), None
        except BaseException as raised:  # `next_message` raises this exception in the driver's call
            ended, error = None, raised
        with self._changed:
            self._ended, self.error = ended, error
            self._changed.notify_all()

    def offer(self, message: Any, *, may_wait: bool = False) -> None:
        """Send a message from the function, and wait until `next_message` has returned it.

        Args:
            message: The message.
            may_wait: True to wait only if more than `num_ahead` messages have not been read.

        Raises:
            RunCancelled: The message will not be read.
        """
        with self._changed:
            self.post(message)
            enough = self._num_offered - (self.num_ahead if may_wait else 0)
            self._hold_until(lambda: self._num_taken >= enough)

    def post(self, message: Any) -> None:
        """Send a message from the function without waiting until it is read."""
        with self._changed:
            self._messages.append(message)
            self._num_offered += 1
            self._changed.notify_all()

    def _hold_until(self, is_over: Callable[[], bool]) -> None:
        """Block the function until a condition holds. Raise `RunCancelled` if `cancel` was called."""
        self._is_holding = True
        self._changed.wait_for(lambda: self._is_cancelled or is_over())
        self._is_holding = False
        if self._is_cancelled:
            raise RunCancelled

    def await_request(self) -> Request:
        """Block the function until `next_message` is called again. Return the `Request` that was passed to that call.

        Raises:
            RunCancelled: No further message will be read.
        """
        with self._changed:
            self._hold_until(lambda: self._is_wanted and not self._messages)
            return self._told

    def next_message(self, request: Request = NO_WORDS) -> Any:
        """Wait for the next message and return it.

        Return a `FunctionEnded` if the function has returned or was stopped by `cancel`.

        Args:
            request: What the driver tells the function, which receives it as the result of `await_request`.

        Raises:
            BaseException: The exception that the function raised, or that was passed to `break_off`.
        """
        with self._changed:
            self._is_wanted, self._told = True, request
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._messages or self.is_over or self._broken)
            if self._messages:
                message = self._messages.popleft()
                self._num_taken += 1
                self._is_wanted = False
                self._changed.notify_all()
                return message
            if self.error is not None:
                raise self.error
            if self._ended is None and self._broken is not None:
                raise self._broken
            return self._ended

    def break_off(self, error: BaseException) -> None:
        """Let `next_message` raise an exception, instead of waiting for a message, until `mend` is called.

        Called when the worker group is broken, and when new workers are about to join the group.
        """
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def mend(self) -> None:
        """End the effect of `break_off`, because the function continues in another group."""
        with self._changed:
            self._broken = None

    @property
    def is_broken_off(self) -> bool:
        """True between `break_off` and `mend`, unless the function has ended."""
        return self._broken is not None and not self.is_over

    @property
    def is_held(self) -> bool:
        """True if the function is waiting in one of this mailbox's methods, or has ended."""
        return self._is_holding or self.is_over

    @property
    def has_more(self) -> bool:
        """True if `next_message` would return a message immediately."""
        with self._changed:
            return bool(self._messages) or self._ended is not None

    @property
    def is_over(self) -> bool:
        """True if the function has returned or raised."""
        return self._ended is not None or self.error is not None

    def cancel(self, timeout_s: float) -> bool:
        """Stop the function at its next message. Return True if it ended in time."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: self.is_over, timeout=timeout_s)
        if is_over:
            self._thread.join()
        return is_over


class PendingCheckpoints:
    """The copies of this worker's checkpoints that the driver has not fetched yet.

    The driver always fetches rank 0's checkpoints, so they are copied immediately. A checkpoint of another rank is
    copied only when the driver requests it, and the function waits until the driver requests or refuses it. The driver
    requests a checkpoint folder, which the worker itself stores, in any case. It requests any other checkpoint only if
    no lower rank has one.
    """

    def __init__(self) -> None:
        self._tokens = count(1)
        self._pending: dict[int, tuple[Future[Any], Future[Any]]] = {}  # the driver's request, and the copy

    def announce(self) -> int:
        """Return a token for a checkpoint that is copied only if the driver fetches it."""
        token = next(self._tokens)
        self._pending[token] = Future(), Future()
        return token

    def keep(self, copy: Any) -> int:
        """Store a copy until it is fetched, and return its token."""
        token = self.announce()
        self._pending[token][1].set_result(copy)
        return token

    def copy_if_fetched(self, token: int, make_copy: Callable[[Any], Any]) -> None:
        """Block the function until the driver requests or refuses an announced checkpoint. If requested, copy it.

        Args:
            token: The token from `announce`.
            make_copy: Function that creates the copy. Its argument is the value `names` that was passed to `fetch`.
        """
        try:
            request, copy = self._pending[token]
            names = request.result()
        except (KeyError, CancelledError):  # the driver has refused the checkpoint
            return
        if copy.set_running_or_notify_cancel():  # from now on, `refuse` does not cancel the copy
            with OnFailure(partial(copy.set_exception, KeyError(token))):
                made = make_copy(names)
            copy.set_result(made)

    def refuse(self, token: int) -> None:
        """Release a function that waits in `copy_if_fetched`, because the driver will not fetch its checkpoint.

        Called from another thread while `copy_if_fetched` waits.
        """
        for future in self._pending.pop(token, ()):
            future.cancel()

    def fetch(self, token: int, names: Any = None) -> Any:
        """Wait for the copy with this token, remove it, and return it.

        Called in another thread while the function runs.

        Args:
            token: The token of the copy, from `keep` or `announce`.
            names: Value to pass to `make_copy`, for a checkpoint that was announced.

        Raises:
            KeyError: The copy does not exist anymore, or copying failed.
        """
        request, copy = self._pending[token]
        try:
            request.set_result(names)
            return copy.result()
        except (CancelledError, InvalidStateError):
            raise KeyError(token) from None
        finally:
            self._pending.pop(token, None)

    def clear(self) -> None:
        """Discard all copies, and release functions that wait in `copy_if_fetched`.

        Called when the driver will not fetch any more of these copies.
        """
        for token in [*self._pending]:
            self.refuse(token)
