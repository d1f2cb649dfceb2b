"""The learning-rate schedulers that the library steps, when, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd._numbers.metric_names import validation_name
from raysgd._numbers.results import as_number
from raysgd.messages.epochs import VALIDATES
from raysgd.torch.constants import SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.step import BatchStep

MeanOf = Callable[[str, Mapping[str, Any]], float | None]
"""Name and metrics of one worker -> the mean over all workers; None where there is none."""

Plateau = tuple[str, Callable[[float], Any]]
"""The metric that a scheduler goes by, and what steps it."""

_VAL_LOSS = "val_loss"


class SchedulerSteps:
    """The schedulers of one epoch of the stock `train_epoch`.

    Args:
        given: `self.scheduler` of the operator: one, several, or None.
        freq: `scheduler_step_freq` of the trainer.
        metric: `scheduler_metric` of the operator.
        validates: Whether a metric that this epoch lacks may be one of the validation that follows, as in `fit`.

    Attributes:
        follow_steps: Whether they step after each step of the optimizer.

    Raises:
        ValueError: One of them goes by a metric, and no metric is named, or it would be asked for after each batch.
    """

    def __init__(self, given: Any, freq: str | None, metric: str | None, validates: bool = False) -> None:
        self._schedulers = _several(given)
        self._freq = freq
        self._metric = metric or _VAL_LOSS
        self._validates = validates
        self.follow_steps = freq == SCHEDULER_STEP_BATCH and bool(self._schedulers)
        has_plateau = any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers)
        lacks_metric = freq == SCHEDULER_STEP_EPOCH and metric is None and not validates
        if has_plateau and (lacks_metric or freq == SCHEDULER_STEP_BATCH):
            raise ValueError(
                f'`scheduler_step_freq="{freq}"`: `ReduceLROnPlateau` needs a metric of an epoch. Pass "epoch": in '
                "`fit` with validation data it goes by `val_loss`. Without, name a metric of `train_batch` in your "
                'operator, as in `scheduler_metric = "train_loss"`. In a loop of your own pass "manual" and call '
                '`trainer.update_scheduler(result["val_loss"])`.'
            )

    @classmethod
    def of(cls, operator: Any, info: Mapping[str, Any]) -> SchedulerSteps:
        """Make them for an operator that has a scheduler, and the `info` of an epoch."""
        return cls(*_scheduling(operator), validates=info.get(VALIDATES, False))

    def after_step(self, precision: Precision, step: BatchStep) -> None:
        """Called after each step of the optimizer, taken or not."""
        if self.follow_steps and not (precision.has_skipped() or step.left_out):
            for scheduler in self._schedulers:
                scheduler.step()

    def after_epoch(self, metrics: Mapping[str, Any], mean_of: MeanOf) -> None:
        """Called after the epoch.

        Args:
            metrics: Those of this worker.
            mean_of: The mean of one of them over all workers, who have to agree about a learning rate.
        """
        for scheduler in self._schedulers if self._freq == SCHEDULER_STEP_EPOCH else ():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
            elif (value := self._value(metrics, mean_of)) is not None:
                scheduler.step(value)

    def _value(self, metrics: Mapping[str, Any], mean_of: MeanOf) -> float | None:
        value = mean_of(self._metric, metrics)
        if value is None and not self._validates:
            raise ValueError(
                f"`scheduler_metric={self._metric!r}`: no worker reported a number with that name in this epoch. "
                f"`train_batch` reports {', '.join(f'`{each}`' for each in metrics)}."
            )
        return value


def plateaus_of(operator: Any) -> list[Plateau]:
    """Return those of the schedulers of `SchedulerSteps` that go by a metric of an epoch."""
    given, freq, metric = _scheduling(operator)
    found = _several(given) if freq == SCHEDULER_STEP_EPOCH else []
    return [(metric or _VAL_LOSS, each.step) for each in found if isinstance(each, ReduceLROnPlateau)]


def values_after_validation(
    names: Sequence[str], trained: Mapping[str, Any], validated: Mapping[str, Any]
) -> dict[str, float]:
    """Return the values for schedulers that wait for the validation: those of names that the training did not report.

    Args:
        names: The metrics that schedulers go by.
        trained: What the training call returned: schedulers that go by one of these have been stepped.
        validated: What the validation returned; names may also be those of the history.

    Raises:
        ValueError: Neither reported a number with such a name.
    """
    reported = {**{validation_name(name): value for name, value in validated.items()}, **validated}
    values: dict[str, float] = {}
    for name in names:
        if name in trained:
            continue
        value = as_number(reported.get(name))
        if value is None:
            raise ValueError(
                f"`ReduceLROnPlateau` goes by `{name}`, and neither training nor validation reported a number with "
                f"that name. There are {', '.join(f'`{each}`' for each in [*trained, *reported])}."
            )
        values[name] = float(value)
    return values


def _scheduling(operator: Any) -> tuple[Any, str | None, str | None]:
    return getattr(operator, "scheduler", None), operator.scheduler_step_freq, operator.scheduler_metric


def _several(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
