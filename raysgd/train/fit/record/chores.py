"""Background work of the driver beside a run, in one thread: deleted checkpoints, logs copied to a remote storage."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from raysgd.air.layout import TrialFolder

logger = logging.getLogger(__name__)

_UPLOAD_EVERY_S = 5.0


class BackgroundTasks:
    """Does one thing after the other in a thread, which lives from the first one until `close`. Failures are logged."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, what: str, work: Callable[[], object]) -> Future[None]:
        """Has `work` done later. `what` says what it is, for the log."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raysgd-fit")
        return self._pool.submit(_attempt, what, work)

    def close(self) -> None:
        """Waits until everything is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _attempt(what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        logger.warning("could not %s: %s: %s", what, type(error).__name__, error)


class Logs:
    """The logs of a trial, on their way to its folder: none, where they are written there.

    Args:
        folder: The folders of the run.
        chores: Copies them.
    """

    def __init__(self, folder: TrialFolder, chores: BackgroundTasks) -> None:
        self._folder = folder
        self._chores = chores
        self._last = time.monotonic()
        self._running: Future[None] | None = None

    def fetch(self) -> None:
        """Gets the logs of the run that this one continues, to write on where they end."""
        if not self._folder.is_local and not self._folder.is_new:
            for name in self._folder.trial.names():
                if self._folder.trial.has(name):
                    (self._folder.local_path / name).write_bytes(self._folder.trial.read(name))

    def upload_soon(self) -> None:
        """Copies them in the background, every few seconds."""
        if self._folder.is_local or time.monotonic() - self._last < _UPLOAD_EVERY_S:
            return
        if self._running is None or self._running.done():
            self._last = time.monotonic()
            self._running = self._chores.submit(f"copy the logs to {self._folder.trial}", self._upload)

    def upload_all(self) -> None:
        """Copies them now, and removes those of this machine. If that fails they stay, and the log says where."""
        if self._folder.is_local:
            return
        try:
            self._upload()
        except OSError as error:
            self._folder.expect_little()
            kept = self._folder.local_path
            logger.error("could not copy the logs to %s; they stay in %s: %s", self._folder.trial, kept, error)
        else:
            self._folder.close()

    def remove(self, name: str) -> None:
        """Deletes one of them."""
        (self._folder.local_path / name).unlink(missing_ok=True)
        self._folder.trial.remove(name)

    def rename(self, name: str, new_name: str) -> None:
        """Renames one of them, if it is there."""
        path = self._folder.local_path / name
        if path.exists():
            shutil.copyfile(path, path.with_name(new_name))
            self.remove(name)

    def _upload(self) -> None:
        self._folder.trial.upload(Path(self._folder.local_path))
