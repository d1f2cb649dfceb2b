"""Metrics that operators report by `self.log` instead of returning them.

Both loops see them in what `train_batch` and `validate_batch` return: the stock one, and one that the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

from raysgd._numbers.meters import BATCH_COUNT, NUM_SAMPLES
from raysgd._numbers.weights import BATCH_WEIGHT, is_weight
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


def completing(operator: Any, place: PlaceInStep) -> AbstractContextManager[None]:
    """Inside, `validate_batch` also returns what was logged in it, and the number of samples."""
    return _changing(operator, "validate_batch", operator._raysgd.completed, place)


def counting(operator: Any, place: PlaceInStep) -> AbstractContextManager[None]:
    """Inside, `train_batch` does so too, and reports no samples for padding: a loop of the user's counts by them."""
    return _changing(operator, "train_batch", partial(_counted, operator._raysgd, place), place)


@contextmanager
def counting_in_loop(operator: Any, place: PlaceInStep) -> Iterator[None]:
    """Inside, a loop of the library does the same itself, which saves each batch a method around the user's."""
    internals = operator._raysgd
    before, internals.place = internals.place, place
    try:
        yield
    finally:
        internals.place = before


def _counted(internals: Any, place: PlaceInStep, metrics: Any, batch: Any) -> Any:
    metrics = internals.completed(metrics, batch)
    if not place.is_padding or not isinstance(metrics, Mapping):
        return metrics
    return {**metrics, **{name: 0 for name in metrics if name == NUM_SAMPLES or is_weight(name)}}


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


@contextmanager
def _changing(operator: Any, name: str, change: Callable[[Any, Any], Any], place: PlaceInStep) -> Iterator[None]:
    """Around the method and not inside it: an override may compute with what the stock one reports."""
    internals, before, method = operator._raysgd, dict(vars(operator)), getattr(operator, name)

    @wraps(method)
    def changed(*args: Any, **kwargs: Any) -> Any:
        internals.begin_batch()
        metrics = method(*args, **kwargs)
        return change(metrics, (*args, *kwargs.values())[0])

    setattr(operator, name, changed)
    try:
        with counting_in_loop(operator, place):
            yield
    finally:
        delattr(operator, name)
        if name in before:  # the user's, set on the object
            setattr(operator, name, method)
