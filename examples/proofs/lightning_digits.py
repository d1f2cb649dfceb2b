"""Trains a `LightningModule` on two workers, and the same module with Lightning's own `Trainer` in one process.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation, and the
remaining 20 % only test the result.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

SIZE_OF_STEP = 64  # samples in each step, over all workers


class Digits(LightningModule):
    """Defines a Lightning module. It does not depend on workers or on raysgd."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        seed_everything(config["seed"], verbose=False)
        self.batch_size, self.lr = config["batch_size"], config["lr"]
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, digits = batch
        return nn.functional.cross_entropy(self.layers(images), digits)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, digits = batch
        self.log("val_accuracy", (self.layers(images).argmax(dim=1) == digits).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return DataLoader(load_data()[0], batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(load_data()[1], batch_size=self.batch_size)


def load_data() -> list[TensorDataset]:
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images)[:, None], torch.tensor(digits)) for images, digits in load_digits()]


def train(config: dict[str, Any], num_epochs: int, **options: Any) -> LightningModule:
    """Train with these trainer options, and return the module."""
    operator_cls = TrainingOperator.from_ptl(Digits)
    with TorchTrainer(training_operator_cls=operator_cls, config=config, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs):
            losses = f"train loss {row['train_loss']:.3f}, validation accuracy {row['val_accuracy']:.3f}"
            print(f"epoch {row['epoch']:2d}: {losses}", flush=True)
        return trainer.get_model(to_cpu=True)


def train_with_lightning(config: dict[str, Any], num_epochs: int) -> LightningModule:
    """Train with Lightning's own trainer, in this process."""
    module, quiet = Digits(config), {"enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_epochs=num_epochs, accelerator="cpu", logger=False, enable_checkpointing=False, **quiet).fit(module)
    return module


@torch.no_grad()
def test_accuracy(module: LightningModule) -> float:
    images, digits = load_data()[2].tensors
    return (module.eval().layers(images).argmax(dim=1) == digits).double().mean().item()


def main() -> None:
    args = parse_arguments(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # it suggests loaders with more processes
    num_epochs = 3 if args.smoke_test else 10
    config = {"lr": 0.002, "batch_size": SIZE_OF_STEP, "seed": 0}
    with ray_running(args):
        found = [test_accuracy(train(config, num_epochs, **options)) for options in one_process_then_workers(args)]
    print("training with Lightning's own trainer", flush=True)
    theirs = test_accuracy(train_with_lightning(config, num_epochs))
    print(f"accuracy on held-out digits: {found[-1]:.3f}, with Lightning's own trainer {theirs:.3f}")
    print_result(
        args,
        test_accuracy=found[-1],
        test_accuracy_of_one_process=found[0],
        test_accuracy_of_lightning=theirs,
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
