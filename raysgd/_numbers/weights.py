"""Weights of batches in averages: their names among the metrics of a batch, and their values checked."""

from __future__ import annotations

import math
from typing import Any

BATCH_WEIGHT = "batch_weight"
_WEIGHT_OF = f"{BATCH_WEIGHT}_of_"


def weight_of(name: Any) -> str:
    """Return the name under which a batch reports the weight of a single metric."""
    return f"{_WEIGHT_OF}{name}"


def is_weight(name: Any) -> bool:
    """Tell whether what has this name is no metric, but the weight of some."""
    return name == BATCH_WEIGHT or str(name).startswith(_WEIGHT_OF)


def as_weight(name: str, value: Any) -> float:
    """A weight of a batch as a number.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, infinite or NaN, or more than one number.
    """
    allowed = f"`{name}={value!r}`: need a number from 0 on, by which the batch counts in averages, such as its tokens."
    if isinstance(value, bool | str) or not hasattr(type(value), "__float__"):
        raise TypeError(allowed)
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(allowed) from error
    if not 0 <= weight < math.inf:
        raise ValueError(allowed)
    return weight
