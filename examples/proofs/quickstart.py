"""Trains a classifier of handwritten digits on two workers, saves it, and tests the saved model.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation, and the
remaining 20 % only test the result.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator


def load_data() -> list[TensorDataset]:
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images)[:, None], torch.tensor(digits)) for images, digits in load_digits()]


class DigitsOperator(ClassificationOperator):
    """Defines the model and the data of each worker. Workers see different samples and keep their models in sync."""

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

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        train, validation, _ = load_data()
        return train, validation


CONFIG = {"lr": 0.002, "batch_size": 64, "seed": 0}  # 64 samples in each step, over all workers


def train(num_epochs: int, path: Path, **options: Any) -> None:
    """Train with these trainer options, and save a checkpoint from which training can continue."""
    with TorchTrainer(
        training_operator_cls=DigitsOperator, config=CONFIG, use_tqdm=True, split_batches=True, **options
    ) as trainer:
        for _ in range(num_epochs):
            trained, validated = trainer.train(info={"num_epochs": num_epochs}), trainer.validate()
            losses = f"train loss {trained['train_loss']:.3f}, validation loss {validated['val_loss']:.3f}"
            print(f"epoch {trained['epoch']:2d}: {losses}, accuracy {validated['val_accuracy']:.3f}", flush=True)
        trainer.save(path)


def test_accuracy(path: Path) -> float:
    """Return the accuracy of the saved model. Any number of workers can load it; here it is one, in this process."""
    *_, test = load_data()
    with TorchTrainer(training_operator_cls=DigitsOperator, config=CONFIG, use_gpu=False, use_local=True) as trainer:
        trainer.load(path)
        model = trainer.get_model(to_cpu=True)
    images, digits = test.tensors
    with torch.no_grad():
        return (model.eval()(images).argmax(dim=1) == digits).double().mean().item()


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, found = 1 if args.smoke_test else 10, []
    with ray_running(args), tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        for options in one_process_then_workers(args):
            path = Path(folder) / "digits.pt"
            train(num_epochs, path, **options)
            found.append(test_accuracy(path))
            print(f"accuracy on held-out digits: {found[-1]:.3f}", flush=True)
    print_result(
        args,
        "The model was saved, and loaded to test it. `python examples/survive.py` kills a worker.",
        test_accuracy=found[-1],
        test_accuracy_of_one_process=found[0],
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
