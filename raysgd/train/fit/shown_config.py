"""A config as reports and files carry it: without the keys of stores, and with a note for each large value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._secrets import masked

_LARGEST_VALUE = 10_000  # bytes: the config stands in each report
_MOST_ENTRIES = 1_000


def shown_config(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return a config, or a value in it, as it may stand in each report; `trainer.pkl` has all of it, once.

    Args:
        value: The config.
        above: What the value is inside of, by identity: a dict may be inside of itself.

    >>> shown_config({"data": "s3://id:secret@bucket/a", "lr": 0.1, "words": bytes(1_000_000)})
    {'data': 's3://***@bucket/a', 'lr': 0.1, 'words': '(bytes: 1,000,... bytes)'}
    """
    if isinstance(value, str):
        value = masked(value)
    inside = above | {id(value)}
    if isinstance(value, Mapping) and len(value) <= _MOST_ENTRIES:
        return "..." if id(value) in above else {key: shown_config(each, inside) for key, each in value.items()}
    size = _size_of(value)
    if size > _LARGEST_VALUE:
        return f"({type(value).__name__}: {size:,} bytes)"
    return [shown_config(each, inside) for each in value] if type(value) is list and id(value) not in above else value


def _size_of(value: Any) -> int:
    """Return how many bytes a value takes where it is stored; 0 where it cannot be."""
    from ray import cloudpickle

    if isinstance(value, bool | int | float | None):
        return 0
    try:
        return len(cloudpickle.dumps(value))
    except Exception:  # whatever an object of the user raises
        return 0
