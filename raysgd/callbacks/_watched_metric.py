"""The metric that a callback decides by."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from raysgd._arguments.checks import did_you_mean
from raysgd._numbers.nested import flattened, value_at
from raysgd._numbers.ranking import MAX, MIN, is_number, mode_of
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import overrides

logger = logging.getLogger(__name__)

AUTO = "auto"
Mode = Literal["auto", "min", "max"]

_OF_VALIDATION = ("val_", "last_val_")


class WatchedMetric:
    """Finds one metric in results and compares its values.

    Args:
        owner: The callback, for messages.
        name: The metric; slashes lead into nested dicts.
        mode: Whether "min" or "max" of it is best; "auto" goes by the name.

    Raises:
        TypeError: `name` is no text.
        ValueError: Another mode.
    """

    def __init__(self, owner: str, name: Any, mode: Any) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"`{owner}(metric={name!r})`: need the name of a metric, such as 'val_loss'.")
        self.name, self.mode = name, _chosen_mode(owner, name, mode)
        self.was_found = False
        self._owner = owner

    def check_run(self, run: Run) -> None:
        """Refuses a run that is never validated, if only a validation could measure the metric.

        Raises:
            ValueError: It is one.
        """
        if self.name.startswith(_OF_VALIDATION) and not run._may_validate and not any(map(_may_add, run.callbacks)):
            raise ValueError(
                f"`{self._owner}(metric={self.name!r})` with `validation_freq=0`: no epoch has a metric of validation. "
                "Pass `validation_freq=1`, or a metric of training, such as 'train_loss'."
            )

    def value_in(self, result: Mapping[str, Any]) -> float | None:
        """Its value; None in an epoch without validation, if it is a metric of validation.

        Raises:
            ValueError: There is no such metric, or it is no number.
        """
        value = value_at(result, self.name)
        if value is None and self.name not in result:
            self._check_absence(result)
            return None
        if not is_number(value):
            raise ValueError(f"`{self._owner}(metric={self.name!r})`: its value is {value!r:.80}; need a number.")
        self.was_found = True
        return float(value)

    def is_better(self, value: float, other: float | None, min_delta: float = 0.0) -> bool:
        """Return whether a value is better than another one, by more than `min_delta`. NaN is never better."""
        if math.isnan(value):
            return False
        if other is None:
            return True
        return value < other - min_delta if self.mode == MIN else value > other + min_delta

    def _check_absence(self, result: Mapping[str, Any]) -> None:
        names = flattened(result)
        if self.name.startswith(_OF_VALIDATION) and not any(name.startswith(_OF_VALIDATION) for name in names):
            return
        known = [name for name, value in names.items() if not name.startswith("last_") and is_number(value)]
        raise ValueError(
            f"`{self._owner}(metric={self.name!r})`: there is no such metric.{did_you_mean(self.name, known)} There "
            f"are {', '.join(known) or 'none'}."
        )


def _may_add(callback: Callback) -> bool:
    """Return whether a callback of the user may add metrics to results, as one that validates in its own way."""
    return overrides(callback, "on_result") and not type(callback).__module__.startswith("raysgd.")


def _chosen_mode(owner: str, metric: str, mode: Any) -> str:
    """Return "min" or "max"; warn where that was not given and the name does not say it.

    Raises:
        ValueError: Another mode.
    """
    if mode not in (AUTO, MIN, MAX):
        raise ValueError(f'`{owner}(mode={mode!r})`: allowed are "{AUTO}", "{MIN}" and "{MAX}".')
    found = mode_of(metric) if mode == AUTO else mode
    if found is None:
        logger.warning(
            "`%s(metric=%r)`: the name does not say which values are best, so low ones are. Pass `mode=%r` if high "
            "ones are, or `mode=%r` to silence this",
            owner,
            metric,
            MAX,
            MIN,
        )
    return str(found or MIN)
