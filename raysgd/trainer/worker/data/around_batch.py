"""A wrapper around `train_batch` or `validate_batch` of an operator, and the metrics that `self.log` reports.

The wrapper is set on the operator, so a user's own loop goes through it like the stock loop. It completes the metrics
outside of the method, because an override may compute with what the stock method returns.
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
    """Keep a logged metric for its batch. If a name is logged twice, the last value stays.

    Raises:
        TypeError: The name is no text, or the value is a symbolic tensor of a TensorFlow graph.
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
    """Return a batch's metrics with the logged ones, and empty `logged`. A returned value replaces a logged one."""
    if not logged:
        return metrics
    together = {**logged, **metrics}
    logged.clear()
    return together


def set_apart(internals: Any) -> None:
    """Move metrics that were logged before this batch to the result of the call."""
    internals.logged_outside.update(internals.logged)
    internals.logged.clear()


def forget(internals: Any) -> None:
    """Drop all logged metrics, at the beginning of a call."""
    internals.logged.clear()
    internals.logged_outside.clear()


def take_outside(internals: Any) -> dict[str, Any]:
    """Return the metrics that were logged outside of any batch, for the result of the call."""
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
    """Wrap a method of the operator, so that its metrics have their number of samples and the logged metrics.

    Args:
        operator: The operator.
        name: Name of the method.
        place: Place of the replica in its step. It says which batches are padding, which count no samples.
        after: Called with the metrics of each batch, and returns metrics.
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
            setattr(operator, name, method)  # the user had set one on the object
        else:
            delattr(operator, name)
