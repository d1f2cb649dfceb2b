"""What happens around a batch: in one wrapper of `train_batch` or `validate_batch`, on the operator itself.

So a loop of the user's goes through it like the stock one. And it is around the method and not inside it: an override
may compute with what the stock one reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from raysgd._numbers.meters import NUM_SAMPLES, is_weight
from raysgd.worker.data.batch_streams import PlaceInStep


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
