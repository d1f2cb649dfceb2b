"""Fits a line with creator functions: the older way of writing a training, which still works.

Data: points on the line y = 2 x + 5, computed and without noise, so what must come out is known. The creator functions
are in `raysgd.torch.examples.train_example`; each takes the config and returns a part of the training.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from typing import Any

import ray
import torch

from raysgd import TorchTrainer, TrainingOperator
from raysgd.torch.examples.train_example import data_creator, model_creator, optimizer_creator, scheduler_creator

# The functions become an operator class, which may also be subclassed.
LineOperator = TrainingOperator.from_creators(
    model_creator=model_creator,
    optimizer_creator=optimizer_creator,
    data_creator=data_creator,
    loss_creator=torch.nn.MSELoss,
    scheduler_creator=scheduler_creator,
)


def fit_line(num_workers: int, use_gpu: bool, num_epochs: int) -> dict[str, float]:
    """Returns the slope and the intercept that were found, and the loss on the validation points."""
    with TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 1e-2, "hidden_size": 1, "batch_size": 4},
        num_workers=num_workers,
        use_gpu=use_gpu,
        scheduler_step_freq="epoch",
    ) as trainer:
        for _ in range(num_epochs):
            trained = trainer.train()
            print(f"epoch {trained['epoch']}: train loss {trained['train_loss']:.4f}", flush=True)
        validated = trainer.validate()
        model = trainer.get_model(to_cpu=True)
    return {"slope": model.weight.item(), "intercept": model.bias.item(), "val_loss": validated["val_loss"]}


def start_ray(address: str | None, num_workers: int) -> None:
    """Connects to a running cluster, or starts one on this machine for as long as this program runs."""
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        num_cpus = max(num_workers, os.cpu_count() or 1)
        options.update(address="local", num_cpus=num_cpus, include_dashboard=False)
    else:
        options.update(address=address)
    ray.init(**options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2, help="processes that train together (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="only one epoch, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else 5

    start_ray(args.address, args.num_workers)
    print(f"fitting a line to computed points with {args.num_workers} worker(s)", flush=True)
    found = fit_line(args.num_workers, args.use_gpu, num_epochs)
    ray.shutdown()
    print(f"found y = {found['slope']:.3f} x + {found['intercept']:.3f}; the points are on y = 2 x + 5")
    print(json.dumps({**found, "num_workers": args.num_workers, "epochs": num_epochs}))


if __name__ == "__main__":
    main()
