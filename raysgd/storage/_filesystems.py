"""Finds the PyArrow or fsspec file system for the URI of a folder or file in remote storage."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from raysgd.core.imports import require
from raysgd.core.text.secrets import has_secret, masked
from raysgd.storage._uris import divided, scheme_of

_NATIVE = {"s3", "gs", "gcs", "hdfs", "viewfs"}
_AZURE = ("abfs", "abfss", "az")
_IN_BUCKETS = ("s3", "gs", "gcs", *_AZURE)
_NAMED = ", ".join(f"`{scheme}`" for scheme in sorted({*_NATIVE, *_AZURE}))
_WHOLE_AT_CLOSE = {"s3", "gcs", "abfs"}
_IS_FOLDER = {"hdi_isfolder": "true"}  # metadata by which Azure recognizes a blob as an empty folder
# URI option that limits how long Google's client retries. By default, it retries for up to 15 minutes.
_RETRIES_OF_GCS = "retry_limit_seconds"
_TRIES_OF_S3 = 3  # maximum number of attempts of one request to S3, before raysgd repeats the whole operation
_SILENCE_S = 3.0  # seconds without an answer after which the S3 client gives up on a request
_SWITCHES = {"true": True, "false": False}
_PURPOSE = "storage other than a local disk"


def pyarrow_fs() -> Any:
    """Return the module `pyarrow.fs`."""
    return require("pyarrow.fs", "storage", _PURPOSE)


def is_whole_at_close(filesystem: Any) -> bool:
    """Return True if a file in this file system becomes visible only when its writer closes it."""
    return _kind(filesystem) in _WHOLE_AT_CLOSE


def make_folder(filesystem: Any, path: str) -> None:
    """Create a folder and its parents in a file system."""
    filesystem.create_dir(path, recursive=True)
    azure = getattr(getattr(filesystem, "handler", None), "fs", None) if _kind(filesystem) == "abfs" else None
    if azure is not None and not azure.exists(path):
        azure.open(path, "wb", metadata=_IS_FOLDER).close()


def lists_folders(filesystem: Any) -> bool:
    """Return True if the file system can list what is directly in a folder, without the content of subfolders."""
    return _kind(filesystem) not in ("gcs", "abfs")


def _kind(filesystem: Any) -> str:
    name: str = filesystem.type_name
    return "abfs" if "'abfs'" in name else name  # fsspec has several names for this file system


def check(argument: str, uri: str) -> None:
    """Check that there is a file system for a URI, without connecting to the store.

    Args:
        argument: Name of the user's argument, for error messages.
        uri: The URI.

    Raises:
        ValueError: The scheme is unknown, the bucket is missing, or an Azure URI has a key or options.
        ModuleNotFoundError: A package is not installed.
    """
    pyarrow_fs()
    scheme, shown = scheme_of(uri), f"`{argument}={masked(uri)!r}`"
    if scheme in _IN_BUCKETS and not divided(uri)[0].partition("://")[2].rpartition("@")[2]:
        raise ValueError(f"{shown}: need the name of a bucket, such as `{scheme}://bucket/folder`.")
    if scheme in _NATIVE:
        return
    if scheme in _AZURE and (has_secret(uri) or divided(uri)[2]):
        raise ValueError(
            f"{shown}: a URI of Azure has no key and no options. Set `AZURE_STORAGE_ACCOUNT_KEY`, or "
            "`AZURE_STORAGE_CONNECTION_STRING`, here and where workers write."
        )
    registry = require("fsspec.registry", "storage", _PURPOSE)
    try:
        registry.get_filesystem_class(scheme)
    except ImportError as error:
        raise ModuleNotFoundError(f"{shown}: {error}, on this machine and on all nodes.") from error
    except ValueError:
        raise ValueError(
            f"{shown}: `{scheme}` is unknown. Allowed are paths, `file`, {_NAMED}, and the schemes of fsspec. For "
            "anything else pass `filesystem`."
        ) from None


@functools.lru_cache(maxsize=32)
def opened(uri: str, limit_s: float = 60.0) -> tuple[Any, str]:
    """Return the `pyarrow.fs.FileSystem` for a URI, and the path in this file system.

    Results are cached, so connections are reused.

    Args:
        uri: URI of a folder or file in a remote store.
        limit_s: Upper limit, in seconds, for how long the store's own client should retry a request. The client may
            give up earlier. Ignored if the file system has no such setting.

    Raises:
        Exception: The file system cannot be created.
    """
    return _native(uri, limit_s) if scheme_of(uri) in _NATIVE else _of_fsspec(uri)


def _native(uri: str, limit_s: float) -> tuple[Any, str]:
    store, path, query = divided(uri)
    if scheme_of(uri) in ("gs", "gcs") and _RETRIES_OF_GCS not in query:
        query = f"{query or '?'}{'&' if query else ''}{_RETRIES_OF_GCS}={min(max(limit_s, 1.0), 10.0):g}"
    filesystem, root = pyarrow_fs().FileSystem.from_uri(f"{_encoded(store)}/{query}")
    if filesystem.type_name == "s3":
        filesystem = _limited_s3(filesystem, store, query, limit_s)
    return filesystem, "/".join(part for part in (root.rstrip("/"), path) if part)


def _encoded(store: str) -> str:
    """Convert the part of a URI before the path to the form that PyArrow expects.

    The scheme becomes lower case, and the credentials are percent-encoded.
    """
    scheme, _, rest = store.partition("://")
    user, at, bucket = rest.rpartition("@")
    return f"{scheme.lower()}://{quote(unquote(user), safe=':')}{at}{bucket}"


def _limited_s3(filesystem: Any, store: str, query: str, limit_s: float) -> Any:
    """Return a copy of an S3 file system that retries less often.

    By default, PyArrow retries for up to 100 s.
    """
    options: dict[str, Any] = {"region": filesystem.region, **dict(parse_qsl(query.removeprefix("?")))}
    user, _, key = store.partition("://")[2].rpartition("@")[0].partition(":")
    if user:
        options |= {"access_key": unquote(user), "secret_key": unquote(key)}
    num_tries = min(max(int(limit_s / _SILENCE_S), 1), _TRIES_OF_S3)
    return pyarrow_fs().S3FileSystem(
        **{name: _SWITCHES.get(value, value) for name, value in options.items()},
        retry_strategy=pyarrow_fs().AwsStandardS3RetryStrategy(num_tries),
    )


def _of_fsspec(uri: str) -> tuple[Any, str]:
    options = {"use_listings_cache": False} if scheme_of(uri) in _AZURE else {}  # other processes write to the store
    filesystem, path = require("fsspec.core", "storage", _PURPOSE).url_to_fs(uri, **options)
    return wrapped(filesystem), path.rstrip("/")


def wrapped(filesystem: Any) -> Any:
    """Wrap an fsspec file system as a PyArrow file system."""
    return pyarrow_fs().PyFileSystem(pyarrow_fs().FSSpecHandler(filesystem))
