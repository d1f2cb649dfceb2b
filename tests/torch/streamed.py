"""Operators that train on streams, of 40 shards each."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysgd.data import HuggingFaceStream, ParquetStream, TarStream
from raysgd.streams.stream import Pipeline
from raysgd.torch import TrainingOperator
from tests.streams.made import MadeStream

BATCH = 25


def as_sample(row: tuple[str, int], rng: np.random.Generator) -> tuple[Any, Any]:
    number = int(row[0].removeprefix("shard-")) * 15 + row[1]
    features = np.random.default_rng(number).normal(size=4)
    return np.array([*features, rng.normal()]), np.array([np.sin(features.sum()), float(number)])


def stream_of(kind: str, num_loaders: int = 0) -> Pipeline:
    """A stream that is not shuffled, one that is, or one that is filtered too, of shards of unknown lengths."""
    source = MadeStream([15] * 40, is_known=kind != "filtered")
    mapped = source.map(as_sample, seeded=True)
    if kind == "filtered":
        mapped = mapped.filter(lambda sample: sample[1][1] % 5 != 0)
    return (mapped if kind == "plain" else mapped.shuffle(128)).batch(BATCH, num_workers=num_loaders)


class StreamOperator(TrainingOperator):
    """Each row that it trains on leaves a mark in the weights."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 1).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.seen: list[int] = []
        stream = stream_of(config["kind"], config.get("num_loaders", 0))
        self.register_data(train_loader=stream, validation_loader=stream)

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        features, target = batch
        if target is None:
            return (features,), None
        self.seen += target[:, 1].int().tolist()
        return (features,), target[:, :1]


class LoaderOperator(TrainingOperator):
    """It trains on a loader."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(5, 1).double()
        self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )


ROWS_OF_FILE = 30


def write_files(folder: Path, kind: str) -> None:
    """Write 40 files of rows that say their numbers."""
    from pyarrow import parquet, table

    for file in range(40):
        numbers = np.arange(file * ROWS_OF_FILE, (file + 1) * ROWS_OF_FILE)
        if kind == "parquet":
            parquet.write_table(table({"number": numbers}), folder / f"{file:02}.parquet")
        elif kind == "tar":
            with tarfile.open(folder / f"{file:02}.tar", "w") as tar:
                for number in numbers:
                    content = str(number).encode()
                    info = tarfile.TarInfo(f"{number:05}.txt")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def stream_of_files(folder: Path, kind: str) -> Pipeline:
    """The rows as pairs of number and target."""
    if kind == "parquet":
        rows = ParquetStream(folder).map(lambda row: int(row["number"]))
    elif kind == "tar":
        rows = TarStream(folder).map(lambda row: int(row["txt"]))
    else:
        import datasets

        numbers = {"number": list(range(40 * ROWS_OF_FILE))}
        dataset = datasets.Dataset.from_dict(numbers).to_iterable_dataset(num_shards=40)
        rows = HuggingFaceStream(dataset).map(lambda row: int(row["number"]))
    return rows.map(lambda number: (number, np.sin(number))).shuffle(128).batch(ROWS_OF_FILE, num_workers=1)


class RowCounts(torch.nn.Module):
    """A weight for each row, which says how often it was trained on, and one that the order of global batches makes."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_rows, dtype=torch.float64))
        self.digest = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.counts[index], self.digest.expand(len(index))


def loss_of(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """A step of 1 along its gradient adds 1 for each row, and the mean target to nine tenths of the digest."""
    counts, digest = output
    return (0.05 * digest**2 - digest * target - ROWS_OF_FILE * counts).mean()


class CountingOperator(TrainingOperator):
    """Counts how often each row was trained on."""

    def setup(self, config: dict[str, Any]) -> None:
        model = RowCounts(40 * ROWS_OF_FILE)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0), criterion=loss_of
        )
        self.register_data(train_loader=stream_of_files(Path(config["folder"]), config["kind"]))
