"""Finds and masks keys and passwords in output. No other module does this itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, overload

_HIDDEN = "***"

# The one list of names of secrets. A name is compared in the form `access_key_2`, whatever its capitals and separators.
_VERSION = r"(?:_?v?\d+)*$"  # at the end of a name, as in `access_token_v2`
_ANYWHERE = (
    r"passw(?:or)?d|passphrase|passcode|pwd|secret|credential|private_?key|conn(?:ection)?_?str|webhook|signature$"
)
_AS_LAST_WORD = r"pass|sig|sas|dsn|jwt|auth|authorization|bearer|cookies?|creds|otp"
_KEY_OF = (
    r"access|account|api|auth|encryption|license|master|shared|signing|ssh|storage|anthropic|aws|azure|cohere|comet|"
    r"databricks|gcp|github|gitlab|google|groq|hf|huggingface|mistral|neptune|openai|wandb"
)
_PLAIN_TOKEN = (  # tokens of a text, such as `eos_token`, and numbers of tokens
    r"pad|eos|bos|unk|sep|cls|class|mask|special|stop|start|end|num|max|min|new|image|audio|video|decoder|prefix|suffix|extra"
)
_IS_SECRET = re.compile(
    rf"{_ANYWHERE}|(?:^|_)(?:{_AS_LAST_WORD}){_VERSION}|^(?!(?:.*_)?(?:{_PLAIN_TOKEN})_tokens?{_VERSION}).*tokens?{_VERSION}"
    rf"|(?:{_KEY_OF})_?keys?(?:_?id)?{_VERSION}|(?:access|azure|databricks|github|gitlab)_?pat{_VERSION}"
)
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")

_QUOTE_INSIDE = r"""['"`](?![\s,:;)\]}]|\Z)"""  # a quote in the middle of a word belongs to the word
# Matches the user and key before the `@` of a URI, even if the key has slashes. In the URI of a storage bucket, a
# number followed by a slash counts as part of the key. In any other URI, such a number counts as a port.
_USER = re.compile(
    r"""(?:\b(s3[an]?|gs|gcs|az|abfss?|wasbs?|oss):)?(?<=:)(?P<slashes>//?)"""
    rf"""(?P<user>[^/@\s'"`]*:(?(1)|(?!\d+/))(?:[^@\s'"`]|{_QUOTE_INSIDE}){{0,1000}}@(?:[^/@\s'"`]*@)*)""",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"""(?P<start>[?&](?P<name>[\w.\-]+)=)(?P<value>(?:[^&\s'"`]|{_QUOTE_INSIDE})+)""")
_QUOTED = r"""(?P<quote>['"])(?:\\.?|(?!(?P=quote)(?!\w))[^\\])*(?:(?P=quote)|\Z)"""
# A value in quotes, the first bracket of a value, a masked value, or a word without the quotes and brackets after it.
_VALUE = re.compile(rf"""[bru]?{_QUOTED}|(?P<bracket>[\[({{])|\*{{3}}|[^\s&;]*[^\s&;:'"`,)\]}}>]""", re.DOTALL)
_BRACKET = re.compile(rf"{_QUOTED}|(?P<opening>[\[({{])|[\])}}]", re.DOTALL)
_ENTRY = re.compile(r"""(?<![\w.\-])(?P<name>[\w.\-]+)(?:=|['"]\s*:\s*|\s*=\s*(?=[bru]?['"]))""")
_ARGUMENT = re.compile(r"""(?<![\w\-])(?P<name>--?[A-Za-z][\w\-]*)\s+(?!-)""")
_CONSTANT = re.compile(r"None|True|False|null|true|false")
_NUMBERS = re.compile(r"[\[(]?[\d\s.,eE+\-]*[\])]?")
# Secrets that are known by their form: bearer tokens, private keys, web hooks, JSON web tokens, and tokens of services.
_SHAPE = re.compile(
    r"""(\bBearer\s+)(?=[^\s'"`]*\d|[^\s'"`]{20})[^\s'"`,;]{6,}"""
    r"""|(-{4,5} ?BEGIN [A-Z\d ]*PRIVATE KEY(?: BLOCK)? ?-{4,5})(?:(?!-{4} ?END|-{5}END)[\s\S])*"""
    r"""|(https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s'"`]+"""
    r"""|\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]+"""
    r"""|\b(?:gh[pousr]_|github_pat_|glpat-|hf_(?!\w*_)|AKIA|AIza|xox[abprs]-|sk-)(?=[\w\-]*\d)[\w\-]{16,}""",
)


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if a name, such as a key of a config, says that its value is a key or a password.

    >>> [is_secret_name(name) for name in ("API-KEY", "dbPassword", "access_token_v2", "num_tokens", "bypass")]
    [True, True, True, False, False]
    """
    return _IS_SECRET.search(_NEW_WORD.sub("_", name).strip("_").lower()) is not None


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

    This masks dict entries whose names indicate a secret, and secrets within strings. Numbers, booleans and None are
    not masked. An object whose `repr` contains a secret is replaced with its masked `repr`. A value without secrets is
    returned unchanged.

    >>> masked({"lr": 0.1, "db": {"password": "abc"}, "data": ["s3://id:secret@bucket/a?region=x&sig=y"]})
    {'lr': 0.1, 'db': {'password': '***'}, 'data': ['s3://***@bucket/a?region=x&sig=***']}
    >>> masked("cannot open s3://id:a/secret@bucket with {'pwd': 'x'} and AccountKey=abc==;b=1")
    "cannot open s3://***@bucket with {'pwd': '***'} and AccountKey=***;b=1"
    """
    return _masked(value, frozenset())


def _masked_text(text: str) -> str:
    text = _USER.sub(lambda match: f"{match[0].removesuffix(match['user'])}{_HIDDEN}@", text)
    for names in (_ENTRY, _ARGUMENT):  # before `_OPTION`, which may take away a quote
        text = _without_values(text, names)
    text = _OPTION.sub(_hidden_option, text)
    return _SHAPE.sub(lambda match: f"{match[1] or match[2] or match[3] or ''}{_HIDDEN}", text)


def _hidden_option(match: re.Match[str]) -> str:
    """Return an option of a URI, masked if it is a secret. Options such as `key` and `my_key` always count as one."""
    is_key = re.search(r"(?:^|_)key", match["name"], re.IGNORECASE) is not None
    return f"{match['start']}{_HIDDEN}" if is_key or is_secret_name(match["name"]) else match[0]


def _without_values(text: str, names: re.Pattern[str]) -> str:
    """Mask the values that follow the names of secrets in a text."""
    parts, end = [], 0
    for match in names.finditer(text):
        if match.start() < end or not is_secret_name(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None:
            continue
        end_of_value = _end_of_brackets(text, value.start()) if value["bracket"] else value.end()
        shown = text[value.start() : end_of_value]
        if _CONSTANT.fullmatch(shown):
            continue
        name, quote = match["name"].lower(), value["quote"] or ""
        # In `password=123`, the digits may be a text. In the `repr` of a dict and in `token=123`, they are a number.
        is_repr = ":" in match[0]
        is_number = (is_repr or "token" in name) and _NUMBERS.fullmatch(shown) is not None
        is_code = name.endswith("tokens") and not (is_repr or quote)  # as in `model(tokens=batch)`
        if is_number or is_code:
            continue
        parts.append(f"{text[end : match.end()]}{quote}{_HIDDEN}{quote}")
        end = end_of_value
    return "".join([*parts, text[end:]])


def _end_of_brackets(text: str, start: int) -> int:
    """Return where the bracket at `start` is closed, or the end of the text. Brackets in quotes do not count."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if not match["quote"]:
            depth += 1 if match["opening"] else -1
        if depth == 0:
            return match.end()
    return len(text)


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
        names = [None, *value] if isinstance(value, list | tuple) else [None] * len(value)
        parts = [_masked_entry(_argument(name), each, inside) for name, each in zip(names, value, strict=False)]
        return value if _are_the_same(parts, value) else type(value)(parts)
    return _masked_object(value)


def _masked_entry(name: Any, value: Any, inside: frozenset[int]) -> Any:
    is_secret = isinstance(name, str) and is_secret_name(name) and not _is_plain(value)
    return _HIDDEN if is_secret else _masked(value, inside)


def _argument(before: Any) -> str | None:
    """Return the name of an argument, such as `--password` in a list of arguments, whose next element is its value."""
    return before if isinstance(before, str) and before.startswith("-") and " " not in before else None


def _is_plain(value: Any) -> bool:
    """Return True for None, numbers, booleans, and lists of them, which are never secrets."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float)


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
