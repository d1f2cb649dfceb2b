"""The life of a batch, the iterator that user code is given, padding that leaves no trace, and batches left for later.

How a cursor moves through passes is tested with the cursors of the frameworks: `tests/torch/data/test_sources.py`
and `tests/tf/data/test_dataset_streams.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.arrays.division import BETWEEN_BATCHES, NO_BATCH, BatchPlan, PlannedBatch
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.feed import DataCursor
from raysgd.trainer.worker.step_loop import Batches, StepLoop, StepParts, StepRules


def step(batch: Any, ends_pass: bool | None = None) -> PlannedBatch:
    """A number that is a step; a negative one is padding."""
    return PlannedBatch(batch, BatchPlan(is_padding=batch is not NO_BATCH and batch < 0), ends_pass)


class Parts(StepParts):
    """Notes what it is told."""

    def __init__(self, remember: Callable[[], Callable[[], None]] | None = None) -> None:
        self.log: list[str] = []
        self._leg = SimpleNamespace(
            rules=StepRules(), plan=BETWEEN_BATCHES, end_data=lambda: self.log.append("no batch follows")
        )
        if remember is not None:
            self.remember_metrics = remember  # type: ignore[method-assign]

    def open(self, plan: BatchPlan, batch: Any) -> None:
        self._leg.plan = plan

    def commit(self) -> None:
        self.log.append("committed")

    def note_committed(self) -> None:
        self.log.append("whole")


class Numbers:
    """Batches out of a list."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def open(self, pass_index: int, consumed: int) -> Iterator[Any]:
        return map(step, self._batches)


class Counter:
    """A metric that also counts padding, unless that is undone."""

    def __init__(self) -> None:
        self.value = 0

    def remember(self) -> Any:
        before = self.value

        def undo() -> None:
            self.value = before

        return undo


def counted(batches: list[Any]) -> tuple[StepLoop, Counter]:
    counter = Counter()
    return StepLoop(DataCursor(Numbers(batches), lambda: 0), Parts(counter.remember), None), counter


def test_what_padding_changes_is_undone_ahead_of_the_next_batch() -> None:
    loop, counter = counted([1, -1, 1])
    found = []
    for _ in loop.batches():
        found.append(counter.value)
        counter.value += 1
    assert (found, counter.value) == ([0, 1, 1], 2)


@pytest.mark.parametrize("end", ["commit", "leave_padding"])
def test_it_is_undone_once_where_the_loop_stops_at_padding(end: str) -> None:
    loop, counter = counted([1, -1, 1])
    batches = loop.batches()
    next(batches), next(batches)
    counter.value = 7
    getattr(loop, end)()
    assert counter.value == 0
    counter.value = 8
    batches.close()  # type: ignore[attr-defined]
    loop.leave_padding()
    assert counter.value == 8, "once"


def test_a_step_without_a_batch_counts_and_is_not_handed_out() -> None:
    loop, _ = counted([1, NO_BATCH])
    cursor = loop.cursor
    assert list(loop.batches()) == [1]
    assert (cursor.num_batches_taken, cursor.num_batches_completed, cursor.is_mid_pass) == (2, 2, False)


def test_a_look_ahead_that_fails_loses_no_batch() -> None:
    class Flaky:
        def open(self, pass_index: int, consumed: int) -> Iterator[Any]:
            yield step(1)
            yield step(2)
            raise OSError("no file")

    cursor = DataCursor(Flaky(), lambda: 0, looks_ahead=True)
    batches = StepLoop(cursor, Parts(), None).batches()
    assert next(batches) == 1
    with pytest.raises(OSError, match="no file"):
        next(batches)
    assert cursor.num_batches_taken == 1
    assert list(StepLoop(cursor, Parts(), None).batches()) == [2]


def test_a_step_that_fails_before_its_batch_is_handed_out_has_not_begun() -> None:
    class Broken(Parts):
        def open(self, plan: BatchPlan, batch: Any) -> None:
            raise ConnectionError("noticed ahead of the batch")

    class One:
        def open(self, pass_index: int, consumed: int) -> Iterator[Any]:
            return iter([step(1, True)])

    cursor = DataCursor(One(), lambda: 0)
    with pytest.raises(ConnectionError):
        next(StepLoop(cursor, Broken(), None).batches())
    assert (cursor.num_batches_completed, cursor.num_batches_taken) == (0, 0)
    assert cursor.is_mid_pass, "also where it is the last of its pass"


def test_the_parts_are_told_when_a_step_is_done_and_when_no_batch_follows() -> None:
    parts, looks = Parts(), list[bool]()
    loop = StepLoop(DataCursor(Numbers([1, 2]), lambda: 0), parts, 1, looks.append)
    assert list(loop.batches()) == [1]
    loop.commit(is_last=True)
    assert parts.log == ["committed", "no batch follows", "whole"]
    assert looks == [False, True]


def test_batches_know_whether_they_were_used() -> None:
    watched = Batches(iter([1, 2]), counted([1, 2])[0])
    assert not watched.was_touched
    assert (next(watched), list(watched), watched.was_touched, watched.is_padding) == (1, [2], True, False)


def test_redrawing_does_not_happen_more_often_than_anyone_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    now, redrawn = [0.0], []
    monkeypatch.setattr("raysgd.trainer.worker.step_loop.time.monotonic", lambda: now[0])
    for number in StepLoop(
        DataCursor(Numbers([*range(8)]), lambda: 0), Parts(), None, redraw=lambda: redrawn.append(now[0])
    ).batches():
        assert number == round(now[0] / 0.03)
        now[0] += 0.03
    assert redrawn == pytest.approx([0.0, 0.12])


def request(num_steps: int | None, starts_over: bool = False) -> EpochRequest:
    return EpochRequest(num_steps, {}, False, 0, starts_over=starts_over)


def test_only_a_call_that_takes_some_batches_and_returns_leaves_the_others() -> None:
    class Counting(TorchFeed):
        num_opened = 0

        def _open_validation(self, request: EpochRequest) -> Any:
            self.num_opened += 1
            return self.num_opened

    feed, found = Counting(lambda name: None, Strategy(), 1), []
    for each in (request(1), request(1), request(None), request(1), request(1, starts_over=True)):
        with feed.validating(each) as stream:
            found.append(stream)
    with pytest.raises(KeyError), feed.validating(request(1)):
        raise KeyError
    with feed.validating(request(1)) as stream:
        found.append(stream)
    feed.close()
    with feed.validating(request(1)) as stream:
        found.append(stream)
    assert found == [1, 1, 1, 2, 3, 4, 5]
