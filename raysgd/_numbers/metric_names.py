"""Names of metrics: what those of a validation are called in the history and in the result of `test`."""

from __future__ import annotations

_FORMER_PREFIX = "validation_"
_LAST = "last_"


def validation_name(name: str) -> str:
    """Return what a metric of validation is called beside those of training.

    Examples:
        >>> [validation_name(name) for name in ("accuracy", "val_loss", "last_x", "validation_loss")]
        ['val_accuracy', 'val_loss', 'last_val_x', 'val_loss']
    """
    if name.startswith(_LAST):
        return _LAST + validation_name(name.removeprefix(_LAST))
    return name if name.startswith("val_") else f"val_{name.removeprefix(_FORMER_PREFIX)}"


def name_in_test(name: str) -> str:
    """Return what a metric of validation is called in the result of `test`.

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
