"""Wraps an operator's `train_batch` or `validate_batch`, and collects the metrics that `self.log` reports.

The wrapper is set on the operator, so a user's own loop calls it just as the default loop does. It adds the sample
count and the logged metrics after the method has returned, because an override may do arithmetic on what the default
method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from raysgd.core.numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, is_weight
from raysgd.trainer.worker.data.batch_streams import PlaceInStep

_COUNTERS = (NUM_SAMPLES, BATCH_WEIGHT, BATCH_COUNT)


def note(logged: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Record a logged metric for the current batch. A later value under the same name replaces an earlier value.

    Raises:
        TypeError: The name is not a non-empty string, or the value is a symbolic tensor of a TensorFlow graph.
        ValueError: The name is reserved for a counter.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'`log({name!r}, ...)`: the first argument is the name of a metric, such as "iou".')
    if name in _COUNTERS:
        raise ValueError(
            f"`log({name!r}, ...)`: this name is reserved for the weight of averages. Return it from the method "
            "instead."
        )
    if hasattr(value, "graph"):
        raise TypeError(
            f"`log({name!r}, ...)` inside a graph of TensorFlow: return the value from `train_step` or `test_step`, or "
            "call `log` in `train_batch` or `validate_batch`, which are not traced."
        )
    logged[name] = value.detach() if hasattr(value, "detach") else value


def with_logged(metrics: Mapping[str, Any], logged: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Merge logged metrics into a batch's metrics, and clear `logged`. A returned value replaces a logged value."""
    if not logged:
        return metrics
    together = {**logged, **metrics}
    logged.clear()
    return together


def set_apart(internals: Any) -> None:
    """Move metrics that were logged since the last batch to `logged_outside`. They belong to the call's result."""
    internals.logged_outside.update(internals.logged)
    internals.logged.clear()


def forget(internals: Any) -> None:
    """Discard all logged metrics at the start of a call."""
    internals.logged.clear()
    internals.logged_outside.clear()


def take_outside(internals: Any) -> dict[str, Any]:
    """Return and clear the metrics that were logged outside any batch. They go into the result of the call."""
    if not (internals.logged or internals.logged_outside):
        return {}
    set_apart(internals)
    taken: dict[str, Any] = dict(internals.logged_outside)
    forget(internals)
    return taken


@contextmanager
def around_batches(
    operator: Any, name: str, place: PlaceInStep, after: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Wrap a method of the operator so that its metrics include the sample count and the logged metrics.

    Args:
        operator: Operator whose method is wrapped.
        name: Name of the method.
        place: The replica's position in its step. It says whether the batch is padding, whose samples do not count.
        after: Called with each batch's metrics. Its return value replaces them.
    """
    internals, method, was_set = operator._raysgd, getattr(operator, name), name in vars(operator)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        internals.begin_batch()
        metrics = internals.completed(method(*args, **kwargs), (*args, *kwargs.values())[0])
        if place.batch.is_padding and isinstance(metrics, Mapping):
            metrics = {**metrics, **{each: 0 for each in metrics if each == NUM_SAMPLES or is_weight(each)}}
        return metrics if after is None else after(metrics)

    setattr(operator, name, wrapped)
    place_before, internals.place = internals.place, place
    try:
        yield
    finally:
        internals.place = place_before
        if was_set:
            setattr(operator, name, method)  # the user had set this method on the instance
        else:
            delattr(operator, name)
