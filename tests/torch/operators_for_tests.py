"""Operators that the tests train, small enough to be started by the dozen.

All of them read the same config, every key of which has a default; see `setting`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.core.engine.shared.types import World
from raysgd.torch import TrainingOperator
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.settings import OperatorContext, TorchSettings

NUM_FEATURES = 3

_DEFAULTS = {
    "num_samples": 20,
    "num_validation_samples": 13,
    "batch_size": 4,
    "shuffle": False,
    "drop_last": False,
    "optimizer": "sgd",
    "lr": 0.05,
    "seed": 0,
}


def setting(config: dict[str, Any], name: str) -> Any:
    return config.get(name, _DEFAULTS[name])


def dataset(num_samples: int, seed: int = 0) -> TensorDataset:
    """Features, number of the sample, and target; the number travels along so that a test can tell who saw what."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    numbers = torch.arange(num_samples)
    target = features.sum(dim=1, keepdim=True) + 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(features, numbers, target)


class LinearOperator(TrainingOperator):
    """A linear model on random samples, the stock loops, and a record of the samples seen."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(setting(config, "seed"))
        model = self.make_model()
        optimizers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=optimizers[setting(config, "optimizer")](model.parameters(), lr=setting(config, "lr")),
            criterion=torch.nn.MSELoss(),
        )
        self.seen: list[list[int]] = []
        self.register_data(
            train_loader=self.make_loader(dataset(setting(config, "num_samples")), shuffle=setting(config, "shuffle")),
            validation_loader=self.make_loader(dataset(setting(config, "num_validation_samples"), seed=1)),
        )

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Linear(NUM_FEATURES, 1)

    def make_loader(self, data: TensorDataset, shuffle: bool = False) -> Any:
        return DataLoader(
            data,
            batch_size=setting(self.config, "batch_size"),
            shuffle=shuffle,
            drop_last=setting(self.config, "drop_last"),
        )

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        features, numbers, target = batch
        self.seen.append(numbers.tolist())
        return super().prepare_batch((features, target))


class OwnModel(torch.nn.Module):
    """A class of its own around a layer: what `compile` compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(NUM_FEATURES, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features)


class OwnModelOperator(LinearOperator):
    def make_model(self) -> torch.nn.Module:
        return OwnModel()


class DropoutOperator(LinearOperator):
    """Draws random numbers in every step."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


class BatchNormOperator(LinearOperator):
    """Has buffers that training changes."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


class ScheduledOperator(LinearOperator):
    """Has the scheduler that its config makes, or one that halves the learning rate in every third step."""

    def register(self, **parts: Any) -> Any:
        make_scheduler = self.config.get("scheduler", partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5))
        self.scheduler = make_scheduler(parts["optimizers"])
        return super().register(**parts, schedulers=self.scheduler)[:3]


class OwnBatchOperator(LinearOperator):
    """Computes gradients by itself, past the rungs of the library."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, numbers, target = batch
        self.seen.append(numbers.tolist())
        loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(target)}


class OwnEpochOperator(LinearOperator):
    """Has a loop of its own, with the signature of the older generation."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        self.model.train()
        total, num_samples = 0.0, 0
        for features, numbers, target in iterator:
            self.seen.append(numbers.tolist())
            loss = self.criterion(self.model(features), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total, num_samples = total + loss.item() * len(target), num_samples + len(target)
        return {"train_loss": total / max(1, num_samples), "num_samples": num_samples}


def samples_seen(operator: LinearOperator) -> list[list[int]]:
    """For `apply_all_operators`: the numbers of the samples of each batch since the last time."""
    seen, operator.seen = operator.seen, []
    return seen


def equal(left: Any, right: Any) -> bool:
    """Whether two states or results are the same to the last bit; NaN is the same as NaN."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right) or (left != left and right != right)


CPU = torch.device("cpu")
ALONE = World(rank=0, size=1)
Operator = Any  # what user code hangs on an operator is unknown to type checkers


def make(
    operator_cls: type[TrainingOperator],
    config: dict[str, Any] | None = None,
    *,
    world: World = ALONE,
    precision: Precision | None = None,
    **options: Any,
) -> Operator:
    settings = TorchSettings(operator_cls, config or {}, **options)
    return operator_cls(config or {}, OperatorContext(settings, world, CPU, precision or Precision()))


class Bare(TrainingOperator):
    """Registers only when a test says so."""

    def setup(self, config: dict[str, Any]) -> None: ...


def a_model() -> torch.nn.Module:
    return torch.nn.Linear(NUM_FEATURES, 1)


def an_optimizer(model: torch.nn.Module | None = None, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or a_model()).parameters(), lr=lr)


def dataset_batches() -> Iterable[Any]:
    return DataLoader(dataset(6), batch_size=2)


def batches(num: int = 3, size: int = 2) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(size, NUM_FEATURES), torch.randn(size, 1)) for _ in range(num)]
