"""What streams of batches of TensorFlow have of their own: samples of all ranks, padding, lockstep, steps of batches.

How a stream moves through passes is tested in `tests/torch/data/test_sources.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raysgd.core.arrays.division import NO_BATCH, BatchPlan, Division, PlannedBatch, plan_of
from raysgd.core.engine.shared.types import SamplesUsed, World
from raysgd.data import IterableStream
from raysgd.exceptions import StreamError
from raysgd.streams.source import stream_data
from raysgd.tf.data.sources import (
    OwnSource,
    Passes,
    TFDividedSource,
    TFRanks,
    dataset_of,
    lockstep_dataset,
    source_of,
)
from raysgd.tf.parallel.step import TFStep
from raysgd.trainer.worker.feed import DataCursor, in_lockstep
from raysgd.trainer.worker.step_loop import StepLoop, StepParts


class Parts(StepParts):
    """The steps of an operator without the operator."""

    def __init__(self, step: TFStep, take_part: Callable[[Any], None] = lambda batch: None) -> None:
        self._leg, self._take_part = step, take_part

    @property
    def leg(self) -> TFStep:
        return self._leg

    def takes_padding(self, batch: Any) -> bool:
        self._take_part(batch)
        return True

    def commit(self) -> None:
        self._leg.confirm()


def take(cursor: DataCursor, num_steps: int | None, committed: Any = lambda is_last: None) -> Iterator[Any]:
    """The batches of so many steps."""
    return StepLoop(cursor, Parts(TFStep()), num_steps, committed).batches()


def stream_of(source: Any) -> DataCursor:
    return DataCursor(source, itertools.count().__next__, looks_ahead=True)


def test_the_ledger_counts_the_samples_of_all_ranks_and_learns_from_the_first_pass_how_many_there_are() -> None:
    import tensorflow as tf

    passes = Passes(tf.data.Dataset.range(10).batch(4))
    stream = stream_of(TFDividedSource(passes, "global", World(1, 2), pads=True, num_global=2, seed=0))
    ledgers = []
    batches = take(stream, None, lambda is_last: ledgers.append(stream.samples_used()))
    assert next(batches).numpy().tolist() == [2, 3]
    assert stream.samples_used() == SamplesUsed(0, None, used=0, in_flight=4)
    assert len(list(batches)) == 2
    assert ledgers == [SamplesUsed(0, None, 4), SamplesUsed(0, None, 8), SamplesUsed(0, 10, 10)]
    assert len(list(take(stream, 1))) == 1
    assert stream.samples_used() == SamplesUsed(1, due=10, used=4)


def test_there_is_no_ledger_of_data_that_each_rank_has_for_itself() -> None:
    assert stream_of(OwnSource([], None)).samples_used() is None


@pytest.mark.parametrize("name", ["train", "validation"])
def test_a_collate_of_a_stream_that_leaves_rows_out_is_refused(name: str) -> None:
    stream = IterableStream([*range(8)]).batch(4, collate=lambda rows: np.stack([row for row in rows if row != 5]))
    ranks: Any = TFRanks(0, 1, None)  # type: ignore[arg-type]
    items = source_of(stream_data(stream, name, Division, 1), ranks, seed=0).open(0, 0)
    assert sorted(next(items).batch.numpy().tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"turned 4 rows into 3 samples.*`filter`"):
        next(items)


class WithPadding:
    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        yield PlannedBatch("real", plan_of(2, 3), used_after=3)
        yield PlannedBatch("padding", plan_of(0, 1), used_after=4)


def test_a_batch_without_samples_is_not_handed_out() -> None:
    step, log = TFStep(), []

    def take_part(batch: Any) -> None:
        log.append(("taken", batch, step.plan.is_padding))
        step.use()

    cursor = DataCursor(WithPadding(), lambda: 0, looks_ahead=True)
    for batch in StepLoop(cursor, Parts(step, take_part), None).batches():
        log.append(("handed out", batch, step.plan.is_padding))
        step.use()
    assert log == [("handed out", "real", False), ("taken", "padding", True)]
    assert (step.num_samples, cursor.num_batches_completed, cursor.completed) == (None, 2, 4)


class Votes:
    """An agreement with another rank that has so many batches."""

    def __init__(self, others: int) -> None:
        self.others = others

    def ask(self, has_batch: bool) -> Any:
        self.others -= 1
        has_any = has_batch or self.others >= 0
        return lambda: has_any


@pytest.mark.parametrize(("own", "others"), [(3, 3), (3, 1), (1, 3), (0, 0)])
def test_ranks_step_until_all_have_run_out(own: int, others: int) -> None:
    votes = Votes(others)
    found = list(in_lockstep(iter(range(own)), lambda batch: votes.ask(batch is not NO_BATCH), "data"))
    repeated = [(own - 1, False, True)] * max(0, others - own)
    assert found == [(number, True, True) for number in range(own)] + repeated


def test_ranks_agree_on_nothing_ahead_of_what_fit_draws() -> None:
    import tensorflow as tf

    votes = Votes(100)
    batches = iter(lockstep_dataset(tf.data.Dataset.range(50).batch(1), votes))  # type: ignore[arg-type]
    assert [int(next(batches)[0]) for _ in range(3)] == [0, 1, 2]
    assert votes.others == 100 - 4  # one for each draw, and one for the next


class Batch(list[int]):
    """Stands for a batch whose number of samples is its length."""


def test_a_rank_that_has_run_out_repeats_its_last_batch_with_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.tf.objects.datasets.num_samples", len)
    items = list(OwnSource([Batch([1, 2])], Votes(2)).open(0, 0))  # type: ignore[arg-type]
    assert [(item.batch, item.plan.num_samples) for item in items] == [([1, 2], 2), ([1, 2], 0)]


def test_a_rank_without_any_batch_says_so() -> None:
    with pytest.raises(ValueError, match="Give every rank at least one batch"):
        list(OwnSource([], Votes(1)).open(0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_samples", "weights", "divisor", "factor"),
    [
        (None, (0.0, 0.0), 2.0, 1.0),  # the loop is Keras's
        (0, (0.0, 0.0), 2.0, 1.0),  # padding
        (2, (0.0, 0.0), None, 4.0),  # a sum
        (2, (3.0, 6.0), 3.0, 2.0),  # a mean by the weights of the batch
        (2, (3.0, 6.0), 5.0, 1.0),  # a mean by other weights
        (2, (0.0, 0.0), 5.0, 1.0),  # there are no weights
    ],
)
def test_what_a_batch_says_about_its_loss(
    num_samples: int | None, weights: tuple[float, float], divisor: float | None, factor: float
) -> None:
    assert TFStep(BatchPlan(num_samples, 8, sample_weights=weights)).factor(divisor) == factor


def tensors(*sizes: int) -> tuple[Iterator[Any], TFStep]:
    """Batches of so many samples of each of two ranks, and its step."""
    import tensorflow as tf

    class Tensors:
        def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
            for size in sizes:
                yield PlannedBatch((tf.zeros([size, 1]), tf.zeros([size])), plan_of(size, 2 * size))

    step = TFStep()
    return StepLoop(DataCursor(Tensors(), lambda: 0, looks_ahead=True), Parts(step), None).batches(), step


def test_a_step_is_for_the_batch_that_was_drawn_last() -> None:
    batches, step = tensors(4, 4, 3, 2)
    used = []
    for index, _ in enumerate(batches):
        if index == 2:
            step.skip()
        else:
            used += [step.use(), step.use()]  # two optimizers
    assert used == [4, 4, 4, 4, 2, 2]
    assert step.num_samples is None


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_batches_drawn_ahead_must_be_alike(num_ahead: int) -> None:
    batches, step = tensors(4, 4, 4, 1)
    for _ in range(num_ahead):
        next(batches)
    for _ in itertools.islice(batches, 3 - num_ahead):
        assert step.use() == 4
    next(batches)
    with pytest.raises(RuntimeError, match=r"Batches of .*4, 1 samples .* Draw one batch, train on it"):
        step.use()
    step.forget()
    assert step.use() is None, "what is done by hand afterwards belongs to no batch"


def test_the_dataset_of_a_stream_leaves_out_rows_that_the_stream_skips() -> None:
    stream = IterableStream([1, 0, 1, 2, 3, 4]).map(lambda row: 6 / (row - 1))
    found = dataset_of(stream.batch(4, on_error="skip"))
    assert [batch.numpy().tolist() for batch in found] == [[-6.0, 6.0, 3.0, 2.0]]
    with pytest.raises(StreamError, match="ZeroDivisionError"):
        dataset_of(stream.batch(4))
