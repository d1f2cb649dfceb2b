"""Averages over the batches of one pass, stored as sums and weights so that they can be merged exactly across workers.

To compute a mean, a float64 sum is divided by its weight, only once. A value that is not a number raises an error. A
tensor on a GPU is not read in the batch that produced it, because the host would then wait for the GPU. A summary is a
dict of means that also carries the sums and weights.

A metric object, such as a metric of torchmetrics, accumulates batches itself and has the methods `compute` and
`merge_state`. This module imports no framework: the caller passes functions that read tensors and capture the states of
metric objects.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

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


_ABSENT = object()


class MetricSummary(dict[str, Any]):
    """The metrics of one pass, as a dict that also stores the sums and weights of its means.

    User code may edit the dict. An edited or removed value loses its sum and weight, so that merging uses the user's
    value. `copy.copy` and pickling preserve the sums and weights; `dict.copy` and `dict(...)` return a plain dict.

    >>> summary = MetricSummary({"loss": 0.5, "accuracy": 1.0}, totals={"loss": (2.0, 4.0), "accuracy": (4.0, 4.0)})
    >>> summary["accuracy"] = 0.75
    >>> summary.totals
    {'loss': (2.0, 4.0)}
    """

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        totals: Mapping[str, tuple[float, float]] | None = None,
        objects: Mapping[str, CapturedMetric] | None = None,
    ) -> None:
        super().__init__(values)
        self._totals = dict(totals or {})
        self._objects = dict(objects or {})
        self._reported = {name: self.get(name, _ABSENT) for name in (*self._totals, *self._objects)}

    def without_objects(self) -> MetricSummary:
        """Return a copy without the metric objects, such as torchmetrics metrics, and without their values."""
        objects = self.objects
        return MetricSummary({name: value for name, value in self.items() if name not in objects}, self.totals)

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each mean that the user did not edit, by name."""
        return {name: total for name, total in self._totals.items() if self._is_unedited(name)}

    def total_of(self, name: str) -> tuple[float, float] | None:
        """Return the sum and weight of the mean `name`.

        Return None if the user edited the value, or if it is not a mean.
        """
        return self._totals[name] if name in self._totals and self._is_unedited(name) else None

    @property
    def objects(self) -> dict[str, CapturedMetric]:
        """Captured state of each metric object whose value the user did not edit, by name."""
        return {name: state for name, state in self._objects.items() if self._is_unedited(name)}

    def _is_unedited(self, name: str) -> bool:
        return name in self and _are_same(self[name], self._reported[name])


def _are_same(one: Any, other: Any) -> bool:
    """Return True for two values of the same type that are equal. NaN counts as equal to NaN, also inside a list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(value, other[key]) for key, value in one.items())
    return one is other or bool(one == other)


class AverageMeter:
    """A running weighted mean of numbers.

    Examples:
        >>> meter = AverageMeter()
        >>> meter.update(5)
        >>> meter.update(10, n=4)
        >>> meter.val, meter.avg, meter.sum, meter.count
        (10, 9.0, 45, 5)

    Attributes:
        val: Last value.
        avg: Weighted mean; 0 before the first value with a nonzero weight.
        sum: Sum of values times weights.
        count: Sum of the weights.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all four attributes to 0."""
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count: Any = 0

    def update(self, val: Any, n: Any = 1) -> None:
        """Add a value with weight `n`. A weight of 0 changes only `val`."""
        self.val = val
        if n:  # NaN * 0 is NaN
            self.sum += val * n
        self.count += n
        if self.count:
            self.avg = self.sum / self.count


PendingMetric = tuple[Any, ObjectMeter | NumberMeter, Any, Any]
"""One metric of a batch: its name, the meter that read it, and its value and weight.

If the value is on the CPU, the value and the weight are stored as numbers. If the value is a tensor on another device,
it is copied on that device, because user code may change the tensor. In that case, a weight that is a tensor is copied,
too. With an `ObjectMeter`, the value is the metric object itself.
"""


class AverageMeterCollection:
    """Weighted means of named metrics over the batches of one pass.

    Examples:
        >>> meters = AverageMeterCollection()
        >>> meters.update({"loss": 0.5}, n=32)
        >>> meters.update({"loss": 0.2}, n=64)
        >>> meters.summary()
        {'batch_count': 2, 'num_samples': 96, 'loss': 0.3, 'last_loss': 0.2}

    Values may be numbers (including NumPy scalars), tensors with one element and, with `capture_object`, metric objects
    (anything with `merge_state` and `compute`). Tensors on a GPU are copied on the GPU, and later read all at once. A
    metric object accumulates batches itself. The last object under a name is captured when the summary is
    created.

    In a training call, the metrics of a batch are pending (`add_pending`) until its step completes. Then they are
    counted (`count_pending`), or dropped if the step is interrupted (`drop_pending`).

    Args:
        to_floats: Reads the values of a list of tensors. Called for a summary, and when a metric has `MAX_UNREAD`
            unread tensors. Default: `float` of each tensor.
        capture_object: Returns the state of a metric object, and resets the object. Default: metric objects are
            rejected.
        remember_objects: Lets metric objects discard batches of interrupted steps. Default: metric objects keep them.

    Attributes:
        n: Number of samples counted, the sum of `n` of all counted batches.
        pending: The metrics and number of samples of each batch whose step has not completed yet.
        num_batches: Number of batches counted.
        has_objects: True if any metric is a metric object.
        is_left_out: True if `count_pending` must not count the pending batches, because their step was left out.
    """

    def __init__(
        self,
        to_floats: ToFloats | None = None,
        capture_object: CaptureObject | None = None,
        remember_objects: RememberObjects | None = None,
    ) -> None:
        self._to_floats = to_floats or float_each
        self._capture_object = capture_object
        self._remember_objects = remember_objects
        self._forget_rest: Callable[[], None] | None = None
        self._meters: dict[str, NumberMeter | ObjectMeter] = {}
        self.num_batches = 0
        self.has_objects = self.is_left_out = False
        self.pending: list[tuple[list[PendingMetric], int | float]] = []
        self.n: int | float = 0

    def update(self, metrics: Mapping[str, Any], n: int | float = 1, *, is_strict: bool = True) -> None:
        """Add the metrics of one batch.

        Args:
            metrics: Values by name. Names may differ from batch to batch, and each metric is averaged over the batches
                that reported it. The entry `batch_weight` overrides `n` as the weight of the metrics, and
                `batch_weight_of_<metric>` sets the weight of one metric.
            n: Weight of the batch, usually its number of samples. A value with weight 0 becomes the last value but does
                not affect the mean.
            is_strict: True to raise an error for values that cannot be averaged, False to skip them.

        Raises:
            TypeError: A value has a type that cannot be averaged, or a weight is not a number.
            ValueError: A tensor or array does not have exactly one element, a weight is invalid, or the name of a
                metric is reserved.
        """
        self.add_pending(metrics, n, is_strict=is_strict)
        waiting, self.pending = self.pending[:-1], self.pending[-1:]
        self.count_pending()
        self.pending = waiting

    def add_pending(self, metrics: Mapping[str, Any], n: int | float = 1, *, is_strict: bool = True) -> None:
        """Store the metrics of a batch until its step has completed. `count_pending` then adds them to the averages.

        If the step is interrupted, call `drop_pending` instead. Arguments and exceptions are the same as for `update`,
        because values are checked now. Metric objects have already accumulated the batch themselves.
        """
        num_samples = n if type(n) is int else float(n)
        if not 0 <= num_samples < math.inf:
            raise ValueError(f"`{NUM_SAMPLES}={n!r}`: need the number of samples of a batch, 0 or more.")
        weight = as_weight(BATCH_WEIGHT, metrics[BATCH_WEIGHT]) if BATCH_WEIGHT in metrics else num_samples
        meters = self._meters
        entries: list[PendingMetric] = []  # `list[PendingMetric]()` would take ten times as long
        for name, value in metrics.items():
            meter = meters.get(name)
            if meter is None and is_weight(name):
                continue
            try:
                meter = meter or self._new_meter(name, value)
                entries.append((name, meter, *meter.read(value, metrics.get(meter.weight_name, weight))))
            except (TypeError, ValueError):
                if is_strict:
                    raise
        self.pending.append((entries, num_samples))

    def count_pending(self) -> None:
        """Add the metrics of batches stored by `add_pending` to the averages. Called when their step has completed."""
        if self.is_left_out:
            self.num_batches += len(self.pending)
            self.drop_pending()
            return
        pending, self.pending = self.pending, []
        meters = self._meters
        for entries, num_samples in pending:
            for name, meter, value, weight in entries:
                (meters.get(name) or meters.setdefault(name, meter)).add(value, weight)
            self.num_batches += 1
            self.n += num_samples

    def note_boundary(self) -> None:
        """Store the states of metric objects at the end of a training step, so that `drop_pending` can restore them."""
        meters = self._meters.values()
        metrics = [meter.live for meter in meters if isinstance(meter, ObjectMeter) and meter.live is not None]
        remember = self._remember_objects if metrics else None
        self._forget_rest = None if remember is None else remember(metrics)

    def drop_pending(self) -> None:
        """Discard the metrics of batches stored by `add_pending`, because their step was interrupted.

        Also restore the states of metric objects that the last `note_boundary` stored.
        """
        self.pending.clear()
        self.is_left_out = False
        if self._forget_rest is not None:
            self._forget_rest()
            self._forget_rest = None

    def summary(self) -> MetricSummary:
        """Return the number of batches and samples, and for each metric its mean and its last value.

        NaN is not skipped: a single NaN makes the mean NaN, unless its weight is 0. The mean of a metric whose total
        weight is 0 is also NaN. A metric object has a single entry, its value on this process's data.

        Creating a summary does not reset the averages: a later summary covers these batches, too.
        """
        self._read_unread()
        values: dict[str, Any] = {BATCH_COUNT: self.num_batches, NUM_SAMPLES: self.n}
        totals: dict[str, tuple[float, float]] = {}
        objects: dict[str, CapturedMetric] = {}
        captured: dict[int, CapturedMetric] = {}
        for name, meter in self._meters.items():
            if isinstance(meter, ObjectMeter):
                objects[name] = meter.captured(captured)
                values[name] = value_here(objects[name], name)
            else:
                totals[name] = meter.total, float(meter.count)
                values[name] = meter.mean
                if f"last_{name}" not in self._meters:  # the user may report a metric with this name
                    values[f"last_{name}"] = meter.last
        return MetricSummary(values, totals, objects)

    def tally(self) -> tuple[tuple[Any, ...], list[float]]:
        """Return the sums of all numeric metrics, including the batches stored by `add_pending`.

        Returns:
            The names of the metrics, and a list of floats: the number of samples, then the sum, weight and last value
            of each metric.
        """
        self._read_unread()
        after = AverageMeterCollection(self._to_floats)
        after.n, meters = self.n, dict[Any, NumberMeter]()
        meters.update((name, each.copy()) for name, each in self._meters.items() if isinstance(each, NumberMeter))
        for entries, num_samples in self.pending:
            after.n += num_samples
            for name, meter, value, weight in entries:
                if isinstance(meter, NumberMeter):
                    meters.setdefault(name, meter.copy()).add(value, weight)
        after._meters.update(meters)
        after._read_unread()
        sums = ((each.total, float(each.count), float(each.last)) for each in meters.values())
        return tuple(meters), [float(after.n), *itertools.chain(*sums)]

    def summary_of(self, names: tuple[Any, ...], row: Sequence[float]) -> MetricSummary:
        """Return the summary of another rank's collection, rebuilt from the result of that collection's `tally`.

        Args:
            names: The names of the metrics.
            row: The list of floats.
        """
        num_samples, *left = row
        values: dict[str, Any] = {NUM_SAMPLES: int(num_samples) if num_samples.is_integer() else num_samples}
        totals: dict[str, tuple[float, float]] = {}
        for name in names:
            total, count, last, *left = left
            values[name], values[f"last_{name}"] = total / count if count else float("nan"), last
            totals[name] = total, count
        return MetricSummary(values, totals)

    def go_on_from(self, *summaries: MetricSummary) -> None:
        """Add the metrics and samples of other collections, for example of a process that has ended.

        The numbers of batches are not added. The largest number counts.

        Args:
            *summaries: The summaries of these collections.
        """
        for summary in summaries:
            self.num_batches = max(self.num_batches, summary.get(BATCH_COUNT, 0))
            self.n += summary.get(NUM_SAMPLES, 0)
            for name, (total, count) in summary.totals.items():
                meter = self._meters.setdefault(name, NumberMeter(name, self._to_floats))
                assert isinstance(meter, NumberMeter)
                meter.add_total(total, count, summary.get(f"last_{name}", float("nan")))
            for name, state in summary.objects.items():
                if self._capture_object is None:
                    raise TypeError(f"metric `{name}` is a metric object, which this collection cannot continue.")
                self.has_objects = True
                holder = self._meters.setdefault(name, ObjectMeter(name, self._capture_object))
                assert isinstance(holder, ObjectMeter)
                holder.add_captured(state)

    def correct(self, summary: MetricSummary) -> None:
        """Replace the sums in this collection with the sums in `summary`. Metric objects are kept.

        After a failure, a surviving rank calls this method if another rank has completed one more step. That step
        counts, but this rank has dropped the step's metrics. In each step, ranks send each other their sums, so
        `summary` contains the sums that the other rank received from this rank in that step.
        """
        self._meters = {name: each for name, each in self._meters.items() if isinstance(each, ObjectMeter)}
        self.n = 0
        self.go_on_from(summary)

    def skip_to(self, num_batches: int) -> None:
        """Set the number of counted batches. It may include batches that another collection counted."""
        self.num_batches = num_batches

    @property
    def names(self) -> Collection[Any]:
        """Names of all metrics that have been added so far."""
        return self._meters.keys()

    @property
    def object_names(self) -> list[Any]:
        """Names of the metric objects."""
        return [name for name, meter in self._meters.items() if isinstance(meter, ObjectMeter)]

    def _new_meter(self, name: str, value: Any) -> NumberMeter | ObjectMeter:
        refuse_taken(name)
        if self._capture_object is not None and is_metric_object(type(value)):
            self.has_objects = True
            return ObjectMeter(name, self._capture_object)
        return NumberMeter(name, self._to_floats)

    def _read_unread(self) -> None:
        """Read the unread tensors of all metrics in one call, so that the host waits for the device only once."""
        meters = [meter for meter in self._meters.values() if isinstance(meter, NumberMeter) and meter.unread]
        if not meters:
            return
        floats = iter(self._to_floats([tensor for meter in meters for tensor in meter.unread]))
        for meter in meters:
            meter.fold([next(floats) for _ in meter.unread])
