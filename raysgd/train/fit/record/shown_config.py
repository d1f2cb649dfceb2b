"""A config as reports and files carry it: without the keys of stores, and with a note for each large value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._text.secrets import masked

_LARGEST_VALUE = 10_000  # bytes: the config stands in each report
_MOST_ENTRIES = 1_000


def shown_config(config: Mapping[str, Any]) -> Any:
    """Return a config as it may stand in each report; `trainer.pkl` has all of it but keys and passwords, once.

    >>> shown_config({"data": "s3://id:secret@bucket/a", "lr": 0.1, "words": bytes(1_000_000)})
    {'data': 's3://***@bucket/a', 'lr': 0.1, 'words': '(bytes: 1,000,... bytes)'}
    """
    return _shortened(masked(config))


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) <= _MOST_ENTRIES:
        return {key: _shortened(each) for key, each in value.items()}
    size = _size_of(value)
    if size > _LARGEST_VALUE:
        return f"({type(value).__name__}: {size:,} bytes)"
    return [_shortened(each) for each in value] if type(value) is list else value


def _size_of(value: Any) -> int:
    """Return how many bytes a value takes where it is stored; 0 where it cannot be."""
    from ray import cloudpickle

    if isinstance(value, bool | int | float | None):
        return 0
    try:
        return len(cloudpickle.dumps(value))
    except Exception:  # whatever an object of the user raises
        return 0
