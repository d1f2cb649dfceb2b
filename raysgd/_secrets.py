"""Keys and passwords in the URIs of stores: found, and masked where a text leaves the library."""

from __future__ import annotations

import re

# Up to the `@` also where a key has slashes, which no file system takes; a port is no key.
_USER = re.compile(r"(?<=://)[^/@\s'\"`]*:(?!\d+/)[^@\s'\"`]*@")
_OPTION = re.compile(r"(?<=[?&])((?:\w*_)?(?:key|secret|token|password)\w*)=[^&\s'\"`]*", re.IGNORECASE)


def has_secret(uri: str) -> bool:
    """Return whether there are keys or passwords in a URI.

    >>> has_secret("s3://id:secret@bucket/a"), has_secret("s3://bucket/a")
    (True, False)
    """
    return masked(uri) != uri


def masked(text: str) -> str:
    """Return a text as it may be shown: without the keys and passwords in the URIs in it.

    >>> masked("s3://id:secret@bucket/a?region=x&secret_key=y")
    's3://***@bucket/a?region=x&secret_key=***'
    """
    return _OPTION.sub(r"\1=***", _USER.sub("***@", text))
