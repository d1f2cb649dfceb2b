"""Averages over the batches of one pass, kept so that they can be merged across workers without loss.

What this module promises: a mean is a float64 sum divided once by its weight, a value that is not a number
never passes silently, and a tensor on a device is not read on the batch that produced it, because reading it makes
the host wait for the device. A summary is a plain dict for its readers; beside the means it carries the
sums and weights they came from.

What it leaves to others: how tensors become floats and how a metric object is captured are two functions
given by the framework's side. Nothing here imports a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from raysgd._numbers.metric_summary import MetricSummary
from raysgd._numbers.number_meter import NumberMeter, ToFloats, float_each, is_tensor
from raysgd._numbers.object_meter import (
    CapturedMetric,
    CaptureObject,
    FlatObjects,
    ObjectMeter,
    is_metric_object,
    value_here,
)
from raysgd._numbers.tally import Flat, Tally
from raysgd._numbers.weights import BATCH_WEIGHT, as_weight, is_weight, weight_of

BATCH_COUNT = "batch_count"
NUM_SAMPLES = "num_samples"


class AverageMeter:
    """A running weighted mean of numbers.

    Examples:
        >>> meter = AverageMeter()
        >>> meter.update(5)
        >>> meter.update(10, n=4)
        >>> meter.val, meter.avg, meter.sum, meter.count
        (10, 9.0, 45, 5)

    Attributes:
        val: The latest value.
        avg: The weighted mean; 0 as long as nothing with a weight was seen.
        sum: Sum of value times weight.
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
        """Count a value with weight `n`; a weight of 0 changes `val` only."""
        self.val = val
        self.sum += val * n
        self.count += n
        if self.count:
            self.avg = self.sum / self.count


class AverageMeterCollection:
    """Weighted means of named metrics over the batches of one pass.

    Examples:
        >>> meters = AverageMeterCollection()
        >>> meters.update({"loss": 0.5}, n=32)
        >>> meters.update({"loss": 0.2}, n=64)
        >>> meters.summary()
        {'batch_count': 2, 'num_samples': 96, 'loss': 0.3, 'last_loss': 0.2}

    Values may be numbers (also numpy scalars), tensors with one element, and, if `capture_object` is given,
    metric objects (anything with `merge_state` and `compute`). Tensors on a device are copied there and read
    later, all in one go. A metric object counts by itself: the last one given under a name is captured when
    the summary is made.

    Args:
        to_floats: Reads a list of tensors; called once for each summary. Default: `float` of each.
        capture_object: Takes the state out of a metric object and resets the object. Default: metric objects
            are refused.
        flat_objects: Makes numbers of what metric objects have seen, for `tally`. Default: it leaves them out.

    Attributes:
        n: Sum of the weights of all updates.
        held: What was held back.
    """

    def __init__(
        self,
        to_floats: ToFloats | None = None,
        capture_object: CaptureObject | None = None,
        flat_objects: FlatObjects | None = None,
    ) -> None:
        self._to_floats = to_floats or float_each
        self._capture_object = capture_object
        self._flat_objects = flat_objects
        self._forget_rest: Callable[[], None] | None = None
        self._meters: dict[str, NumberMeter | ObjectMeter] = {}
        self._num_batches = 0
        self.held: list[tuple[dict[str, Any], int | float]] = []
        self.n: int | float = 0

    def update(self, metrics: Mapping[str, Any], n: int | float = 1) -> None:
        """Count the metrics of one batch.

        Args:
            metrics: Value by metric name. Names may differ from batch to batch: each metric is averaged over
                the batches that had it. The entry `batch_weight` is no metric: it is the weight of the others,
                in the place of `n`; `batch_weight_of_<metric>` is that of a single one.
            n: Weight of the batch, usually its number of samples. With weight 0 a value is remembered as the
                last one and left out of the mean, whatever it is.

        Raises:
            TypeError: If a value is of a kind that cannot be averaged.
            ValueError: If a tensor or array has more or less than one element, or `batch_weight` is no weight.
        """
        num_samples = n if type(n) is int else float(n)
        if not 0 <= num_samples < math.inf:
            raise ValueError(f"`{NUM_SAMPLES}={n!r}`: need the number of samples of a batch, 0 or more.")
        weight = as_weight(BATCH_WEIGHT, metrics[BATCH_WEIGHT]) if BATCH_WEIGHT in metrics else num_samples
        meters = self._meters
        for name, value in metrics.items():
            meter = meters.get(name)
            if meter is not None:
                meter.add(value, metrics.get(meter.weight_name, weight))
            elif not is_weight(name):
                meter = self._new_meter(name, value)
                meter.add(value, metrics.get(meter.weight_name, weight))
                meters[name] = meter
        self._num_batches += 1
        self.n += num_samples

    def hold(self, metrics: Mapping[str, Any], n: int | float = 1) -> None:
        """Keep the metrics of a batch back until it is known whether the batch counts.

        The same arguments as for `update`. Metric objects have counted the batch already, by themselves.
        """
        kept = {name: value.detach().clone() if is_tensor(type(value)) else value for name, value in metrics.items()}
        self.held.append((kept, n))

    def count_held(self) -> None:
        """Count what was held back; raises what `update` raises."""
        held, self.held = self.held, []
        for metrics, n in held:
            self.update(metrics, n)

    def note_boundary(self) -> None:
        """Say that what metric objects have seen by now counts, whatever becomes of the batches that follow."""
        meters = self._meters.values()
        metrics = [meter.live for meter in meters if isinstance(meter, ObjectMeter) and meter.live is not None]
        objects = self._flat_objects if metrics else None
        self._forget_rest = None if objects is None else objects.remember_all(metrics)

    def drop_held(self) -> None:
        """Forget what was held back, and what metric objects have seen since the last boundary: it does not count."""
        self.held.clear()
        if self._forget_rest is not None:
            self._forget_rest()
            self._forget_rest = None

    def summary(self) -> MetricSummary:
        """Return batch count, number of samples, and for each metric its mean and its last value.

        NaN is not skipped: one NaN batch makes the mean NaN. A metric that was never seen with a weight has
        no mean, which is NaN too. Metric objects appear under their name only, with the value on this
        process's share.

        May be called again after further updates; it then covers all of them.
        """
        self._read_pending()
        values: dict[str, Any] = {BATCH_COUNT: self._num_batches, NUM_SAMPLES: self.n}
        totals: dict[str, tuple[float, float]] = {}
        objects: dict[str, CapturedMetric] = {}
        captured: dict[int, CapturedMetric] = {}
        for name, meter in self._meters.items():
            if isinstance(meter, ObjectMeter):
                objects[name] = meter.captured(captured)
                values[name] = value_here(name, objects[name])
            else:
                totals[name] = meter.total, float(meter.count)
                values[name] = meter.mean
                if f"last_{name}" not in self._meters:  # a metric of the user's, which goes first
                    values[f"last_{name}"] = meter.last
        return MetricSummary(values, totals, objects)

    def tally(self, coming: Mapping[str, Any] | None = None, n: int | float = 0) -> Tally:
        """Return the running sums, those of batches that are held back included.

        Args:
            coming: The metrics of a batch that will be counted once its step is done; None without one.
            n: As for `update`.
        """
        self._read_pending()
        tally = Tally(float(self.n))
        for name, meter in self._meters.items():
            if isinstance(meter, NumberMeter):
                tally.sums[name] = meter.total, float(meter.count), float(meter.last)
            elif self._flat_objects is not None and (flat := meter.flat(self._flat_objects)) is not None:
                tally.objects[name] = flat
        for metrics, num_samples in (*self.held, *([] if coming is None else [(coming, n)])):
            self._add_to(tally, metrics, num_samples)
        return tally

    def _add_to(self, tally: Tally, metrics: Mapping[str, Any], n: int | float) -> None:
        """Add to a tally what `update` would count; what that would refuse is left out."""
        tally.num_samples += float(n)
        weight_of_batch = metrics.get(BATCH_WEIGHT, n)
        for name, value in metrics.items():
            if is_weight(name) or is_metric_object(type(value)):
                continue
            with suppress(TypeError, ValueError, RuntimeError):
                weight, number = float(metrics.get(weight_of(name), weight_of_batch)), float(value)
                total, count, _ = tally.sums.get(name, (0.0, 0.0, 0.0))
                tally.sums[name] = (total + number * weight if weight else total), count + weight, number

    def summary_of(self, tally: Tally) -> MetricSummary:
        """Return what a collection that counted so much would return as its summary."""
        num_samples = tally.num_samples
        values: dict[str, Any] = {NUM_SAMPLES: int(num_samples) if num_samples.is_integer() else num_samples}
        for name, (total, count, last) in tally.sums.items():
            values[name], values[f"last_{name}"] = total / count if count else float("nan"), last
        objects = {name: state for name, flat in tally.objects.items() if (state := self._captured(name, flat))}
        values.update({name: value_here(name, state) for name, state in objects.items()})
        return MetricSummary(values, {name: (total, count) for name, (total, count, _) in tally.sums.items()}, objects)

    def _captured(self, name: Any, flat: Flat) -> CapturedMetric | None:
        """Return what another metric object has seen that is like the one of this name here."""
        meter = self._meters.get(name)
        if not isinstance(meter, ObjectMeter) or self._flat_objects is None:
            return None
        return meter.captured_like(flat, self._flat_objects)

    def go_on_from(self, summary: MetricSummary) -> None:
        """Count what another collection, perhaps in a process that is gone, had counted when it made `summary`."""
        self._num_batches = max(self._num_batches, summary.get(BATCH_COUNT, 0))
        self.n += summary.get(NUM_SAMPLES, 0)
        for name, (total, count) in summary.totals.items():
            meter = self._meters.setdefault(name, NumberMeter(name, self._to_floats))
            assert isinstance(meter, NumberMeter)
            meter.add_total(total, count, summary.get(f"last_{name}", float("nan")))
        for name, state in summary.objects.items():
            if self._capture_object is None:
                raise TypeError(f"metric `{name}` is a metric object, which this collection cannot continue.")
            holder = self._meters.setdefault(name, ObjectMeter(name, self._capture_object))
            assert isinstance(holder, ObjectMeter)
            holder.add_captured(state)

    def correct(self, summary: MetricSummary) -> None:
        """Count what `summary` says instead of what was counted. Metric objects that it does not have go on."""
        for name, meter in list(self._meters.items()):
            if isinstance(meter, NumberMeter) or name in summary.objects:
                meter.drop()
                del self._meters[name]
        self.n = 0
        self.go_on_from(summary)

    def skip_to(self, num_batches: int) -> None:
        """Say how many batches there were in total, including those that others counted."""
        self._num_batches = num_batches

    @property
    def names(self) -> Collection[Any]:
        """The names of all that was measured so far."""
        return self._meters.keys()

    @property
    def object_names(self) -> list[Any]:
        """The names of what metric objects measure."""
        return [name for name, meter in self._meters.items() if isinstance(meter, ObjectMeter)]

    @property
    def num_batches(self) -> int:
        """The number of batches that have gone by."""
        return self._num_batches

    def _new_meter(self, name: str, value: Any) -> NumberMeter | ObjectMeter:
        if self._capture_object is not None and is_metric_object(type(value)):
            return ObjectMeter(name, self._capture_object)
        return NumberMeter(name, self._to_floats)

    def _read_pending(self) -> None:
        """Read the tensors of all metrics with one call, hence with one wait for the device."""
        meters = [meter for meter in self._meters.values() if isinstance(meter, NumberMeter) and meter.pending]
        if not meters:
            return
        floats = iter(self._to_floats([tensor for meter in meters for tensor in meter.pending]))
        for meter in meters:
            meter.fold([next(floats) for _ in meter.pending])
