"""The replica in a worker that runs functions: the driver calls its methods."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from raysgd._state.state_codec import decode
from raysgd.air._running import close_session, open_session
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import Heartbeat, World
from raysgd.exceptions import TrainBackendError
from raysgd.train._worker.ahead import is_mere_report
from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import FunctionMessage, FunctionSpec, Question
from raysgd.train._worker.pending_checkpoints import PendingCheckpoints
from raysgd.train._worker.session import Session

_NEXT_MESSAGE_S = 1.0  # how long a function may take to its next message when it is ended


class FunctionReplica:
    """Runs one function after the other; each gives the driver one message at a time.

    Attributes:
        worker_object: The object of the user's class in this worker; None without one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._session: Session | None = None
        self._pending_checkpoints = PendingCheckpoints()
        self._num_messages = 0
        self.worker_object: Any = None

    def setup(self) -> None:
        """Nothing: there is nothing to build before there is a function."""

    def begin(self, spec: FunctionSpec, checkpoint: dict[str, Any] | None, shard: Any) -> None:
        """Starts a function.

        Raises:
            TrainBackendError: A function is running already.
        """
        if self._session is not None:
            raise TrainBackendError("a function is running in this worker already")
        self._pending_checkpoints.clear()
        make_session = spec.make_session or Session
        self._session = make_session(self.world, spec, checkpoint, shard, self._pending_checkpoints)
        open_session(self._session)
        self._session.mailbox.start()

    def next(self, index: int | None = None) -> FunctionMessage | FunctionEnded | Question:
        """The function's next message, waiting for it.

        Args:
            index: The number of the next checkpoint that workers store themselves.

        Raises:
            TrainBackendError: No function was started.
            Exception: What the function raised.
        """
        session = self._session
        if session is None:
            raise TrainBackendError("no function is running in this worker: call `start_training` first")
        try:
            message = session.mailbox.take(index)
            while session.is_muted and is_mere_report(message):
                message = session.mailbox.take(index)
        except SystemExit:
            _leave_process()
            raise
        except BaseException:
            self._close()
            raise
        self._num_messages += 1
        if isinstance(message, FunctionEnded):
            self._close()
        assert isinstance(message, FunctionMessage | FunctionEnded | Question)
        return message

    def start(self, *start: Any) -> None:
        """Starts a function if `start` has what that takes: its spec, its encoded checkpoint, its shard of the data."""
        if start:
            spec, checkpoint, shard = start
            self.begin(spec, decode(checkpoint, copy=True) if checkpoint is not None else None, shard)

    def take(self, index: int | None, is_needed: bool, *start: Any) -> list[FunctionMessage | FunctionEnded | Question]:
        """The messages that there are, at least one, and none behind a checkpoint; as `next`.

        Args:
            index: The number of the next checkpoint that workers store themselves.
            is_needed: Whether to wait for one; else there are none, because the driver has some of this worker already.
            start: What starts the function first, where it does not run yet.
        """
        self.start(*start)
        messages = [self.next(index)] if is_needed else []
        while messages and self._has_more_behind(messages):
            messages.append(self.next(index))
        return messages

    def _has_more_behind(self, messages: Sequence[FunctionMessage | FunctionEnded | Question]) -> bool:
        """Return whether to add a message that is there already. A function may well report as fast as it is read."""
        session = self._session
        if session is None or session.is_muted or not is_mere_report(messages[-1]):
            return False
        return len(messages) <= session.mailbox.num_ahead and session.mailbox.has_more

    def answer(self, value: Any, *start: Any) -> None:
        """Gives the function the answer to its question. One that is only started with this has not asked yet."""
        self.start(*start)
        if not start and self._session is not None:
            self._session.mailbox.answer(value)

    def mute(self, *start: Any) -> None:
        """Lets the function continue without waiting for its reports to be read. It may have ended before that."""
        self.start(*start)
        if self._session is not None:
            self._session.is_muted = True

    def end(self) -> bool:
        """Ends the function at its next message; returns False if it sent none in time."""
        if self._session is None:
            return True
        self._pending_checkpoints.clear()  # a function that waits for the driver continues to its next message
        is_over = self._session.mailbox.cancel(_NEXT_MESSAGE_S)
        self._close()
        return is_over

    def _close(self) -> None:
        close_session(self._session)
        self._session = None

    def capture(self, landed_token: int | None) -> Capture:
        """Nothing: a function restarts from its checkpoint, which the driver has."""
        return Capture()

    def fetch(self, token: int) -> Any:
        """A checkpoint that was too large to travel with its message."""
        return self._pending_checkpoints.fetch(token)

    def store(self, token: int | None, taken: Sequence[str], *start: Any) -> list[str] | None:
        """Stores the folder that waits under a token, if there is one, where lower ranks use some of its names too.

        Returns:
            The names for which it had to take others; None where it was lost, with its function.
        """
        self.start(*start)
        if start or token is None:
            return None if start else []
        try:
            moved: list[str] = self._pending_checkpoints.fetch(token, taken)
        except KeyError:  # it failed, and the function says why
            return None
        return moved

    def refuse(self, token: int) -> None:
        """Takes note that the driver will not fetch a checkpoint."""
        self._pending_checkpoints.refuse(token)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Nothing: the next call starts the function from the newest checkpoint."""

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""
        session = self._session
        if session is None:
            return Heartbeat()
        return Heartbeat(epoch=session.iteration, step=self._num_messages, phase="in the function")

    def shutdown(self) -> None:
        """Abandons the function; its thread ends with the process."""
        self._close()


def _leave_process() -> None:
    """Ends the worker of a function that called `sys.exit`, which would end its process without a worker too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
