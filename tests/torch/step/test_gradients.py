"""Gradients of batches and of windows of them, on one worker."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd._text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.gradients import Gradients, OwnSteps, backward_with, step_with
from raysgd.worker.worker_callbacks import InstalledCallbacks


class Bench:
    """One parameter, whose gradient is that of `loss(value)`, and its optimizer."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.parallel = NoParallel(has_others=False)
        none: Any = None  # there are no bounds
        own_steps = OwnSteps(Precision(), StepOptions(), none, self.parallel.step, InstalledCallbacks())
        own_steps.watch([self.optimizer])
        self.own_steps = own_steps
        self.gradients = Gradients(Precision(), self.parallel, own_steps, Once())

    def batch(self, value: float, weight: float | None = None, **begin: Any) -> None:
        self.begin(**begin)
        self.backward(value, weight)
        self.apply()

    def open_call(self, window: int) -> None:
        self.parallel.step.open_call(window)
        self.own_steps.begin_call()

    def begin(self, **begin: Any) -> None:
        self.parallel.step.begin_batch(1.0, 2, 2, **begin)

    def backward(self, value: float, weight: float | None = None) -> None:
        loss = (self.parameter * value).sum()
        self.gradients.compute(loss, [self.optimizer], [], weight, lambda: [self.parameter])

    def apply(self) -> None:
        self.gradients.apply([self.optimizer])


def accumulating(value: float = 1.0) -> Bench:
    """In the second of three batches of a step, when the first one had this gradient."""
    bench = Bench()
    bench.open_call(3)
    bench.batch(value, is_last=False)
    bench.begin(is_last=False)
    return bench


def test_a_window_of_batches_is_one_step_with_their_mean() -> None:
    bench = Bench()
    bench.open_call(2)
    bench.batch(1.0, is_last=False)
    assert bench.parameter.item() == 0.0
    bench.batch(3.0, is_last=False)
    assert bench.parameter.item() == -2.0


def test_losses_of_a_batch_add_up_until_its_step() -> None:
    bench = Bench()
    bench.begin()
    bench.backward(1.0)
    bench.backward(2.0)
    bench.apply()
    assert bench.parameter.item() == -3.0
    bench.backward(4.0)
    bench.apply()
    assert bench.parameter.item() == -7.0


def test_losses_of_a_batch_add_up_each_with_its_weight() -> None:
    bench = Bench()
    for own in (3.0, 5.0):
        bench.begin()
        bench.backward(1.0, own)
        bench.backward(2.0, 7.0)
        bench.apply()
    assert bench.parameter.item() == -6.0


@pytest.mark.parametrize("steps_by_itself", [True, False])
def test_a_batch_begins_with_no_gradients(steps_by_itself: bool) -> None:
    bench = Bench()
    for value in (1.0, 2.0):
        bench.begin()
        bench.backward(value)
        if steps_by_itself:
            bench.optimizer.step()
            bench.backward(10 * value)
    bench.apply()
    assert bench.parameter.item() == (-23.0 if steps_by_itself else -2.0)


def test_each_call_of_a_closure_begins_with_no_gradients() -> None:
    bench = Bench()
    found = []

    def closure() -> None:
        bench.backward(1.0)
        bench.backward(2.0)
        assert bench.parameter.grad is not None
        found.append(bench.parameter.grad.item())

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            closure()
            super().step(closure)

    bench.optimizer = Twice([bench.parameter], lr=1.0)
    bench.gradients._own_steps.watch([bench.optimizer])
    bench.begin()
    bench.optimizer.step(closure)
    assert found == [3.0, 3.0]


@pytest.mark.parametrize(("is_global", "window", "words"), [(True, 1, "use one worker"), (False, 2, "omit")])
def test_a_closure_is_refused_where_a_step_takes_more_than_this_batch(is_global: bool, window: int, words: str) -> None:
    bench = Bench()
    bench.parallel.step.is_global, bench.parallel.step.window = is_global, window
    with pytest.raises(ValueError, match=rf"^`SGD.step` was given a closure.*{words}"):
        bench.optimizer.step(lambda: pytest.fail("it was called"))


def test_user_code_may_drop_what_it_has_computed_of_a_batch() -> None:
    bench = Bench()
    bench.begin()
    bench.backward(1.0)
    bench.optimizer.zero_grad()
    bench.backward(2.0)
    bench.apply()
    assert bench.parameter.item() == -2.0


def test_gradients_of_earlier_batches_that_are_gone_are_an_error() -> None:
    bench = accumulating()
    bench.optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=3`: the gradients of earlier .* `zero_grad\(\)`"):
        bench.backward(2.0)
    bench = accumulating()
    bench.backward(2.0)
    bench.optimizer.zero_grad()  # of this batch, and with it the others
    with pytest.raises(ValueError, match="multiply its loss by 0"):
        bench.batch(3.0, is_last=True)


def test_gradients_that_wait_are_stepped_by_the_rung_alone() -> None:
    bench = accumulating()
    with pytest.raises(ValueError, match=r"your code calls `step` of `SGD`, .* call `self.optimizer_step\(\)`"):
        bench.optimizer.step()
    bench.parallel.step.most_parts = 3
    with pytest.raises(ValueError, match="`micro_batch_size`: your code"):
        bench.optimizer.step()
    assert bench.parameter.item() == 0.0


def test_a_batch_of_a_window_has_one_step() -> None:
    bench = accumulating()
    bench.backward(1.0)
    bench.apply()
    with pytest.raises(ValueError, match=r"after `self\.optimizer_step` for the same batch and optimizer"):
        bench.backward(1.0)


def test_it_must_be_known_whether_an_optimizer_has_stepped() -> None:
    bench = Bench()
    bench.optimizer = SimpleNamespace(  # type: ignore[assignment]
        zero_grad=bench.optimizer.zero_grad, step=bench.optimizer.step, param_groups=bench.optimizer.param_groups
    )
    for value in (1.0, 2.0):
        bench.batch(value)
    assert bench.parameter.item() == -3.0
    bench.begin()
    bench.backward(1.0)
    with pytest.raises(ValueError, match="unknown whether `SimpleNamespace` has stepped"):
        bench.backward(1.0)


def test_weights_decide_how_much_the_batches_of_a_window_count() -> None:
    bench = Bench()
    bench.open_call(2)
    bench.batch(1.0, weight=3, is_last=False)
    bench.batch(5.0, weight=1, is_last=False)
    assert bench.parameter.item() == pytest.approx(-2.0)
    bench.batch(1.0, weight=0, is_last=False)
    bench.batch(5.0, weight=1, is_last=False)
    assert bench.parameter.item() == pytest.approx(-7.0)


def test_the_weights_of_a_window_are_for_all_of_its_batches_and_one_for_each() -> None:
    bench = accumulating()
    with pytest.raises(ValueError, match=r"`weight=` for some of the 3 batches .* for all of them, or for none"):
        bench.backward(1.0, 2.0)
    bench = Bench()
    bench.open_call(3)
    bench.begin(is_last=False)
    bench.backward(1.0, 2.0)
    bench.backward(1.0, 2.0)
    with pytest.raises(ValueError, match=r"`self.backward\(loss, weight=3.0\)`: another loss of this batch .*=2.0"):
        bench.backward(1.0, 3.0)


def test_a_loop_that_stops_in_a_window_steps_with_the_mean_of_what_it_has() -> None:
    bench = Bench()
    bench.open_call(3)
    bench.batch(1.0, is_last=False)
    bench.parallel.step.is_boundary = True
    bench.apply()
    assert bench.parameter.item() == pytest.approx(-1.0)


class Ranks(NoParallel):
    """Knows what the other ranks count, and the gradient that they have."""

    synchronizes = True

    def __init__(self, num_ranks: int) -> None:
        super().__init__(has_others=False)
        self.num, self.others, self.factor = num_ranks, 0.0, 1.0
        self.step.weighting = self.weighting  # type: ignore[method-assign]

    @property
    def num_ranks(self) -> int:
        return self.num

    def start_total(self, amount: float) -> Any:
        return lambda: amount + self.others

    def weighting(self, counted: Any) -> Any:
        """Does as the hooks do, but for the gradients."""
        self.factor = counted.factor()
        return nullcontext()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_batches_count_by_what_user_code_gives_them(window: int, num_ranks: int) -> None:
    """This rank's gradient is multiplied so that the mean of the ranks' is that over all weights."""
    weights = [(5.0, 1.0), (2.0, 0.0), (0.0, 7.0), (3.0, 3.0), (100.0, 1.0)]
    bench = Bench()
    parallel = bench.parallel = Ranks(num_ranks)
    bench.gradients._parallel = parallel
    bench.own_steps._step = parallel.step
    bench.open_call(window)
    for first in range(0, len(weights), window):
        taken = weights[first : first + window]
        before, parallel.others = bench.parameter.item(), 0.0
        for own, others in taken:
            parallel.others = (parallel.others if window > 1 else 0.0) + others
            bench.begin(is_last=(own, others) == weights[-1])
            bench.backward(1.0, own)
            bench.apply()
        whole = sum(map(sum, taken))
        change = before - bench.parameter.item()
        found = change if window > 1 else change * parallel.factor
        assert found == pytest.approx(num_ranks * sum(own for own, _ in taken) / whole)


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
    bench.gradients.compare_weight({"batch_weight": 3}, "Mine")
    assert not caplog.records
    for _ in range(2):
        bench.gradients.compare_weight({"batch_weight": 4}, "Mine")
    assert caplog.text.count("`Mine.train_batch` returned `batch_weight` 4") == 1


class Old:
    """An operator whose methods have the arguments of the first version."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backward(self, loss: torch.Tensor) -> None: ...

    def optimizer_step(self) -> None:
        self.calls.append("step")


def test_methods_of_old_are_called_as_they_want() -> None:
    old = Old()
    step_with(old, "optimizer")
    assert old.calls == ["step"]
    with pytest.raises(TypeError, match=r"`Old\.forward` returned a weight"):
        backward_with(old, torch.ones(1), 3)
