"""Lets one program at a time write to a folder.

On a disk, the program locks a file in the folder. The operating system releases the lock when the program dies. In a
store, and on disks without locks, the program writes a file with a counter instead, and increases the counter every few
seconds: if it stands still, the program is dead.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raysgd.core.files import has_ended, home_of_processes
from raysgd.storage.folder import Folder

logger = logging.getLogger(__name__)

FILE = ".raysgd-owner"
_DYING_S = 30.0
_POLL_S = 0.2
# How often the counter is increased, and for how long it stands still if the program is dead.
_BEAT_S, _STALE_S = 8.0, 25.0


@contextmanager
def owning(folder: Folder, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside the block, let no other program own the folder. If a program owns it now, wait up to 30 s for its end.

    A program may own a folder several times. If the folder is not writable, do nothing.

    Args:
        folder: The folder. It is created.
        on_wait: Function to call repeatedly during the wait.

    Raises:
        ValueError: Another program still owns the folder.
    """
    owner: _Lock | _CounterFile | None = None
    kinds: list[type[_Lock | _CounterFile]] = [_Lock, _CounterFile] if folder.is_local else [_CounterFile]
    for kind in [] if folder.is_in_memory else kinds:  # some network disks, and Windows, have no locks
        try:
            owner = _taken(kind(folder), folder, on_wait)
            break
        except (OSError, ImportError) as error:  # the run raises its own error where it cannot write
            logger.debug("no %s in %s: %s", kind.__name__, folder, error)
    try:
        yield
    finally:
        if owner is not None:
            with suppress(OSError):
                owner.release()


def _taken(owner: _Lock | _CounterFile, folder: Folder, on_wait: Callable[[], None]) -> _Lock | _CounterFile | None:
    """Wait until this program owns the folder, and return `owner`. Return None if it owned the folder before."""
    until = time.monotonic() + _DYING_S
    while not owner.take():
        holder = _holder_of(folder)
        if _is_this_process(holder):
            return None
        if time.monotonic() > until:
            raise ValueError(
                f"Another program writes to `{folder}`: process {holder.get('pid', 'unknown')} on "
                f"{holder.get('host', 'an unknown machine')}. Two runs would mix their files. End that program, or "
                "pass another folder."
            )
        on_wait()
        time.sleep(_POLL_S)
    return owner


def _is_this_process(holder: dict[str, Any]) -> bool:
    return (holder.get("machine"), holder.get("pid")) == (home_of_processes(), os.getpid())


def _about_this_process(**more: Any) -> bytes:
    return json.dumps(
        {"pid": os.getpid(), "host": socket.gethostname(), "machine": home_of_processes(), **more}
    ).encode()


def _holder_of(folder: Folder) -> dict[str, Any]:
    """Return what is known about the program that owns a folder. Empty if there is none."""
    with suppress(FileNotFoundError, ValueError, RecursionError):
        found = json.loads(folder.read(FILE))
        if isinstance(found, dict):
            return found
    return {}


_locked: set[int] = set()
"""Descriptors of the files that this process has locked. A forked process closes them, or it would keep the locks."""


def _close_all() -> None:
    while _locked:
        os.close(_locked.pop())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_all)


class _Lock:
    """A locked file in a folder on a disk. Other machines see the lock too if the network disk has locks, as NFS."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.local_path / FILE
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to lock the file. Return True if this succeeds."""
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # the folder may come from someone else
        descriptor = os.open(self._path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another program may have removed this file between the two calls above. Its lock would then be worthless.
            if os.path.samestat(os.fstat(descriptor), os.lstat(self._path)):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, _about_this_process(), 0)
                self._descriptor = descriptor
                _locked.add(descriptor)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        return self._descriptor is not None

    def release(self) -> None:
        """Remove the file and its lock."""
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None, "the file is locked"
        if descriptor in _locked:  # not in a forked process
            _locked.remove(descriptor)
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


class _CounterFile:
    """A file with a counter, in a folder of a store or on a disk without locks.

    Two programs that begin in the same moment may both believe that they own the folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.without_retries()
        self._token = uuid.uuid4().hex
        self._seen: tuple[dict[str, Any], float] = ({}, 0.0)
        self._ends = threading.Event()

    def take(self) -> bool:
        """Write the file unless another program owns the folder. Return True if this program owns the folder."""
        holder, now = _holder_of(self._folder), time.monotonic()
        if holder != self._seen[0]:
            self._seen = holder, now
        if holder and not has_ended(holder.get("machine"), holder.get("pid")) and now < self._seen[1] + _STALE_S:
            return False
        self._write(0)
        time.sleep(_POLL_S)
        if _holder_of(self._folder).get("token") != self._token:  # another program began in the same moment
            return False
        threading.Thread(target=self._count, name="raysgd-owner", daemon=True).start()
        return True

    def release(self) -> None:
        """Remove the file, if it is still the file of this program."""
        self._ends.set()
        holder = _holder_of(self._folder)
        if holder.get("token") == self._token and _is_this_process(holder):  # not in a forked process
            self._folder.remove(FILE)

    def _write(self, count: int) -> None:
        self._folder.write(FILE, _about_this_process(token=self._token, count=count))

    def _count(self) -> None:
        count = 0
        while not self._ends.wait(_BEAT_S):
            count += 1
            with suppress(OSError):
                if _holder_of(self._folder).get("token") != self._token:
                    logger.warning("another program has taken over %s, because this one did not respond", self._folder)
                    return
                self._write(count)
