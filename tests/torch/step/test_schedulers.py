"""When schedulers step, and by what."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from raysgd._text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.step.schedulers import IdleSchedulers, SchedulerSteps
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


class TestIdleSchedulers:
    """Those that are registered and that nothing steps."""

    def warnings(self, caplog: pytest.LogCaptureFixture, schedulers: Any, **operator: Any) -> int:
        idle, once = IdleSchedulers(schedulers), Once()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                idle.warn(SimpleNamespace(**{"scheduler_step_freq": "epoch", "world_rank": 0, **operator}), once)
        return len(caplog.records)

    def test_the_user_is_warned_of_them_once(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.warnings(caplog, [a_scheduler()]) == 1

    @pytest.mark.parametrize(
        "operator", [{"scheduler_step_freq": "manual"}, {"scheduler": torch.nn.Identity()}, {"world_rank": 1}]
    )
    def test_the_user_is_not_warned_of_what_is_meant(
        self, operator: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.warnings(caplog, [a_scheduler()], **operator) == 0

    def test_there_is_nothing_to_say_without_any(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.warnings(caplog, []) == 0

    def test_one_that_has_stepped_is_not_idle(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler = a_scheduler()
        idle = IdleSchedulers([scheduler])
        scheduler.step()
        idle.warn(SimpleNamespace(scheduler_step_freq="epoch", world_rank=0), Once())
        assert not caplog.records
