"""Notes the loss of each step in the workers, without waiting for a device, until the driver fetches it."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, is_weight, weight_of

_MOST_WAITING = 100_000
TRAIN_LOSS = "train_loss"
_WEIGHT_OF_TRAIN_LOSS = weight_of(TRAIN_LOSS)
Attempt = tuple[int, int]
"""Number of the training call, and of the attempt at it: the same on all ranks, and larger for what comes later."""


class LegReport(NamedTuple):
    """A worker begins to train in a group, or in an epoch.

    Attributes:
        attempt: The attempt.
        entry: Where it begins, as plain data.
    """

    attempt: Attempt
    entry: Mapping[str, Any]


class StepReport(NamedTuple):
    """The part of one worker in a step.

    Attributes:
        attempt: The attempt in which the step was taken.
        step: Number of the step.
        total: Sum of its losses, each times its weight.
        weight: Sum of the weights.
        norm: Norm of the gradients of all workers; None if nothing has computed it.
    """

    attempt: Attempt
    step: int
    total: float
    weight: float
    norm: float | None


class _Waiting(NamedTuple):
    """A step whose numbers may still be on a device: loss and weight of each of its batches, and the norms."""

    attempt: Attempt
    step: int
    batches: Sequence[tuple[Any, Any]]
    norms: Sequence[Any]


Report = LegReport | StepReport


class StepRecorder(WorkerCallback):
    """Notes what happens in the steps of a worker. Reports are numbered, and kept until the driver has them."""

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
        self._begin_step()  # a step that broke off comes again
        self._report(LegReport(self._attempt, leg))

    def _on_norm(self, norm: Any) -> None:
        if norm is not None and not hasattr(norm, "full_tensor"):  # reading a divided tensor is a collective
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

    def reports(self, after: int) -> list[tuple[int, Report]]:
        """Return the reports after a number. Forget earlier ones. Runs in a second thread, and may wait for a device.

        Args:
            after: Number of the last report that the driver has.
        """
        while self._reports and self._reports[0][0] <= after:
            self._reports.popleft()
        waiting = list(self._reports)
        values = [value for _, each in waiting if isinstance(each, _Waiting) for value in _values_of(each)]
        numbers = iter(_read(values))
        return [(n, each if isinstance(each, LegReport) else _as_report(each, numbers)) for n, each in waiting]


def reports_after(replica: Any, received: Mapping[str, int]) -> tuple[str, list[tuple[int, Report]]]:
    """Return the name of a worker's recorder, and its reports that the driver does not have.

    Args:
        replica: The replica of the worker.
        received: For each recorder, the number of the last report that the driver has.
    """
    found: StepRecorder | None = replica.operator._raysgd.callbacks.of_kind(StepRecorder)
    return ("", []) if found is None else (found.name, found.reports(received.get(found.name, 0)))


def _loss_of(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the loss of a batch and its weight, which is 0 if no metric is a loss."""
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
    """Return a number, or a copy of a tensor on a device, which user code may change in place."""
    try:
        if not hasattr(value, "detach"):
            return float(value)
        return value.item() if getattr(value, "is_cpu", False) else value.detach().reshape(()).clone()
    except (TypeError, ValueError, RuntimeError):  # not one number
        return math.nan


def _values_of(waiting: _Waiting) -> Iterator[Any]:
    for loss, weight in waiting.batches:
        yield loss
        yield weight
    yield from waiting.norms


def _read(values: Sequence[Any]) -> list[float]:
    """Return numbers, with all tensors read at once."""
    tensors = [value for value in values if hasattr(value, "detach")]
    if not tensors:
        return [float(value) for value in values]
    import torch

    read = iter(torch.stack([each.double() for each in tensors]).tolist())
    return [next(read) if hasattr(value, "detach") else float(value) for value in values]


def _as_report(waiting: _Waiting, numbers: Iterator[float]) -> StepReport:
    batches = [(next(numbers), next(numbers)) for _ in waiting.batches]
    norms = [next(numbers) for _ in waiting.norms]
    counted = [(loss * weight, weight) for loss, weight in batches if weight > 0]  # padding may have any loss
    total, weight = math.fsum(each for each, _ in counted), math.fsum(each for _, each in counted)
    return StepReport(waiting.attempt, waiting.step, total, weight, max(norms, key=_by_size) if norms else None)


def _by_size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
