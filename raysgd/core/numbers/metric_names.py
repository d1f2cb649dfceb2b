"""Names of metrics: prefixes for validation and test metrics, and names with slashes for nested dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FORMER_PREFIX = "validation_"
_LAST = "last_"


def validation_name(name: str) -> str:
    """Return the name under which a validation metric appears next to training metrics.

    Examples:
        >>> [validation_name(name) for name in ("accuracy", "val_loss", "last_x", "validation_loss")]
        ['val_accuracy', 'val_loss', 'last_val_x', 'val_loss']
    """
    if name.startswith(_LAST):
        return _LAST + validation_name(name.removeprefix(_LAST))
    return name if name.startswith("val_") else f"val_{name.removeprefix(_FORMER_PREFIX)}"


def name_in_test(name: str) -> str:
    """Return the name under which a validation metric appears in the result of `test`.

    Examples:
        >>> [name_in_test(name) for name in ("val_loss", "last_val_loss", "validation_loss", "num_samples")]
        ['test_loss', 'last_test_loss', 'test_loss', 'num_samples']
    """
    if name.startswith(_LAST):
        return _LAST + name_in_test(name.removeprefix(_LAST))
    for prefix in ("val_", _FORMER_PREFIX):
        if name.startswith(prefix):
            return f"test_{name.removeprefix(prefix)}"
    return name


def flattened(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one flat dict. The keys on the way to a value are joined with slashes.

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
    """Return the value of a metric by name, or None if there is no such metric.

    A slash in a name leads into a nested dict.

    >>> value_at({"val": {"loss": 0.5}}, "val/loss")
    0.5
    """
    return metrics[name] if name in metrics else flattened(metrics).get(name)
