"""Adds the number of samples, and the metrics passed to `self.log`, to what the operator's `train_batch` returns.

The same is done for `validate_batch`. A wrapper replaces the operator's method, so that the entries are also added in a
training loop that the user wrote. The wrapper adds them only after the user's method has returned, because that method
may do arithmetic on the result of the library's default method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from raysgd.core.numbers.metric_meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, is_weight

_COUNTERS = (NUM_SAMPLES, BATCH_WEIGHT, BATCH_COUNT)


def note(logged: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Record a metric that the user passed to `self.log`. A later value of the same name replaces an earlier value.

    Args:
        logged: The metrics logged so far in the current batch, to which this metric is added.
        name: Name of the metric.
        value: Value of the metric.

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
    """Return the metrics of a batch together with the logged metrics, and clear `logged`.

    Args:
        metrics: The metrics that `train_batch` or `validate_batch` returned. They take precedence over `logged`.
        logged: The metrics that were passed to `self.log` in the batch.
    """
    together = {**logged, **metrics}
    logged.clear()
    return together


def set_apart(internals: Any) -> None:
    """Move the metrics logged since the last batch to `logged_outside`.

    These metrics were logged outside any batch, and are added to the result of the whole `train` or `validate` call.
    """
    internals.logged_outside.update(internals.logged)
    internals.logged.clear()


def forget(internals: Any) -> None:
    """Discard all logged metrics, for example at the start of a call."""
    internals.logged.clear()
    internals.logged_outside.clear()


def take_outside(internals: Any) -> dict[str, Any]:
    """Return the metrics that were logged outside any batch, for the result of the whole call, and clear them."""
    taken = {**internals.logged_outside, **internals.logged}
    forget(internals)
    return taken


@contextmanager
def around_batches(operator: Any, name: str, after: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Inside the block, let a method of the operator also return the number of samples and the logged metrics.

    Args:
        operator: Operator whose method is wrapped.
        name: Name of the method, "train_batch" or "validate_batch".
        after: Function that receives the metrics of each batch and returns the metrics to use instead. None to use the
            metrics unchanged.
    """
    internals, method, was_set = operator._raysgd, getattr(operator, name), name in vars(operator)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        internals.begin_metrics()
        metrics = internals.completed(method(*args, **kwargs), (*args, *kwargs.values())[0])
        if internals.leg.plan.is_padding and isinstance(metrics, Mapping):
            metrics = {**metrics, **{each: 0 for each in metrics if each == NUM_SAMPLES or is_weight(each)}}
        return metrics if after is None else after(metrics)

    setattr(operator, name, wrapped)
    try:
        yield
    finally:
        if was_set:
            setattr(operator, name, method)  # the user had set this method on the instance
        else:
            delattr(operator, name)
