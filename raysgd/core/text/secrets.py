"""Finds and masks keys and passwords in output. No other module does this itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, overload

_HIDDEN = "***"

# Patterns for names of secrets: words that may occur anywhere in a name, at its end, or as its last separate word.
_ANYWHERE = r"passw(?:or)?d|passphrase|passcode|pwd|secret|credential|private_?key|conn(?:ection)?_?str"
_AT_THE_END = (
    r"(?:(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token)|(?:db|smtp|user|root)_?pass"
    r"|(?:access|account|api|auth|encryption|master|shared|signing|ssh|storage)_?key(?:_?id)?|signature"
)
_AS_A_WORD = r"sig|sas|dsn|jwt|auth|authorization|bearer"
_NAME = rf"(?:(?:{_ANYWHERE})\w{{0,40}}|(?:{_AT_THE_END}|(?<![a-z0-9])(?:{_AS_A_WORD}))\d*)"
_IS_SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)

# Matches the user and key before the `@` of a URI, even if the key has slashes. In the URI of a storage bucket, a
# number followed by a slash counts as part of the key. In any other URI, such a number counts as a port.
_USER = re.compile(
    r"""(?:\b(s3[an]?|gs|gcs|az|abfss?|wasbs?|oss):)?(?<=:)(?P<slashes>//?)"""
    r"""(?P<user>[^/@\s'"`]*:(?(1)|(?!\d+/))[^@\s'"`]{0,1000}@(?:[^/@\s'"`]*@)*)""",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"([?&](?:[\w.\-]{{0,60}}_)?(?:key\w{{0,40}}|[\w.\-]{{0,60}}?{_NAME})=)[^&\s'\"`]+", re.IGNORECASE
)
_ENTRY = re.compile(
    rf"""({_NAME}(?:=|['"]\s*:\s*|\s*=\s*(?=[bru]?['"])))(?!(?:None|True|False|null|true|false)\b)"""
    r"""(?:([bru]?)(?P<quote>['"])(?:[^'"\\]|\\.|(?!(?P=quote))['"])*(?:(?P=quote)|$)"""
    r"""|[\[({][^\])}]{0,500}(?:[\])}]|$)|[^\s&;'"`\[({]*[^\s&;'"`,)\]}\[({])""",
    re.IGNORECASE,
)


def has_secret(text: str) -> bool:
    """Return True if a string, such as a URI, contains a key or password.

    >>> has_secret("s3://id:secret@bucket/a"), has_secret("s3://bucket/a")
    (True, False)
    """
    return masked(text) != text


def user_of(uri: str) -> str:
    """Return the user and key in a URI, including the `@` that follows them. Return "" if the URI has no user and key.

    >>> user_of("s3://id:a/secret@bucket/a"), user_of("s3://bucket/a")
    ('id:a/secret@', '')
    """
    match = _USER.search(uri)
    return match["user"] if match is not None and match["slashes"] == "//" else ""


@overload
def masked(value: str) -> str: ...


@overload
def masked(value: Any) -> Any: ...


def masked(value: Any) -> Any:
    """Return a value with its keys and passwords masked, so that the value can be shown.

    This masks dict entries whose names indicate a secret, and secrets within strings. Entries that are None, True or
    False are not masked. An object whose `repr` contains a secret is replaced with its masked `repr`. A value without
    secrets is returned unchanged.

    >>> masked({"lr": 0.1, "db": {"password": "abc"}, "data": ["s3://id:secret@bucket/a?region=x&sig=y"]})
    {'lr': 0.1, 'db': {'password': '***'}, 'data': ['s3://***@bucket/a?region=x&sig=***']}
    >>> masked("cannot open s3://id:a/secret@bucket with {'pwd': 'x'} and AccountKey=abc==;b=1")
    "cannot open s3://***@bucket with {'pwd': '***'} and AccountKey=***;b=1"
    """
    return _masked(value, frozenset())


def _masked_text(text: str) -> str:
    text = _USER.sub(lambda match: f"{match[0].removesuffix(match['user'])}{_HIDDEN}@", text)
    return _ENTRY.sub(_hidden_entry, _OPTION.sub(rf"\1{_HIDDEN}", text))


def _hidden_entry(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    return f"{match[1]}{quote}{_HIDDEN}{quote}"


def _masked(value: Any, above: frozenset[int]) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _masked_text(value)
    if id(value) in above:
        return "..."
    inside = above | {id(value)}
    if isinstance(value, Mapping):
        shown = {_masked(key, inside): _masked_entry(key, each, inside) for key, each in value.items()}
        return value if _are_the_same(shown.values(), value.values()) and _are_the_same(shown, value) else shown
    if type(value) in (list, tuple, set, frozenset):
        parts = [_masked(each, inside) for each in value]
        return value if _are_the_same(parts, value) else type(value)(parts)
    return _masked_object(value)


def _masked_entry(name: Any, value: Any, inside: frozenset[int]) -> Any:
    is_secret = isinstance(name, str) and _IS_SECRET.search(name) is not None
    return _HIDDEN if is_secret and not (value is None or isinstance(value, bool)) else _masked(value, inside)


def _masked_object(value: Any) -> Any:
    try:
        text = repr(value)
    except Exception:  # the `repr` of a user's class may raise, but showing a value must not end a run
        return value
    shown = _masked_text(text)
    return value if shown == text else shown


def _are_the_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(
        one is other or (isinstance(one, str) and one == other) for one, other in zip(some, others, strict=True)
    )
