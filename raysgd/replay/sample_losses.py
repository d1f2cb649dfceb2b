"""Computes the loss of each sample of a step by itself, with the weights of an earlier checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raysgd.journal.journal import Journal
from raysgd.replay.checkpoints import nearest_checkpoint
from raysgd.replay.program import Program
from raysgd.replay.samples import StepSamples, samples_of
from raysgd.streams.source import StreamData
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.sampling import ShardedLoader
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator


@dataclass(frozen=True)
class SampleLoss:
    """The loss of one sample by itself.

    Attributes:
        sample: The sample: an index in the dataset, or the `StreamRow` of a stream.
        rank: The rank that trained on the sample.
        loss: The loss of the sample.
    """

    sample: Any
    rank: int
    loss: float


def data_of(trainer: TorchTrainer) -> Any:
    """Return the training data that a trainer's operator has registered. The trainer must train in this process."""
    operator: TrainingOperator = trainer.get_local_operator()
    return operator._raysgd.data.train


def recomputed(
    journal: Journal, step: int, program: Program, checkpoints: str | os.PathLike[str] | None = None
) -> tuple[list[SampleLoss], StepSamples, str | None]:
    """Compute the loss of each sample of a step by itself, in evaluation mode.

    Args:
        journal: The journal of the run.
        step: Number of the step.
        program: The operator class and the config of the run.
        checkpoints: Path or URI of the folder with the checkpoints, if they are not in the folder of the run.

    Returns:
        The losses, NaN first and then in descending order; the samples of each rank; and the path or URI of the
        checkpoint whose weights were used, or None for the initial weights.

    Raises:
        ValueError: The samples cannot be determined, one process cannot repeat the steps of this run, or the loss of a
            single sample cannot be computed.
    """
    leg, checkpoint = journal.leg_of(step), nearest_checkpoint(journal, step, checkpoints)
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
    losses.sort(key=lambda each: (each.loss == each.loss, -each.loss))  # NaN comes first
    return losses, samples, None if checkpoint is None else checkpoint[1]


def one_by_one(data: Any, samples: StepSamples) -> Iterator[list[tuple[Any, Callable[[], Any]]]]:
    """Yield for each rank a list of its samples, each with a function that makes a batch of only this sample."""
    for rank, own in enumerate(samples.by_rank):
        if isinstance(data, ShardedLoader):
            yield [(sample, partial(batch_of, data, [sample])) for sample in own]
        else:
            rows = samples.rows[rank]
            yield [(sample, partial(_collated, data, [row])) for sample, row in zip(own, rows, strict=True)]


def batch_of(data: ShardedLoader, indices: list[Any]) -> Any:
    """Return a batch of the samples with these indices in the dataset, as the data loader would make it."""
    dataset, collate = data.loader.dataset, data.loader.collate_fn
    whole = getattr(dataset, "__getitems__", None)
    return collate(whole(indices) if whole else [dataset[index] for index in indices])


def whole_batch(data: Any, samples: StepSamples) -> Any:
    """Return one batch with the samples of all ranks in a step."""
    if isinstance(data, ShardedLoader):
        return batch_of(data, [sample for own in samples.by_rank for sample in own])
    return _collated(data, [row for own in samples.rows for row in own])


def _collated(data: StreamData, rows: list[Any]) -> Any:
    own = data.loader.collate
    return TensorCollate()(rows) if own is None else own(rows)


def _losses(operator: TrainingOperator, samples: list[tuple[Any, Callable[[], Any]]]) -> Iterator[tuple[Any, float]]:
    internals = operator._raysgd
    for model in internals.registered.models:
        model.eval()  # in training mode, layers such as batch normalization cannot process a single sample
    with torch.no_grad():
        for sample, make in samples:
            loss = internals.evaluate(make())[3]["val_loss"]
            yield sample, float(loss)
