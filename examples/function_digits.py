"""Trains a classifier of handwritten digits with a function of your own, on two workers that may come and go.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn. 64 % are trained on, 16 % decide which
checkpoint is best, and the remaining 20 % test that one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import CheckpointStrategy, Trainer, TrainingCallback
from raysgd.train.callbacks import JsonLoggerCallback
from raysgd.train.torch import gather_state, get_device, load_state, prepare_data_loader, prepare_model


def load_data() -> list[TensorDataset]:
    """Returns train, validation and test data, the same ones every time."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    rest, test = train_test_split(range(len(data)), test_size=0.2, stratify=digits, random_state=0)
    training, validation = train_test_split(rest, test_size=0.2, stratify=digits[rest], random_state=0)
    return [TensorDataset(*data[part]) for part in (training, validation, test)]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def accuracy(model: torch.nn.Module, data: TensorDataset, device: torch.device | str = "cpu") -> float:
    images, digits = (tensor.to(device) for tensor in data.tensors)
    with torch.no_grad():
        return (model.eval()(images).argmax(dim=1) == digits).double().mean().item()


def learn_digits(config: dict[str, Any]) -> float:
    """Runs in every worker; after a loss of workers once more, from the last checkpoint. Returns the accuracy."""
    training, validation, _ = load_data()
    loader = prepare_data_loader(DataLoader(training, batch_size=64 // train.world_size(), shuffle=True))
    torch.manual_seed(0)
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first, found, checkpoint = 0, 0.0, train.load_checkpoint()
    if checkpoint is not None:
        first = checkpoint["epoch"] + 1
        load_state(model, checkpoint["model"])
        load_state(optimizer, checkpoint["optimizer"])
    for epoch in range(first, config["num_epochs"]):
        if train.world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for images, digits in loader:
            loss = torch.nn.functional.cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = accuracy(model, validation, get_device())
        train.report(epoch=epoch, loss=float(loss), accuracy=found)
        state = {"model": gather_state(model), "optimizer": gather_state(optimizer)}
        train.save_checkpoint(epoch=epoch, accuracy=found, **state)
    return found


class Show(TrainingCallback):
    """Prints what rank 0 reports, in the driver."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        print(f"epoch {results[0]['epoch']:2d}: validation accuracy {results[0]['accuracy']:.3f}", flush=True)


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
    parser.add_argument("--num-workers", type=int, default=2, help="at most so many processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="only one epoch, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    began, num_epochs = time.monotonic(), 1 if args.smoke_test else 15

    start_ray(args.address, args.num_workers)
    print(f"training on the digits of scikit-learn with up to {args.num_workers} worker(s)", flush=True)
    with tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        trainer = Trainer("torch", num_workers=(1, args.num_workers), use_gpu=args.use_gpu, logdir=folder)
        trainer.start()
        returned = trainer.run(
            learn_digits,
            {"num_epochs": num_epochs, "lr": 0.005},
            callbacks=[Show(), JsonLoggerCallback()],
            checkpoint_strategy=CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="accuracy"),
        )
        trainer.shutdown()
        log = json.loads(Path(trainer.latest_run_dir, "results.json").read_text())
        best = trainer.best_checkpoint
    ray.shutdown()

    model = make_model()
    model.load_state_dict(best["model"])
    test_accuracy = accuracy(model, load_data()[2])
    print(f"{len(log)} reports; the best checkpoint, of epoch {best['epoch']}, reads {test_accuracy:.3f} of the digits")
    seconds = round(time.monotonic() - began, 1)
    result = {"test_accuracy": test_accuracy, "num_workers": len(returned), "epochs": num_epochs, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
