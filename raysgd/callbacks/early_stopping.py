"""`EarlyStopping`: ends a run when a metric stops improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from raysgd._arguments import checks
from raysgd._numbers.nested import value_at
from raysgd.callbacks._watched_metric import Mode, WatchedMetric
from raysgd.callbacks.callback import Callback, Run

logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Ends a run when a metric has not improved for some epochs. The driver decides, once for all workers.

    Only epochs that have the metric count: with `validation_freq=2` a metric of validation is looked at every second
    epoch.

    Args:
        metric: Its name in the results, such as "val_loss".
        mode: Whether "min" or "max" of it is best. "auto" goes by its name: "max" for an accuracy, "min" for a loss.
            Where the name does not say it, a warning does, and it is "min".
        patience: After how many results without improvement the run ends.
        min_delta: By how much a result has to be better than the best one to count as an improvement.
        threshold: End the run as soon as the metric is as good as this; None for never.
        check_finite: Whether NaN and infinity end the run at once.

    Attributes:
        best: The best value so far; None before the first one.
        best_epoch: The epoch of it.
        num_without_improvement: How many results there have been since.

    Raises:
        ValueError, TypeError: An argument is wrong. In a run: there is no such metric.

    Examples:
        >>> stopping = EarlyStopping("val_accuracy", patience=5)
    """

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
        self.patience = checks.check_count("patience", patience, "It is the number of epochs to wait.")
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
        self.best_epoch = 0
        self.num_without_improvement = 0

    def _check_run(self, run: Run) -> None:
        self._metric.check_run(run)

    def on_run_begin(self, run: Run) -> None:
        """Begins to count; if a checkpoint has brought the counts of its run, stops at once where that one stopped."""
        if not self._is_loaded:
            self._begin()
        elif len(run.history) and value_at(run.history[-1], self._metric.name) is not None:
            self._judge(run, self._metric.value_in(run.history[-1]))
        self._is_loaded = False

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Looks at a result."""
        value = self._metric.value_in(result)
        if value is None:
            return
        self._count(value, run.epoch)
        self._judge(run, value)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Warns if the metric was never there."""
        if error is None and run.epoch and not self._metric.was_found:
            logger.warning(
                "EarlyStopping: no epoch had `%s`, because there was no validation; nothing was decided by it",
                self._metric.name,
            )

    def _judge(self, run: Run, value: float | None) -> None:
        reason = self._reason_to_stop(value) if value is not None else None
        if reason is not None:
            run.stop(reason)

    def _count(self, value: float, epoch: int) -> None:
        if self._metric.is_better(value, self.best, self.min_delta if self.best is not None else 0.0):
            self.best, self.best_epoch, self.num_without_improvement = value, epoch, 0
        else:
            self.num_without_improvement += 1

    def _reason_to_stop(self, value: float) -> str | None:
        name = self._metric.name
        if self.check_finite and not math.isfinite(value):
            return f"`{name}` is {value}"
        if self.threshold is not None and not self._metric.is_better(self.threshold, value):
            return f"`{name}` is {value:.6g}, as good as the threshold {self.threshold:g}"
        if self.num_without_improvement >= self.patience:
            best = "never" if self.best is None else f"{self.best:.6g} in epoch {self.best_epoch}"
            return f"`{name}` has not improved for {self.patience} results; the best one was {best}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the counts of another run."""
        self.best, self.best_epoch = state["best"], int(state["best_epoch"])
        self.num_without_improvement = int(state["num_without_improvement"])
        self._is_loaded = True
