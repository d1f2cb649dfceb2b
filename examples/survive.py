"""Kills one of four workers in the middle of an epoch, and shows that nothing is lost.

Data: 1,776 of the 1,797 real digits, 8x8 pixels each, that come with scikit-learn: 37 steps of 48. Each digit has a
counter among the weights, which every step that trains on this digit raises by one. So the trained model itself tells
how many times it saw each digit. The weights are compared with those of one process, and of four that all live.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.testing import kill_worker
from raysgd.utils import BATCH_SIZE

NUM_DIGITS, STEP_OF_DEATH = 1776, 10
CONFIG = {BATCH_SIZE: 48, "seed": 0}  # 48 samples in each step


class CountingModel(nn.Module):
    """A network, and a counter for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
        self.counters = nn.Parameter(torch.zeros(NUM_DIGITS))

    def forward(self, images: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.network(images), self.counters[index]


class CountingOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return CountingModel()

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        weights = {"params": model.network.parameters(), "lr": 0.1, "momentum": 0.9}
        counters = {"params": [model.counters], "lr": CONFIG[BATCH_SIZE]}  # times the gradient, 1/48, makes 1
        return torch.optim.SGD([weights, counters])

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        images, digits = (np.concatenate(parts)[:NUM_DIGITS] for parts in zip(*load_digits(), strict=True))
        index = torch.arange(NUM_DIGITS)
        data = TensorDataset(torch.tensor(images).flatten(1), index, torch.tensor(digits))
        return data, data

    def forward(self, features: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, counted = self.model(*features)
        raises_counters = (counted.detach() - counted).mean()  # its value is 0, its gradient is not
        return scores, self.criterion(scores, target) + raises_counters


def train(trainer: TorchTrainer, num_epochs: int, *, kills: bool = False) -> tuple[nn.Module, float]:
    """Trains, and kills a worker on the way if told to; returns the model and its accuracy."""
    for epoch in range(1, num_epochs + 1):
        if kills and epoch == num_epochs // 2 + 1:
            pids = [worker.pid for worker in trainer.status().workers]
            print(f"  the workers are the processes {pids}: killing {pids[1]} in step {STEP_OF_DEATH}", flush=True)
            kill_worker(trainer, rank=1, at=f"step:{STEP_OF_DEATH}")
        loss = trainer.train()["train_loss"]
        print(f"  epoch {epoch}: train loss {loss:.4f}, {trainer.num_workers} worker(s)", flush=True)
    return trainer.get_model(to_cpu=True), trainer.validate()["val_accuracy"]


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two weights that belong together."""
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    return max((first - second).abs().max().item() for first, second in pairs)


def verdict(times_seen: torch.Tensor, num_epochs: int, apart: float) -> str:
    """Return what the failure has cost, in a sentence."""
    off = int((times_seen != num_epochs).sum())
    used = f"{off} digits were not used once" if off else f"each of {NUM_DIGITS:,} digits was used once"
    return f"A worker was killed: {used} in each epoch, and the weights differ from those without it by {apart:.0e}."


def main() -> None:
    args = parse_arguments(__doc__, num_workers=4)
    if args.num_workers < 2:
        raise SystemExit(f"--num-workers {args.num_workers}: need at least 2, because one of them dies.")
    num_epochs = 2 if args.smoke_test else 20
    options = {"use_gpu": args.use_gpu, "config": CONFIG, "split_batches": True}
    print("one process")
    with TorchTrainer(training_operator_cls=CountingOperator, use_local=True, **options) as trainer:
        alone, accuracy_alone = train(trainer, num_epochs)
    # The global batch is constant: the others go on at once, and a new worker steps in when it is ready.
    options.update(num_workers=args.num_workers)
    with ray_running(args), TorchTrainer(training_operator_cls=CountingOperator, **options) as trainer:
        print(f"{args.num_workers} workers, undisturbed")
        undisturbed, _ = train(trainer, num_epochs)
        print(f"the same {args.num_workers} workers from the beginning, one of which is killed")
        trainer.reset_config(CONFIG)
        survivor, accuracy = train(trainer, num_epochs, kills=True)
        [failure] = [event for event in trainer.status().events if event.is_failure]
    times_seen, apart = survivor.counters.round(), largest_difference(survivor, undisturbed)
    print_result(
        args,
        verdict(times_seen, num_epochs, apart),
        accuracy=accuracy,
        accuracy_of_one_process=accuracy_alone,
        recovery=failure.kind,
        recovery_s=failure.seconds,
        times_seen=[times_seen.min().item(), times_seen.max().item()],
        difference_of_weights=apart,
        difference_to_one_process=largest_difference(survivor, alone),
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
