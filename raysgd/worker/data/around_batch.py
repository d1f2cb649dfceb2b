"""The frame around a batch: one wrapper of `train_batch` or `validate_batch`, on the operator itself.

So a loop of the user's goes through it like the stock one. And it is around the method and not inside it: an override
may compute with what the stock one reports.

Metrics that operators report by `self.log` instead of returning them are added there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from raysgd._numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, is_weight
from raysgd.worker.data.batch_streams import PlaceInStep

_COUNTERS = (NUM_SAMPLES, BATCH_WEIGHT, BATCH_COUNT)


def note(logged: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Keep a metric until the batch is counted. Of several with one name the last one stays.

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
    """Keep what was logged before this batch for the result of the call."""
    internals.logged_outside.update(internals.logged)
    internals.logged.clear()


def forget(internals: Any) -> None:
    """Forget what was logged, at the beginning of a call."""
    internals.logged.clear()
    internals.logged_outside.clear()


def take_outside(internals: Any) -> dict[str, Any]:
    """Return what was logged outside of any batch, for the result of the call."""
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
    """Inside, a method of the operator also counts what it is called with, and reports what was logged in it.

    Args:
        operator: The operator.
        name: The method.
        place: The place in the step; a batch of padding has no samples.
        after: Called with the metrics of each batch; returns metrics.
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
            setattr(operator, name, method)  # the user's, set on the object
        else:
            delattr(operator, name)
