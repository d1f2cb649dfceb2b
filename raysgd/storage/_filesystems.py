"""Finds the file system of a URI: one of PyArrow's own, or one of fsspec."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from raysgd._optional import require
from raysgd.storage._uris import divided, masked, scheme_of

_NATIVE = {"s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"}
_WHOLE_AT_CLOSE = {"s3", "gcs", "abfs"}
_RETRIES_OF_GCS = "retry_limit_seconds"  # or an operation would take up to 15 minutes to fail
_PURPOSE = "storage other than a local disk"


@dataclass(frozen=True)
class Opened:
    """A file system, and where in it something is.

    Attributes:
        filesystem: A `pyarrow.fs.FileSystem`.
        base: The path in it.
    """

    filesystem: Any
    base: str

    @property
    def is_whole_at_close(self) -> bool:
        """Whether a file appears when it is closed, and not before."""
        return self.filesystem.type_name in _WHOLE_AT_CLOSE

    @property
    def lists_folders(self) -> bool:
        """Whether a listing of one level names the folders in it; PyArrow finds the files alone on Google's store."""
        return self.filesystem.type_name != "gcs"


def check(argument: str, uri: str) -> None:
    """Makes sure that there is a file system for a URI. Connects to nothing.

    Raises:
        ValueError: The scheme is unknown.
        ModuleNotFoundError: A package is missing.
    """
    require("pyarrow.fs", "storage", _PURPOSE)
    scheme = scheme_of(uri)
    if scheme in _NATIVE:
        return
    registry = require("fsspec.registry", "storage", _PURPOSE)
    try:
        registry.get_filesystem_class(scheme)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"`{argument}={masked(uri)!r}`: {error}, on this machine and on all nodes."
        ) from error
    except ValueError:
        raise ValueError(
            f"`{argument}={masked(uri)!r}`: `{scheme}` is unknown; allowed are paths, `file`, {_named(_NATIVE)}, and "
            "what fsspec knows. For anything else pass `filesystem`."
        ) from None


def _named(schemes: set[str]) -> str:
    return ", ".join(f"`{scheme}`" for scheme in sorted(schemes))


@functools.lru_cache(maxsize=32)
def opened(uri: str) -> Opened:
    """The file system of a URI, made once in each process, so that connections are used again.

    Raises:
        Exception: What the file system raises where it cannot be made.
    """
    return _native(uri) if scheme_of(uri) in _NATIVE and _is_built_in(uri) else _of_fsspec(uri)


def _is_built_in(uri: str) -> bool:
    """Whether this build of PyArrow has the file system."""
    kinds = {"gs": "GcsFileSystem", "gcs": "GcsFileSystem", "s3": "S3FileSystem"}
    kinds |= {"abfs": "AzureFileSystem", "abfss": "AzureFileSystem"}
    try:
        getattr(require("pyarrow.fs", "storage", _PURPOSE), kinds.get(scheme_of(uri) or "", "FileSystem"))
    except ImportError:
        return False
    return True


def _native(uri: str) -> Opened:
    store, path, query = divided(uri)
    if scheme_of(uri) in ("gs", "gcs") and _RETRIES_OF_GCS not in query:
        query = f"{query or '?'}{'&' if query else ''}{_RETRIES_OF_GCS}=10"
    filesystem, root = require("pyarrow.fs", "storage", _PURPOSE).FileSystem.from_uri(f"{store}/{query}")
    return Opened(filesystem, "/".join(part for part in (root.rstrip("/"), path) if part))


def _of_fsspec(uri: str) -> Opened:
    filesystem, path = require("fsspec.core", "storage", _PURPOSE).url_to_fs(uri)
    return Opened(wrapped(filesystem), path.rstrip("/"))


def wrapped(filesystem: Any) -> Any:
    """A file system of fsspec as one of PyArrow."""
    fs = require("pyarrow.fs", "storage", _PURPOSE)
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem))
