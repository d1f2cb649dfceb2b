"""Asks for labels where the model is least certain: the driver predicts on live workers, chooses, and trains again.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 80 % are a pool whose labels are unknown at first; each
round adds some. The other 20 % are only for testing. For comparison, the same workers also train with randomly chosen
labels. Between rounds no process is started or stopped, and no checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import Arrays, load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator

NUM_LABELS_EACH_ROUND = 40
FIRST = np.arange(NUM_LABELS_EACH_ROUND)  # indices in the pool, which is in random order

Array = np.ndarray[Any, Any]


def make_config(known: Array) -> dict[str, Any]:
    return {"lr": 0.003, "batch_size": 16, "seed": 0, "known": known}


def load_data() -> tuple[Arrays, Arrays]:
    """Return the pool and the test data, which are always the same."""
    train, validation, test = load_digits()
    images, labels = (np.concatenate(parts) for parts in zip(train, validation, strict=True))
    return (images, labels), test


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        """Return the labeled part of the pool, and the test data."""
        (images, labels), test = load_data()
        known = config["known"]
        train = TensorDataset(torch.tensor(images[known]), torch.tensor(labels[known]))
        return train, TensorDataset(*(torch.tensor(part) for part in test))


def least_certain(trainer: TorchTrainer, images: Array) -> Array:
    """Return the indices of the images, most uncertain first: the scores of the two best digits are closest."""
    best = np.sort(trainer.predict(images), axis=1)
    return np.argsort(best[:, -1] - best[:, -2])


def in_any_order(trainer: TorchTrainer, images: Array) -> Array:
    return np.random.default_rng(len(images)).permutation(len(images))


def learn(trainer: TorchTrainer, num_rounds: int, choose: Callable[[TorchTrainer, Array], Array]) -> list[float]:
    """Train and ask for more labels, round after round. Return the accuracy on the test data in each round."""
    (pool, _), _ = load_data()
    known, accuracies = FIRST, []
    for _ in range(num_rounds):
        trainer.reset_config(make_config(known))  # a new model, in the same processes
        accuracies.append(trainer.fit(20, validation_freq=20)[-1]["val_accuracy"])
        unknown = np.setdiff1d(np.arange(len(pool)), known)
        order = choose(trainer, pool[unknown])
        known = np.concatenate([known, unknown[order[:NUM_LABELS_EACH_ROUND]]])
    return accuracies


def compare(num_rounds: int, **options: Any) -> tuple[float, float]:
    """Return the accuracies after the last round, with chosen labels and with random labels."""
    with TorchTrainer(
        training_operator_cls=DigitsOperator, config=make_config(FIRST), split_batches=True, **options
    ) as trainer:
        chosen = learn(trainer, num_rounds, least_certain)
        at_random = learn(trainer, num_rounds, in_any_order)
    for index, pair in enumerate(zip(chosen, at_random, strict=True), start=1):
        num_labels = index * NUM_LABELS_EACH_ROUND
        print(f"  {num_labels:3d} labels: accuracy {pair[0]:.3f}; chosen at random {pair[1]:.3f}", flush=True)
    return chosen[-1], at_random[-1]


def main() -> None:
    args = parse_arguments(__doc__)
    num_rounds = 2 if args.smoke_test else 8
    with ray_running(args):
        found = [compare(num_rounds, **options) for options in one_process_then_workers(args)]
    (alone, _), (chosen, at_random) = found[0], found[-1]
    print_result(
        args,
        test_accuracy=chosen,
        test_accuracy_of_one_process=alone,
        test_accuracy_of_random_labels=at_random,
        labels=num_rounds * NUM_LABELS_EACH_ROUND,
    )


if __name__ == "__main__":
    main()
