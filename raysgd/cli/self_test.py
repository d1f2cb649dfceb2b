"""The self test of `raysgd doctor`: trains a linear model for two steps.

The result is the same for any number of workers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE

NUM_STEPS = 2
_GLOBAL_BATCH = 4


class LineOperator(TrainingOperator):
    """Training operator of the self test. It fits a line to eight points."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, 0.0)
        torch.nn.init.constant_(model.bias, 0.0)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        x = torch.arange(NUM_STEPS * _GLOBAL_BATCH, dtype=torch.float32).reshape(-1, 1) / 8
        self.register_data(train_loader=DataLoader(TensorDataset(x, 2 * x + 1), batch_size=config[BATCH_SIZE]))


def trained_weights(**options: Any) -> tuple[list[float], dict[str, float]]:
    """Train one epoch of two steps. Return the model's weights and how long each part of the test took.

    Args:
        **options: Further arguments of the `TorchTrainer`.

    Returns:
        A pair: a list with the model's weight and bias, and a dict of the seconds that each part of the test took.
    """
    began = time.monotonic()
    with TorchTrainer(
        training_operator_cls=LineOperator, config={BATCH_SIZE: _GLOBAL_BATCH}, use_gpu=False, **options
    ) as trainer:
        started = time.monotonic()
        trainer.train()
        trained = time.monotonic()
        model = trainer.get_model(to_cpu=True)
    seconds = {
        "starting them took": started - began,
        "two steps": trained - started,
        "fetching the model and stopping them": time.monotonic() - trained,
    }
    return [model.weight.item(), model.bias.item()], seconds
