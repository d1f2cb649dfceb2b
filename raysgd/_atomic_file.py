"""Files that are written whole or not at all.

A write goes to a temporary file beside the target, which takes the target's name only when all of it is on the disk. A
process killed in the middle leaves the earlier file intact, and a file `.raysgd-*.tmp` that may be deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `target` when the block ends well, and vanishes when it does not."""
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "the checkpoint's folder does not exist: create it first", folder)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "the checkpoint's path is a folder: add a file name", target)
    temporary = os.path.join(folder, f".raysgd-{secrets.token_hex(8)}.tmp")
    file = open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "w+b")  # noqa: SIM115
    try:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # as when the disk is full
            error.filename = target
        with contextlib.suppress(OSError):  # Closing tries once more to write what could not be written.
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


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
