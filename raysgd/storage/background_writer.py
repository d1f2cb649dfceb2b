"""Writes checkpoint files in background threads, so that training does not wait for the disk or the store."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from raysgd.core.cluster.ray_cluster import RayThread
from raysgd.exceptions import WorkersLostError
from raysgd.storage import files

logger = logging.getLogger(__name__)

Write = Callable[[str, Any], object]
"""Function that takes a path and an object, such as a state dict, and writes the object to a file at this path."""


class SubmittedWrite:
    """A file that was submitted to a `BackgroundWriter`. Without arguments, a file that is complete already.

    Args:
        write: Function that writes the file. A new thread calls it.

    Attributes:
        failure: Why the file could not be written. None if it could, or if the error was raised.
        seconds: How long it took to produce and write the content of the file. 0 until `is_done` is True.
    """

    def __init__(self, write: Callable[[SubmittedWrite], None] | None = None) -> None:
        self.failure: BaseException | None = None
        self.seconds = 0.0
        # Not the thread itself: before Python 3.13, Ctrl-C in `join` makes a thread that runs count as ended.
        self._done = threading.Event()
        if write is None:
            self._done.set()
            return
        # Not a daemon thread, so a program finishes its files before it exits.
        RayThread(target=self._run, args=(write,), name="raysgd-checkpoint-writer", daemon=False).start()

    @property
    def is_done(self) -> bool:
        """True when the file is complete or could not be written."""
        return self._done.is_set()

    def end(self) -> None:
        """Wait until the file is complete or could not be written."""
        self._done.wait()

    def _run(self, write: Callable[[SubmittedWrite], None]) -> None:
        try:
            write(self)
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait until the file is complete.

        Raises:
            BaseException: The file could not be written. No later call raises this error again.
        """
        self.end()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


class BackgroundWriter:
    """Writes checkpoint files in the background, one after the other, in the order of `submit`.

    Each file has a thread, which first waits for the files before it.

    If a file cannot be written, this is logged at once, and the next call to `submit`, `write`, `wait` or `close`
    raises the error. After several failures, each of these calls raises one error, the oldest first. A
    `WorkersLostError` means that the state was lost with its worker. Only `wait` and `close` raise it, and only if no
    later file was written successfully.
    """

    def __init__(self) -> None:
        self._writes: list[SubmittedWrite] = []  # in the order of `submit`, without those that are written
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, path: str | os.PathLike[str], produce: Callable[[], Any], write: Write) -> SubmittedWrite:
        """Let a thread write a file, after all files that were submitted before.

        Args:
            path: Path or URI of the file. A relative path is made absolute immediately.
            produce: Function that returns the object to write. The thread calls it.
            write: Function that takes the path and this object, and writes the file atomically.

        Raises:
            ValueError: The writer is closed.
            BaseException: An earlier file could not be written. This file was not submitted. To submit it, call
                `submit` again.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError(f"`submit` on a closed `{type(self).__name__}`: make a new one.")
            self._raise_failure(passing=WorkersLostError)
            earlier = [each for each in self._writes if not each.is_done or each.failure is not None]
            submitted = SubmittedWrite(partial(self._run, earlier, files.absolute(path), produce, write))
            self._writes = [*earlier, submitted]
            return submitted

    def write(self, path: str | os.PathLike[str], state: Any, write: Write) -> None:
        """Write a file in the current thread, after all files that were submitted before.

        Args:
            path: Path or URI of the file.
            state: The object to write.
            write: Function that takes the path and the object, and writes the file.

        Raises:
            BaseException: This file or an earlier file could not be written. If it was an earlier file, this file was
                not written either.
        """
        self.drain()
        self._raise_failure(passing=WorkersLostError)
        write(os.fspath(path), state)
        _make_up(self._writes)

    def wait(self) -> None:
        """Wait until all submitted files are written.

        Raises:
            BaseException: The original error of a file that could not be written.
        """
        self.drain()
        self._raise_failure()

    def drain(self) -> None:
        """Wait until each submitted file is complete or could not be written."""
        for each in self._writes:
            each.end()

    def close(self) -> None:
        """Refuse further calls to `submit`, and wait until all submitted files are written.

        If several files could not be written, each call to `close` raises one of the errors.

        Raises:
            BaseException: The original error of a file that could not be written.
        """
        with self._lock:
            self._is_closed = True
        self.wait()

    def _raise_failure(self, passing: type[BaseException] | tuple[()] = ()) -> None:
        """Raise the oldest error of a failed write that has not been raised yet, if there is such an error.

        Args:
            passing: Errors of this class are not raised.
        """
        for each in self._writes:
            if each.is_done and not isinstance(each.failure, passing):
                each.wait()

    def _run(
        self, earlier: list[SubmittedWrite], path: str, produce: Callable[[], Any], write: Write, own: SubmittedWrite
    ) -> None:
        """Write a file, after the files before it. The thread of the file runs this method."""
        for each in earlier:
            each.end()
        began = time.perf_counter()
        try:
            write(path, produce())
        except BaseException as error:  # only log the error here, because a later call raises it
            logger.error("could not write checkpoint %s: %r", files.shown(path), error)
            _forget_variables(error)
            own.failure = error
        else:
            logger.info("wrote checkpoint %s", files.shown(path))
            _make_up(earlier)
        own.seconds = time.perf_counter() - began


def _make_up(earlier: list[SubmittedWrite]) -> None:
    """Discard the errors about states that were lost with a worker, because a newer state was written."""
    for each in earlier:
        if isinstance(each.failure, WorkersLostError):
            each.failure = None


def _forget_variables(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of an error and of its causes.

    These variables may keep the whole training state in memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
