"""Metrics that operators report by `self.log` instead of returning them.

Both loops see them in what `train_batch` and `validate_batch` return: the stock one, and one that the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from raysgd._numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES

_COUNTERS = (NUM_SAMPLES, BATCH_WEIGHT, BATCH_COUNT)


def note(logged: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Keeps a metric until the batch is counted. Of several with one name the last one stays.

    Raises:
        TypeError: The name is no text, or the value belongs to a graph of TensorFlow that is being traced.
        ValueError: The name is that of a counter.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'`log({name!r}, ...)`: the first argument is the name of a metric, such as "iou".')
    if name in _COUNTERS:
        raise ValueError(f"`log({name!r}, ...)`: this counts what metrics are averaged by. Return it from the method.")
    if hasattr(value, "graph"):
        raise TypeError(
            f"`log({name!r}, ...)` inside a graph of TensorFlow: return the value from `train_step` or `test_step`, or "
            "call `log` in `train_batch` or `validate_batch`, which are not traced."
        )
    logged[name] = value.detach() if hasattr(value, "detach") else value


def with_logged(metrics: Mapping[str, Any], logged: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """The metrics of a batch together with what was logged in it; what was returned goes first. Empties `logged`."""
    if not logged:
        return metrics
    together = {**logged, **metrics}
    logged.clear()
    return together


def set_apart(internals: Any) -> None:
    """Keeps what was logged before this batch for the result of the call."""
    internals.logged_outside.update(internals.logged)
    internals.logged.clear()


def forget(internals: Any) -> None:
    """Forgets what was logged, at the beginning of a call."""
    internals.logged.clear()
    internals.logged_outside.clear()


def take_outside(internals: Any) -> dict[str, Any]:
    """Returns what was logged outside of any batch, for the result of the call."""
    set_apart(internals)
    taken: dict[str, Any] = dict(internals.logged_outside)
    forget(internals)
    return taken
