"""A replica's answer to a call: results as the driver can read them, and how long the operator took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from raysgd._numbers.meters import MetricSummary
from raysgd._numbers.results import WorkerMetrics
from raysgd._numbers.timers import TimerCollection
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.worker.data.logged import take_outside


class CallAnswers:
    """Makes the answers of a replica. It keeps the operator's timers, which run in calls that ask for a profile."""

    def __init__(self) -> None:
        self._timers = TimerCollection()

    def begin(self, operator: Any, profile: bool) -> None:
        """Gets the timers ready for a call."""
        if profile:
            self._timers.reset()
            self._timers.enable()
        else:
            self._timers.disable()
        operator.timers = self._timers

    def timed(self, name: str) -> AbstractContextManager[Any]:
        """Measures the body."""
        return self._timers.record(name)

    def answer(
        self,
        operator: Any,
        returned: Any,
        request: EpochRequest,
        num_steps: int,
        plain: Callable[[Any], Any],
        extra: Mapping[str, Any] | None = None,
    ) -> EpochAnswer:
        """The answer to a call.

        Args:
            operator: What it ran on.
            returned: What the operator's method returned. What is no mapping travels as it is.
            request: What was asked.
            num_steps: How many steps were taken.
            plain: Makes something that the driver can read of a result.
            extra: What the library adds to the metrics.
        """
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        together = {**take_outside(operator._raysgd), **returned}
        values = {**(extra or {}), **{name: plain(value) for name, value in together.items()}}
        if request.profile:
            values["profile"] = self._timers.stats()
        behind = (returned.totals, returned.objects) if isinstance(returned, MetricSummary) else ()
        return EpochAnswer(WorkerMetrics(values, *behind), None, num_steps)
