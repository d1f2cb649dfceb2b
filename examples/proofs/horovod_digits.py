"""Trains a classifier of handwritten digits with Horovod instead of `DistributedDataParallel`.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation. First build
Horovod with `python -m raysgd.horovod.install`. The operator is the same with and without it.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.utils import BATCH_SIZE


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        parts = load_digits()[:2]
        return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in parts]


def train(num_epochs: int, **options: Any) -> float:
    """Train with these trainer options. Return the last accuracy."""
    config = {"lr": 0.003, BATCH_SIZE: 64, "seed": 0}
    with TorchTrainer(training_operator_cls=DigitsOperator, config=config, backend="horovod", **options) as trainer:
        for row in trainer.epochs(num_epochs):
            print(f"  epoch {row['epoch']:2d}: accuracy {row['val_accuracy']:.3f}", flush=True)
    return row["val_accuracy"]


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 15
    with ray_running(args):
        found = [train(num_epochs, **options) for options in one_process_then_workers(args)]
    print_result(args, accuracy=found[-1], accuracy_of_one_process=found[0], epochs=num_epochs)


if __name__ == "__main__":
    main()
