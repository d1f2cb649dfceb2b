"""An operator whose model keeps the books itself: how often each sample was used is one of its parameters.

A gradient marks the samples of a global step, over all ranks, and the optimizer adds the marks up. So the books are
part of the very state that is handed over, restored and saved: a step that was taken back is not in them, one that was
taken twice is in them twice, and neither can be mended by a log that somebody writes beside it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.operators_for_tests import NUM_FEATURES, dataset

NUM_SAMPLES = 240
BATCH_SIZE_OF_ONE = 3


class BookKeeping(torch.nn.Module):
    """A linear model, with a number for each sample of the data, and as many more as are wanted, which stay 0."""

    def __init__(self, num_samples: int, num_more: int = 0) -> None:
        super().__init__()
        self.line = torch.nn.Linear(NUM_FEATURES, 1)
        self.used = torch.nn.Parameter(torch.zeros(num_samples))
        if num_more:
            self.more = torch.nn.Parameter(torch.zeros(num_more))

    def forward(self, features: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The prediction, and marks that are zero but have a gradient."""
        picked = self.used[numbers % len(self.used)]
        marks = picked - picked.detach()
        return self.line(features), marks + 0 * self.more.sum() if hasattr(self, "more") else marks


class LossAndMarks(torch.nn.Module):
    """The mean squared error; its gradient marks each sample with one over the size of the global batch."""

    def forward(self, output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        prediction, marks = output
        return torch.nn.functional.mse_loss(prediction, target) + marks.mean()


class Ledger(TrainingOperator):
    """Config: `batch_size`, `num_samples`, `step_s` (how long a step takes at least), `num_loader_processes`.

    Also `slow_size`: with it only the steps of a group of that size take `step_s`, so that its change can be awaited.
    And `is_large`: the gradients of a model with many buckets travel in another way.
    """

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        net = BookKeeping(config.get("num_samples", NUM_SAMPLES), 300_000 if config.get("is_large") else 0)
        others = [each for name, each in net.named_parameters() if name != "used"]
        optimizer = torch.optim.SGD([{"params": others}, {"params": [net.used], "lr": 1.0}], lr=0.03)
        self.net = net
        self.model, self.optimizer, self.criterion = self.register(
            models=net,
            optimizers=optimizer,
            criterion=LossAndMarks(),
            ddp_args={"bucket_cap_mb": 0.1} if config.get("is_large") else None,
        )
        batch_size = config.get("batch_size", BATCH_SIZE_OF_ONE)
        self.register_data(
            train_loader=DataLoader(
                dataset(len(net.used)),
                batch_size=batch_size,
                shuffle=True,
                num_workers=config.get("num_loader_processes", 0),
            ),
            validation_loader=DataLoader(dataset(60, seed=1), batch_size=10),
        )

    def optimizer_step(self) -> None:
        marks = self.net.used.grad
        assert marks is not None
        marks /= marks[marks > 0].min()  # so many times was each sample in the global batch
        marks.round_()
        super().optimizer_step()
        if self.config.get("slow_size", self.world_size) == self.world_size:
            time.sleep(self.config.get("step_s", 0.0))


def uses(trainer: TorchTrainer) -> set[int]:
    """How often the samples were used: one number if all were used equally often."""
    return set((-trainer.state_dict()["models"][0]["used"]).round().int().tolist())


def parameters_of(operator: Ledger) -> list[torch.Tensor]:
    """For `apply_all_operators`."""
    return [parameter.detach().clone() for parameter in operator.net.parameters()]
