"""When schedulers step, and by what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.step.schedulers import schedulers_of, step_after_batch, step_after_epoch
from tests.torch.operators_for_tests import an_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no optimizer is needed here


def a_scheduler() -> StepLR:
    return StepLR(an_optimizer(), step_size=1)


def found(scheduler: Any, freq: str, metric: str | None = None) -> tuple[list[Any], list[Any]]:
    return schedulers_of(SimpleNamespace(scheduler=scheduler, scheduler_step_freq=freq, scheduler_metric=metric))


def no_mean(name: str, metrics: Any) -> None:
    return None


@pytest.mark.parametrize(("freq", "after_step", "after_epoch"), [("batch", 1, 1), ("epoch", 0, 1), ("manual", 0, 0)])
def test_the_frequency_says_when_they_step(freq: str, after_step: int, after_epoch: int) -> None:
    scheduler = a_scheduler()
    by_batch, by_epoch = found(scheduler, freq)
    step_after_batch(by_batch, Precision(), BatchStep())
    assert scheduler.last_epoch == after_step
    step_after_epoch(by_epoch, None, {}, no_mean, False)
    assert scheduler.last_epoch == after_epoch


def test_a_step_that_was_left_out_is_none_for_a_scheduler() -> None:
    class Skips(Precision):
        def has_skipped(self) -> bool:
            return True

    scheduler, idle = a_scheduler(), BatchStep()
    idle.leave_out(an_optimizer())
    step_after_batch([scheduler], Skips(), BatchStep())
    step_after_batch([scheduler], Precision(), idle)
    assert scheduler.last_epoch == 0


def test_a_plateau_is_told_the_mean_over_all_workers() -> None:
    plateau = ReduceLROnPlateau(an_optimizer())
    step_after_epoch([plateau], "train_loss", {"train_loss": 3.0}, lambda name, metrics: metrics[name] - 1, False)
    assert plateau.best == 2.0
    with pytest.raises(ValueError, match=r"`scheduler_metric='train_loss'`: no worker .* reports `accuracy`"):
        step_after_epoch([plateau], "train_loss", {"accuracy": 1.0}, no_mean, False)
