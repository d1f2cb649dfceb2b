"""Gradients of batches and of windows of them, on one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd._once import Once
from raysgd.torch.batch_weights import BatchWeights
from raysgd.torch.gradients import Gradients, backward_with, step_with
from raysgd.torch.options import StepOptions
from raysgd.torch.own_steps import OwnSteps
from raysgd.torch.parallel import NoParallel
from raysgd.torch.precision import Precision


class Bench:
    """One parameter, whose gradient is that of `loss(value)`, and its optimizer."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.parallel = NoParallel(has_others=False)
        own_steps = OwnSteps(Precision(), StepOptions(), bounds=None)  # type: ignore[arg-type]  # without bounds
        weights = BatchWeights(self.parallel, Once())
        self.gradients = Gradients(Precision(), self.parallel, weights, own_steps, Once())

    def batch(self, value: float, weight: float | None = None, **begin: Any) -> None:
        self.parallel.step.begin(1.0, 2, 2, **begin)
        loss = (self.parameter * value).sum()
        self.gradients.compute(loss, [self.optimizer], [], weight, lambda: [self.parameter])
        self.gradients.apply([self.optimizer])


def test_each_batch_is_a_step_with_a_gradient_of_its_own() -> None:
    bench = Bench()
    bench.batch(1.0)
    bench.batch(2.0)
    assert bench.parameter.item() == -3.0


def test_a_window_of_batches_is_one_step_with_their_mean() -> None:
    bench = Bench()
    bench.parallel.step.open_call(2)
    bench.batch(1.0, is_last=False)
    assert bench.parameter.item() == 0.0
    bench.batch(3.0, is_last=False)
    assert bench.parameter.item() == -2.0


def test_weights_decide_how_much_the_batches_of_a_window_count() -> None:
    bench = Bench()
    bench.parallel.step.open_call(2)
    bench.batch(1.0, weight=3, is_last=False)
    bench.batch(5.0, weight=1, is_last=False)
    assert bench.parameter.item() == pytest.approx(-2.0)


def test_gradients_of_bystanders_are_cleared_too() -> None:
    bench = Bench()
    other = torch.nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    bystander = torch.optim.SGD([other], lr=1.0)
    bench.gradients.compute(bench.parameter.sum(), [bench.optimizer], [bystander], None, lambda: [])
    assert other.grad is None


def test_where_nothing_counts_there_is_no_gradient_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for _ in range(2):
        bench.batch(1.0, weight=0)
    assert (bench.parameter.item(), bench.parameter.grad) == (0.0, None)
    assert caplog.text.count("nothing counts in a step") == 1


def test_a_weight_of_metrics_that_no_backward_pass_had_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.batch(1.0, weight=3)
    for metrics in (None, {}, {"batch_weight": 3}):
        bench.gradients.compare_weight(metrics, "Mine")
    assert not caplog.records
    for _ in range(2):
        bench.gradients.compare_weight({"batch_weight": 4}, "Mine")
    assert caplog.text.count("`Mine.train_batch` returned `batch_weight` 4") == 1


class Old:
    """An operator whose methods have the arguments of the first version."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append("backward")

    def optimizer_step(self) -> None:
        self.calls.append("step")


def test_methods_of_old_are_called_as_they_want() -> None:
    old = Old()
    backward_with(old, torch.ones(1), None)
    step_with(old, "optimizer")
    assert old.calls == ["backward", "step"]
    with pytest.raises(TypeError, match=r"`Old\.forward` returned a weight"):
        backward_with(old, torch.ones(1), 3)
