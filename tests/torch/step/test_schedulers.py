"""When schedulers step, and by what."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.step.schedulers import SchedulerSteps
from tests.torch.operators_for_tests import an_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no optimizer is needed here


def a_scheduler() -> StepLR:
    return StepLR(an_optimizer(), step_size=1)


def no_mean(name: str, metrics: Any) -> None:
    return None


@pytest.mark.parametrize(("freq", "after_step", "after_epoch"), [("batch", 1, 1), ("epoch", 0, 1), ("manual", 0, 0)])
def test_the_frequency_says_when_they_step(freq: str, after_step: int, after_epoch: int) -> None:
    scheduler = a_scheduler()
    steps = SchedulerSteps(scheduler, freq, None)
    steps.after_step(Precision(), BatchStep())
    assert scheduler.last_epoch == after_step
    steps.after_epoch({}, no_mean)
    assert scheduler.last_epoch == after_epoch


def test_several_step_together_and_none_is_fine() -> None:
    schedulers = [a_scheduler(), a_scheduler()]
    SchedulerSteps(schedulers, "epoch", None).after_epoch({}, no_mean)
    assert [each.last_epoch for each in schedulers] == [1, 1]
    SchedulerSteps(None, "epoch", None).after_epoch({}, no_mean)


def test_a_step_that_was_left_out_is_none_for_a_scheduler() -> None:
    class Skips(Precision):
        def has_skipped(self) -> bool:
            return True

    scheduler, idle = a_scheduler(), BatchStep()
    idle.leave_out(an_optimizer())
    SchedulerSteps(scheduler, "batch", None).after_step(Skips(), BatchStep())
    SchedulerSteps(scheduler, "batch", None).after_step(Precision(), idle)
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(("freq", "metric"), [("epoch", None), ("batch", "train_loss"), ("batch", None)])
def test_one_that_goes_by_a_metric_needs_one_of_an_epoch(freq: str, metric: str | None) -> None:
    plateau = ReduceLROnPlateau(an_optimizer())
    with pytest.raises(ValueError, match=r"`ReduceLROnPlateau` needs a metric of an epoch"):
        SchedulerSteps([a_scheduler(), plateau], freq, metric)
    SchedulerSteps(plateau, "manual", None)


def test_a_plateau_is_told_the_mean_over_all_workers() -> None:
    plateau = ReduceLROnPlateau(an_optimizer())
    steps = SchedulerSteps(plateau, "epoch", "train_loss")
    steps.after_epoch({"train_loss": 3.0}, lambda name, metrics: metrics[name] - 1)
    assert plateau.best == 2.0
    with pytest.raises(ValueError, match=r"`scheduler_metric='train_loss'`: no worker .* reports `accuracy`"):
        steps.after_epoch({"accuracy": 1.0}, no_mean)
