"""Trains a population of models at the same time. Bad models copy good models and change their config a little.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % decide which models are
good, and the remaining 20 % test the best model. For comparison, one process trains for the same time with one
learning rate, from the middle of the range of the population.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.tune.population import Population
from raysgd.utils import BATCH_SIZE

SPACE = {"lr": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0], "optimizer": "sgd", BATCH_SIZE: 64, "seed": 0}
MIDDLE = {**SPACE, "lr": 0.03}


def load_data() -> list[TensorDataset]:
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in load_digits()]


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        return load_data()[:2]


def accuracy(trainer: TorchTrainer) -> float:
    images, digits = load_data()[2].tensors
    with torch.no_grad():
        return (trainer.get_model(to_cpu=True).eval()(images).argmax(dim=1) == digits).double().mean().item()


def train_alone(num_intervals: int, use_gpu: bool) -> float:
    options = {"training_operator_cls": DigitsOperator, "use_local": True, "use_gpu": use_gpu}
    with TorchTrainer(config=MIDDLE, **options) as trainer:
        trainer.fit(num_intervals, validation_freq=0)
        return accuracy(trainer)


def train_population(size: int, num_intervals: int, use_gpu: bool) -> tuple[float, list[float], int]:
    """Return the accuracy of the best member, the last learning rates, and how many members copied another member."""

    def make_trainer(config: dict[str, Any]) -> TorchTrainer:
        return TorchTrainer(training_operator_cls=DigitsOperator, config=config, num_workers=1, use_gpu=use_gpu)

    num_copies = 0
    with Population(make_trainer, SPACE, size, metric="val_accuracy", seed=0) as population:
        for interval in range(num_intervals):
            if interval:
                exploits = population.evolve()
                num_copies += len(exploits)
                for exploit in exploits:
                    print(f"  member {exploit.index} copies {exploit.source}, goes on with lr {exploit.config['lr']}")
            population.train()
            shown = ", ".join(f"{each.result['val_accuracy']:.3f}" for each in population.members)
            print(f"  interval {interval}: accuracies {shown}", flush=True)
        rates = [member.config["lr"] for member in population.members]
        return accuracy(population.best.trainer), rates, num_copies


def main() -> None:
    args = parse_arguments(__doc__, num_workers=4)
    num_intervals = 3 if args.smoke_test else 12
    alone = train_alone(num_intervals, args.use_gpu)
    print(f"one process with lr {MIDDLE['lr']}: accuracy {alone:.3f}")
    print(f"a population of {args.num_workers}, each with its own worker", flush=True)
    with ray_running(args, num_cpus=args.num_workers):
        best, rates, num_copies = train_population(args.num_workers, num_intervals, args.use_gpu)
    print_result(
        args,
        test_accuracy=best,
        test_accuracy_of_one_process=alone,
        learning_rates=rates,
        copies=num_copies,
        epochs=num_intervals,
    )


if __name__ == "__main__":
    main()
