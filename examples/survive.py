"""Kills one of four workers in the middle of an epoch, and shows that nothing is lost.

Data: 1,776 of the 1,797 real digits of scikit-learn, 8x8 pixels each: 37 steps of 48. Each digit has a counter among
the weights, and every step that trains on the digit adds one. So the counters show how many times the model saw each
digit. The weights are compared with those of training in one process, and on four workers without a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import Any

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.testing import kill_worker

NUM_DIGITS, STEP_OF_DEATH = 1776, 10
CONFIG = {"batch_size": 48, "seed": 0}  # 48 samples in each step


class CountingModel(nn.Module):
    """A network with a counter for each sample."""

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
        counters = {"params": [model.counters], "lr": CONFIG["batch_size"]}  # its gradient is 1/48, so each step adds 1
        return torch.optim.SGD([weights, counters])

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        pixels, digits = (torch.tensor(each[:NUM_DIGITS]) for each in load_digits(return_X_y=True))
        data = TensorDataset(pixels.float() / 16, torch.arange(NUM_DIGITS), digits)
        return data, data

    def forward(self, features: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, counted = self.model(*features)
        raises_counters = (counted.detach() - counted).mean()  # its value is 0, its gradient is not
        return scores, self.criterion(scores, target) + raises_counters


def train(trainer: TorchTrainer, num_epochs: int, *, kills: bool = False) -> tuple[nn.Module, float]:
    """Train, and with `kills` kill a worker during training. Return the model and its accuracy."""
    for epoch in range(1, num_epochs + 1):
        if kills and epoch == num_epochs // 2 + 1:
            pids = [worker.pid for worker in trainer.status().workers]
            print(f"  the workers are the processes {pids}: killing {pids[1]} in step {STEP_OF_DEATH}", flush=True)
            kill_worker(trainer, rank=1, at=f"step:{STEP_OF_DEATH}")
        loss = trainer.train()["train_loss"]
        print(f"  epoch {epoch}: train loss {loss:.4f}, {trainer.num_workers} worker(s)", flush=True)
    return trainer.get_model(to_cpu=True), trainer.validate()["val_accuracy"]


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between corresponding weights of two models."""
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    return max((first - second).abs().max().item() for first, second in pairs)


def verdict(times_seen: torch.Tensor, num_epochs: int, apart: float) -> str:
    """Return a sentence that says what the failure cost."""
    off = int((times_seen != num_epochs).sum())
    used = f"{off} digits were not used once" if off else f"each of {NUM_DIGITS:,} digits was used once"
    return f"A worker was killed: {used} in each epoch, and the weights differ from those without it by {apart:.0e}."


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=4, help="how many train together (default: 4)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="train only briefly, to see that it runs")
    parser.add_argument("--address", default="local", help="a running Ray cluster, such as `auto` (default: start one)")
    parser.add_argument("--json", action="store_true", help="print the result as a line of JSON, for programs")
    args = parser.parse_args()
    if args.num_workers < 2:
        raise SystemExit(f"--num-workers {args.num_workers}: need at least 2, because one of them dies.")
    return args


def main() -> None:
    args, began = parse_arguments(), time.monotonic()
    num_epochs = 2 if args.smoke_test else 20
    options = {"use_gpu": args.use_gpu, "config": CONFIG, "split_batches": True}
    print("one process")
    with TorchTrainer(training_operator_cls=CountingOperator, use_local=True, **options) as trainer:
        alone, accuracy_alone = train(trainer, num_epochs)
    num_cpus = max(args.num_workers, os.cpu_count() or 1)
    new = {"num_cpus": num_cpus, "include_dashboard": False} if args.address == "local" else {}
    ray.init(args.address, **new, log_to_driver=False, logging_level=logging.ERROR)
    # The global batch is constant, so the others continue at once. A new worker joins when it is ready.
    with TorchTrainer(training_operator_cls=CountingOperator, num_workers=args.num_workers, **options) as trainer:
        print(f"{args.num_workers} workers, undisturbed")
        undisturbed, _ = train(trainer, num_epochs)
        print(f"the same {args.num_workers} workers from the beginning, one of which is killed")
        trainer.reset_config(CONFIG)
        survivor, accuracy = train(trainer, num_epochs, kills=True)
        [failure] = [event for event in trainer.status().events if event.is_failure]
    times_seen, apart = survivor.counters.round(), largest_difference(survivor, undisturbed)
    result = {
        "accuracy": accuracy,
        "accuracy_of_one_process": accuracy_alone,
        "recovery": failure.kind,
        "recovery_s": failure.seconds,
        "times_seen": [times_seen.min().item(), times_seen.max().item()],
        "difference_of_weights": apart,
        "difference_to_one_process": largest_difference(survivor, alone),
        "epochs": num_epochs,
        "num_workers": args.num_workers,
        "seconds": round(time.monotonic() - began, 1),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"  {name.replace('_', ' ')}: {f'{value:.3g}' if isinstance(value, float) else value}")
    print(verdict(times_seen, num_epochs, apart))


if __name__ == "__main__":
    main()
