"""`open_folder` and `make_new`: return a `Folder` for a path or URI, or create a new folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
from typing import Any

from raysgd.core.text.secrets import masked
from raysgd.storage import _filesystems, _uris
from raysgd.storage._retrying import limit_s, telling
from raysgd.storage._store import StoreFolder
from raysgd.storage.folder import ADVICE, Folder


def open_folder(path: str | os.PathLike[str], filesystem: Any = None, *, argument: str = "path") -> Folder:
    """Return the `Folder` for a path or URI, without connecting to a store. The folder need not exist.

    Args:
        path: A path on disk (`~` is your home folder), or a URI such as `s3://bucket/results`, `gs://...`,
            `abfs://...`, `file://...`, or a URI of any other file system that fsspec supports.
        filesystem: A PyArrow or fsspec file system. `path` is then a path in this file system, such as
            `bucket/results`.
        argument: Name of the `path` argument in error messages.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `path` is empty, or is a URI that cannot be used, for example because its scheme is unknown or
            because `filesystem` was passed too.
        ModuleNotFoundError: The file system needs a package that is not installed.
    """
    text = _uris.checked_text(argument, path)
    if filesystem is not None:
        return _in(filesystem, text, argument)
    if "::" in text and "://" in text:
        raise ValueError(
            f"`{argument}={masked(text)!r}`: to chain file systems, pass an fsspec file system as `filesystem=`."
        )
    if _uris.is_local(text):
        return Folder(_uris.local_path_of(argument, text))
    _filesystems.check(argument, text)
    return StoreFolder(text, patience_s=limit_s())


def make_new(parent: Folder, name: str) -> Folder:
    """Create a new folder with a unique name, and return it. Several programs can call this at the same time.

    Args:
        parent: Folder in which to create the new folder.
        name: Name of the new folder. On disk, a number is appended if there is a folder of this name. In a store,
            random characters are always appended, because two programs could otherwise create the same folder.

    Raises:
        OSError: The folder could not be created. In a store, this is a `StorageError`.
    """
    if not parent.is_local:
        folder = parent / f"{name}_{secrets.token_hex(4)}"
        folder.make()
        return folder
    parent.make()
    folders = (parent / (f"{name}_{number}" if number else name) for number in itertools.count())
    return next(each for each in folders if _is_new(each))


def _is_new(folder: Folder) -> bool:
    """Create a folder on disk. Return False if there is a folder or a file of this name."""
    with telling(f"make the folder `{folder}`", ADVICE), contextlib.suppress(FileExistsError):
        folder.local_path.mkdir()
        return True
    return False


def _in(filesystem: Any, text: str, argument: str) -> Folder:
    """Return a folder in a file system object that the user passed.

    Args:
        filesystem: The file system.
        text: Path of the folder in the file system.
        argument: Name of the user's argument for the path, for error messages.
    """
    if _uris.scheme_of(text) is not None:
        raise ValueError(
            f"`{argument}={masked(text)!r}`: with `filesystem=`, pass a path inside it, such as 'bucket/results', "
            "not a URI."
        )
    if _is_of(filesystem, "pyarrow.fs", "LocalFileSystem") or _is_of(
        filesystem, "fsspec.implementations.local", "LocalFileSystem"
    ):
        return Folder(_uris.local_path_of(argument, text))
    if _is_of(filesystem, "fsspec", "AbstractFileSystem"):
        filesystem = _filesystems.wrapped(filesystem)
    elif not _is_of(filesystem, "pyarrow.fs", "FileSystem"):
        raise TypeError(f"`filesystem={masked(filesystem)!r}`: need a file system of PyArrow or fsspec, or None.")
    base = text.rstrip("/")
    scheme = str(filesystem.type_name).removeprefix("py::").removeprefix("fsspec+")
    uri = f"{scheme}://{base.lstrip('/')}"
    return StoreFolder(uri, filesystem, base, limit_s())


def _is_of(value: Any, module: str, name: str) -> bool:
    """Return True if a value is an instance of the class `module.name`, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
