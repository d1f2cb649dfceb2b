"""Records the loss and the gradient norm of each step in every worker, for the journal of the run.

The values stay in the worker until the driver fetches them. Recording does not wait for the GPU.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.numbers.metric_meters import BATCH_WEIGHT, NUM_SAMPLES, ToFloats, is_weight, weight_of

_MOST_WAITING = 100_000
TRAIN_LOSS = "train_loss"
_WEIGHT_OF_TRAIN_LOSS = weight_of(TRAIN_LOSS)
Attempt = tuple[int, int]
"""The number of a training call, and the number of the attempt to run this call. A later attempt is greater.

All ranks have the same numbers.
"""


class LegReport(NamedTuple):
    """Report that a worker starts a leg: it starts an epoch, or continues an epoch in a new group of workers.

    Attributes:
        attempt: The attempt at a training call in which the leg starts.
        entry: The line for the journal that describes the leg, as plain data.
    """

    attempt: Attempt
    entry: Mapping[str, Any]


class StepReport(NamedTuple):
    """Report of one worker about a step.

    Attributes:
        attempt: The attempt at a training call in which the step was taken.
        step: Number of the step.
        total: Weighted sum of the losses of this worker's batches in the step.
        weight: Sum of the weights.
        norm: Norm of the gradients, which are averaged over all workers. None if nothing has computed the norm.
    """

    attempt: Attempt
    step: int
    total: float
    weight: float
    norm: float | None


class _Waiting(NamedTuple):
    """The values of one step, which may still be on a GPU: loss and weight of each batch, and the gradient norms."""

    attempt: Attempt
    step: int
    batches: Sequence[tuple[Any, Any]]
    norms: Sequence[Any]


Report = LegReport | StepReport


class StepRecorder(WorkerCallback):
    """Worker callback that records the losses and gradient norms of this worker's steps.

    Each report has a number, and is kept until the driver has it.
    """

    def on_begin(self, operator: Any) -> None:
        self.name = uuid.uuid4().hex
        self._num_reports = 0
        self._reports = deque[tuple[int, LegReport | _Waiting]](maxlen=_MOST_WAITING)
        self._attempt: Attempt = (0, 0)
        self._is_off = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._batches, self._norms = list[tuple[Any, Any]](), list[Any]()

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        call, number = leg["attempt"]
        self._attempt, self._is_off = (call, number), leg["obstacle"] is not None
        self._begin_step()  # discard the values of an interrupted step, which is repeated
        self._report(LegReport(self._attempt, leg))

    def _on_norm(self, norm: Any) -> None:
        if norm is not None and not hasattr(norm, "full_tensor"):  # reading a sharded tensor would need all ranks
            self._norms.append(_kept(norm))

    def _on_batch(self, operator: Any, metrics: Any, is_boundary: bool) -> None:
        if self._is_off:
            return
        if isinstance(metrics, Mapping):
            self._batches.append(_loss_of(metrics))
        if is_boundary:
            self._report(_Waiting(self._attempt, operator.global_step + 1, self._batches, self._norms))
            self._begin_step()

    def _report(self, report: LegReport | _Waiting) -> None:
        self._num_reports += 1
        self._reports.append((self._num_reports, report))

    def reports(self, after: int, to_floats: ToFloats) -> list[tuple[int, Report]]:
        """Return the reports that the driver does not have yet, and discard all earlier reports.

        A second thread of the worker calls this method, because reading values may wait for the GPU.

        Args:
            after: Number of the last report that the driver has.
            to_floats: Function that converts a list of one-element tensors to floats.
        """
        while self._reports and self._reports[0][0] <= after:
            self._reports.popleft()
        waiting = list(self._reports)
        values = [value for _, each in waiting if isinstance(each, _Waiting) for value in _values_of(each)]
        numbers = iter(_read(values, to_floats))
        return [(n, each if isinstance(each, LegReport) else _as_report(each, numbers)) for n, each in waiting]


def reports_after(replica: Any, received: Mapping[str, int]) -> tuple[str, list[tuple[int, Report]]]:
    """Return the name of the recorder in a worker, and those of its reports that the driver does not have yet.

    Args:
        replica: The object in the worker that holds the training operator.
        received: For each recorder, the number of the last report that the driver has.
    """
    internals = replica.operator._raysgd
    found: StepRecorder | None = internals.callbacks.of_kind(StepRecorder)
    if found is None:
        return "", []
    return found.name, found.reports(received.get(found.name, 0), internals.to_floats)


def _loss_of(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the loss of a batch and its weight in the mean loss. If no metric is a loss, return NaN and 0."""
    name = TRAIN_LOSS if TRAIN_LOSS in metrics else _name_of_loss(metrics)
    if name is None:
        return math.nan, 0
    weight = metrics.get(_WEIGHT_OF_TRAIN_LOSS if name is TRAIN_LOSS else weight_of(name))
    if weight is None:
        weight = metrics.get(BATCH_WEIGHT, metrics.get(NUM_SAMPLES, 1))
    return _kept(metrics[name]), weight if type(weight) is int else _kept(weight)


def _name_of_loss(metrics: Mapping[str, Any]) -> str | None:
    if "loss" in metrics:
        return "loss"
    return next((name for name in metrics if "loss" in str(name) and not is_weight(name)), None)


def _kept(value: Any) -> Any:
    """Return a number, or a copy of a tensor on a GPU, because the user's code may change the tensor in place.

    Return NaN for any other value.
    """
    try:
        if not hasattr(value, "detach"):
            return float(value)
        return value.item() if getattr(value, "is_cpu", False) else value.detach().reshape(()).clone()
    except (TypeError, ValueError, RuntimeError):  # the value is not a single number
        return math.nan


def _values_of(waiting: _Waiting) -> Iterator[Any]:
    for loss, weight in waiting.batches:
        yield loss
        yield weight
    yield from waiting.norms


def _read(values: Sequence[Any], to_floats: ToFloats) -> list[float]:
    """Convert numbers and tensors to floats. All tensors are read from the GPU together."""
    tensors = [value for value in values if hasattr(value, "detach")]
    read = iter(to_floats(tensors) if tensors else ())
    return [next(read) if hasattr(value, "detach") else float(value) for value in values]


def _as_report(waiting: _Waiting, numbers: Iterator[float]) -> StepReport:
    batches = [(next(numbers), next(numbers)) for _ in waiting.batches]
    norms = [next(numbers) for _ in waiting.norms]
    # Leave out padding batches, whose samples do not count. Their weight is 0.
    counted = [(loss * weight, weight) for loss, weight in batches if weight > 0]
    total, weight = math.fsum(each for each, _ in counted), math.fsum(each for _, each in counted)
    return StepReport(waiting.attempt, waiting.step, total, weight, max(norms, key=_by_size) if norms else None)


def _by_size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
