"""Fits a line with creator functions: the older API, in which functions create the model, optimizer and data.

Existing programs and tests import names from this module. For new code, subclass `raysgd.TrainingOperator`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator

_NUM_EPOCHS = 5
_SLOPE, _INTERCEPT = 2, 5


class LinearDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on the line `y = a * x + b`, without noise. The values of x are evenly spaced from 0 to 10 (exclusive).

    >>> LinearDataset(2, 5, size=10)[3]
    (tensor([3.]), tensor([11.]))

    Args:
        a: Slope.
        b: Intercept.
        size: Number of points.
    """

    def __init__(self, a: float, b: float, size: int = 1000) -> None:
        self.x = torch.arange(size, dtype=torch.float32) * (10 / size)
        self.y = a * self.x + b

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index, None], self.y[index, None]

    def __len__(self) -> int:
        return len(self.x)


def model_creator(config: dict[str, Any]) -> torch.nn.Module:
    """Create a linear layer with `hidden_size` outputs, 1 by default."""
    return torch.nn.Linear(1, config.get("hidden_size", 1))


def optimizer_creator(model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Create an SGD optimizer with learning rate `lr`, 0.01 by default."""
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))


def scheduler_creator(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> torch.optim.lr_scheduler.LRScheduler:
    """Create a scheduler that reduces the learning rate by 10% after every five scheduler steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)


def data_creator(config: dict[str, Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Create unshuffled loaders: one with `data_size` points for training, one with `val_size` for validation."""
    batch_size = config.get("batch_size", 32)
    train = LinearDataset(_SLOPE, _INTERCEPT, size=config.get("data_size", 1000))
    validation = LinearDataset(_SLOPE, _INTERCEPT, size=config.get("val_size", 400))
    return DataLoader(train, batch_size=batch_size), DataLoader(validation, batch_size=batch_size)


def train_example(num_workers: int = 1, use_gpu: bool = False) -> None:
    """Train for five epochs, validate, and print the fitted line, which is close to `y = 2 x + 5`.

    Args:
        num_workers: Number of workers.
        use_gpu: True to give each worker a GPU.
    """
    operator_cls = TrainingOperator.from_creators(
        model_creator=model_creator,
        optimizer_creator=optimizer_creator,
        data_creator=data_creator,
        loss_creator=torch.nn.MSELoss,
        scheduler_creator=scheduler_creator,
    )
    trainer = TorchTrainer(
        training_operator_cls=operator_cls,
        config={"lr": 1e-2, "hidden_size": 1, "batch_size": 4},
        num_workers=num_workers,
        use_gpu=use_gpu,
        backend="gloo",
        scheduler_step_freq="epoch",
    )
    with trainer:
        for _ in range(_NUM_EPOCHS):
            print(trainer.train())
        print(trainer.validate())
        model = trainer.get_model()
    print(f"trained weight: {model.weight.item():.2f}, bias: {model.bias.item():.2f}")


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    train_example(args.num_workers, args.use_gpu)
