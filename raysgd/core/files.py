"""Files on this machine: written completely or not at all, and checks of paths that must be on a disk.

A write goes to a temporary file next to the target, which gets the target's name when all of it is on the disk. If a
process is killed in the middle, the earlier file stays, and a file `.raysgd-*.tmp` is left over. The next write into
the folder deletes such a leftover: at once if its process ran on this machine, which its name says, otherwise when it
is old. Without that, a training that is preempted often would fill the disk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from raysgd.core.text.secrets import masked

_PREFIX, _SUFFIX = ".raysgd-", ".tmp"
_OF_PROCESS = re.compile(rf"{re.escape(_PREFIX)}([0-9a-f]{{16}})-([0-9]+)-[0-9a-f]+{re.escape(_SUFFIX)}")
_LEFTOVER_S = 3600.0  # without any change: a living writer writes more often
_INSTEAD = "Mount the storage, or copy the files to and from it yourself."


@contextlib.contextmanager
def replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `target` if the block ends without an error, and is deleted otherwise.

    The folder is made if necessary.
    """
    folder = os.path.dirname(target) or os.curdir
    os.makedirs(folder, exist_ok=True)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "the checkpoint's path is a folder: add a file name", target)
    if os.path.lexists(target) and not os.path.isfile(target):
        raise FileExistsError(
            errno.EEXIST,
            "the checkpoint's path is not a regular file: pass another path",
            target,
        )
    remove_leftovers(folder)
    temporary = os.path.join(folder, f"{_PREFIX}{_home_of_processes()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
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
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # such as a full disk
            error.filename = target
        with contextlib.suppress(OSError):  # `close` tries to write the rest once more
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    flush_to_disk(folder)


@functools.cache
def _home_of_processes() -> str:
    """Return an ID of this machine and container, in which a process ID is unique; "" if unknown."""
    try:
        boot, processes = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {processes}".encode()).hexdigest()[:16]


def _is_of_dead_process(name: str) -> bool:
    """Return True if this is a temporary file of a process of this machine that has ended, by its name."""
    found = _OF_PROCESS.fullmatch(name)
    if found is None or found[1] != _home_of_processes():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process belongs to another user
        return False
    return False


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Delete temporary files of killed writers in this folder, if they can be recognized and deleted."""
    old = time.time() - _LEFTOVER_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    if _last_change(entry) >= old and not _is_of_dead_process(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry)
                    else:
                        os.unlink(entry)


def _last_change(entry: os.DirEntry[str]) -> float:
    """Return the time of the last change; for a folder, also of anything directly in it."""
    times = [entry.stat(follow_symlinks=False).st_mtime]
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry) as inner:
            times.extend(each.stat(follow_symlinks=False).st_mtime for each in inner)
    return max(times)


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the names in a folder, to the disk. Some file systems cannot, and need not, flush a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<second>/?)")
"""The beginning of a URI, possibly with only one slash: `pathlib` turns two into one."""


def checked_text(name: str, path: Any, what: str = "a path") -> str:
    """Return a path as text.

    Args:
        name: Name of the argument.
        path: Its value.
        what: What it should be, for the error.

    Raises:
        TypeError: It is neither text nor a path.
        ValueError: It is empty, or contains a null character.
    """
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise TypeError(f"`{name}={path!r}`: need {what}, as a `str` or a `pathlib.Path`.")
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ValueError(f"`{name}={path!r}`: need {what}, not an empty one or one with a null character.")
    return text


def check_path(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Refuse anything but the path of a file or folder on this machine.

    Args:
        name: Name of the argument.
        path: Its value.
        instead: What to do instead of passing a URI, for the error.

    Raises:
        TypeError: It is neither text nor a path.
        ValueError: It is empty, contains a null character, or is a URI.
    """
    check_local(name, checked_text(name, path), instead)


def check_local(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Refuse a URI. Does not check anything else.

    Raises:
        ValueError: It is a URI.

    >>> check_local("logdir", "/mnt/results")
    >>> check_local("logdir", "s3://bucket/results")
    Traceback (most recent call last):
    ValueError: `logdir='s3://bucket/results'`: need a path on a local or mounted disk, not a URI...
    """
    if isinstance(path, str | os.PathLike) and SCHEME.match(str(path)):
        raise ValueError(
            f"`{name}={masked(str(path))!r}`: need a path on a local or mounted disk, not a URI. {instead}"
        )


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse what could be read forever: a device, a pipe, a socket. The file may be missing.

    Raises:
        OSError: It is a device, a pipe or a socket.
    """
    place = Path(path)
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(f"`{path}` is not a regular file, but a device, a pipe or a socket")


def make_folder(name: str, path: str | os.PathLike[str]) -> None:
    """Make a folder if it does not exist. Refuse one without permission to write.

    Raises:
        ValueError: It cannot be made, or not be written to.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{name}={str(path)!r}`: the folder cannot be made ({error.strerror}). Pass a writable folder."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`{name}={str(path)!r}`: this folder is not writable. Pass a writable folder.")
