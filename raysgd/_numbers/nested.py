"""Metrics with dicts inside: as a flat dict, and one of them by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flattened(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A dict without dicts inside: their keys are joined by slashes.

    >>> flattened({"loss": 0.5, "config": {"lr": 0.1, "model": {}}})
    {'loss': 0.5, 'config/lr': 0.1, 'config/model': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def value_at(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric by its name, in which slashes may lead into nested dicts; None if there is none.

    >>> value_at({"val": {"loss": 0.5}}, "val/loss")
    0.5
    """
    return metrics[name] if name in metrics else flattened(metrics).get(name)
