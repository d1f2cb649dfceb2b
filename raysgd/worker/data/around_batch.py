"""What happens around a batch: in one wrapper of `train_batch` or `validate_batch`, on the operator itself.

So a loop of the user's goes through it like the stock one. And it is around the method and not inside it: an override
may compute with what the stock one reports.

Metrics that operators report by `self.log` instead of returning them are added there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from raysgd._numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, is_weight
from raysgd.worker.data.batch_streams import PlaceInStep

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
    if not (internals.logged or internals.logged_outside):
        return {}
    set_apart(internals)
    taken: dict[str, Any] = dict(internals.logged_outside)
    forget(internals)
    return taken


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class AroundBatch:
    """A part of what happens around a batch.

    Attributes:
        after: Called with the metrics that the method returned and the batch; returns metrics.
        before: Called before the method.
    """

    after: Callable[[Any, Any], Any]
    before: Callable[[], None] = _nothing


def completing(internals: Any, place: PlaceInStep) -> AroundBatch:
    """Return what adds to the metrics of a batch: what was logged in it, and its samples, of which padding has none."""

    def after(metrics: Any, batch: Any) -> Any:
        metrics = internals.completed(metrics, batch)
        if not place.is_padding or not isinstance(metrics, Mapping):
            return metrics
        return {**metrics, **{name: 0 for name in metrics if name == NUM_SAMPLES or is_weight(name)}}

    return AroundBatch(after, internals.begin_batch)


@contextmanager
def around_batches(operator: Any, name: str, place: PlaceInStep, parts: Sequence[AroundBatch]) -> Iterator[None]:
    """Inside, a method of the operator is called with all of this around it; without parts it is called as it is."""
    internals, method, was_set = operator._raysgd, getattr(operator, name), name in vars(operator)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for part in parts:
            part.before()
        metrics, batch = method(*args, **kwargs), (*args, *kwargs.values())[0]
        for part in parts:
            metrics = part.after(metrics, batch)
        return metrics

    if parts:
        setattr(operator, name, wrapped)
    place_before, internals.place = internals.place, place
    try:
        yield
    finally:
        internals.place = place_before
        if parts and was_set:
            setattr(operator, name, method)  # the user's, set on the object
        elif parts:
            delattr(operator, name)
