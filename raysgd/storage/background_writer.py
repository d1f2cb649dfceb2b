"""Writes checkpoint files in a background thread, so that training does not wait for the disk or the store."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
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
        changed: Condition of the writer.
        job: The path of the file, the function that returns the object to write, and the function that writes it.

    Attributes:
        is_done: True when the file is complete or could not be written.
        seconds: How long it took to produce and write the content of the file. 0 until `is_done` is True.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        job: tuple[str, Callable[[], Any], Write] | None = None,
    ) -> None:
        self._changed, self._job = changed or threading.Condition(), job
        self._failure: BaseException | None = None
        self.is_done, self.seconds = job is None, 0.0

    def wait(self) -> None:
        """Wait until the file is complete.

        Raises:
            BaseException: The file could not be written. No later call raises this error again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_done)
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> BaseException | None:
        """Write the file. Return the error, or None if the file was written."""
        assert self._job is not None, "each file is written once"
        # Forget the functions before the end of the write is told, because they may refer to large objects.
        (path, produce, write), self._job = self._job, None
        try:
            write(path, produce())
        except BaseException as error:  # only log the error here, because a later call raises it
            logger.error("could not write checkpoint %s: %r", files.shown(path), error)
            _forget_variables(error)
            return error
        logger.info("wrote checkpoint %s", files.shown(path))
        return None


class BackgroundWriter:
    """Writes checkpoint files in a background thread, one after the other, in the order of `submit`.

    The thread runs only while files are waiting to be written. It is not a daemon thread, so a program finishes its
    files before it exits.

    If a file cannot be written, this is logged at once, and the next call to `submit`, `write`, `wait` or `close`
    raises the error. After several failures, each of these calls raises one error, the oldest first. A
    `WorkersLostError` means that the state was lost with its worker. Only `wait` and `close` raise it, and only if no
    later file was written successfully.
    """

    def __init__(self) -> None:
        self._writes: list[SubmittedWrite] = []  # in the order of `submit`, without those that are written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, path: str | os.PathLike[str], produce: Callable[[], Any], write: Write) -> SubmittedWrite:
        """Let the background thread write a file, after all files that were submitted before.

        Args:
            path: Path or URI of the file. A relative path is made absolute immediately.
            produce: Function that returns the object to write. The background thread calls it.
            write: Function that takes the path and this object, and writes the file atomically.

        Raises:
            ValueError: The writer is closed.
            BaseException: An earlier file could not be written. This file was not submitted. To submit it, call
                `submit` again.
        """
        with self._changed:
            if self._is_closed:
                raise ValueError(f"`submit` on a closed `{type(self).__name__}`: make a new one.")
            self._raise_failure(passing=WorkersLostError)
            if self._thread is None:
                thread = RayThread(target=self._work, name="raysgd-checkpoint-writer", daemon=False)
                thread.start()  # the thread cannot run before this block ends, because the block holds the lock
                self._thread = thread
            submitted = SubmittedWrite(self._changed, (files.absolute(path), produce, write))
            self._writes.append(submitted)
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
        self._drain()
        self._raise_failure(passing=WorkersLostError)
        write(os.fspath(path), state)
        self._make_up()

    def wait(self) -> None:
        """Wait until all submitted files are written.

        Raises:
            BaseException: The original error of a file that could not be written.
        """
        self._drain()
        self._raise_failure()

    def _drain(self) -> None:
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Refuse further calls to `submit`, and wait until all submitted files are written.

        If several files could not be written, each call to `close` raises one of the errors.

        Raises:
            BaseException: The original error of a file that could not be written.
        """
        with self._changed:
            self._is_closed = True
        self.wait()

    def _raise_failure(self, passing: type[BaseException] | tuple[()] = ()) -> None:
        """Raise the oldest error of a failed write that has not been raised yet, if there is such an error.

        Args:
            passing: Errors of this class are not raised.
        """
        with self._changed:
            for each in self._writes:
                if not isinstance(each._failure, passing):
                    each._raise_failure()

    def _make_up(self) -> None:
        """Discard the errors about states that were lost with a worker, because a newer state was written."""
        with self._changed:
            for each in self._writes:
                if isinstance(each._failure, WorkersLostError):
                    each._failure = None

    def _work(self) -> None:
        """Write the submitted files, one after the other, until none is left.

        The background thread runs this method.
        """
        while True:
            with self._changed:
                self._writes = [each for each in self._writes if not each.is_done or each._failure is not None]
                submitted = next((each for each in self._writes if not each.is_done), None)
                if submitted is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            began = time.perf_counter()
            failure = submitted._run()
            if failure is None:
                self._make_up()
            with self._changed:
                submitted._failure, submitted.seconds = failure, time.perf_counter() - began
                submitted.is_done = True
                self._changed.notify_all()
            del failure, submitted


def _forget_variables(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of an error and of its causes.

    These variables may keep the whole training state in memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
