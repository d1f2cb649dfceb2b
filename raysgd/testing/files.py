"""Makes writes of checkpoint files fail, to test what a program does when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from typing import Any

from raysgd.storage import files
from raysgd.testing.targets import controller_of


@contextlib.contextmanager
def fail_save(trainer: Any, error: OSError | None = None, after_bytes: int = 0) -> Iterator[None]:
    """Inside the ``with`` block, make `trainer.save` fail while it writes a file, as if the disk were full.

    A save in the background (`blocking=False`) that starts inside the block fails too. At the end of the block, the
    program waits until such saves have ended.

    Args:
        trainer: A running trainer.
        error: The exception that a write raises. Default: an `OSError` with "No space left on device".
        after_bytes: Number of bytes of each file that are still written before the exception is raised.

    Raises:
        ValueError: `after_bytes` is negative or not an integer, or `error` is not an `OSError`.
    """
    if isinstance(after_bytes, bool) or not isinstance(after_bytes, int) or after_bytes < 0:
        raise ValueError(f"`after_bytes={after_bytes!r}`: need a whole number of bytes, 0 or more.")
    if error is not None and not isinstance(error, OSError):
        raise ValueError(f"`error={error!r}`: need an `OSError`, as a failed write raises.")
    controller_of(trainer)
    number = errno.ENOSPC
    failure = error or OSError(number, os.strerror(number))
    targets: set[str] = set()
    writing: Any = files
    saving = files.saving
    save = trainer.save

    @functools.wraps(save)
    def noting(checkpoint: Any, *args: Any, **keywords: Any) -> Any:
        targets.add(os.fspath(checkpoint))
        return save(checkpoint, *args, **keywords)

    @contextlib.contextmanager
    def failing(target: Any) -> Iterator[Any]:
        with saving(target) as file:
            yield _FullFile(file, after_bytes, failure) if os.fspath(target) in targets else file

    writing.saving = failing
    trainer.save = noting
    try:
        yield
    finally:
        thread = trainer._life.writer._thread
        if thread is not None:
            thread.join()
        del trainer.save
        writing.saving = saving


class _FullFile:
    """A file whose `write` raises `failure` when more than `num_left` bytes are written in total."""

    def __init__(self, file: Any, num_left: int, failure: OSError) -> None:
        self._file, self._num_left, self._failure = file, num_left, failure

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(view) > self._num_left:
            self._file.write(view[: self._num_left])
            self._num_left = 0
            raise self._failure
        self._num_left -= len(view)
        return int(self._file.write(view))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
