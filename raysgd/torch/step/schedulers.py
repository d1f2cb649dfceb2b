"""The learning-rate schedulers that the library steps, when, and by what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from raysgd._numbers.metric_names import validation_name
from raysgd._numbers.results import as_number
from raysgd.torch.constants import SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.batch import Batch

logger = logging.getLogger(__name__)

MeanOf = Callable[[str, Mapping[str, Any]], float | None]
"""Name and metrics of one worker -> the mean over all workers; None where there is none."""

Plateau = tuple[str, Callable[[float], Any]]
"""The metric that a scheduler goes by, and what steps it."""

_VAL_LOSS = "val_loss"


def schedulers_of(operator: Any, validates: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the schedulers that the stock `train_epoch` steps: after each step of the optimizer, and after the epoch.

    Args:
        operator: Has them, and says when they step and by what.
        validates: Whether a metric that this epoch lacks may be one of the validation that follows, as in `fit`.

    Raises:
        ValueError: One of them goes by a metric, and no metric is named, or it would be asked for after each batch.
    """
    schedulers, freq = _several(operator.scheduler), operator.scheduler_step_freq
    lacks_metric = freq == SCHEDULER_STEP_EPOCH and operator.scheduler_metric is None and not validates
    by_batch, by_epoch = (schedulers if freq == each else [] for each in (SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH))
    if (by_batch or lacks_metric) and any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        raise ValueError(
            f'`scheduler_step_freq="{freq}"`: `ReduceLROnPlateau` needs a metric of an epoch. Pass "epoch": in '
            "`fit` with validation data it goes by `val_loss`. Without, name a metric of `train_batch` in your "
            'operator, as in `scheduler_metric = "train_loss"`. In a loop of your own pass "manual" and call '
            '`trainer.update_scheduler(result["val_loss"])`.'
        )
    for each in (*by_batch, *by_epoch):
        if isinstance(each, CosineAnnealingLR) and each.last_epoch >= each.T_max:
            _warn_of_end(operator, each.T_max)
    return by_batch, by_epoch


def _warn_of_end(operator: Any, length: int) -> None:
    """Say once that a cosine is over, and the training is not: a run that resumes may have more epochs than before."""
    if operator.world_rank == 0 and operator._raysgd.once.is_first("cosine"):
        logger.warning(
            "`CosineAnnealingLR(T_max=%d)` has taken its %d steps: from here on the learning rate climbs back to its "
            "start. Pass the steps of the whole run as `T_max`. A run that resumes keeps the `T_max` of its file; to "
            'train longer, begin a new one in another folder after `trainer.load(path, parts=["models"])`',
            length,
            length,
        )


def step_after_batch(schedulers: Sequence[Any], precision: Precision, batch: Batch) -> None:
    """Step them after a step of the optimizer, if that was taken."""
    if not (precision.has_skipped() or batch.left_out):
        for scheduler in schedulers:
            scheduler.step()


def step_after_epoch(
    schedulers: Sequence[Any], metric: str | None, metrics: Mapping[str, Any], mean_of: MeanOf, validates: bool
) -> None:
    """Step them after an epoch.

    Args:
        schedulers: The schedulers.
        metric: The name of what they may go by.
        metrics: Those of this worker.
        mean_of: The mean of one of them over all workers, who have to agree about a learning rate.
        validates: As in `schedulers_of`.

    Raises:
        ValueError: No worker has the metric.
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
    """Return those of the schedulers that go by a metric of an epoch, where the library steps them after it."""
    is_by_epoch = operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH
    found = _several(getattr(operator, "scheduler", None)) if is_by_epoch else []
    metric = operator.scheduler_metric or _VAL_LOSS
    return [(metric, each.step) for each in found if isinstance(each, ReduceLROnPlateau)]


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


def _several(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
