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
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from raysgd.core.numbers.metric_meters import (
    BATCH_COUNT,
    BATCH_WEIGHT,
    NUM_SAMPLES,
    CapturedMetric,
    CaptureObject,
    NumberMeter,
    ObjectMeter,
    RememberObjects,
    ToFloats,
    as_weight,
    float_each,
    is_metric_object,
    is_weight,
    refuse_taken,
    value_here,
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

    def add_all(self, summaries: Iterable[MetricSummary]) -> None:
        """Add the metrics and samples of several other collections. See `go_on_from`."""
        for each in summaries:
            self.go_on_from(each)

    def go_on_from(self, summary: MetricSummary) -> None:
        """Add the metrics and samples of another collection, for example of a process that has ended.

        The two numbers of batches are not added. The larger number counts.

        Args:
            summary: The summary of that collection.
        """
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
