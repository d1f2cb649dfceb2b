"""Finds which samples each rank trained on in a step, and computes the loss of each by itself.

For streams and the user's own samplers, the journal of the run is not enough: the data that the program registers is
needed too. A loss is computed with the weights of an earlier checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from raysgd.core.arrays.division import Division
from raysgd.journal.entries import Leg, LoaderLayout, OtherLayout, StreamLayout
from raysgd.journal.journal import Journal
from raysgd.replay.checkpoints import nearest_checkpoint
from raysgd.replay.program import Program
from raysgd.streams.global_reader import GlobalReader
from raysgd.streams.lanes import LanePosition, LaneSlice, StreamPass, StreamPosition
from raysgd.streams.loaders import BatchMaker
from raysgd.streams.source import StreamData
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.sample_order import (
    Indices,
    JoinedBatches,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
)
from raysgd.torch.data.sampling import GlobalBatchRule, PassPlan, ShardedLoader
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator

_MOST_SAMPLES = 2**24
_MOST_SHARES = 2**32  # each worker looks at the shares of all workers


class NeedsProgramError(ValueError):
    """Raised if the samples of a step cannot be found from the journal alone.

    The samples then also depend on the user's own sampler, or on the files of a stream.
    """


class StreamRow(NamedTuple):
    """The place of a row in a stream.

    Attributes:
        shard: Name of the shard that has the row, such as the path of a file.
        row: Number of the row in the shard, from 0.
    """

    shard: str
    row: int

    def __str__(self) -> str:
        return f"{self.shard}:{self.row}"


@dataclass(frozen=True)
class StepSamples:
    """The samples that each rank trained on in one step.

    Attributes:
        by_rank: The samples of each rank, in the order of training: indices in the dataset, or a `StreamRow` for each
            row of a stream.
        rows: For a stream, the contents of each rank's rows. Empty for a dataset.
    """

    by_rank: tuple[tuple[Any, ...], ...]
    rows: tuple[tuple[Any, ...], ...] = ()


def samples_of(journal: Journal, step: int, data: Any = None) -> StepSamples:
    """Return the samples that each rank trained on in a step.

    Args:
        journal: The journal of the run.
        step: Number of the step.
        data: The training data that the user's program registers, or None if there is no program.

    Raises:
        NeedsProgramError: The samples cannot be found without `data`.
        ValueError: The samples cannot be found, or `data` is not the data of the run.
    """
    leg, begin = journal.leg_of(step), journal.begin_of(step)
    if leg.is_of_call and data is not None:
        raise ValueError("the run trained on the `dataset` of `fit`, and the program registers other data.")
    batches = range(begin - leg.after, step - leg.after)  # numbers of the step's batches, from the start of the leg
    if isinstance(leg.data, LoaderLayout):
        return _of_loader(leg, leg.data, batches, _order_of(leg.data, data))
    if isinstance(leg.data, StreamLayout):
        if not isinstance(data, StreamData):
            raise NeedsProgramError("the rows of a stream stand in its files: pass `--program`, which registers it.")
        return _of_stream(leg, leg.data, batches, data)
    raise ValueError(
        f"the library did not divide the train data, a `{leg.data.name}`, so it does not know which samples a step had."
    )


def range_of(journal: Journal, step: int) -> tuple[Any, ...]:
    """Return a tuple that identifies the samples of a step: the data, the pass over it, and the range in the pass.

    Two steps with equal tuples have the same samples, provided that the user's dataset and sampler were the same in
    both runs. Comparing the tuples is faster than generating the shuffled order to compare the samples themselves.
    """
    leg, begin = journal.leg_of(step), journal.begin_of(step)
    layout = leg.data
    data = tuple(str(getattr(layout, name, None)) for name in ("kind", "order", "num_samples", "stream", "name"))
    if getattr(layout, "order", None) != SequentialOrder.name:
        data = *data, str(getattr(layout, "seed", None))
    first, after = begin - leg.after, step - leg.after
    if isinstance(layout, LoaderLayout) and layout.is_of_batches:
        return *data, leg.pass_index, leg.consumed, first, after
    if isinstance(layout, LoaderLayout):
        plan = plan_of(leg, layout, range(layout.num_samples))
        return *data, leg.pass_index, *(plan.consumed_after(min(each, plan.num_steps)) for each in (first, after))
    size = 1 if isinstance(layout, OtherLayout) else layout.batch_size
    return *data, leg.pass_index, leg.consumed + first * size, leg.consumed + after * size


def _order_of(layout: LoaderLayout, data: Any) -> SampleOrder:
    if isinstance(data, ShardedLoader):
        order, then, now = data.sampler.order, layout.order, data.sampler.order.name
        if (then, layout.num_samples) != (now, data.num_samples):
            raise ValueError(
                f"the program registers other data than the run had: {data.num_samples} samples, {now}, and not "
                f"{layout.num_samples}, {then}."
            )
        return order
    if layout.order == SequentialOrder.name:
        return SequentialOrder(layout.num_samples)
    if layout.order == ShuffledOrder.name:
        return ShuffledOrder(layout.num_samples)
    raise NeedsProgramError(f"the order comes from your own {layout.order}: pass `--program`, which makes it.")


def plan_of(leg: Leg, layout: LoaderLayout, indices: Indices) -> PassPlan:
    """Return the plan by which a group of workers divided the rest of a pass over the data.

    Args:
        leg: The part of the epoch that the group ran.
        layout: The data of the leg.
        indices: The indices of all samples, in the order of the pass.
    """
    size, num_workers = layout.batch_size, leg.num_workers
    bounds = indices.bounds if isinstance(indices, JoinedBatches) else None
    if layout.rule is None:
        division: Any = Division(size * num_workers, num_workers, cap=size)
    else:
        largest = indices.largest if isinstance(indices, JoinedBatches) else size
        division = GlobalBatchRule(**asdict(layout.rule)).division(largest, num_workers)
    return PassPlan(len(indices), leg.consumed, division, layout.drop_last, pad=True, bounds=bounds)


def _of_loader(leg: Leg, layout: LoaderLayout, batches: range, order: SampleOrder) -> StepSamples:
    indices = order.indices(layout.seed, leg.pass_index)
    plan, by_rank = plan_of(leg, layout, indices), list[tuple[Any, ...]]()
    first, last = (plan.consumed_after(min(each, plan.num_steps)) for each in (batches.start, batches.stop))
    if last - first > min(_MOST_SAMPLES, _MOST_SHARES // leg.num_workers):
        raise ValueError(f"the step has {last - first} samples on {leg.num_workers} workers: too many to list them.")
    for rank in range(leg.num_workers):
        of_rank: list[Any] = []
        for number in batches:
            start, shares = plan.shares_of_step(number, rank)
            for share in shares:
                of_rank.extend(indices[start + share.start : start + share.stop] if share.plan.num_samples else ())
        by_rank.append(tuple(of_rank))
    return StepSamples(tuple(by_rank))


class _NamedRows(BatchMaker):
    """Makes batches that are lists of pairs `(StreamRow, row)`."""

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps = self._pass.last_steps
        return [(StreamRow(shard, number), steps(row, shard, number)) for shard, number, row in self.rows(wanted)]


def _of_stream(leg: Leg, layout: StreamLayout, batches: range, data: StreamData) -> StepSamples:
    place = {"consumed": leg.consumed, "stream": layout.stream, "turn": layout.turn, "lanes": layout.lanes}
    data.check_position({"is_mid_pass": True, **place})
    of_pass, num_workers = data.open_pass(leg.pass_index, layout.seed), leg.num_workers
    lanes = None if layout.lanes is None else tuple(LanePosition(*lane) for lane in layout.lanes)
    num_skipped, begin = batches.start, StreamPosition(leg.consumed, layout.turn, lanes)
    if of_pass.is_known:  # the lengths of all shards are known, so the number of rows is enough to find the position
        begin, num_skipped = StreamPosition(leg.consumed + batches.start * data.batch_size), 0
    by_rank: list[list[Any]] = [[] for _ in range(num_workers)]
    for number, rows in enumerate(_global_batches(of_pass, begin, data.batch_size)):
        if number >= num_skipped:
            shares = data.divide(data.batch_size, num_workers)
            for rank, own in enumerate(by_rank):
                own += [row for start, stop, _ in shares.parts(len(rows), rank) for row in rows[start:stop]]
        if number + 1 == num_skipped + len(batches):
            break
    places = tuple(tuple(place for place, _ in own) for own in by_rank)
    return StepSamples(places, tuple(tuple(row for _, row in own) for own in by_rank))


def _global_batches(of_pass: StreamPass, begin: StreamPosition, size: int) -> Iterator[list[Any]]:
    """Yield the global batches from the position `begin` to the end of the pass.

    Each global batch has the rows of all workers, as a list of pairs `(StreamRow, row)`. The order of the rows does not
    depend on the number of workers.
    """
    watched, shares = range(of_pass.num_lanes), Division(size, 1)
    reader = GlobalReader(of_pass, shares, 0, begin, watched, _NamedRows(of_pass, watched, list))
    return (batch.batch for batch in reader)


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
