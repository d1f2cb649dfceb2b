"""Which learning-rate schedulers the library steps, when, and by what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd._once import Once
from raysgd.torch.constants import SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH
from raysgd.torch.precision import Precision
from raysgd.torch.step import Step

logger = logging.getLogger(__name__)

MeanOf = Callable[[str, Mapping[str, Any]], float | None]
"""Name and metrics of one worker -> the mean over all workers; None where there is none."""


class SchedulerSteps:
    """The schedulers of one epoch of the stock `train_epoch`.

    Args:
        given: `self.scheduler` of the operator: one, several, or None.
        freq: `scheduler_step_freq` of the trainer.
        metric: `scheduler_metric` of the operator.

    Raises:
        ValueError: One of them goes by a metric, and no metric is named, or it would be asked for after each batch.
    """

    def __init__(self, given: Any, freq: str | None, metric: str | None) -> None:
        self._schedulers = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        self._freq = freq
        self._metric = metric
        has_plateau = any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers)
        lacks_metric = freq == SCHEDULER_STEP_EPOCH and metric is None
        if has_plateau and (lacks_metric or freq == SCHEDULER_STEP_BATCH):
            raise ValueError(
                f'`scheduler_step_freq="{freq}"`: `ReduceLROnPlateau` needs a metric of an epoch. Pass "epoch", and '
                'name a metric of `train_batch` in your operator, as in `scheduler_metric = "train_loss"`. To go by '
                'a metric of the validation, pass "manual" and call `trainer.update_scheduler(result["val_loss"])`.'
            )

    def after_step(self, precision: Precision, step: Step) -> None:
        """Called after each step of the optimizer, taken or not."""
        if self._freq != SCHEDULER_STEP_BATCH or not self._schedulers:
            return
        if not (precision.has_skipped() or step.is_idle):
            for scheduler in self._schedulers:
                scheduler.step()

    def after_epoch(self, metrics: Mapping[str, Any], mean_of: MeanOf) -> None:
        """Called after the epoch.

        Args:
            metrics: Those of this worker.
            mean_of: The mean of one of them over all workers, who have to agree about a learning rate.
        """
        for scheduler in self._schedulers if self._freq == SCHEDULER_STEP_EPOCH else ():
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self._value(metrics, mean_of))
            else:
                scheduler.step()

    def _value(self, metrics: Mapping[str, Any], mean_of: MeanOf) -> float:
        value = mean_of(str(self._metric), metrics)
        if value is None:
            raise ValueError(
                f"`scheduler_metric={self._metric!r}`: no worker reported a number with that name in this epoch. "
                f"`train_batch` reports {', '.join(f'`{each}`' for each in metrics)}."
            )
        return value


class IdleSchedulers:
    """Notices registered schedulers that are not stepped in an epoch."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers
        self._before = self._progress()

    def _progress(self) -> list[Any]:
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._schedulers]

    def warn(self, operator: Any, once: Once) -> None:
        """Warns once about schedulers that are never stepped, if the library is to step them."""
        is_ours = operator.scheduler_step_freq in (SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH)
        is_idle = any(each is not None for each in self._before) and self._progress() == self._before
        if not is_ours or not is_idle or getattr(operator, "scheduler", None) is not None:
            return
        if once.is_first("idle schedulers") and operator.world_rank == 0:
            logger.warning(
                "no scheduler was stepped in this epoch: the library steps `self.scheduler`, which is not set. Set it "
                "in `setup` to what `register` returns for `schedulers`, one or a list. To step it yourself, pass "
                '`scheduler_step_freq="manual"`'
            )
