"""An operator that trains on a stream of 40 shards with 15 rows each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raysgd.streams.pipeline import Pipeline
from raysgd.torch import TrainingOperator
from tests.streams.made import MadeStream

BATCH = 25


def as_sample(row: tuple[str, int], rng: np.random.Generator) -> tuple[Any, Any]:
    number = int(row[0].removeprefix("shard-")) * 15 + row[1]
    features = np.random.default_rng(number).normal(size=4)
    return np.array([*features, rng.normal()]), np.array([np.sin(features.sum()), float(number)])


def stream_of(kind: str) -> Pipeline:
    """A stream that is not shuffled, one that is, or one that is filtered too, of shards of unknown lengths."""
    source = MadeStream([15] * 40, is_known=kind != "filtered")
    mapped = source.map(as_sample, seeded=True)
    if kind == "filtered":
        mapped = mapped.filter(lambda sample: sample[1][1] % 5 != 0)
    return (mapped if kind == "plain" else mapped.shuffle(128)).batch(BATCH)


class StreamOperator(TrainingOperator):
    """Each row that it trains on leaves a mark in the weights."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 1).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.seen: list[int] = []
        self.register_data(train_loader=stream_of(config["kind"]), validation_loader=stream_of(config["kind"]))

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        features, target = batch
        self.seen += target[:, 1].int().tolist()
        return (features,), target[:, :1]
