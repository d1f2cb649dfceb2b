"""`why`: what the journal of a run shows about one step.

It finds which samples each rank trained on in the step, and computes the loss of each by itself. For streams and the
user's own samplers, the journal is not enough: the data that the program registers is needed too. A loss is computed
with the weights of an earlier checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from raysgd.core.arrays.division import Division
from raysgd.core.history.history import History
from raysgd.core.history.readable import counted
from raysgd.core.text import cards
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.journal.entries import LeftOutLine, Leg, LoaderLayout, OtherLayout, StreamLayout
from raysgd.journal.journal import Journal, StepRecord, journal_of
from raysgd.replay.program import Program, nearest_checkpoint
from raysgd.streams.global_reader import GlobalReader
from raysgd.streams.lanes import LaneSlice, StreamPosition
from raysgd.streams.loaders import BatchMaker
from raysgd.streams.source import StreamData
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.sample_order import Indices, JoinedBatches, SampleOrder, SequentialOrder, ShuffledOrder
from raysgd.torch.data.sampling import GlobalBatchRule, PassPlan, ShardedLoader
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator

_AROUND = 4
_MOST_SHOWN = 20
_MOST_SAMPLES = 2**24
_MOST_SHARES = 2**32  # each worker looks at the shares of all workers


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


@dataclass(frozen=True)
class Why:
    """The result of `why`: what the journal of the run shows about one step.

    Attributes:
        record: The loss and the gradient norm of the step.
        around: The records of the step and of nearby steps, in the order of steps.
        epoch: Number of the epoch in which the step was taken, from 1.
        num_workers: Number of workers that took the step.
        left_out: Why `Guard` left the step out: a line for each optimizer that did not step. Empty for other steps.
        samples: The samples that each rank trained on: dataset indices, or `StreamRow(shard, row)` for a stream. None
            if they are unknown.
        obstacle: Reason why the samples are unknown, if `samples` is None.
        losses: The loss of each sample by itself: first NaN, then from highest to lowest. None without
            `recompute=True`.
        checkpoint: The checkpoint whose weights were used to compute `losses`. None if the initial weights from
            `setup` were used, or without `recompute=True`.
    """

    record: StepRecord
    around: tuple[StepRecord, ...]
    epoch: int
    num_workers: int
    samples: tuple[tuple[Any, ...], ...] | None
    obstacle: str | None = None
    losses: tuple[SampleLoss, ...] | None = None
    checkpoint: str | None = None
    left_out: tuple[LeftOutLine, ...] = ()

    def __str__(self) -> str:
        """Return everything about the step as text with tables."""
        head = f"step {self.record.step}, in epoch {self.epoch}, on {counted(self.num_workers, 'worker')}"
        steps = [
            [
                ">" if each.step == self.record.step else "",
                str(each.step),
                f"{each.loss:.6g}",
                "" if each.norm is None else f"{each.norm:.4g}",
                "no loss" if each.weight < 0 else f"{each.weight:g}",
            ]
            for each in self.around
        ]
        table = cards.in_columns([["", "step", "loss", "norm", "weight"], *steps], indent=2)
        lines = [head, *map(str, self.left_out), "", *table, ""]
        if self.samples is None:
            lines.append(f"samples: {self.obstacle}")
        for rank, own in enumerate(self.samples or ()):
            lines.append(f"rank {rank}: {', '.join(printable(str(each), None) for each in own) or 'no sample'}")
        if self.losses is not None:
            weights = masked(self.checkpoint or "`setup`, because no checkpoint before the step is left")
            lines += ["", f"loss of each sample by itself, with the weights of {printable(weights, None)}:", ""]
            rows = [
                [f"{each.loss:.6g}", printable(str(each.sample), None), str(each.rank)]
                for each in self.losses[:_MOST_SHOWN]
            ]
            lines += cards.in_columns([["loss", "sample", "rank"], *rows], indent=2)
            if len(self.losses) > _MOST_SHOWN:
                lines.append(f"  ({len(self.losses) - _MOST_SHOWN} more are lower)")
        return "\n".join(lines)


def why(
    run: str | os.PathLike[str] | History,
    step: int,
    *,
    program: Any = None,
    recompute: bool = False,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
) -> Why:
    """Look up a step of a run: its loss, the losses of neighboring steps, and the samples of each rank.

    Args:
        run: The folder or the history of the run.
        step: Number of the step, from 1, as in `metrics.steps.csv` and `global_step`.
        program: The operator class of the run, or its location, such as "train.py:MyOperator". Needed if the data was a
            stream or your own sampler, and with `recompute`. The `setup` of the class runs in this process.
        recompute: Whether to compute the loss of each sample by itself, in evaluation mode, with the weights of the
            nearest checkpoint before the step. If there is none, the initial weights from `setup` are used.
        config: Entries of the config that are missing in the journal: objects and secrets.
        options: Arguments of the trainer that are missing in the journal, such as a dict for `compile`.
        checkpoints: Path or URI of the folder with the checkpoints, if they are not in the folder of the run.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The run has no step with this number, the journal is damaged, the program does not match the run, or
            `recompute` is True without a `program`.
    """
    journal = journal_of(run)
    record, leg = journal.check_step(step), journal.leg_of(step)
    losses: tuple[SampleLoss, ...] | None = None
    obstacle, checkpoint, samples = None, None, None
    if recompute and program is None:
        raise ValueError("`recompute` needs the program of the run: pass `--program train.py:MyOperator`.")
    if recompute:
        found, of_step, checkpoint = recomputed(journal, step, Program(program, config, options), checkpoints)
        losses, samples = tuple(found), of_step.by_rank
    else:
        try:
            samples = samples_of(journal, step).by_rank
        except NeedsProgramError as error:
            obstacle = str(error)
            if program is not None:
                with Program(program, config, options).trainer(leg) as trainer:
                    samples = samples_of(journal, step, data_of(trainer)).by_rank
                obstacle = None
        except ValueError as error:
            obstacle = str(error)
    around = tuple(_around(journal, step))
    left_out = tuple(each for each in journal.left_out if each.step == step)
    return Why(record, around, leg.epoch, leg.num_workers, samples, obstacle, losses, checkpoint, left_out)


def _around(journal: Journal, step: int) -> Sequence[StepRecord]:
    numbers = sorted({*journal.numbers(), step})
    place = numbers.index(step)
    return [journal.check_step(number) for number in numbers[max(0, place - _AROUND) : place + _AROUND + 1]]


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


class StepSamples(NamedTuple):
    """The samples that each rank trained on in one step.

    Attributes:
        by_rank: The samples of each rank, in the order of training: indices in the dataset, or a `StreamRow` for each
            row of a stream.
        rows: For each of them, what `batch_of` needs: the index in the dataset, or the content of the row.
    """

    by_rank: tuple[tuple[Any, ...], ...]
    rows: tuple[tuple[Any, ...], ...]


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
    return StepSamples(tuple(by_rank), tuple(by_rank))


class _NamedRows(BatchMaker):
    """Makes batches that are lists of pairs `(StreamRow, row)`."""

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps = self._pass.last_steps
        return [(StreamRow(shard, number), steps(row, shard, number)) for shard, number, row in self.rows(wanted)]


def _of_stream(leg: Leg, layout: StreamLayout, batches: range, data: StreamData) -> StepSamples:
    place = {"consumed": leg.consumed, "stream": layout.stream, "turn": layout.turn, "lanes": layout.lanes}
    num_skipped, begin = batches.start, data.position(place)
    of_pass, num_workers = data.open_pass(leg.pass_index, layout.seed), leg.num_workers
    if of_pass.is_known:  # the lengths of all shards are known, so the number of rows is enough to find the position
        begin, num_skipped = StreamPosition(leg.consumed + batches.start * data.batch_size), 0
    by_rank: list[list[Any]] = [[] for _ in range(num_workers)]
    # One reader of all lanes yields whole global batches. Their rows do not depend on the number of workers.
    shares, maker = data.divide(data.batch_size, num_workers), _NamedRows(of_pass, range(of_pass.num_lanes), list)
    batches_of_all = GlobalReader(of_pass, Division(data.batch_size, 1), 0, begin, maker)
    for number, (_, [rows]) in enumerate(batches_of_all):
        if number >= num_skipped:
            for rank, own in enumerate(by_rank):
                own += [row for start, stop, _ in shares.parts(len(rows), rank) for row in rows[start:stop]]
        if number + 1 == num_skipped + len(batches):
            break
    places = tuple(tuple(place for place, _ in own) for own in by_rank)
    return StepSamples(places, tuple(tuple(row for _, row in own) for own in by_rank))


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
    leg, (_, checkpoint) = journal.leg_of(step), nearest_checkpoint(journal, step, checkpoints)
    with program.trainer(leg) as trainer, torch.no_grad():
        data = data_of(trainer)
        samples = samples_of(journal, step, data)
        if checkpoint is not None:
            trainer.load(checkpoint, parts=["models"])
        operator: TrainingOperator = trainer.get_local_operator()
        for model in operator._raysgd.registered.models:
            model.eval()  # in training mode, layers such as batch normalization cannot process a single sample
        losses = [
            SampleLoss(sample, rank, float(operator._raysgd.evaluate(batch_of(data, [row]))[3]["val_loss"]))
            for rank, of_rank in enumerate(zip(*samples, strict=True))
            for sample, row in zip(*of_rank, strict=True)
        ]
    losses.sort(key=lambda each: (each.loss == each.loss, -each.loss))  # NaN comes first
    return losses, samples, checkpoint


def batch_of(data: Any, rows: list[Any]) -> Any:
    """Return a batch of some samples of a step.

    Args:
        data: The training data of the program.
        rows: Indices in the dataset, of which the data loader makes a batch, or rows of a stream.
    """
    if isinstance(data, ShardedLoader):
        dataset, collate = data.loader.dataset, data.loader.collate_fn
        whole = getattr(dataset, "__getitems__", None)
        return collate(whole(rows) if whole else [dataset[index] for index in rows])
    own = data.loader.collate
    return TensorCollate()(rows) if own is None else own(rows)
