"""Trains a small network to learn the identity function, from a `Dataset` that is sharded across workers.

Data: 6,400 computed numbers from 0 to 1; each number is its own label. Do not rename anything here, because existing
programs and tests import these names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raysgd.data.dataset import Dataset
from raysgd.data.examples._points import POINTS


class Net(nn.Module):
    """A network with one hidden layer of 128 units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for each number."""
        return self.layers(x)


def model_creator(config: dict[str, Any]) -> nn.Module:
    """Create the network."""
    return Net()


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Create an SGD optimizer with learning rate `lr`, 0.0001 by default."""
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))


def to_mat(x: float) -> torch.Tensor:
    """Return a number as a 1x1 matrix.

    >>> to_mat(0.5)
    tensor([[0.5000]])
    """
    return torch.tensor([[x]], dtype=torch.float32)


def _pair(x: float) -> tuple[torch.Tensor, torch.Tensor]:
    return to_mat(x), to_mat(x)


def dataset_creator() -> Dataset:
    """Create the dataset: numbers that are both inputs and labels, in batches of 32."""
    return Dataset(POINTS, batch_size=32, max_concurrency=2, download_func=_pair)


def main(num_workers: int = 2, num_steps: int = 200, use_gpu: bool = False) -> float:
    """Train the network, print its output for the input 0.5, and return that output.

    Args:
        num_workers: Number of workers.
        num_steps: Steps in each of five epochs.
        use_gpu: True to give each worker a GPU.
    """
    from raysgd.torch import TorchTrainer, TrainingOperator

    operator_cls = TrainingOperator.from_creators(
        model_creator=model_creator, optimizer_creator=optimizer_creator, loss_creator=nn.MSELoss
    )
    dataset = dataset_creator()
    with TorchTrainer(
        training_operator_cls=operator_cls, config={"lr": 0.1}, num_workers=num_workers, use_gpu=use_gpu
    ) as trainer:
        for _ in range(5):
            print(trainer.train(dataset=dataset, num_steps=num_steps))
        model = trainer.get_model(to_cpu=True)
    prediction = float(model(to_mat(0.5)))
    print(f"the network takes 0.5 for {prediction:.3f}")
    return prediction


if __name__ == "__main__":
    main()
