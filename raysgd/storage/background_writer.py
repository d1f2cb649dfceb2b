"""Writes files in a background thread, so that training does not wait for the disk."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from raysgd.exceptions import WorkersLostError
from raysgd.storage import files

logger = logging.getLogger(__name__)

Write = Callable[[str, Any], object]
"""Function that writes an object, such as a state dict, to a path."""


class SubmittedWrite:
    """A write that was submitted to a `BackgroundWriter`.

    Attributes:
        is_done: True once the write has finished or failed.
        seconds: Duration of the write in seconds.
    """

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self._failure: BaseException | None = None
        self.is_done, self.seconds = False, 0.0

    def wait(self) -> None:
        """Wait until the file is complete.

        Raises:
            BaseException: The write failed. No later call raises this error again.
        """
        self._writer._await(self)


class BackgroundWriter:
    """Writes checkpoint files in a background thread, one after the other, in the order of `submit`.

    The thread runs only while writes are queued. It is not a daemon thread, so a program finishes its writes before it
    exits. A failed write is logged at once, and the next call to `submit`, `write`, `wait` or `close` raises the error.
    After several failures, each of these calls raises one error, oldest first. A `WorkersLostError`, for a state that
    was lost with its worker, is different: only `wait` and `close` raise it, and not after a later successful write.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[SubmittedWrite, str, Callable[[], Any], Write]] = collections.deque()
        self._failures: collections.deque[BaseException] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, path: str | os.PathLike[str], produce: Callable[[], Any], write: Write) -> SubmittedWrite:
        """Queue a write: in the background thread, call `produce` and write its result to `path`.

        A relative `path` is resolved against the current working directory now. `write` must write the file atomically.

        Raises:
            ValueError: The writer is closed.
            BaseException: An earlier write failed. Nothing was queued; call `submit` again to queue this write.
        """
        with self._changed:
            if self._is_closed:
                raise ValueError(f"`submit` on a closed `{type(self).__name__}`: make a new one.")
            self._raise_failure(passing=WorkersLostError)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="raysgd-checkpoint-writer", daemon=False)
                thread.start()  # the thread cannot run before this block ends, because the block holds the lock
                self._thread = thread
            submitted = SubmittedWrite(self)
            self._jobs.append((submitted, files.absolute(path), produce, write))
            return submitted

    def write(self, path: str | os.PathLike[str], state: Any, write: Write) -> None:
        """Write `state` to `path` in this thread, after all submitted writes.

        Raises:
            BaseException: The error of this write or an earlier write.
        """
        self._drain()
        with self._changed:
            self._raise_failure(passing=WorkersLostError)
        write(os.fspath(path), state)
        self._make_up()

    def wait(self) -> None:
        """Block until all submitted writes have finished.

        Raises:
            BaseException: The original error of a failed write.
        """
        self._drain()
        with self._changed:
            self._raise_failure()

    def _await(self, submitted: SubmittedWrite) -> None:
        with self._changed:
            self._changed.wait_for(lambda: submitted.is_done)
            failure, submitted._failure = submitted._failure, None
            if failure is not None:
                if failure in self._failures:
                    self._failures.remove(failure)
                raise failure

    def _drain(self) -> None:
        with self._changed:
            thread = self._thread
            self._changed.wait_for(lambda: self._thread is not thread or thread is None)
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Finish all writes and accept no more. If several writes failed, each call raises one error.

        Raises:
            BaseException: The original error of a failed write.
        """
        with self._changed:
            self._is_closed = True
        self.wait()

    def _raise_failure(self, passing: type[BaseException] | tuple[()] = ()) -> None:
        """If a write has failed, raise the oldest failure, skipping failures that are instances of `passing`."""
        failure = next((each for each in self._failures if not isinstance(each, passing)), None)
        if failure is not None:
            self._failures.remove(failure)
            raise failure

    def _make_up(self) -> None:
        """Discard the errors of states that were lost with a worker, because a newer state was written."""
        with self._changed:
            kept = [failure for failure in self._failures if not isinstance(failure, WorkersLostError)]
            self._failures = collections.deque(kept)

    def _work(self) -> None:
        """Run the queued writes until the queue is empty."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                submitted, path, produce, write = self._jobs.popleft()
            began = time.perf_counter()
            failure = self._failure_of(path, produce, write)
            del produce, write  # these functions may hold references to large objects
            if failure is None:
                self._make_up()
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                submitted._failure, submitted.seconds = failure, time.perf_counter() - began
                submitted.is_done = True
                self._changed.notify_all()
            del failure, submitted

    def _failure_of(self, path: str, produce: Callable[[], Any], write: Write) -> BaseException | None:
        """Write a file. Return the error, or None if the write succeeded."""
        try:
            write(path, produce())
        except BaseException as error:  # a later call raises this error
            logger.error("could not write checkpoint %s: %r", files.shown(path), error)
            _forget_variables(error)
            return error
        logger.info("wrote checkpoint %s", files.shown(path))
        return None


def _forget_variables(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error and its causes, which may hold the whole state."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
