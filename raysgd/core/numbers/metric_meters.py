"""Meters, which accumulate one metric each, and the weights of batches.

`NumberMeter` averages numbers, and `ObjectMeter` holds a metric object. `AverageMeterCollection`, in
`raysgd.core.numbers.meters`, has a meter for each metric.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

BATCH_WEIGHT = "batch_weight"
_WEIGHT_OF = f"{BATCH_WEIGHT}_of_"
# Largest number of unread device tensors per metric. Reading them waits for the device, and storing them uses the
# device's memory.
MAX_UNREAD = 256
BATCH_COUNT = "batch_count"
NUM_SAMPLES = "num_samples"


_TAKEN = frozenset({"epoch", "seconds", "num_workers", BATCH_COUNT})


def refuse_taken(name: Any) -> None:
    """Raise an error if a metric has a name that raysgd uses for its own entries in results, such as `epoch`.

    Raises:
        ValueError: The name is reserved.
    """
    if name in _TAKEN:
        raise ValueError(f"the metric name `{name}` is reserved for the library: use another, such as `my_{name}`.")


def weight_of(name: Any) -> str:
    """Return the key under which a batch reports the weight of the metric `name`."""
    return f"{_WEIGHT_OF}{name}"


def is_weight(name: Any) -> bool:
    """Return True if the entry with this key in a batch's results is a weight, not a metric."""
    return name == BATCH_WEIGHT or str(name).startswith(_WEIGHT_OF)


def as_weight(name: str, value: Any) -> float:
    """Return a batch's weight as a float.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is negative, infinite or NaN, or has more than one element.
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


logger = logging.getLogger(__name__)


CapturedMetric = Any
"""A copy of a metric object's state, with methods `value` and `merged_with`."""

CaptureObject = Callable[[Any], CapturedMetric]
"""Copies the state of a metric object, and resets the object."""

RememberObjects = Callable[[Sequence[Any]], Callable[[], None]]
"""Stores the states of metric objects. Returns a function that restores them."""


class ObjectMeter:
    """Accumulates one metric that batches report as a metric object. The object itself accumulates its batches.

    For a summary, the state of the last reported object is copied (captured) and the object is reset. This class stores
    that object and the merged copies.

    Attributes:
        live: The metric object that a batch has reported since the last capture, or None if no batch has reported one.
    """

    __slots__ = ("_capture", "_captured", "_name", "live", "weight_name")

    def __init__(self, name: str, capture: CaptureObject) -> None:
        self._name, self.weight_name = name, weight_of(name)
        self._capture = capture
        self.live: Any = None
        self._captured: CapturedMetric | None = None

    def read(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """Check that a batch reported a metric object. Return the object and its weight as arguments for `add`.

        Raises:
            TypeError: The value is not a metric object.
        """
        if not is_metric_object(type(value)):
            raise TypeError(
                f"metric `{self._name}` was a metric object in an earlier batch and is a "
                f"`{type(value).__name__}` now: report the object in every batch, or use two names."
            )
        return value, weight

    def add(self, value: Any, weight: int | float) -> None:
        """Store the metric object that a batch reported. The object itself accumulates its batches."""
        self.live = value

    def add_captured(self, state: CapturedMetric) -> None:
        """Merge another collection's captured state into this metric."""
        self._captured = state if self._captured is None else self._captured.merged_with([state])

    def captured(self, already: dict[int, CapturedMetric]) -> CapturedMetric:
        """Return the captured state of this metric.

        If a batch reported a metric object since the last capture, capture it first.

        Args:
            already: States already captured for the same summary, keyed by the object's id. Capturing resets the
                object, so an object reported under two names must be captured only once.
        """
        if self.live is not None:
            self.add_captured(already.get(id(self.live)) or already.setdefault(id(self.live), self._capture(self.live)))
            self.live = None
        assert self._captured is not None
        return self._captured


def is_metric_object(kind: type) -> bool:
    """Return True if objects of this class are metric objects, which accumulate batches themselves."""
    return hasattr(kind, "merge_state") and hasattr(kind, "compute")


def value_here(state: CapturedMetric, name: str) -> Any:
    """Compute a metric from the data of this process alone.

    Return NaN if this fails, for example if there is too little data.
    """
    try:
        return state.value()
    # A warning is enough here: only the value over all workers matters, and an error in its computation is raised.
    except Exception as error:
        logger.warning(
            "metric `%s` cannot be computed on this worker's share alone, so it reports NaN: %s", name, error
        )
        return math.nan


PLAIN_NUMBERS = frozenset({float, int, bool})
_UNREAD = object()

ToFloats = Callable[[list[Any]], list[float]]


class NumberMeter:
    """Accumulates one metric: its sum, weight and last value, and the device tensors that have not been read yet."""

    __slots__ = ("_name", "_to_floats", "_weights", "count", "last", "total", "unread", "weight_name")

    def __init__(self, name: str, to_floats: ToFloats) -> None:
        self._name, self.weight_name = name, weight_of(name)
        self._to_floats = to_floats
        self.last: Any = _UNREAD
        # An entry is None if the weight is a tensor. The weight then follows its value in `unread`.
        self._weights: list[int | float | None] = []
        self.unread: list[Any] = []
        self.total = 0.0
        self.count: int | float = 0

    def read(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """Check a value that a batch reported. Return the value and its weight as arguments for `add`.

        A tensor on the CPU becomes a number. A tensor on another device is copied on that device and read later.

        Raises:
            TypeError: The value has a type that cannot be averaged.
            ValueError: The value is not exactly one number, or the weight is invalid.
        """
        kind = type(value)
        if kind in PLAIN_NUMBERS:
            number = value
        elif hasattr(kind, "detach"):
            if value.numel() != 1:
                raise ValueError(_not_one_element(self._name, tuple(value.shape)))
            if not getattr(value, "is_cpu", False):
                # A copy, because user code may modify the tensor in place, and a replayed CUDA graph writes each
                # batch's loss to the same memory.
                waits = type(weight) is not int and is_tensor(type(weight))
                return value.detach().clone(), weight.detach().clone() if waits else self._checked(weight)
            number = value.item()
        else:
            number = _as_float(self._name, value)
        return number, weight if type(weight) is int else self._checked(weight)

    def add(self, value: Any, weight: Any) -> None:
        """Add a value and its weight, as `read` returned them."""
        if type(value) not in PLAIN_NUMBERS:
            waits = is_tensor(type(weight))
            self.unread += [value, weight] if waits else [value]
            self._weights.append(None if waits else weight)
            self.last = _UNREAD
            if len(self.unread) >= MAX_UNREAD:
                self.fold(self._to_floats(self.unread))
            return
        self.last = value
        if weight:  # a batch of padding has weight 0 but may have the value NaN, and 0 * NaN is NaN
            self.total += value * weight
            self.count += weight

    def add_total(self, total: float, count: float, last: Any) -> None:
        """Add the sum and weight of another meter. Use that meter's last value only if this meter has no last value."""
        self.total += total
        self.count += count
        if self.last is _UNREAD and not self.unread:
            self.last = last

    def copy(self) -> NumberMeter:
        """Return a copy of this meter. The meter must have no unread tensors."""
        other = NumberMeter(self._name, self._to_floats)
        other.total, other.count, other.last = self.total, self.count, self.last
        return other

    def fold(self, floats: list[float]) -> None:
        """Add the values of the unread tensors, given as floats, and discard the tensors."""
        numbers = iter(floats)
        for weight in self._weights:
            number = next(numbers)
            weight = self._checked(next(numbers)) if weight is None else weight
            if weight:
                self.total += number * weight
                self.count += weight
        if self.last is _UNREAD:
            self.last = number
        self.unread.clear()
        self._weights.clear()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def _checked(self, weight: Any) -> int | float:
        return weight if type(weight) is int else as_weight(self.weight_name, weight)


def is_tensor(kind: type) -> bool:
    """Return True if the class is a class of PyTorch tensors, which have a method `detach`."""
    return hasattr(kind, "detach")


def float_each(tensors: list[Any]) -> list[float]:
    """Return the values of single-element tensors as floats."""
    return [float(tensor) for tensor in tensors]


def _as_float(name: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise TypeError(
            f"metric `{name}` is a `{type(value).__name__}`: allowed are numbers, tensors with one element, "
            "and metric objects of torchmetrics where the operator supports them. Reduce it to one number, "
            "or omit it."
        )
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError) as error:
        raise ValueError(_not_one_element(name, getattr(value, "shape", ()))) from error


def _not_one_element(name: str, shape: Any) -> str:
    return (
        f"metric `{name}` has shape `{tuple(shape)}`: a metric is one number for each batch, so exactly one "
        "element is allowed. Reduce it first, for example with `.mean()`, or report its parts one by one."
    )
