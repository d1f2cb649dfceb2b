"""What paths may be where only a disk will do: those of files that this machine can open."""

from __future__ import annotations

import os
import re
from typing import Any

from raysgd._secrets import masked

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: `pathlib` makes one of two


def check_path(name: str, path: Any) -> None:
    """Refuses what is no path of a file on this machine.

    Raises:
        TypeError: It is no text and no path.
        ValueError: It is empty, has a null character, or is a URI.
    """
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise TypeError(f"`{name}={path!r}`: need the path of a file, as a `str` or a `pathlib.Path`.")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"`{name}={path!r}`: need the path of a file, not an empty one or one with a null character.")
    check_local(name, path)


def check_local(name: str, path: Any) -> None:
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
            f"`{name}={masked(str(path))!r}`: need a path on a local or mounted disk, not a URI. Mount the storage, "
            "or copy the files to and from it yourself."
        )
