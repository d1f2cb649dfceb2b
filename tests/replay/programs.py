"""Programs that runs are replayed of, each with something that a replay could get wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.torch import TrainingOperator

NUM_SAMPLES = 120


class Points(Dataset[Any]):
    """Points with a class, and noise from three generators in each reading."""

    def __init__(self, noise: float = 0.0, bad: dict[str, str] | None = None, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(num_samples, 6, generator=generator)
        self.target = (self.features[:, 0] > 0).long() + (self.features[:, 1] > 0.5).long()
        self.noise = noise
        for index, kind in (bad or {}).items():
            if kind == "nan":
                self.features[int(index)] = torch.nan
            elif kind == "scale":
                self.features[int(index)] *= 1000
            else:
                self.target[int(index)] = (self.target[int(index)] + 1 + (self.target[int(index)] == 1)) % 3

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        noise = self.noise * (torch.rand(6) + np.random.rand() + random.random())
        return self.features[index] + noise, self.target[index]


class Plain(TrainingOperator):
    """A small network with SGD."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = self.make_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=self.make_optimizer(model), criterion=torch.nn.CrossEntropyLoss()
        )
        data = Points(config.get("noise", 0.0), config.get("bad"), config.get("num_samples", NUM_SAMPLES))
        self.register_data(
            train_loader=DataLoader(data, batch_size=config.get("batch_size", 12), shuffle=True),
            validation_loader=DataLoader(Points(), batch_size=30),
        )

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.config.get("lr", 0.1), momentum=0.9)


class Rectified(Plain):
    """A network whose output grows with its input."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


class Regression(Plain):
    """A linear model of the sum of the features, whose loss grows with the square of its input."""

    def register(self, **parts: Any) -> Any:
        return super().register(**{**parts, "criterion": torch.nn.MSELoss()})

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 1)

    def forward(self, features: Any, target: Any) -> Any:
        output = self.model(*features)
        return output, self.criterion(output[:, 0], features[0].sum(dim=1) + 0.1 * target)


class Normed(Plain):
    """Batch normalization, whose buffers change in each forward pass."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))


class Noisy(Plain):
    """Dropout, Adam, and noise in the data."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.4), torch.nn.Linear(32, 3))

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class Scheduled(Plain):
    """A schedule by batches."""

    def register(self, **parts: Any) -> Any:
        self.scheduler = torch.optim.lr_scheduler.StepLR(parts["optimizers"], step_size=3, gamma=0.7)
        return super().register(**parts, schedulers=self.scheduler)[:3]


class Watching(Plain):
    """A schedule that follows the validation."""

    def register(self, **parts: Any) -> Any:
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(parts["optimizers"], patience=0, threshold=10.0)
        return super().register(**parts, schedulers=self.scheduler)[:3]


class OwnBatch(Plain):
    """Its own batch, with a penalty and a metric."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (features,), target = self.prepare_batch(batch)
        output, loss = self.forward((features,), target)
        loss = loss + 1e-3 * sum(each.square().sum() for each in self.model.parameters())
        self.backward(loss)
        self.optimizer_step()
        return {
            "loss": loss.item(),
            "accuracy": (output.argmax(1) == target).float().mean(),
            "num_samples": len(target),
        }


class Changed(Plain):
    """Does something else in one step, if its config says so: another row, or another rate."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        step = self.global_step + 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.11 if step == self.config.get("rate_at") else 0.1
        if step == self.config.get("row_at"):
            batch[0][0] += 0.5
        return super().train_batch(batch, batch_info)
