"""The loss of each sample of a step by itself, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raysgd.journal.journal import Journal
from raysgd.replay.program import Program
from raysgd.replay.samples import StepSamples, samples_of
from raysgd.streams.source import StreamData
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.sampling import ShardedLoader
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator


@dataclass(frozen=True)
class SampleLoss:
    """The loss of one sample.

    Attributes:
        sample: Index of the dataset, or row of a stream.
        rank: The rank that had it.
        loss: Its loss.
    """

    sample: Any
    rank: int
    loss: float


def nearest_checkpoint(journal: Journal, step: int, *, may_be_at: bool = False) -> tuple[int, str] | None:
    """Return the step and the place of the newest checkpoint before a step that still exists; None if there is none.

    Args:
        journal: The journal of the run.
        step: The step.
        may_be_at: True if a checkpoint after the step itself counts, too.
    """
    for at in sorted(journal.checkpoints, reverse=True):
        place = journal.checkpoints[at]
        path = place if "://" in place else str(journal.folder / place)
        if (at < step or (may_be_at and at == step)) and ("://" in place or Path(path).exists()):
            return at, path
    return None


def data_of(trainer: TorchTrainer) -> Any:
    """Return the registered train data of a trainer with one process."""
    operator: TrainingOperator = trainer.get_local_operator()
    return operator._raysgd.data.train


def recomputed(journal: Journal, step: int, program: Program) -> tuple[list[SampleLoss], StepSamples, str | None]:
    """Return the losses of all samples of a step, highest first; the samples; and the checkpoint that was used.

    Raises:
        ValueError: The samples cannot be found, or have no loss of their own.
    """
    leg, checkpoint = journal.leg_of(step), nearest_checkpoint(journal, step)
    with program.trainer(journal, leg) as trainer:
        data = data_of(trainer)
        samples = samples_of(journal, step, data)
        if checkpoint is not None:
            trainer.load(checkpoint[1], parts=["models"])
        operator: TrainingOperator = trainer.get_local_operator()
        losses = [
            SampleLoss(sample, rank, loss)
            for rank, batches in enumerate(one_by_one(data, samples))
            for sample, loss in _losses(operator, batches)
        ]
    losses.sort(key=lambda each: (each.loss == each.loss, -each.loss))  # NaN first
    return losses, samples, None if checkpoint is None else checkpoint[1]


def one_by_one(data: Any, samples: StepSamples) -> Iterator[list[tuple[Any, Callable[[], Any]]]]:
    """Yield for each rank its samples, each with a function that makes a batch of it alone."""
    for rank, own in enumerate(samples.by_rank):
        if isinstance(data, ShardedLoader):
            yield [(sample, partial(batch_of, data, [sample])) for sample in own]
        else:
            rows = samples.rows[rank]
            yield [(sample, partial(_collated, data, [row])) for sample, row in zip(own, rows, strict=True)]


def batch_of(data: ShardedLoader, indices: list[Any]) -> Any:
    """Return a batch of samples of a dataset, as the loader makes it."""
    dataset, collate = data.loader.dataset, data.loader.collate_fn
    whole = getattr(dataset, "__getitems__", None)
    return collate(whole(indices) if whole else [dataset[index] for index in indices])


def whole_batch(data: Any, samples: StepSamples) -> Any:
    """Return one batch of all samples of a step."""
    if isinstance(data, ShardedLoader):
        return batch_of(data, [sample for own in samples.by_rank for sample in own])
    return _collated(data, [row for own in samples.rows for row in own])


def _collated(data: StreamData, rows: list[Any]) -> Any:
    own = data.loader.collate
    return TensorCollate()(rows) if own is None else own(rows)


def _losses(operator: TrainingOperator, samples: list[tuple[Any, Callable[[], Any]]]) -> Iterator[tuple[Any, float]]:
    internals = operator._raysgd
    for model in internals.registered.models:
        model.eval()  # layers such as batch normalization cannot train on a single sample
    with torch.no_grad():
        for sample, make in samples:
            loss = internals.evaluate(make())[3]["val_loss"]
            yield sample, float(loss)
