"""Gradients of batches and of windows of them, on one worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.core.engine.shared.types import World
from raysgd.core.text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel import undo
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.step.gradients import Gradients, backward_with
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import BatchOptions
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.step_loop import StepRules
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks
from tests.torch.operators_for_tests import LinearOperator, dataset
from tests.torch.planning import begin_next


class Bench:
    """One parameter, whose gradient is that of `loss(value)`, and its optimizer."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.sync = GradientSync(has_others=False)
        operator = SimpleNamespace(_raysgd=SimpleNamespace(trained_parameters=lambda: [self.parameter]))
        parts = operator, Precision(), self.sync, StepOptions(), InstalledCallbacks()
        self.gradients = Gradients(*parts, once=Once())
        self.gradients.watch([self.optimizer])

    def batch(self, value: float, weight: float | None = None, **begin: Any) -> None:
        self.begin(**begin)
        self.backward(value, weight)
        self.apply()

    def open_call(self, window: int) -> None:
        self.sync.leg = Leg(StepRules(accumulate=window))

    def begin(self, is_last: bool = True) -> None:
        leg = self.sync.leg
        self.number = 1 if leg.plan.ends_step else self.number + 1
        begin_next(leg, 2, 2, is_last=is_last, number=self.number)

    def backward(self, value: float, weight: float | None = None) -> None:
        loss = (self.parameter * value).sum()
        self.gradients.backward(loss, self.optimizer, weight)

    def apply(self) -> None:
        self.gradients.apply(self.optimizer)


def accumulating(value: float = 1.0) -> Bench:
    """In the second of three batches of a step, when the first one had this gradient."""
    bench = Bench()
    bench.open_call(3)
    bench.batch(value, is_last=False)
    bench.begin(is_last=False)
    return bench


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
    bench.gradients.watch([bench.optimizer])
    bench.begin()
    bench.optimizer.step(closure)
    assert found == [3.0, 3.0]


@pytest.mark.parametrize(("is_global", "window", "words"), [(True, 1, "use one worker"), (False, 2, "omit")])
def test_a_closure_is_refused_where_a_step_takes_more_than_this_batch(is_global: bool, window: int, words: str) -> None:
    bench = Bench()
    bench.sync.leg = Leg(StepRules(is_global, window))
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
    bench.sync.leg.rules = StepRules(micro_batches=3)
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


def test_a_backward_that_takes_no_weight_is_told_how() -> None:
    old = SimpleNamespace(backward=lambda loss: None)
    with pytest.raises(
        TypeError, match=r"`SimpleNamespace\.forward` returned a weight.*`def backward\(self, loss, \*\*opt"
    ):
        backward_with(old, torch.ones(1), 3)


# ------------------------------------------------------------------------------------------------ a user's own step

NUM_SAMPLES, SIZE, BOUND = 20, 8, 0.1  # steps of 8, 8 and 4 samples


class Clips(LinearOperator):
    """Clips in its own `optimizer_step`, and keeps the norms that it saw."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"num_samples": NUM_SAMPLES, **config})
        self.norms: list[float] = []
        if self.use_fp16:  # the first scale of PyTorch is too large for these gradients
            self._amp_scaler.load_state_dict({**self._amp_scaler.state_dict(), "scale": 256.0})

    def optimizer_step(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), BOUND)
        self.norms.append(norm.item())
        super().optimizer_step()


class ClipsInItsBatch(Clips):
    """Calls its own `optimizer_step` from its own `train_batch`, for each part of a batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


class AddsInItsStep(Clips):
    """Computes the same gradients again where they were averaged already."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.batch = batch
        return super().train_batch(batch, batch_info)

    def optimizer_step(self) -> None:
        features, _, target = self.batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        self.backward(loss)
        super().optimizer_step()


def train(operator_cls: type[Clips], **spec: Any) -> Clips:
    runner = TorchRunner(TorchSettings(operator_cls, spec.pop("config", {}), **spec), World(rank=0, size=1))
    runner.setup()
    runner.train_epoch(EpochRequest(None, {}, False, seed=0))
    assert isinstance(runner.operator, Clips)
    return runner.operator


def clipped_by_pytorch(times: int = 1) -> tuple[list[float], torch.Tensor]:
    """Return the norms before clipping and the weights of plain PyTorch."""
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(train(Clips, config={"num_samples": 0}).model.state_dict())
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.05), []
    for features, _, target in torch.utils.data.DataLoader(dataset(NUM_SAMPLES), SIZE):
        optimizer.zero_grad()
        (times * torch.nn.functional.mse_loss(model(features), target)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND).item())
        optimizer.step()
    return norms, model.weight.detach()


@pytest.mark.parametrize("operator_cls", [Clips, ClipsInItsBatch])
@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize(
    "spec",
    [
        {"config": {"batch_size": SIZE}},
        {"config": {"batch_size": SIZE}, "batch_options": BatchOptions(split_batches=True, micro_batch_size=3)},
        {"config": {"batch_size": 4}, "step_options": StepOptions(accumulate_grad_batches=2)},
    ],
)
def test_an_own_step_sees_the_mean_gradients_of_its_step(
    operator_cls: type[Clips], precision: str | None, spec: dict[str, Any]
) -> None:
    operator, (norms, weight) = train(operator_cls, precision=precision, **spec), clipped_by_pytorch()
    tolerance = 1e-5 if precision is None else 2e-2
    assert operator.norms == pytest.approx(norms, rel=tolerance)
    torch.testing.assert_close(operator.model.weight.detach(), weight, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_an_own_step_may_add_gradients(precision: str | None) -> None:
    operator = train(AddsInItsStep, precision=precision, config={"batch_size": SIZE})
    assert operator.norms == pytest.approx(clipped_by_pytorch(times=2)[0], rel=1e-5 if precision is None else 2e-2)


def test_an_own_step_may_leave_a_step_out_in_fp16() -> None:
    class Leaves(Clips):
        def optimizer_step(self) -> None:
            if self.global_step == 1:
                super().optimizer_step()
            else:
                self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item())

    left, norms = train(Leaves, precision="fp16", config={"batch_size": SIZE}).norms, clipped_by_pytorch()[0]
    assert left[0] == pytest.approx(norms[0], rel=2e-2)
    assert all(norm < 10 for norm in left)


@pytest.mark.parametrize("is_last", [True, False])
def test_accumulated_gradients_that_user_code_changes_outside_its_step_are_an_error(is_last: bool) -> None:
    bench = Bench()
    bench.open_call(2)
    bench.begin(is_last=False)
    bench.backward(1.0)
    if is_last:
        bench.apply()
        bench.begin(is_last=False)
        bench.backward(1.0)
    torch.nn.utils.clip_grad_norm_([bench.parameter], 0.1)
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=2`: gradients were changed .* `optimizer_step`"):
        bench.apply() if is_last else bench.batch(1.0, is_last=False)


def test_a_step_waits_once_for_its_sums_and_again_for_those_of_user_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, num_started, waits = Bench(), [0], list[int]()
    bench.sync.waits = True  # as over NCCL
    monkeypatch.setattr(undo, "_num_collectives", lambda: num_started[0])
    monkeypatch.setattr(undo, "wait_for_collectives", lambda: waits.append(num_started[0]))

    def took_step(*, by_library: bool, gathers: bool = False) -> list[int]:
        waits.clear()
        bench.begin()
        bench.backward(1.0) if by_library else bench.parameter.sum().backward()
        num_started[0] += gathers
        bench.optimizer.step()
        bench.sync.leg.renew_record()
        return [*waits]

    assert took_step(by_library=True) == [0]
    assert took_step(by_library=False) == [0]
    assert took_step(by_library=True, gathers=True) == [0, 1]
