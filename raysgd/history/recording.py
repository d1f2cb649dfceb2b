"""Records every call of `train`, `validate` and `test` in the history of a trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from raysgd._numbers.metric_names import name_in_test
from raysgd._numbers.results import Metrics
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history.history import CallRecord, History, Kind

RecordBeside = Callable[[Any, float, float], CallRecord]
"""Adds a call that has ended: takes its result, when it began, and how many seconds it took."""

Method = TypeVar("Method", bound=Callable[..., Any])

MOST_EPOCHS = 10_000
"""That the history of a trainer has; a run has its own."""


class CallRecorder:
    """Keeps the history of a trainer.

    Args:
        events: What happens to the workers; the list is read, and grows.
        num_workers: How many workers there are.

    Attributes:
        history: The calls so far.
    """

    def __init__(self, events: list[GroupEvent], num_workers: Callable[[], int]) -> None:
        self.history = History(events)
        self._num_workers = num_workers
        self._lock = threading.Lock()

    def record(self, kind: Kind, result: Any, began_at: float, seconds: float) -> None:
        """Adds a call."""
        metrics = _metrics_of(result)
        with self._lock:
            epoch = metrics.get("epoch") if kind == "train" else None
            if not isinstance(epoch, int):
                epoch = self._epoch + (kind == "train")
            self._add(CallRecord(kind, epoch, metrics, began_at, seconds, self._num_workers()), None)

    def begin_beside(self, num_workers: int) -> RecordBeside:
        """Return what adds a validation that runs while other calls are made: it completes the row of now."""
        history = self.history
        epoch, row = self._epoch, history[-1] if len(history) else None

        def add(result: Any, began_at: float, seconds: float) -> CallRecord:
            record = CallRecord("validation", epoch, _metrics_of(result), began_at, seconds, num_workers)
            with self._lock:
                self._add(record, row)
            return record

        return add

    def add(self, record: CallRecord) -> None:
        """Adds a call that another process has recorded."""
        with self._lock:
            self._add(record, None)

    @property
    def _epoch(self) -> int:
        records = self.history.records
        return records[-1].epoch if records else 0

    def _add(self, record: CallRecord, row: dict[str, Any] | None) -> None:
        self.history.add(record, row)
        self.history.forget_old(MOST_EPOCHS)


def recorded(kind: Kind) -> Callable[[Method], Method]:
    """Lets a method of a trainer that has a `_recorder` record each call that succeeds."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            began_at, began = time.time(), time.perf_counter()
            result = method(trainer, *args, **kwargs)
            recorder: CallRecorder = trainer._recorder
            recorder.record(kind, result, began_at, time.perf_counter() - began)
            return result

        return cast("Method", call)

    return decorate


def _metrics_of(result: Any) -> dict[str, Any]:
    return dict(result) if isinstance(result, Mapping) else {}


def as_test(metrics: Mapping[str, Any]) -> Metrics:
    """The result of `validate` as that of `test`."""
    return Metrics({name_in_test(name): value for name, value in metrics.items()})
