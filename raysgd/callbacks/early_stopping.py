"""`EarlyStopping`: a callback that ends a run when a metric stops improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import overrides
from raysgd.core import arguments as checks
from raysgd.core.arguments import did_you_mean
from raysgd.core.numbers.ranking import MAX, MIN, is_number, mode_of
from raysgd.core.numbers.results import flattened, value_at

logger = logging.getLogger(__name__)

AUTO = "auto"
Mode = Literal["auto", "min", "max"]

_OF_VALIDATION = ("val_", "last_val_")


class WatchedMetric:
    """Looks up the metric that a callback watches in the results of a run, and compares its values.

    Args:
        owner: Class name of the callback, for error messages.
        name: Name of the metric. Slashes separate the keys of nested dicts.
        mode: "min" if low values are best, "max" if high values are, "auto" to infer this from the name.

    Raises:
        TypeError: `name` is not a string, or is empty.
        ValueError: `mode` is unknown.
    """

    def __init__(self, owner: str, name: Any, mode: Any) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"`{owner}(metric={name!r})`: need the name of a metric, such as 'val_loss'.")
        self.name, self.mode = name, _chosen_mode(owner, name, mode)
        self.was_found = False
        self._owner = owner

    def check_run(self, run: Run) -> None:
        """If the metric is a validation metric, check that the run can produce this metric.

        Raises:
            ValueError: The metric is a validation metric, but the run never validates, and no callback of the user can
                add the metric.
        """
        if self.name.startswith(_OF_VALIDATION) and not run._may_validate and not any(map(_may_add, run.callbacks)):
            raise ValueError(
                f"`{self._owner}(metric={self.name!r})` with `validation_freq=0`: no epoch has a metric of validation. "
                "Pass `validation_freq=1`, or a metric of training, such as 'train_loss'."
            )

    def value_in(self, result: Mapping[str, Any]) -> float | None:
        """Return the value of the metric in the result of an epoch.

        Return None if the metric is a validation metric and the epoch had no validation.

        Raises:
            ValueError: The result has no such metric, or its value is not a number.
        """
        value = value_at(result, self.name)
        if value is None and self.name not in result:
            self._check_absence(result)
            return None
        if not is_number(value):
            raise ValueError(f"`{self._owner}(metric={self.name!r})`: its value is {value!r:.80}; need a number.")
        self.was_found = True
        return float(value)

    def value_inside(self, run: Run, metrics: Mapping[str, Any]) -> float | None:
        """Return the value of the metric in a validation inside an epoch.

        Return None if only the results of whole epochs have the metric.

        Raises:
            ValueError: The validation has no such metric, or its value is not a number.
        """
        is_of_epochs = not self.name.startswith(_OF_VALIDATION) or any(map(_may_add, run.callbacks))
        return None if is_of_epochs and value_at(metrics, self.name) is None else self.value_in(metrics)

    def is_better(self, value: float, other: float | None, min_delta: float = 0.0) -> bool:
        """Return True if `value` is better than `other` by more than `min_delta`.

        NaN is never better. Any other value is better than no value (None).
        """
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
    """Return True if the user wrote this callback and it may add metrics to results, for example from a validation."""
    return overrides(callback, "on_result") and not type(callback).__module__.startswith("raysgd.")


def _chosen_mode(owner: str, metric: str, mode: Any) -> str:
    """Return "min" if low values of a metric are best, and "max" if high values are.

    With mode "auto", the name of the metric decides. If the name gives no hint, log a warning and return "min".

    Raises:
        ValueError: `mode` is unknown.
    """
    if mode not in (AUTO, MIN, MAX):
        raise ValueError(f'`{owner}(mode={mode!r})`: allowed are "{AUTO}", "{MIN}" and "{MAX}".')
    known = mode_of(metric) if mode == AUTO else mode
    if known is None:
        logger.warning(
            "`%s(metric=%r)`: the name does not say which values are best, so low ones are. Pass `mode=%r` if high "
            "ones are, or `mode=%r` to silence this",
            owner,
            metric,
            MAX,
            MIN,
        )
    return str(known or MIN)


class EarlyStopping(Callback):
    """Ends a run when a metric has stopped improving. All workers stop together, because the driver decides.

    Epochs without the metric do not count. With `validation_freq=2`, for example, a validation metric is checked
    every second epoch. With `validate_every_n_steps`, a validation metric is checked after each validation, and the run
    can end at that step.

    Args:
        metric: Name of the metric in the results, such as "val_loss".
        mode: "min" if low values of the metric are best, "max" if high values are. "auto" infers it from the name:
            "max" for an accuracy, "min" for a loss. For other names it uses "min" and logs a warning.
        patience: Number of results without improvement after which the run ends.
        min_delta: A result is an improvement only if it is better than the best result so far by more than this amount.
        threshold: The run ends as soon as the metric is at least as good as this value. None for no threshold.
        check_finite: Whether to end the run as soon as the metric is NaN or infinite.

    Attributes:
        best: The best value so far, or None before the first result.
        best_epoch: The epoch of the best value.
        num_without_improvement: Number of results since the best value.

    Raises:
        ValueError, TypeError: An argument is invalid.
        CallbackError: During a run, the results have no such metric.

    Examples:
        >>> stopping = EarlyStopping("val_accuracy", patience=5)
    """

    @checks.answer_mistakes('`EarlyStopping("val_loss", patience=3)`', shown="EarlyStopping")
    def __init__(
        self,
        metric: str = "val_loss",
        mode: Mode = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        threshold: float | None = None,
        check_finite: bool = True,
    ) -> None:
        self._metric = WatchedMetric("EarlyStopping", metric, mode)
        self.patience = checks.check_count("patience", patience, "It is the number of results to wait for.")
        if not checks.is_number(min_delta) or min_delta < 0:
            raise ValueError(f"`min_delta={min_delta!r}`: need a number, 0 or more.")
        if threshold is not None and not checks.is_number(threshold):
            raise ValueError(f"`threshold={threshold!r}`: need a number, or None.")
        checks.refuse_text(check_finite=check_finite)
        self.min_delta, self.threshold, self.check_finite = float(min_delta), threshold, check_finite
        self._is_loaded = False
        self._begin()

    def _begin(self) -> None:
        self.best: float | None = None
        self._last: float | None = None
        self.best_epoch = 0
        self.num_without_improvement = 0

    def _check_run(self, run: Run) -> None:
        self._metric.check_run(run)

    def on_run_begin(self, run: Run) -> None:
        """Start counting results from zero, unless the run resumes from a checkpoint.

        If the counts in the checkpoint already meet a stopping criterion, stop the run immediately.
        """
        self._metric.was_found = False
        if not self._is_loaded:
            self._begin()
        elif self._last is not None:
            self._metric.was_found = True
            self._judge(run, self._last)
        elif len(run.history) and value_at(run.history[-1], self._metric.name) is not None:
            self._judge(run, self._metric.value_in(run.history[-1]))
        self._is_loaded = False

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Count the result of an epoch, and stop the run if the metric meets a stopping criterion."""
        self._take(run, self._metric.value_in(result), run.epoch)

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Count a validation inside an epoch as a result, and stop the run if the metric meets a stopping criterion."""
        self._take(run, self._metric.value_inside(run, metrics), run.epoch + 1)

    def _take(self, run: Run, value: float | None, epoch: int) -> None:
        if value is None:
            return
        self._last = value
        if self._metric.is_better(value, self.best, self.min_delta):
            self.best, self.best_epoch, self.num_without_improvement = value, epoch, 0
        else:
            self.num_without_improvement += 1
        self._judge(run, value)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Log a warning if no result of the run contained the metric."""
        if error is None and run.epoch and not self._metric.was_found:
            logger.warning(
                "EarlyStopping: no epoch had `%s`, because there was no validation; nothing was decided by it",
                self._metric.name,
            )

    def _judge(self, run: Run, value: float | None) -> None:
        reason = self._reason_to_stop(value) if value is not None else None
        if reason is not None:
            run.stop(reason)

    def _reason_to_stop(self, value: float) -> str | None:
        name = self._metric.name
        if self.check_finite and not math.isfinite(value):
            return f"`{name}` is {value}"
        threshold = self.threshold
        if threshold is not None and not math.isnan(value) and not self._metric.is_better(threshold, value):
            return f"`{name}` is {value:.6g}, as good as the threshold {threshold:g}"
        if self.num_without_improvement >= self.patience:
            best = "never" if self.best is None else f"{self.best:.6g} in epoch {self.best_epoch}"
            by = f" of more than {self.min_delta:g}" if self.min_delta else ""
            return f"no improvement{by} of `{name}` for {self.patience} results; the best one was {best}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the best and the last value of the metric, and the number of results without improvement."""
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "num_without_improvement": self.num_without_improvement,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values of the metric and the counts from the checkpoint of an earlier run."""
        best, last = (None if value is None else float(value) for value in (state["best"], state.get("last")))
        self.best, self.best_epoch, self._last = best, int(state["best_epoch"]), last
        self.num_without_improvement = int(state["num_without_improvement"])
        self._is_loaded = True
