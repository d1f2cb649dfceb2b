"""The small run that the pictures show: digits on three workers, one of which is killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from raysgd import Recovery, TorchTrainer
from raysgd.callbacks import Callback, HTMLReport, LearningRateMonitor, ProgressBar, Run
from raysgd.operators import ClassificationOperator
from raysgd.testing import kill_worker
from raysgd.utils import BATCH_SIZE


class Digits(ClassificationOperator):
    """A small convolutional network."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(32 * 4 * 4, 10),
        )

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        images, digits = load_digits(return_X_y=True)
        images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        data = train_test_split(images, torch.tensor(digits), test_size=0.2, random_state=0, stratify=digits)
        return TensorDataset(data[0], data[2]), TensorDataset(data[1], data[3])

    def build_scheduler(self, optimizer: Any, config: dict[str, Any]) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


class KillOne(Callback):
    """Kills a worker in the middle of an epoch."""

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 3:
            kill_worker(run.trainer, rank=1, at="step:20")


def train(folder: Path, epochs: int = 8) -> tuple[str, str]:
    """Trains; returns the cards of the trainer and of the history."""
    config = {"lr": 0.003, BATCH_SIZE: 24, "seed": 0, "model": {"channels": 32, "dropout": 0.3}}
    chosen = ("train_loss", "val_loss", "val_accuracy", "lr")
    callbacks = [
        LearningRateMonitor(),
        ProgressBar(metrics=chosen),
        HTMLReport(folder / "report.html"),
        KillOne(),
    ]
    options = {
        "num_workers": 3,
        "scheduler_step_freq": "epoch",
        "recovery": Recovery(wait_for_workers=False, resize_interval_s=60.0),
    }
    with TorchTrainer(training_operator_cls=Digits, config=config, **options) as trainer:
        history = trainer.fit(epochs, callbacks=callbacks)
        cards = trainer._repr_html_(), history._repr_html_()
    return cards


if __name__ == "__main__":
    where = Path(sys.argv[1])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    for name, card in zip(("trainer", "history"), train(where), strict=True):
        (where / f"{name}.html").write_text(card, encoding="utf-8")
