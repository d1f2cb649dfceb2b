"""Trains a classifier of handwritten digits on two workers, saves it, and tests what was saved.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn. 64 % are trained on, 16 % show during the
training how it goes, and the remaining 20 % only test the result.
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
from torch.utils.data import Dataset, TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.utils import BATCH_SIZE


def load_data() -> tuple[Dataset[Any], Dataset[Any], TensorDataset]:
    """Returns train, validation and test data, the same ones every time."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(digits))
    rest, test = train_test_split(range(len(data)), test_size=0.2, stratify=digits, random_state=0)
    train, validation = train_test_split(rest, test_size=0.2, stratify=digits[rest], random_state=0)
    return TensorDataset(*data[train]), TensorDataset(*data[validation]), TensorDataset(*data[test])


class DigitsOperator(ClassificationOperator):
    """What each worker trains, and on what. Workers take different samples and keep equal models."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, kernel_size=3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, kernel_size=3, padding=1),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(64 * 4 * 4, 10),
        )

    def build_data(self, config: dict[str, Any]) -> tuple[Dataset[Any], Dataset[Any]]:
        train, validation, _ = load_data()
        return train, validation


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    images, digits = data.tensors
    with torch.no_grad():
        return (model.eval()(images).argmax(dim=1) == digits).double().mean().item()


def train(trainer: TorchTrainer, num_epochs: int) -> None:
    for _ in range(num_epochs):
        trained, validated = trainer.train(info={"num_epochs": num_epochs}), trainer.validate()
        print(
            f"epoch {trained['epoch']:2d}: train loss {trained['train_loss']:.3f} on {trained['num_samples']} samples, "
            f"validation loss {validated['val_loss']:.3f}, accuracy {validated['val_accuracy']:.3f}",
            flush=True,
        )


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
    began, num_epochs = time.monotonic(), 1 if args.smoke_test else 10

    start_ray(args.address, args.num_workers)
    config = {"lr": 0.002, BATCH_SIZE: 64, "seed": 0}  # 64 samples in each step, however many workers share them
    print(f"training on the digits of scikit-learn with {args.num_workers} worker(s)", flush=True)
    with tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        checkpoint = Path(folder) / "digits.pt"
        with TorchTrainer(
            training_operator_cls=DigitsOperator,
            config=config,
            num_workers=args.num_workers,
            use_gpu=args.use_gpu,
            use_tqdm=True,
        ) as trainer:
            train(trainer, num_epochs)
            trainer.save(checkpoint)

        # Any number of workers can load it. Here it is one, in this very process: good for a debugger, too.
        with TorchTrainer(
            training_operator_cls=DigitsOperator, config=config, use_gpu=args.use_gpu, use_local=True
        ) as restored:
            restored.load(checkpoint)
            print(f"loaded into one process: validation accuracy {restored.validate()['val_accuracy']:.3f}")
            model = restored.get_model(to_cpu=True)
    ray.shutdown()

    *_, test = load_data()
    test_accuracy = accuracy(model, test)
    print(f"accuracy on {len(test)} held-out digits: {test_accuracy:.3f}")
    seconds = round(time.monotonic() - began, 1)
    result = {"test_accuracy": test_accuracy, "num_workers": args.num_workers, "epochs": num_epochs, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
