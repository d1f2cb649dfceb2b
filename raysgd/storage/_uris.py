"""Parses the paths on disk and the URIs of stores that users pass.

The path in the URI of a store is taken literally, as the command-line tools of stores do: `%20` is three characters.
Only `file://` URIs are percent-decoded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raysgd.core import files as _files
from raysgd.core.text.secrets import masked, user_of

_QUERY = re.compile(r"\?[A-Za-z_]+=[^?]*$")
LOCAL_SCHEMES = ("file", "local")


def checked_text(name: str, location: Any) -> str:
    """Return a path or URI as a string.

    If the user has passed a URI as a `pathlib.Path`, which changes `s3://a` to `s3:/a`, restore the missing slashes.

    Args:
        name: Name of the user's argument, for error messages.
        location: The path or URI.

    Raises:
        TypeError: `location` is neither a string nor a path.
        ValueError: `location` is empty, or contains a null character.
    """
    text = _files.checked_text(name, location, "a path or a URI")
    match = _files.SCHEME.match(text)
    if match is None or match["second"]:
        return text
    slashes = "//" if match["scheme"] in LOCAL_SCHEMES else "/"
    return text[: match.end()] + slashes + text[match.end() :]


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URI in lower case, or None for a path.

    >>> scheme_of("s3://bucket/x"), scheme_of("/mnt/x")
    ('s3', None)
    """
    match = _files.SCHEME.match(text)
    return match["scheme"].lower() if match is not None else None


def is_local(text: str) -> bool:
    """Return True if a path or URI refers to a file or folder on this machine."""
    return scheme_of(text) in (None, *LOCAL_SCHEMES)


def local_path_of(name: str, text: str) -> Path:
    """Return the absolute path for a path on disk or a `file://` URI.

    Args:
        name: Name of the user's argument, for error messages.
        text: The path or URI.

    Raises:
        ValueError: The URI names another machine.
    """
    if scheme_of(text) is not None:
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(
                f"`{name}={masked(text)!r}`: `{parts.hostname}` is the name of a machine; need three slashes, as in "
                "`file:///mnt/results`."
            )
        text = unquote(parts.path) or "/"
    return Path(os.path.abspath(os.path.expanduser(text)))


def divided(uri: str) -> tuple[str, str, str]:
    """Split the URI of a store into the store, the path in the store, and the query.

    >>> divided("s3://bucket/a/b?region=eu-north-1")
    ('s3://bucket', 'a/b', '?region=eu-north-1')
    """
    match = _QUERY.search(uri)
    query = match[0] if match is not None else ""
    scheme, _, rest = uri.removesuffix(query).partition("://")
    user = user_of(uri)
    authority, _, path = rest.removeprefix(user).partition("/")
    return f"{scheme}://{user}{authority}", path.strip("/"), query


def child_of(uri: str, name: str) -> str:
    """Append a name to the path in a URI.

    >>> child_of("s3://bucket/a?region=eu-north-1", "b")
    's3://bucket/a/b?region=eu-north-1'
    """
    store, path, query = divided(uri)
    return "/".join(part for part in (store, path, name) if part) + query
