"""The trainer's options and a `train_batch` of plain PyTorch: they act, or are missed with an error or a warning."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from raysgd.core.engine.shared.types import World
from raysgd.torch import TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.messages.epochs import EpochRequest
from tests.torch.operators_for_tests import LinearOperator

BOUND = 0.01
LR = 0.5
NUM_STEPS = 20


class Plain(LinearOperator):
    """A loop as tutorials have it, with steps that a test can compare with a bound."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"lr": LR, **config})
        self.norms: list[float] = []

    def loss_of(self, batch: Any) -> torch.Tensor:
        features, _, target = batch
        loss: torch.Tensor = 10 * self.criterion(self.model(features), target)
        return loss

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        before = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        self.optimizer.zero_grad()
        loss = self.step_on(batch)
        after = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        self.norms.append(float((after - before).norm()) / LR)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}

    def step_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return loss


class WithClosure(Plain):
    def step_on(self, batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = self.loss_of(batch)
            loss.backward()
            return loss

        loss: torch.Tensor = self.optimizer.step(closure)
        return loss


class WithClosureByName(WithClosure):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        step = self.optimizer.step
        self.optimizer.step = lambda closure: step(closure=closure)


class WithScaler(Plain):
    def step_on(self, batch: Any) -> torch.Tensor:
        with self.autocast():
            loss = self.loss_of(batch)
        self._amp_scaler.scale(loss).backward()
        self._amp_scaler.step(self.optimizer)
        self._amp_scaler.update()
        return loss


class WithFusedOptimizer(WithScaler):
    def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
        fused = torch.optim.SGD(models.parameters(), lr=LR, fused=True)
        return super().register(models=models, optimizers=fused, **parts)


class WithRungs(Plain):
    def step_on(self, batch: Any) -> torch.Tensor:
        with self.autocast():
            loss = self.loss_of(batch)
        self.backward(loss)
        self.optimizer_step()
        return loss


def make_runner(operator_cls: type[TrainingOperator], **spec: Any) -> TorchRunner:
    runner = TorchRunner(TorchSettings(operator_cls, spec.pop("config", {}), **spec), World(rank=0, size=1))
    runner.setup()
    return runner


def train(runner: TorchRunner, num_steps: int | None = None) -> None:
    runner.train_epoch(EpochRequest(num_steps, {}, False, seed=0))


# ------------------------------------------------------------------------------------------------ clipping


def clipped(operator_cls: type[Plain], precision: str | None = None, **options: float) -> Plain:
    runner = make_runner(operator_cls, step_options=StepOptions(**options), precision=precision)
    train(runner, NUM_STEPS)
    operator = runner.operator
    assert isinstance(operator, Plain)
    return operator


LOOPS = [
    (Plain, None),
    (WithClosure, None),
    (WithClosureByName, None),
    (WithScaler, "fp16"),
    (WithScaler, "bf16"),
    (WithFusedOptimizer, "fp16"),
    (WithRungs, None),
    (WithRungs, "fp16"),
]


@pytest.mark.parametrize(("operator_cls", "precision"), LOOPS)
def test_gradients_have_a_norm_within_the_bound_whoever_steps(operator_cls: type[Plain], precision: str | None) -> None:
    operator = clipped(operator_cls, precision, clip_grad_norm=BOUND)
    assert len(operator.norms) == NUM_STEPS
    taken = [norm for norm in operator.norms if norm]  # fp16 leaves steps out while its scale is too large
    assert len(taken) > NUM_STEPS / 2
    assert taken == pytest.approx([BOUND] * len(taken), rel=1e-2)


@pytest.mark.parametrize(("operator_cls", "precision"), LOOPS)
def test_the_numbers_of_gradients_are_within_the_bound_too(operator_cls: type[Plain], precision: str | None) -> None:
    operator = clipped(operator_cls, precision, clip_grad_value=BOUND)
    assert 0 < max(operator.norms) <= 2 * BOUND * 1.001, "of three weights and a bias"


@pytest.mark.parametrize("base", [Plain, WithRungs, WithClosure])
def test_the_rung_for_clipping_is_called_once_in_each_step(base: type[Plain]) -> None:
    class Noting(base):  # type: ignore[misc, valid-type]
        num_clipped = 0

        def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> None:
            self.num_clipped += 1
            super().clip_grad_norm(parameters, max_norm)

    assert clipped(Noting, clip_grad_norm=BOUND).num_clipped == NUM_STEPS  # type: ignore[attr-defined]


def test_without_a_bound_nothing_is_clipped() -> None:
    assert clipped(Plain).norms[0] > 1


class Homemade:
    """Steps, and is no optimizer of PyTorch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= LR * parameter.grad

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("base", [Plain, WithRungs])
def test_an_optimizer_that_cannot_be_watched_is_clipped_by_the_rung_or_missed(base: type[Plain]) -> None:
    class WithHomemade(base):  # type: ignore[misc, valid-type]
        def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
            return super().register(models=models, optimizers=Homemade(models), **parts)

    if base is WithRungs:
        assert max(clipped(WithHomemade, clip_grad_norm=BOUND).norms) == pytest.approx(BOUND, rel=1e-3)
        return
    with pytest.raises(ValueError, match=r"had no effect: `WithHomemade` .* Call `self.optimizer_step\(\)`"):
        clipped(WithHomemade, clip_grad_norm=BOUND)


# ------------------------------------------------------------------------------------------------ precision


class WithoutAutocast(Plain):
    def step_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.backward(loss)
        self.optimizer_step()
        return loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("operator_cls", [Plain, WithClosure])
def test_a_precision_without_effect_is_an_error_before_the_first_step(
    operator_cls: type[Plain], precision: str
) -> None:
    runner = make_runner(operator_cls, precision=precision)
    before = [parameter.clone() for parameter in runner.operator.model.parameters()]  # type: ignore[attr-defined]
    for _ in range(2):
        runner.validate(EpochRequest(None, {}, False, seed=0))  # the stock one computes as it should
        with pytest.raises(ValueError, match=rf'`precision="{precision}"` had no effect: .* `with self.autocast\(\):`'):
            train(runner)
    after = runner.operator.model.parameters()  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class StepsAhead(WithRungs):
    """Steps without gradients ahead of all others, as some programs do for their schedulers."""

    def train_epoch(self, iterator: Iterable[Any], **options: Any) -> dict[str, Any]:  # type: ignore[override]
        self.optimizer.zero_grad()
        self.optimizer.step()
        return super().train_epoch(iterator, **options)


@pytest.mark.parametrize(
    ("operator_cls", "options"),
    [
        (LinearOperator, {"precision": "bf16"}),
        (StepsAhead, {"precision": "bf16"}),
        (WithScaler, {"precision": "fp16"}),
        (WithRungs, {"precision": "bf16"}),
        (Plain, {"precision": "fp32"}),
        (Plain, {"use_fp16": True}),
    ],
)
def test_a_precision_with_effect_is_none_and_the_flag_of_old_allows_every_loop(
    operator_cls: type[TrainingOperator], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(operator_cls, **options)
    for _ in range(2):
        train(runner)
    assert not caplog.records


def test_a_backward_pass_of_the_library_alone_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(WithoutAutocast, precision="bf16")
    for _ in range(2):
        train(runner)
    assert [record.message[:32] for record in caplog.records] == ['`precision="bf16"` had no effect']


# ------------------------------------------------------------------------------------------------ schedulers


class Scheduled(LinearOperator):
    """Registers two schedulers, which `make` makes, in a container."""

    scheduler_metric = None

    def register(self, **parts: Any) -> Any:
        schedulers = self.config["container"](self.config["make"](parts["optimizers"]) for _ in range(2))
        *others, self.scheduler = super().register(**parts, schedulers=schedulers)
        return others

    @property
    def steps(self) -> list[int]:
        return [scheduler.last_epoch for scheduler in self.scheduler]


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize(("freq", "steps"), [("epoch", [1, 1]), ("batch", [5, 5]), ("manual", [0, 0])])
def test_several_schedulers_are_stepped_each(freq: str, steps: list[int], container: type) -> None:
    config = {"container": container, "make": partial(StepLR, step_size=1)}
    runner = make_runner(Scheduled, config=config, scheduler_step_freq=freq)
    train(runner)
    assert runner.operator.steps == steps  # type: ignore[attr-defined]


class OnPlateau(Scheduled):
    """Reports a metric that gets worse."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "score": float(batch_info["global_step"])}


def on_plateau(metric: str | None, freq: str = "epoch") -> TorchRunner:
    config = {"container": list, "make": partial(ReduceLROnPlateau, patience=0)}
    runner = make_runner(OnPlateau, config=config, scheduler_step_freq=freq)
    runner.operator.scheduler_metric = metric
    return runner


def test_a_scheduler_may_go_by_a_metric_of_the_epoch() -> None:
    runner = on_plateau("score")
    for _ in range(2):
        train(runner)
    operator = runner.operator
    assert isinstance(operator, OnPlateau)
    assert [scheduler.best for scheduler in operator.scheduler] == [2.0, 2.0], "the mean over 0, 1, 2, 3, 4"
    assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1 * 0.1)


@pytest.mark.parametrize(("metric", "freq"), [(None, "epoch"), (None, "batch"), ("score", "batch")])
def test_a_scheduler_that_needs_a_metric_and_has_none_is_an_error_before_the_first_step(
    metric: str | None, freq: str
) -> None:
    runner = on_plateau(metric, freq)
    with pytest.raises(ValueError, match=r'needs a metric of an epoch.*`scheduler_metric = "train_loss"`'):
        train(runner)
    assert not runner.operator.seen  # type: ignore[attr-defined]


def test_a_metric_that_nobody_reports_is_an_error_that_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"`scheduler_metric='val_loss'`: .* `train_loss`, `last_train_loss`, `score`"):
        train(on_plateau("val_loss"))


def test_a_scheduler_that_needs_a_metric_can_be_stepped_by_the_trainer() -> None:
    runner = on_plateau(None, "manual")
    train(runner)
    runner.update_schedulers(3.0)
    assert runner.operator.steps == [1, 1]  # type: ignore[attr-defined]
