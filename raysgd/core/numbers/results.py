"""Merges the metrics of all workers into one result, and names metrics. All functions are pure.

Metrics are merged by name. For an average that raysgd computed, each worker sends a sum and a weight. The total of the
sums is divided by the total of the weights, so N workers report the same result as one process with the same samples. A
value that user code computed is weighted by its worker's `num_samples`.

ADR 1 explains why metrics are weighted by samples.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from raysgd.core.numbers.meters import BATCH_COUNT, NUM_SAMPLES, MetricSummary

_PER_WORKER = ("epoch", BATCH_COUNT)  # per-worker counters, merged by an unweighted mean
_LAST = "last_"
_FORMER_PREFIX = "validation_"


class Metrics(dict[str, Any]):
    """The result of `train`, `validate` or `test`: a dict of metrics. Its properties return raysgd's own counters.

    >>> result = Metrics(num_samples=64, epoch=1, batch_count=2, train_loss=0.5)
    >>> result.epoch, result["train_loss"]
    (1, 0.5)
    """

    @property
    def num_samples(self) -> float:
        """Total number of samples across all workers. NaN if an operator does not count samples."""
        return self._counted(NUM_SAMPLES)

    @property
    def batch_count(self) -> float:
        """Average number of batches per worker."""
        return self._counted(BATCH_COUNT)

    @property
    def epoch(self) -> int:
        """Number of passes over the training data so far. Only results of `train` have this."""
        return int(self._counted("epoch"))

    def _repr_html_(self) -> str:
        """Return an HTML card for notebooks."""
        from raysgd.core.text.cards import card, two_column_table

        shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value)[:80] for name, value in self.items()}
        return card("Result", two_column_table(shown.items()))

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"{name!r} is not in this result. Available: {', '.join(map(repr, self)) or 'nothing'}")

    def _counted(self, name: str) -> float:
        if name not in self:
            raise AttributeError(f"This result has no {name!r}. Available: {', '.join(map(repr, self)) or 'nothing'}.")
        return self[name]


def merge(workers: Sequence[MetricSummary]) -> Metrics:
    """Merge the metrics of all workers into one result.

    If any worker reports `num_samples`, the result starts with it. The other metrics follow in order of first
    appearance.
    """
    if len(workers) == 1 and workers[0].get(NUM_SAMPLES):
        return _of_one(workers[0])
    counts = any(NUM_SAMPLES in worker for worker in workers)
    merged = Metrics({NUM_SAMPLES: _total_samples(workers)} if counts else {})
    for name in dict.fromkeys(name for worker in workers for name in worker):
        if name != NUM_SAMPLES:
            merged[name] = _merge_one(name, [worker for worker in workers if name in worker])
    return merged


def _of_one(worker: MetricSummary) -> Metrics:
    """Return the result of a call with only one worker. Its means are already the overall means."""
    merged = Metrics({NUM_SAMPLES: math.nan, **worker})
    objects = worker.objects
    for name, value in merged.items():
        if name in objects:
            merged[name] = objects[name].value()
        elif (number := as_number(value)) is not None:
            is_count = name == NUM_SAMPLES or name in _PER_WORKER or _is_last_value(str(name), worker)
            merged[name] = number if is_count else number * 1.0
    return merged


def with_lost(worker: MetricSummary, lost: Sequence[MetricSummary], known: Collection[Any]) -> MetricSummary:
    """Merge the metrics of a surviving worker with the averages that lost workers had accumulated.

    Values that user code computed stay unchanged, and metrics that user code removed stay removed. Metric objects cover
    only the survivor's batches. A survivor that counted 0 samples gets the lost averages. Otherwise, its metrics are
    returned unchanged if they contain no metric objects and no averages that raysgd computed.

    Args:
        worker: Metrics of the worker that survived.
        lost: Metrics that each lost worker had accumulated.
        known: Names of the metrics that the surviving worker measured, before user code could edit them.
    """
    if not worker.totals and not worker.objects and worker.get(NUM_SAMPLES) != 0:
        return worker
    values, totals = dict(worker), worker.totals
    for each in lost:
        for name, total in each.totals.items():
            if name in totals or name not in known:  # merge unless the user edited or removed the value
                values[name], totals[name] = _averaged(totals.get(name, (0.0, 0.0)), total)
    if NUM_SAMPLES in values:
        values[NUM_SAMPLES] = _total_samples([worker, *lost])
    return MetricSummary(values, totals, worker.objects)


def _averaged(*totals: tuple[float, float]) -> tuple[float, tuple[float, float]]:
    """Return the overall mean of several (sum, weight) pairs, and a pair of the total sum and the total weight."""
    total, count = sum(total for total, weight in totals if weight), math.fsum(weight for _, weight in totals)
    return total / count if count else math.nan, (total, count)


def num_samples_of(worker: MetricSummary) -> Any:
    """Return the number of samples that a worker counted. Return NaN if the worker does not count samples."""
    return _total_samples([worker])


def _total_samples(workers: Sequence[MetricSummary]) -> Any:
    counts = [as_number(worker.get(NUM_SAMPLES, math.nan)) for worker in workers]
    return sum(math.nan if count is None else count for count in counts)


def _merge_one(name: str, workers: Sequence[MetricSummary]) -> Any:
    objects = [worker.objects[name] for worker in workers if name in worker.objects]
    if objects:
        return objects[0].merged_with(objects[1:]).value()
    values = [as_number(worker[name]) for worker in workers]
    present = [value for value in values if value is not None]
    if len(present) < len(values):  # some values are not numbers, so return the first worker's value
        return workers[0][name]
    if name in _PER_WORKER or all(_is_last_value(str(name), worker) for worker in workers):
        return _plain_mean(present)
    return _averaged(*(_sum_and_count(name, worker) for worker in workers))[0]


def _is_last_value(name: str, worker: MetricSummary) -> bool:
    """Return True if `name` is raysgd's entry for the last value of another metric, such as `last_loss`.

    Return False for a metric of the user that merely has such a name.
    """
    return name.startswith(_LAST) and name.removeprefix(_LAST) in worker and worker.total_of(name) is None


def _sum_and_count(name: str, worker: MetricSummary) -> tuple[float, float]:
    """Return the sum and weight of a worker's metric.

    If raysgd computed the mean, both are exact. The weight is 0 if none of the worker's batches counted for the metric.
    Otherwise, the sum is the value times the worker's number of samples.
    """
    total = worker.total_of(name)
    if total is not None:
        return total
    value, samples = as_number(worker[name]), as_number(worker.get(NUM_SAMPLES))
    weight = 1.0 if samples is None or math.isnan(samples) else float(samples)
    return value * weight, weight


def _plain_mean(values: Sequence[Any]) -> Any:
    """Return the unweighted mean of the workers' values.

    If all values are equal, return that value, so integers stay integers.
    """
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def as_number(value: Any) -> Any:
    """Return the value as a Python number, or None if it is not a number.

    Zero-dimensional tensors and arrays count as numbers.
    """
    if type(value) in (float, int, bool):  # exact types, because some NumPy numbers are instances of `float`
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, numbers.Complex):
        return value
    return float(value) if isinstance(value, Decimal) else None  # a `Decimal` cannot be multiplied by a float


ProgressKind = Literal["train", "validation", "test", "predict"]


@dataclass(frozen=True)
class CallProgress:
    """The progress of a running call, as seen by rank 0.

    Attributes:
        num_steps: Number of batches drawn from the data so far.
        total: Total number of batches. None if unknown.
        epoch_idx: Index of the pass over the training data, from 0.
        num_epochs: Total number of epochs. None if unknown.
        loss: `train_loss` of the last batch, or `val_loss` in validation. None if the batch reported no loss. If
            `is_done` is True, `val_loss` is rank 0's mean over the call.
        kind: The type of call: "train", "validation", "test" or "predict".
        metrics: All numeric metrics of the last batch, by name. If `is_done` is True, rank 0's metrics of the call.
        is_done: True if the call has returned.
    """

    num_steps: int
    total: int | None
    epoch_idx: int
    num_epochs: int | None
    loss: float | None
    kind: ProgressKind = "train"
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_done: bool = False


def validation_name(name: str) -> str:
    """Return the name under which a validation metric appears next to training metrics.

    Examples:
        >>> [validation_name(name) for name in ("accuracy", "val_loss", "last_x", "validation_loss")]
        ['val_accuracy', 'val_loss', 'last_val_x', 'val_loss']
    """
    if name.startswith(_LAST):
        return _LAST + validation_name(name.removeprefix(_LAST))
    return name if name.startswith("val_") else f"val_{name.removeprefix(_FORMER_PREFIX)}"


def name_in_test(name: str) -> str:
    """Return the name under which a validation metric appears in the result of `test`.

    Examples:
        >>> [name_in_test(name) for name in ("val_loss", "last_val_loss", "validation_loss", "num_samples")]
        ['test_loss', 'last_test_loss', 'test_loss', 'num_samples']
    """
    if name.startswith(_LAST):
        return _LAST + name_in_test(name.removeprefix(_LAST))
    for prefix in ("val_", _FORMER_PREFIX):
        if name.startswith(prefix):
            return f"test_{name.removeprefix(prefix)}"
    return name


def flattened(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one flat dict. The keys on the way to a value are joined with slashes.

    >>> flattened({"loss": 0.5, "config": {"lr": 0.1, "model": {}}})
    {'loss': 0.5, 'config/lr': 0.1, 'config/model': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def value_at(metrics: Mapping[str, Any], name: str) -> Any:
    """Return the value of a metric by name, or None if there is no such metric.

    A slash in a name leads into a nested dict.

    >>> value_at({"val": {"loss": 0.5}}, "val/loss")
    0.5
    """
    return metrics[name] if name in metrics else flattened(metrics).get(name)
