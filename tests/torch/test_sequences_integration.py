"""Workers that die between two calls, one after the other: the next call is begun, and never answered by another one.

Covers `raysgd.trainer.worker.runner` where the beginning of a call fails.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from raysgd.data import IterableStream
from raysgd.torch import TorchTrainer, TrainingOperator

pytestmark = pytest.mark.integration

NUM_SAMPLES, BATCH_SIZE = 120, 24


def numbers() -> TensorDataset:
    indices = torch.arange(NUM_SAMPLES)
    return TensorDataset(indices, indices)


def collate(rows: list[Any]) -> Any:
    return default_collate(rows)


class Counting(TrainingOperator):
    """Adds 1 to the weight of each sample that is used."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Embedding(NUM_SAMPLES, 1, _weight=torch.zeros(NUM_SAMPLES, 1).double())
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=float(BATCH_SIZE)),
            criterion=lambda output, target: -output.mean(),
        )
        loader = DataLoader(numbers(), BATCH_SIZE, shuffle=True, collate_fn=config["collate_fn"])
        self.register_data(train_loader=loader, validation_loader=DataLoader(numbers(), BATCH_SIZE))


def lose(trainer: TorchTrainer) -> None:
    """Kill a worker, and go on at once."""
    os.kill(trainer.status().workers[1].pid, signal.SIGKILL)


def after_validation(trainer: TorchTrainer) -> Any:
    trainer.validate()
    lose(trainer)
    return trainer.train()


def after_prediction(trainer: TorchTrainer) -> Any:
    trainer.predict(torch.arange(NUM_SAMPLES))
    lose(trainer)
    return trainer.train()


def on_a_loader(trainer: TorchTrainer) -> Any:
    return trainer.train(dataset=DataLoader(numbers(), BATCH_SIZE, collate_fn=collate))


def on_a_stream(trainer: TorchTrainer) -> Any:
    rows = IterableStream(lambda: ((number, number) for number in range(NUM_SAMPLES)))
    return trainer.train(dataset=rows.batch(BATCH_SIZE))


@pytest.mark.parametrize(
    ("train_again", "collate_fn"),
    [(after_validation, collate), (after_prediction, collate), (on_a_loader, None), (on_a_stream, None)],
)
def test_deaths_between_calls_leave_out_no_epoch(
    ray_cluster: None, train_again: Callable[[TorchTrainer], Any], collate_fn: Any
) -> None:
    """The ranks connect once more where a call begins that needs it, and one of them is dead."""
    with TorchTrainer(
        training_operator_cls=Counting,
        config={"collate_fn": collate_fn},
        num_workers=3,
        num_cpus_per_worker=0.5,
        split_batches=True,
    ) as trainer:
        trainer.train()
        lose(trainer)
        result = train_again(trainer)
        assert (result["epoch"], result["num_samples"]) == (2, NUM_SAMPLES)
        assert trainer.get_model().weight.unique().tolist() == [2.0]
