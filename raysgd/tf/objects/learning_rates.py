"""Reads, sets and compares learning rates of Keras optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rates = Sequence[float | None]
"""One rate per optimizer, or None for an optimizer that follows a schedule or whose rate cannot be set."""


def read(optimizers: Iterable[Any]) -> list[float | None]:
    """Return the optimizers' current learning rates.

    The rate is None for an optimizer that follows a schedule or whose rate cannot be set.
    """
    return [_read(optimizer) for optimizer in optimizers]


def _read(optimizer: Any) -> float | None:
    chosen = getattr(optimizer, "inner_optimizer", optimizer).get_config().get("learning_rate")
    is_scheduled = isinstance(chosen, Mapping)  # a schedule would soon overwrite a rate that is assigned here
    rate: Any = getattr(optimizer, "learning_rate", None)
    return float(rate.numpy()) if hasattr(rate, "assign") and not is_scheduled else None


def apply(rates: Rates, optimizers: Iterable[Any]) -> None:
    """Set the optimizers' learning rates. An optimizer for which `rates` has None keeps its rate."""
    for rate, optimizer in zip(rates, optimizers, strict=True):
        if rate is not None:
            optimizer.learning_rate.assign(rate)


def differing(before: Rates, after: Rates) -> list[float | None]:
    """Compare two lists of learning rates, one rate per optimizer.

    Return `after`, with None in place of each rate that is the same in `before`. Return [] if all rates are the same.
    """
    changed = [rate if rate != (before[at] if at < len(before) else None) else None for at, rate in enumerate(after)]
    return changed if any(rate is not None for rate in changed) else []
