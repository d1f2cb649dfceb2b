"""Records every call of `train`, `validate` and `test` in the history of a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from raysgd._numbers.metric_names import name_in_test
from raysgd._numbers.results import Metrics
from raysgd.engine.decisions.history import GroupEvent
from raysgd.history.history import CallRecord, History, Kind

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
        self._as_test = False

    @contextmanager
    def as_test(self) -> Iterator[None]:
        """Inside the block, calls of `validate` are recorded as calls of `test`."""
        before, self._as_test = self._as_test, True
        try:
            yield
        finally:
            self._as_test = before

    def record(self, kind: Kind, result: Any, began_at: float, seconds: float) -> None:
        """Adds a call."""
        metrics = dict(result) if isinstance(result, Mapping) else {}
        if kind == "validation" and self._as_test:
            kind, metrics = "test", as_test(metrics)
        records = self.history.records
        epoch = metrics.get("epoch") if kind == "train" else None
        if not isinstance(epoch, int):
            epoch = (records[-1].epoch if records else 0) + (kind == "train")
        self.history.add(CallRecord(kind, epoch, metrics, began_at, seconds, self._num_workers()))
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


def as_test(metrics: Mapping[str, Any]) -> Metrics:
    """The result of `validate` as that of `test`."""
    return Metrics({name_in_test(name): value for name, value in metrics.items()})
