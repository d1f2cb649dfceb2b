"""Steps the registered learning rate schedulers after batches or epochs, with the metrics that they need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from raysgd.core.numbers.results import as_number, validation_name
from raysgd.torch.constants import SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH

logger = logging.getLogger(__name__)

MeanOf = Callable[[str, Mapping[str, Any]], float | None]
"""Function that gets a metric's name and this worker's metrics, and returns the metric's mean over all workers.

The function returns None if no worker has reported the metric.
"""

Plateau = tuple[str, Callable[[float], Any]]
"""For a `ReduceLROnPlateau` scheduler: the name of its metric, and its `step` method."""

_VAL_LOSS = "val_loss"


def schedulers_of(operator: Any, validates: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the schedulers that the default `train_epoch` steps, in two lists.

    The schedulers in the first list step after each optimizer step, those in the second list after the epoch.

    Args:
        operator: Operator with `scheduler_step_freq` and `scheduler_metric`. If it has no `scheduler`, none steps.
        validates: True if a validation follows the epoch, as in `fit`. Schedulers may use the validation's metrics.

    Raises:
        ValueError: A `ReduceLROnPlateau` has no metric, or would step after each batch.
    """
    schedulers, freq = _several(getattr(operator, "scheduler", None)), operator.scheduler_step_freq
    if (
        not schedulers
        and freq in (SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH)
        and operator._raysgd.registered.schedulers
    ):
        _warn_of_none(operator, freq)
    lacks_metric = freq == SCHEDULER_STEP_EPOCH and operator.scheduler_metric is None and not validates
    by_batch, by_epoch = (schedulers if freq == each else [] for each in (SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH))
    if (by_batch or lacks_metric) and any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        raise ValueError(
            f'`scheduler_step_freq="{freq}"`: `ReduceLROnPlateau` needs a metric of an epoch. Pass "epoch". In '
            "`fit` with validation data, it then follows `val_loss`. Without validation data, name a metric of "
            '`train_batch` in your operator, as in `scheduler_metric = "train_loss"`. In a loop of your own pass '
            '"manual" and call `trainer.update_scheduler(result["val_loss"])`.'
        )
    for each in (*by_batch, *by_epoch):
        if isinstance(each, CosineAnnealingLR) and each.last_epoch >= each.T_max:
            _warn_of_end(operator, each.T_max)
    return by_batch, by_epoch


def _warn_of_none(operator: Any, freq: str) -> None:
    """Warn once that registered schedulers do not step, because `train_epoch` steps `self.scheduler` only."""
    if operator.world_rank == 0 and operator._raysgd.once.is_first("scheduler"):
        logger.warning(
            '`scheduler_step_freq="%s"` steps `self.scheduler`, which is not set, so the registered schedulers do not '
            'step. Set `self.scheduler` in `setup`, or pass "manual" if you step them yourself.',
            freq,
        )


def _warn_of_end(operator: Any, length: int) -> None:
    """Warn once that a cosine schedule has ended although training continues.

    This happens, for example, if a resumed run has more epochs than the original run.
    """
    if operator.world_rank == 0 and operator._raysgd.once.is_first("cosine"):
        logger.warning(
            "`CosineAnnealingLR(T_max=%d)` has taken its %d steps, so the learning rate now climbs back to its initial "
            "value. Pass the number of steps of the whole run as `T_max`. A resumed run uses the `T_max` of its "
            "checkpoint. To train longer, start a new run in another folder after `trainer.load(path, "
            'parts=["models"])`',
            length,
            length,
        )


def step_after_epoch(
    schedulers: Sequence[Any], metric: str | None, metrics: Mapping[str, Any], mean_of: MeanOf, validates: bool
) -> None:
    """Step schedulers after an epoch.

    Args:
        schedulers: Schedulers to step.
        metric: Name of the metric that `ReduceLROnPlateau` schedulers get; None for `val_loss`.
        metrics: This worker's metrics of the epoch.
        mean_of: Function that returns the mean of a metric over all workers. With the mean, all workers choose the same
            learning rate.
        validates: True if a validation follows. A scheduler whose metric is missing then steps after the validation
            instead.

    Raises:
        ValueError: No worker has the metric, and no validation follows.
    """
    metric = metric or _VAL_LOSS
    for scheduler in schedulers:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        elif (value := mean_of(metric, metrics)) is not None:
            scheduler.step(value)
        elif not validates:
            raise ValueError(
                f"`scheduler_metric={metric!r}`: no worker reported a number with that name in this epoch. "
                f"`train_batch` reports {', '.join(f'`{each}`' for each in metrics)}."
            )


def plateaus_of(operator: Any) -> list[Plateau]:
    """Return the name of the metric and the `step` method of each `ReduceLROnPlateau` that is stepped after epochs."""
    is_by_epoch = operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH
    found = _several(getattr(operator, "scheduler", None)) if is_by_epoch else []
    metric = operator.scheduler_metric or _VAL_LOSS
    return [(metric, each.step) for each in found if isinstance(each, ReduceLROnPlateau)]


def values_after_validation(
    names: Sequence[str], trained: Mapping[str, Any], validated: Mapping[str, Any]
) -> dict[str, float]:
    """Return the metrics, by name, for the schedulers that step after the validation.

    Args:
        names: Names of the schedulers' metrics. A metric that the validation reports without the prefix `val_` is found
            with or without the prefix. A metric that it reports with the prefix must be named with the prefix.
        trained: Metrics of the training call. Schedulers that use one of these metrics have already stepped.
        validated: Metrics of the validation.

    Raises:
        ValueError: For one of these names, neither training nor validation reported a number.
    """
    reported = {**{validation_name(name): value for name, value in validated.items()}, **validated}
    values: dict[str, float] = {}
    for name in names:
        if name in trained:
            continue
        value = as_number(reported.get(name))
        if value is None:
            raise ValueError(
                f"`ReduceLROnPlateau` follows `{name}`, but neither training nor validation reported a number with "
                f"that name. Available: {', '.join(f'`{each}`' for each in [*trained, *reported])}."
            )
        values[name] = float(value)
    return values


def _several(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
