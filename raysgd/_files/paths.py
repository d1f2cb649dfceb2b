"""Checks of paths where only a disk will do: this machine has to be able to open them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from raysgd._text.secrets import masked

_INSTEAD = "Mount the storage, or copy the files to and from it yourself."
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: `pathlib` makes one of two


def check_path(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Refuses what is no path of a file or a folder on this machine.

    Args:
        name: The argument.
        path: Its value.
        instead: What to do with a URI.

    Raises:
        TypeError: It is no text and no path.
        ValueError: It is empty, has a null character, or is a URI.
    """
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise TypeError(f"`{name}={path!r}`: need a path, as a `str` or a `pathlib.Path`.")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"`{name}={path!r}`: need a path, not an empty one or one with a null character.")
    check_local(name, path, instead)


def check_local(name: str, path: Any, instead: str = _INSTEAD) -> None:
    """Refuses what names a place in a remote storage; everything else is left for others to check.

    Raises:
        ValueError: It is a URI.

    >>> check_local("logdir", "/mnt/results")
    >>> check_local("logdir", "s3://bucket/results")
    Traceback (most recent call last):
    ValueError: `logdir='s3://bucket/results'`: need a path on a local or mounted disk, not a URI...
    """
    if isinstance(path, str | os.PathLike) and _SCHEME.match(str(path)):
        raise ValueError(
            f"`{name}={masked(str(path))!r}`: need a path on a local or mounted disk, not a URI. {instead}"
        )


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuses to read what may never end: a device, a pipe, a socket. The file may be missing.

    Raises:
        OSError: It is one.
    """
    place = Path(path)
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(f"`{path}` is not a regular file, but a device, a pipe or a socket")


def make_folder(name: str, path: str | os.PathLike[str]) -> None:
    """Makes a folder, unless it is there, and refuses one that takes no files.

    Raises:
        ValueError: It cannot be made, or not be written to.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{name}={str(path)!r}`: the folder cannot be made ({error.strerror}). Pass one that you may write to."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`{name}={str(path)!r}`: you may not write there. Pass a folder that you may write to.")
