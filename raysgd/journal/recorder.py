"""Records the loss and the gradient norm of each step in every worker, for the journal of the run.

The values stay in the worker until the driver fetches them. Recording does not wait for the GPU.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.numbers.meters import PLAIN_NUMBERS, NumberMeter, PendingMetric, ToFloats
from raysgd.journal.entries import LEFT_OUT, LEG
from raysgd.journal.steps import NO_NORM

_MOST_WAITING = 100_000
TRAIN_LOSS = "train_loss"
Attempt = tuple[int, int]
"""An attempt to run a training call: the number of the call, and the number of the attempt at this call.

Later attempts compare as greater. All ranks have the same numbers.
"""
Column: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PARTS = np.dtype([("step", "i8"), ("total", "f8"), ("weight", "f8"), ("norm", "f8")])
"""What a worker adds to a step: the number of the step, the weighted sum of the losses of the worker's batches, the sum
of the weights, and the norm of the gradients, which are averaged over all workers. With several optimizers, the largest
of their norms. `NO_NORM` if no norm was recorded.
"""


class LineReport(NamedTuple):
    """Report with a line for the journal. All workers of a group make the same report.

    Attributes:
        kind: `LEG` if the worker starts an epoch, or continues an epoch in a new group of workers. `LEFT_OUT` if it has
            left out a step.
        attempt: The attempt at a training call in which this happens.
        entry: The entries of the line, as plain data.
    """

    kind: str
    attempt: Attempt
    entry: Mapping[str, Any]


class StepBlock(NamedTuple):
    """Report of one worker about several steps of one attempt.

    Attributes:
        attempt: The attempt at a training call in which the steps were taken.
        parts: What this worker adds to each step, an array of `PARTS` in ascending order of the steps.
    """

    attempt: Attempt
    parts: Column


class _Waiting(NamedTuple):
    """The values of one step, some of which may still be on a GPU.

    Attributes:
        attempt: The attempt in which the step was taken.
        step: Number of the step.
        values: The loss and the weight of each batch of the step, one after another.
        norms: The norm of each optimizer's gradients.
    """

    attempt: Attempt
    step: int
    values: Sequence[Any]
    norms: Sequence[Any]


Report = LineReport | StepBlock


class News(NamedTuple):
    """The new entries that the recorder of one worker has for the driver.

    Attributes:
        name: The name of the recorder.
        last: Number of the last report that the driver has with these reports.
        reports: The reports.
        lost: Numbers of the first and the last step whose report the recorder has discarded, or None.
    """

    name: str
    last: int
    reports: list[Report]
    lost: tuple[int, int] | None = None


class StepRecorder(WorkerCallback):
    """Worker callback that records the losses and gradient norms of this worker's steps.

    Each report has a number, and is kept until the driver has it. If 100,000 reports wait for the driver, each further
    step replaces the oldest step that waits.

    Attributes:
        lost: Numbers of the first and the last step whose report was discarded before the driver had it, or None.
    """

    def on_begin(self, operator: Any) -> None:
        self.name = uuid.uuid4().hex
        self._num_reports = 0
        self._reports = deque[tuple[int, LineReport | _Waiting]]()
        self._removing = threading.Lock()  # two threads remove reports
        self.lost: tuple[int, int] | None = None
        self._attempt: Attempt = (0, 0)
        self._is_off = False
        self._begin_step()

    def _add(self, report: LineReport | _Waiting) -> None:
        self._num_reports += 1
        self._reports.append((self._num_reports, report))

    def _begin_step(self) -> None:
        self._values: list[Any] = []
        self._norms: Sequence[Any] = ()

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        call, number = leg["attempt"]
        self._attempt, self._is_off = (call, number), leg["obstacle"] is not None
        self._begin_step()  # discard the values of an interrupted step, which is repeated
        self._add(LineReport(LEG, self._attempt, leg))

    def _on_left_out(self, entry: Mapping[str, Any]) -> None:
        self._add(LineReport(LEFT_OUT, self._attempt, entry))

    def _on_norm(self, norm: Any) -> None:
        if norm is not None and not hasattr(norm, "full_tensor"):  # reading a sharded tensor would need all ranks
            self._norms = (*self._norms, _kept(norm))

    def _on_batch(self, operator: Any, metrics: Sequence[PendingMetric] | None, is_boundary: bool) -> None:
        if self._is_off:
            return
        if metrics is not None:
            self._values += _loss_of(metrics)
        if is_boundary:
            if len(self._reports) >= _MOST_WAITING:
                self._discard_oldest_step()
            self._add(_Waiting(self._attempt, operator.global_step + 1, self._values, self._norms))
            self._begin_step()

    def _discard_oldest_step(self) -> None:
        """Discard the oldest step that waits for the driver. Keep the starts of legs, because later steps need them."""
        with self._removing:
            steps = ((at, each.step) for at, (_, each) in enumerate(self._reports) if isinstance(each, _Waiting))
            place, step = next(steps, (None, 0))
            if place is None:
                return
            del self._reports[place]
        self.lost = (step, step) if self.lost is None else (min(self.lost[0], step), max(self.lost[1], step))

    def _news(self, operator: Any, received: Mapping[str, int]) -> News:
        """Return the reports that the driver does not have yet, and discard all earlier reports.

        Args:
            operator: This worker's operator.
            received: For each recorder, the number of the last report that the driver has.
        """
        after, to_floats = received.get(self.name, 0), operator._raysgd.to_floats
        with self._removing:
            while self._reports and self._reports[0][0] <= after:
                self._reports.popleft()
        waiting, found = list(self._reports), list[Report]()
        for are_steps, group in groupby((each for _, each in waiting), lambda each: isinstance(each, _Waiting)):
            some: list[Any] = list(group)
            found += [_as_block(some, to_floats)] if are_steps else some
        return News(self.name, waiting[-1][0] if waiting else after, found, self.lost)


def _loss_of(metrics: Sequence[PendingMetric]) -> tuple[Any, Any]:
    """Return the loss of a batch and its weight in the mean loss. If no metric is a loss, return NaN and 0."""
    for name, _, value, weight in metrics:
        if name == TRAIN_LOSS:
            return value, weight
    losses = [each for each in metrics if "loss" in str(each[0]) and isinstance(each[1], NumberMeter)]
    found = next((each for each in losses if each[0] == "loss"), losses[0] if losses else None)
    return (math.nan, 0) if found is None else found[2:]


def _kept(value: Any) -> Any:
    """Return a value that the user's code cannot change later: a number, or a copy of a tensor on a GPU.

    Return NaN if the value is not a single number.
    """
    try:
        if not hasattr(value, "detach"):
            return float(value)
        return value.item() if getattr(value, "is_cpu", False) else value.detach().reshape(()).clone()
    except (TypeError, ValueError, RuntimeError):  # the value is not a single number
        return math.nan


def _as_block(waiting: Sequence[_Waiting], to_floats: ToFloats) -> StepBlock:
    """Read the values of some steps, and return them as a report.

    Args:
        waiting: The steps, all from one attempt.
        to_floats: Function that converts a list of one-element tensors to floats.
    """
    counts = np.array([len(each.values) // 2 for each in waiting])
    read = _read([value for each in waiting for value in each.values], to_floats)
    losses, weights = read[::2], read[1::2]
    # Leave out batches with a weight of 0, such as batches without a loss.
    weights = np.where(weights > 0, weights, 0.0)
    with np.errstate(over="ignore"):
        totals = np.multiply(losses, weights, out=np.zeros(len(losses)), where=weights > 0)
    if (counts != 1).any():
        ends = counts.cumsum()
        split = (np.split(each, ends[:-1]) for each in (totals, weights))
        totals, weights = (np.array([exact_sum(part.tolist()) for part in parts]) for parts in split)
    parts = np.empty(len(waiting), PARTS)
    parts["step"], parts["total"], parts["weight"] = [each.step for each in waiting], totals, weights
    of_steps = iter(_read([norm for each in waiting for norm in each.norms], to_floats).tolist())
    parts["norm"] = [_largest([next(of_steps) for _ in each.norms]) for each in waiting]
    return StepBlock(waiting[0].attempt, parts)


def _read(values: Sequence[Any], to_floats: ToFloats) -> Column:
    """Convert numbers and tensors to floats. All tensors are read from the GPU together."""
    tensors = [value for value in values if type(value) not in PLAIN_NUMBERS]
    if tensors:
        read = iter(to_floats(tensors))
        values = [value if type(value) in PLAIN_NUMBERS else next(read) for value in values]
    return np.array(values, dtype=np.float64)


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order of the numbers.

    If the sum is too large for a float, or adds infinity and minus infinity, return the result of Python's `sum`.
    """
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)


def _largest(norms: Sequence[float]) -> float:
    """Return the largest norm, where NaN counts as infinite. Return `NO_NORM` if there is no norm."""
    return max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm, default=NO_NORM)
