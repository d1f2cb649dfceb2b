"""Writes local files atomically, checks that paths are local, and finds the user's cache folder.

A write goes to a temporary file next to the target. Once the temporary file is completely on disk, it is renamed to the
target. If a process is killed during a write, the earlier file stays intact, and a file `.raysgd-*.tmp` is left over.
The next write to the same folder deletes a leftover if its name shows that its process ran on this machine and has
ended, or if it is older than an hour. Without this cleanup, frequently preempted training runs would fill the disk.

The library runs code from the cache folder, so no other user may be able to write there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from raysgd.core.text.secrets import masked

_PREFIX, _SUFFIX = ".raysgd-", ".tmp"
_OF_PROCESS = re.compile(rf"{re.escape(_PREFIX)}([0-9a-f]{{16}})-([0-9]+)-[0-9a-f]+{re.escape(_SUFFIX)}")
_LEFTOVER_S = 3600.0  # age in seconds at which a temporary file counts as old; a live process writes more often
_PIECE_BYTES = 2**23
_SYNC_FILE_RANGE_WRITE = 2  # a constant of Linux
_INSTEAD = "Mount the storage, or copy the files to and from it yourself."


@contextlib.contextmanager
def replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a temporary file. If the `with` block succeeds, the file replaces `target`; otherwise, it is deleted.

    The folder is created if necessary. If `target` is a link, the file replaces the link, and not what it leads to.

    Raises:
        OSError: `target` exists and is not a regular file, or the file cannot be written.
    """
    folder = os.path.dirname(target) or os.curdir
    os.makedirs(folder, exist_ok=True)
    earlier = os.lstat(target).st_mode if os.path.lexists(target) else stat.S_IFLNK
    if stat.S_ISDIR(earlier):
        raise IsADirectoryError(errno.EISDIR, "the path is a folder: add a file name", target)
    if not (stat.S_ISREG(earlier) or stat.S_ISLNK(earlier)):
        raise FileExistsError(errno.EEXIST, "the path is not a regular file: pass another path", target)
    remove_leftovers(folder)
    temporary = os.path.join(folder, f"{_PREFIX}{home_of_processes()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    file = cast("IO[bytes]", io.BufferedRandom(_FlushedEarly(descriptor, "r+b")))
    try:
        if stat.S_ISREG(earlier):
            os.chmod(temporary, stat.S_IMODE(earlier))
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, target)
    except BaseException as error:
        # Some errors name no file, such as the error for a full disk. Add the target's name.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = target
        with contextlib.suppress(OSError):  # `close` tries to write the remaining data again, which may fail again
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    flush_to_disk(folder)


class _FlushedEarly(io.FileIO):
    """A file that Linux starts to write to the disk before the program has written all of it.

    Without this, Linux would keep a large file in memory until `fsync`, which would then wait for the whole file. Other
    systems write the file as usual.
    """

    _num_begun = 0  # bytes from the start of the file that the system has begun to write to the disk

    def write(self, content: Any) -> int:
        """Write at most `_PIECE_BYTES` bytes of `content`, and return the number of bytes written.

        Whenever this many bytes have gathered, Linux is asked to start writing them to the disk.
        """
        num_written = super().write(memoryview(content)[:_PIECE_BYTES])
        end, begin_flush = self.tell(), _find_begin_flush()
        if begin_flush is not None and end - self._num_begun >= _PIECE_BYTES:
            begin_flush(self.fileno(), self._num_begun, end - self._num_begun, _SYNC_FILE_RANGE_WRITE)
            self._num_begun = end
        return num_written


@functools.cache
def _find_begin_flush() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's function that starts to write a part of a file to the disk. Return None outside Linux."""
    import ctypes  # imported here, because programs that write no file do not need it

    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", found)


@functools.cache
def home_of_processes() -> str:
    """Return a name for this machine since its last boot, or for this container. In it, process IDs are unique."""
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # only Linux has these files
        place = "", uuid.getnode()
    return hashlib.sha256(f"{socket.gethostname()} {place}".encode()).hexdigest()[:16]


def has_ended(home: Any, pid: Any) -> bool:
    """Return True if a process ran in the place `home`, which is here, and has ended. Return False if it is unknown."""
    if home != home_of_processes() or not isinstance(pid, int) or os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # the process is alive, but belongs to another user, or the number is not one
        return False
    return False


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Delete temporary files and subfolders that killed processes left in a folder.

    Skip those that a live process may still use.
    """
    old = time.time() - _LEFTOVER_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    of_process = _OF_PROCESS.fullmatch(entry.name)
                    is_dead = of_process is not None and has_ended(of_process[1], int(of_process[2]))
                    if not is_dead and _last_change(entry) >= old:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry)
                    else:
                        os.unlink(entry)


def _last_change(entry: os.DirEntry[str]) -> float:
    """Return the time of a file's or folder's last change. For a folder, also consider the entries directly in it."""
    times = [entry.stat(follow_symlinks=False).st_mtime]
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry) as inner:
            times.extend(each.stat(follow_symlinks=False).st_mtime for each in inner)
    return max(times)


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Flush a file to disk. For a folder, flush its list of names.

    If the file system cannot flush folders, do nothing for a folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<second>/?)")
"""The start of a URI, possibly with only one slash, because `pathlib` collapses two slashes into one."""


def checked_text(name: str, path: Any, what: str = "a path") -> str:
    """Check that an argument is a path, and return it as a string.

    Args:
        name: Name of the argument.
        path: The argument's value.
        what: Description of the expected value, for the error.

    Raises:
        TypeError: `path` is neither a string nor a path.
        ValueError: `path` is empty or contains a null character.
    """
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise TypeError(f"`{name}={masked(path)!r}`: need {what}, as a `str` or a `pathlib.Path`.")
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ValueError(f"`{name}={masked(path)!r}`: need {what}, not an empty one or one with a null character.")
    return text


def check_path(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Raise an error unless an argument is a path on a local or mounted disk. The path need not exist.

    Args:
        name: Name of the argument.
        path: The argument's value.
        instead: Advice for a user who passed a URI, for the error.

    Raises:
        TypeError: `path` is neither a string nor a path.
        ValueError: `path` is empty, contains a null character, or is a URI.
    """
    check_local(name, checked_text(name, path), instead)


def check_local(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Raise an error if a path is a URI. Nothing else is checked.

    Raises:
        ValueError: `path` is a URI.

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
    """Raise an error for the path of a device, a pipe or a socket, because reading it may never end.

    A path where no file exists is accepted.

    Raises:
        OSError: `path` is a device, a pipe or a socket.
    """
    place = Path(path)
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(f"`{path}` is not a regular file, but a device, a pipe or a socket")


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file or folder that the library makes in the folder of a run.

    The folder may come from someone else, so links in it are not followed to other places.

    Raises:
        OSError: A link leads out of `folder`.
    """
    place = folder / name
    if not is_inside(place, folder):
        leads_out = "this is a link, or lies behind one, that leads out of the run's folder: remove the link"
        raise OSError(errno.ELOOP, leads_out, str(place))
    return place


def is_inside(path: Path, folder: Path) -> bool:
    """Return True if a path, after all links, is in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def make_folder(name: str, path: str | os.PathLike[str]) -> None:
    """Create a folder if it does not exist, and check that it is writable.

    Raises:
        ValueError: The folder cannot be created or is not writable.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{name}={masked(str(path))!r}`: the folder cannot be made ({error.strerror}). Pass a writable folder."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`{name}={masked(str(path))!r}`: this folder is not writable. Pass a writable folder.")


def cache_folder(environment: Mapping[str, str], home: str) -> str:
    """Return the path of raysgd's cache folder. The environment variable `RAYSGD_CACHE` can set it.

    By default, it is the folder `raysgd` in the user's cache folder.
    """
    return environment.get("RAYSGD_CACHE") or f"{environment.get('XDG_CACHE_HOME') or f'{home}/.cache'}/raysgd"


def make_private(folder: Path) -> None:
    """Create a folder and the missing folders above it, with access for this user only, and call `check_private`."""
    folder = Path(os.path.abspath(folder))
    for each in reversed([each for each in (folder, *folder.parents) if not os.path.lexists(each)]):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Check that only this user and the administrator can change a file or folder, also by way of the folders above.

    A folder above may be writable for others if only owners can rename what is in it, as in `/tmp`.

    Raises:
        PermissionError: Another user owns, or can write to, the path, a folder above it or a link on the way.
    """
    os.stat(path)  # raises an error for links that form a circle
    for each in _way_to(path):
        status = os.lstat(each)
        if status.st_uid not in (0, os.getuid()):
            problem = f"belongs to another user (number {status.st_uid})"
        elif not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            problem = f"is writable for other users (mode {stat.S_IMODE(status.st_mode):o})"
        else:
            continue
        raise PermissionError(
            f"`{each}` {problem}, who could put code there that raysgd would run. Set `RAYSGD_CACHE` to a new folder "
            f"in your home folder, or run `chmod go-w {each}` if it is yours."
        )


def _way_to(path: Path) -> Iterator[str]:
    """Yield each folder and link that the system passes on the way to a path, also between two links, and the path."""
    place, names = os.sep, os.path.join(os.getcwd(), path).split(os.sep)[::-1]
    yield place
    while names:
        name = names.pop()
        if name == os.pardir:
            place = os.path.dirname(place)
        elif name not in ("", os.curdir):
            place = os.path.join(place, name)
            yield place
            if os.path.islink(place):
                target = os.readlink(place)
                names += target.split(os.sep)[::-1]
                place = os.sep if os.path.isabs(target) else os.path.dirname(place)
