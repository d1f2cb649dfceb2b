"""Trains a small network to learn the identity function, from an `MLDataset`, with PyTorch.

Data: 6,400 computed numbers from 0 to 1; each number is its own label. Do not rename anything here, because existing
programs and tests import these names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from raysgd.data.examples._points import dataset_creator
from raysgd.data.examples.mlp_identity import Net, to_mat

__all__ = ["Net", "dataset_creator", "main", "make_train_operator"]


def make_train_operator(ds: Any) -> type[Any]:
    """Return an operator class that trains on its rank's shard of the dataset.

    Args:
        ds: A `TorchMLDataset` with as many shards as there are workers.
    """
    from raysgd.torch import TrainingOperator

    class IdentityTrainOperator(TrainingOperator):
        """Trains the network. The config has `batch_size` and, optionally, `lr`."""

        def setup(self, config: dict[str, Any]) -> None:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
            )
            rows = ds.get_shard(self.world_rank, shuffle=True, shuffle_buffer_size=4)
            self.register_data(train_loader=DataLoader(rows, batch_size=config["batch_size"]))

    return IdentityTrainOperator


def main(num_workers: int = 2, num_epochs: int = 5, num_steps: int = 100) -> float:
    """Train the network, print its output for the input 0.5, and return that output.

    Args:
        num_workers: Number of workers and of shards.
        num_epochs: Number of epochs.
        num_steps: Steps per epoch.
    """
    from raysgd.torch import TorchTrainer

    dataset = dataset_creator(num_workers).to_torch(feature_columns=[0], label_column=1)
    with TorchTrainer(
        training_operator_cls=make_train_operator(dataset),
        config={"batch_size": 32, "lr": 0.1},
        num_workers=num_workers,
        add_dist_sampler=False,
    ) as trainer:
        for _ in range(num_epochs):
            print(trainer.train(num_steps=num_steps))
        model = trainer.get_model(to_cpu=True)
    with torch.no_grad():
        prediction = float(model(to_mat(0.5)))
    print(f"the network takes 0.5 for {prediction:.3f}")
    return prediction


if __name__ == "__main__":
    main()
