"""Records each step's loss in the workers, without waiting for the device, until the driver fetches it."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, ToFloats, is_weight, weight_of

_MOST_WAITING = 100_000
TRAIN_LOSS = "train_loss"
_WEIGHT_OF_TRAIN_LOSS = weight_of(TRAIN_LOSS)
Attempt = tuple[int, int]
"""Numbers of the training call and of the attempt to run it. Equal on all ranks; later attempts compare greater."""


class LegReport(NamedTuple):
    """Report that a worker starts a leg: it starts a new epoch, or continues an epoch in a new worker group.

    Attributes:
        attempt: The attempt at a training call that the leg belongs to.
        entry: The leg's journal entry, as plain data.
    """

    attempt: Attempt
    entry: Mapping[str, Any]


class StepReport(NamedTuple):
    """One worker's part of a step.

    Attributes:
        attempt: The attempt at a training call in which the step was taken.
        step: Number of the step.
        total: Weighted sum of the losses of the worker's batches.
        weight: Sum of the weights.
        norm: Norm of the gradients over all workers; None if nothing computed it.
    """

    attempt: Attempt
    step: int
    total: float
    weight: float
    norm: float | None


class _Waiting(NamedTuple):
    """Values of one step, which may still be on a device: each batch's loss and weight, and the gradient norms."""

    attempt: Attempt
    step: int
    batches: Sequence[tuple[Any, Any]]
    norms: Sequence[Any]


Report = LegReport | StepReport


class StepRecorder(WorkerCallback):
    """Records the losses and gradient norms of a worker's steps. Keeps numbered reports until the driver has them."""

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
        self._begin_step()  # an interrupted step is repeated
        self._report(LegReport(self._attempt, leg))

    def _on_norm(self, norm: Any) -> None:
        if norm is not None and not hasattr(norm, "full_tensor"):  # reading a sharded tensor would run a collective
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
        """Return the reports with numbers above `after`, and discard all other reports.

        Runs in a second thread, and may wait for a device.

        Args:
            after: Number of the last report that the driver has.
            to_floats: Reads a list of one-element tensors.
        """
        while self._reports and self._reports[0][0] <= after:
            self._reports.popleft()
        waiting = list(self._reports)
        values = [value for _, each in waiting if isinstance(each, _Waiting) for value in _values_of(each)]
        numbers = iter(_read(values, to_floats))
        return [(n, each if isinstance(each, LegReport) else _as_report(each, numbers)) for n, each in waiting]


def reports_after(replica: Any, received: Mapping[str, int]) -> tuple[str, list[tuple[int, Report]]]:
    """Return the name of a worker's recorder, and the reports that the driver does not have yet.

    Args:
        replica: The worker's replica.
        received: Number of the last report that the driver has, by recorder name.
    """
    internals = replica.operator._raysgd
    found: StepRecorder | None = internals.callbacks.of_kind(StepRecorder)
    if found is None:
        return "", []
    return found.name, found.reports(received.get(found.name, 0), internals.to_floats)


def _loss_of(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the loss of a batch and the loss's weight. If no metric is a loss, return NaN and 0."""
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
    """Return a number unchanged, but copy a tensor on a device, because user code may change the tensor in place."""
    try:
        if not hasattr(value, "detach"):
            return float(value)
        return value.item() if getattr(value, "is_cpu", False) else value.detach().reshape(()).clone()
    except (TypeError, ValueError, RuntimeError):  # not a single number
        return math.nan


def _values_of(waiting: _Waiting) -> Iterator[Any]:
    for loss, weight in waiting.batches:
        yield loss
        yield weight
    yield from waiting.norms


def _read(values: Sequence[Any], to_floats: ToFloats) -> list[float]:
    """Convert numbers and tensors to floats. Read all tensors together."""
    tensors = [value for value in values if hasattr(value, "detach")]
    read = iter(to_floats(tensors) if tensors else ())
    return [next(read) if hasattr(value, "detach") else float(value) for value in values]


def _as_report(waiting: _Waiting, numbers: Iterator[float]) -> StepReport:
    batches = [(next(numbers), next(numbers)) for _ in waiting.batches]
    norms = [next(numbers) for _ in waiting.norms]
    # Skip padding, whose loss is meaningless.
    counted = [(loss * weight, weight) for loss, weight in batches if weight > 0]
    total, weight = math.fsum(each for each, _ in counted), math.fsum(each for _, each in counted)
    return StepReport(waiting.attempt, waiting.step, total, weight, max(norms, key=_by_size) if norms else None)


def _by_size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
