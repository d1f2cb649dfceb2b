"""The position in the data: batches that come one after the other, across calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.engine.shared.types import DataLedger, World
from raysgd.tf.data.batch_streams import (
    OwnSource,
    StreamItem,
    TFBatchStream,
    TFDividedSource,
    in_lockstep,
    lockstep_dataset,
)
from raysgd.tf.data.batch_streams import Passes as StreamPasses
from raysgd.tf.parallel.step import TFStep


class Numbers:
    """A pass of ten batches of one sample each."""

    def __init__(self, total: int = 10) -> None:
        self.total = total

    def open(self, pass_index: int, consumed: int) -> Iterator[StreamItem]:
        for number in range(consumed, self.total):
            yield StreamItem(number, 1, 1)

    def num_steps(self) -> int:
        return self.total


class Passes:
    """Counts the passes that are begun."""

    def __init__(self) -> None:
        self.epoch = 0

    def __call__(self) -> int:
        self.epoch += 1
        return self.epoch - 1


def stream_of(source: Any) -> tuple[TFBatchStream, Passes]:
    passes = Passes()
    return TFBatchStream(source, TFStep(), passes), passes


def test_a_pass_begun_elsewhere_is_resumed() -> None:
    stream, passes = stream_of(Numbers())
    stream.resume(3, 7)
    assert (stream.is_mid_pass, stream.pass_index, stream.consumed) == (True, 3, 7)
    assert list(stream.take(None)) == [7, 8, 9]
    assert (passes.epoch, stream.consumed) == (0, 10)


def test_a_step_that_broke_off_comes_again_elsewhere() -> None:
    stream, passes = stream_of(Numbers())
    batches = stream.take(None)
    for _ in range(4):
        next(batches)
    assert (stream.num_steps_taken, stream.num_steps_completed, stream.completed) == (4, 3, 3)
    stream.break_off()
    assert (stream.num_steps_completed, stream.is_mid_pass) == (3, True)
    assert list(stream.take(2)) == [3, 4]
    assert (stream.num_steps_completed, passes.epoch) == (5, 1)


def test_what_is_called_at_a_boundary_may_end_the_iteration_between_two_steps() -> None:
    class Stopped(Exception):
        pass

    def at_boundary() -> None:
        if stream.num_steps_completed == 3:
            raise Stopped

    stream, _ = stream_of(Numbers())
    stream.at_boundary = at_boundary
    seen: list[int] = []
    with pytest.raises(Stopped):
        seen.extend(stream.take(None))
    assert seen == [0, 1, 2]
    stream.at_boundary = None
    stream.break_off()
    assert list(stream.take(None)) == list(range(3, 10))


def test_the_ledger_counts_the_samples_of_all_ranks_and_learns_from_the_first_pass_how_many_there_are() -> None:
    import tensorflow as tf

    passes = StreamPasses(tf.data.Dataset.range(10).batch(4))
    stream, _ = stream_of(TFDividedSource(passes, "global", World(1, 2), pads=True))
    ledgers = []
    stream.at_boundary = lambda: ledgers.append(stream.ledger())
    batches = stream.take(None)
    assert next(batches).numpy().tolist() == [2, 3]
    assert stream.ledger() == DataLedger(0, None, used=0, in_flight=4)
    assert len(list(batches)) == 2
    assert ledgers == [DataLedger(0, None, 4), DataLedger(0, None, 8), DataLedger(0, 10, 10)]
    assert len(list(stream.take(1))) == 1
    assert stream.ledger() == DataLedger(1, due=10, used=4)


def test_there_is_no_ledger_of_data_that_each_rank_has_for_itself() -> None:
    stream, _ = stream_of(OwnSource([], None))
    assert stream.ledger() is None


class WithPadding(Numbers):
    def open(self, pass_index: int, consumed: int) -> Iterator[StreamItem]:
        yield StreamItem("real", 2, 3)
        yield StreamItem("padding", 0, 1)


def test_a_batch_without_samples_is_not_handed_out() -> None:
    step, log = TFStep(), []

    def take_part(batch: Any) -> None:
        log.append(("taken", batch, step.is_padding))
        step.use()

    stream = TFBatchStream(WithPadding(), step, Passes(), take_part)
    for batch in stream.take(None):
        log.append(("handed out", batch, step.is_padding))
        step.use()
    assert log == [("handed out", "real", False), ("taken", "padding", True)]
    assert (step.num_samples, stream.num_steps_completed, stream.completed) == (None, 2, 4)


class Votes:
    """An agreement with another rank that has so many batches."""

    def __init__(self, others: int) -> None:
        self.others = others

    def ask(self, has_batch: bool) -> Any:
        self.others -= 1
        has_any = has_batch or self.others >= 0
        return lambda: has_any


@pytest.mark.parametrize(("own", "others"), [(3, 3), (3, 1), (1, 3), (0, 2), (0, 0)])
def test_ranks_step_until_all_have_run_out(own: int, others: int) -> None:
    found = list(in_lockstep(iter(range(own)), Votes(others)))  # type: ignore[arg-type]
    assert found == list(range(own)) + [None] * max(0, others - own)


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
    assert [(item.batch, item.num_samples) for item in items] == [([1, 2], 2), ([1, 2], 0)]


def test_a_rank_without_any_batch_says_so() -> None:
    with pytest.raises(ValueError, match="Give every rank at least one batch"):
        list(OwnSource([], Votes(1)).open(0, 0))  # type: ignore[arg-type]
