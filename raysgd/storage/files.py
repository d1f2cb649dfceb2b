"""Reads and writes single files, such as checkpoints, on disk or in a store.

A location is the path or the URI of a file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from raysgd.core.files import check_regular, replacing
from raysgd.core.text.secrets import masked
from raysgd.exceptions import StorageError
from raysgd.storage import _filesystems, _uris
from raysgd.storage._store import open_folder
from raysgd.storage.folder import Folder


def check_location(name: str, location: Any) -> None:
    """Check that a value is the path or URI of a file, without connecting to a store.

    Args:
        name: Name of the user's argument, for error messages.
        location: The value that the user has passed.

    Raises:
        TypeError: `location` is neither a string nor a path.
        ValueError: `location` is empty, or a URI with an unknown scheme or without a file name.
        ModuleNotFoundError: Access to this URI needs a package that is not installed.
    """
    text = _uris.checked_text(name, location)
    if _uris.is_local(text):
        _uris.local_path_of(name, text)
    else:
        _folder_and_name(text, name)


def saving(location: str | os.PathLike[str]) -> AbstractContextManager[IO[bytes]]:
    """Open a temporary file for writing and reading. At the end of the block, it replaces the file at `location`.

    If the block raises an exception, the file at `location` is unchanged.

    Args:
        location: Path or URI of the file.

    Raises:
        OSError: The file could not be written. For a URI of a store, this is a `StorageError`.
    """
    text = _uris.checked_text("path", location)
    if _uris.is_local(text):
        return replacing(_path_of(text).rstrip(os.sep) or os.sep)
    folder, name = _folder_and_name(text)
    return folder.writing(name)


@contextlib.contextmanager
def local_copy(location: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a local file that has the content of the file at `location`.

    For a path on disk, this is the file itself. For a file in a store, it is a temporary copy, which exists only in the
    block.

    Raises:
        FileNotFoundError: The store has no such file. The existence of local files is not checked.
        OSError: `location` is a device, a pipe or a socket on this machine.
        StorageError: The store could not be reached.
    """
    text = _uris.checked_text("path", location)
    if _uris.is_local(text):
        path = _path_of(text)
        check_regular(path)
        yield path
        return
    folder, name = _folder_and_name(text)
    with tempfile.TemporaryDirectory(prefix="raysgd-") as temporary:
        copy = Path(temporary, name)
        folder.fetch(name, copy)
        yield str(copy)


def is_uri(location: Any) -> bool:
    """Return True for a URI, including a `file://` URI and a `pathlib.Path` that was made from a URI."""
    return isinstance(location, str | os.PathLike) and _uris.scheme_of(str(location)) is not None


def absolute(location: str | os.PathLike[str]) -> str:
    """Make a path absolute, so that it stays valid if the program changes its working directory.

    Return a URI unchanged.
    """
    text = _uris.checked_text("path", location)
    return text if _uris.scheme_of(text) is not None else os.path.join(os.getcwd(), text)


def shown(location: str | os.PathLike[str]) -> str:
    """Return a path or URI as a string without keys and passwords."""
    return masked(_uris.checked_text("path", location))


@contextlib.contextmanager
def state_is_kept() -> Iterator[None]:
    """If the block raises a `StorageError`, add to its message that the trainer still has its state."""
    try:
        yield
    except StorageError as error:
        raised = StorageError(f"{error} The trainer still has its state: you can save it again, also to another place.")
        raised.errno = error.errno
        raise raised from error


def _path_of(text: str) -> str:
    return text if _uris.scheme_of(text) is None else str(_uris.local_path_of("path", text))


def _folder_and_name(uri: str, argument: str = "path") -> tuple[Folder, str]:
    store, path, query = _uris.divided(uri)
    above, _, name = path.rpartition("/")
    if not name or uri.removesuffix(query).endswith("/"):
        example = f"{masked(store)}/folder/last.pt"
        raise ValueError(f"`{argument}={masked(uri)!r}`: need the URI of a file, such as '{example}'.")
    _filesystems.check(argument, uri)
    return open_folder(_uris.child_of(f"{store}{query}", above)), name


def in_folder_of(location: str | os.PathLike[str], name: str) -> str:
    """Return the path or URI of the file `name` in the folder of the file at `location`.

    Args:
        location: Path or URI of the file.
        name: Name of the file in the same folder.

    Examples:
        >>> in_folder_of("s3://bucket/run/last.pt?region=eu", "a.json"), in_folder_of("last.pt", "a.json")
        ('s3://bucket/run/a.json?region=eu', 'a.json')
    """
    text, query = _without_query(location)
    above, slash, _ = text.rpartition("/")
    return f"{above}{slash}{name}{query}"


def beside(location: str | os.PathLike[str], ending: str) -> str:
    """Append an ending to the name of a file in a path or URI. The query of a URI stays at the end.

    Examples:
        >>> beside("s3://bucket/last.pt?region=eu", ".json"), beside("runs/last.pt", ".json")
        ('s3://bucket/last.pt.json?region=eu', 'runs/last.pt.json')
    """
    text, query = _without_query(location)
    return f"{text}{ending}{query}"


def _without_query(location: str | os.PathLike[str]) -> tuple[str, str]:
    text = _uris.checked_text("path", location)
    query = "" if _uris.is_local(text) else _uris.divided(text)[2]
    return text.removesuffix(query), query
