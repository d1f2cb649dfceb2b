"""Several backward passes for a batch, and gradients that user code clears: on two workers, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.torch.parallel.options import StepOptions
from tests.torch.lab import Experiment, run_alone, run_together
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration

CONFIG = {"num_samples": 69, "batch_size": 8}  # on two workers: four global batches of 16, and one of 3 + 2 samples
JOINT_BATCH = 16
LR = 0.05

Losses = list[torch.Tensor]


def penalty_of(model: Any) -> torch.Tensor:
    """A loss of some of the parameters."""
    weight, bias, *_ = model.parameters()
    penalty: torch.Tensor = weight.square().sum() + bias.square().sum()
    return penalty


class InRungs(LinearOperator):
    """Takes its steps with `backward` and `optimizer_step`."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        self.step_on(features, target)
        return {"num_samples": len(target)}

    def step_on(self, features: Any, target: Any) -> None:
        for loss in self.losses(self.model, features, target):
            self.backward(loss)
        self.optimizer_step()

    @staticmethod
    def losses(model: Any, features: Any, target: Any) -> Iterable[torch.Tensor]:
        yield torch.nn.functional.mse_loss(model(features), target)


class ClearsFirst(InRungs):
    def step_on(self, features: Any, target: Any) -> None:
        self.optimizer.zero_grad()
        super().step_on(features, target)


class ClearsLast(InRungs):
    def step_on(self, features: Any, target: Any) -> None:
        super().step_on(features, target)
        self.optimizer.zero_grad(set_to_none=False)


class OneAfterTheOther(InRungs):
    @staticmethod
    def losses(model: Any, features: Any, target: Any) -> Iterable[torch.Tensor]:
        yield torch.nn.functional.mse_loss(model(features), target)
        yield torch.nn.functional.l1_loss(model(2 * features), target)


class ForwardFirst(OneAfterTheOther):
    @staticmethod
    def losses(model: Any, features: Any, target: Any) -> Losses:
        return list(OneAfterTheOther.losses(model, features, target))


class WithWeight(ForwardFirst):
    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(loss, weight=self.num_samples)

    def step_on(self, features: Any, target: Any) -> None:
        self.num_samples = len(target)
        super().step_on(features, target)


class WithPenalty(InRungs):
    """The second loss needs no forward pass, so `DistributedDataParallel` exchanges nothing for it."""

    @staticmethod
    def losses(model: Any, features: Any, target: Any) -> Iterable[torch.Tensor]:
        yield from InRungs.losses(model, features, target)
        yield penalty_of(model)


class StepsByHand(WithPenalty):
    def optimizer_step(self, optimizer: Any = None) -> None:
        self.optimizer.step()


class StockBatch(LinearOperator):
    """Adds a penalty where the stock `train_batch` steps: no communication hook weights gradients here."""

    def make_model(self) -> torch.nn.Module:
        return InRungs.make_model(self)  # type: ignore[arg-type]

    def optimizer_step(self, optimizer: Any = None) -> None:
        self.backward(penalty_of(self.model))
        super().optimizer_step(optimizer)

    losses = WithPenalty.losses


class OptimizerEach(ForwardFirst):
    """A loss and an optimizer for each half of one model."""

    def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
        optimizers = [torch.optim.SGD(models[index].parameters(), lr=LR) for index in (0, 2)]
        return super().register(models=models, optimizers=optimizers, **parts)

    def step_on(self, features: Any, target: Any) -> None:
        losses = self.losses(self.model, features, target)
        for optimizer, loss in zip(self.optimizer, losses, strict=True):
            self.backward(loss, optimizer=optimizer)
            self.optimizer_step(optimizer)


def by_pytorch(operator_cls: Any) -> Any:
    """The same losses, and steps that the library has no part in."""

    class ByPyTorch(operator_cls):  # type: ignore[misc]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            losses = list(operator_cls.losses(self.model, batch[0], batch[2]))
            several = self.optimizer if operator_cls is OptimizerEach else [self.optimizer]
            for optimizer, loss in zip(several, losses if len(several) > 1 else [sum(losses)], strict=True):
                parameters = optimizer.param_groups[0]["params"]
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
                ):
                    parameter.grad = gradient
            for optimizer in several:
                optimizer.step()
            return {}

    return ByPyTorch


CASES: list[tuple[Any, tuple[int, ...]]] = [
    (ClearsFirst, (1,)),
    (ClearsLast, (1,)),
    (OneAfterTheOther, (1, 2)),
    (ForwardFirst, (1, 2)),
    (WithWeight, (1, 2)),
    (WithPenalty, (1, 2, 3)),
    (StepsByHand, (1,)),
    (StockBatch, (1,)),
    (OptimizerEach, (1,)),
]


@pytest.mark.parametrize(("operator_cls", "windows"), CASES)
def test_gradients_of_a_batch_add_up_as_in_plain_pytorch(
    two: TorchTrainer, operator_cls: Any, windows: tuple[int, ...]
) -> None:
    for window in windows:
        options = {"step_options": StepOptions(accumulate_grad_batches=window)}
        whole = {**CONFIG, "batch_size": JOINT_BATCH * window}
        [expected] = run_alone(Experiment(by_pytorch(operator_cls), whole)).model
        alone = run_alone(Experiment(operator_cls, {**CONFIG, "batch_size": JOINT_BATCH}, options=options))
        together = run_together(two, Experiment(operator_cls, CONFIG, options=options))
        for model in (*alone.model, *together.model):
            torch.testing.assert_close(dict(model), dict(expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(together.model[0], together.model[1], rtol=0, atol=0)
