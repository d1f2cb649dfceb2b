"""When a run stops before its function returns: the conditions of `RunConfig(stop=...)`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd._checks import is_number
from raysgd._once import Once
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
        return _never
    if isinstance(stop, Mapping):
        return _Limits(stop)
    if isinstance(stop, Sequence) and not isinstance(stop, str | bytes):
        return _AnyOf([make_stop(each) for each in stop])
    if hasattr(stop, "stop_all"):
        return _OfStopper(stop)
    if callable(stop) and not isinstance(stop, type):
        return _OfFunction(stop)
    raise TypeError(f"`RunConfig(stop={stop!r})`: {_ALLOWED}")


def _never(trial_id: str, result: Mapping[str, Any]) -> bool:
    return False


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


class _AnyOf:
    """Stops when one of several conditions is met."""

    def __init__(self, conditions: list[Stop]) -> None:
        self._conditions = conditions

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return any([condition(trial_id, result) for condition in self._conditions])  # each one sees each report


class _OfStopper:
    """Asks an object such as `ray.tune.Stopper`."""

    def __init__(self, stopper: Any) -> None:
        self._stopper = stopper

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return bool(self._stopper(trial_id, dict(result))) or bool(self._stopper.stop_all())


class _OfFunction:
    """Asks a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            inspect.signature(function).bind("trial", {})
        except TypeError:
            raise ValueError(
                f"`RunConfig(stop={function!r})`: need a function of two arguments, `stop(trial_id, result)`."
            ) from None
        except ValueError:  # a function without a signature, of a library in C
            pass
        self._function = function

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return bool(self._function(trial_id, dict(result)))
