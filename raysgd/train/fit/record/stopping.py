"""Conditions that stop a run before its function returns: those of `RunConfig(stop=...)`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd._arguments.checks import is_number
from raysgd._text.once import Once
from raysgd.air.result import value_at

logger = logging.getLogger(__name__)

Stop = Callable[[str, Mapping[str, Any]], bool]
"""Says, for the identity of the trial and the metrics of a report, whether the run stops after it."""

_ALLOWED = (
    "need a dict of metrics and the values at which to stop, such as `{'training_iteration': 10}`, a function "
    "`stop(trial_id, result)` that returns True or False, or a `ray.tune.Stopper`."
)


def make_stop(stop: Any) -> Stop:
    """Turns what the user gave into a condition.

    Raises:
        TypeError: It is something else.
        ValueError: A limit is not a number, or the function cannot be called with two arguments.
    """
    if stop is None:
        return lambda trial_id, result: False
    if isinstance(stop, Mapping):
        return _Limits(stop)
    if isinstance(stop, Sequence) and not isinstance(stop, str | bytes):
        conditions = [make_stop(each) for each in stop]
        return lambda trial_id, result: any([each(trial_id, result) for each in conditions])  # each sees each report
    if hasattr(stop, "stop_all"):
        return lambda trial_id, result: bool(stop(trial_id, dict(result))) or bool(stop.stop_all())
    if callable(stop) and not isinstance(stop, type):
        _check_takes_two(stop)
        return lambda trial_id, result: bool(stop(trial_id, dict(result)))
    raise TypeError(f"`RunConfig(stop={stop!r})`: {_ALLOWED}")


def _check_takes_two(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind("trial", {})
    except TypeError:
        raise ValueError(
            f"`RunConfig(stop={function!r})`: need a function of two arguments, `stop(trial_id, result)`."
        ) from None
    except ValueError:  # a function without a signature, of a library in C
        pass


class _Limits:
    """Stops when a metric is at its limit or above."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        for name, limit in limits.items():
            if not isinstance(name, str) or not is_number(limit):
                raise ValueError(
                    f"`RunConfig(stop={{{name!r}: {limit!r}}})`: need the name of a metric and a number. The run stops "
                    "when the metric reaches it."
                )
        self._limits = dict(limits)
        self._once = Once()

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return any(self._is_reached(name, limit, result) for name, limit in self._limits.items())

    def _is_reached(self, name: str, limit: float, result: Mapping[str, Any]) -> bool:
        value = value_at(result, name)
        if value is None and self._once.is_first(name):
            logger.warning(
                "`RunConfig(stop=...)` names the metric %r, which this report does not have. It has: %s",
                name,
                ", ".join(map(str, result)),
            )
        return value is not None and bool(value >= limit)
