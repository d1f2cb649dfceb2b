"""Files that are written whole or not at all.

A write goes to a temporary file beside the target, which takes the target's name only when all of it is on the disk. A
process killed in the middle leaves the earlier file intact, and a file `.raysgd-*.tmp`. Such a leftover is deleted by
the next write into the folder that finds it old and without a writer: a training that is preempted again and again
would fill the disk with them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from typing import IO

_PREFIX, _SUFFIX = ".raysgd-", ".tmp"
_LEFTOVER_S = 600.0  # age of a leftover; decides where file locks do not work


@contextlib.contextmanager
def replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `target` when the block ends well, and vanishes when it does not."""
    folder = os.path.dirname(target) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "the checkpoint's folder does not exist: create it first", folder)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "the checkpoint's path is a folder: add a file name", target)
    if os.path.lexists(target) and not os.path.isfile(target):
        raise FileExistsError(
            errno.EEXIST,
            "the checkpoint's path is not a regular file: pass another path",
            target,
        )
    _remove_leftovers(folder)
    temporary = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    file = open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "w+b")  # noqa: SIM115
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # the disk is full, say
            error.filename = target
        with contextlib.suppress(OSError):  # Closing tries once more to write what could not be written.
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _remove_leftovers(folder: str) -> None:
    """Deletes what writers that were killed have left in this folder, as far as that can be told and done."""
    old = time.time() - _LEFTOVER_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < old:
                        _remove_unless_locked(entry.path)


def _remove_unless_locked(path: str) -> None:
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    """Put a renaming on the disk. Some file systems cannot do that for a folder, and need not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
