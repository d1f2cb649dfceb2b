"""The iterator that user code is given, padding that leaves no trace, and the batches that are left for later.

How a stream moves through passes is tested with the streams of the frameworks: `tests/torch/data/test_sources.py`
and `tests/tf/data/test_batch_streams.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.torch.data.loader_feed import TorchFeed
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.data import batch_streams
from raysgd.trainer.worker.data.batch_streams import NO_BATCH, BatchStream, WatchedBatches, redrawing
from raysgd.trainer.worker.step_loop import BETWEEN_BATCHES, BatchPlan


class Item(int):
    """A number that is a step; a negative one is padding."""

    is_first = is_last_part = True
    is_last_of_pass: bool | None = None

    def plan(self, starts_step: bool, sync_gradients: bool) -> BatchPlan:
        return BatchPlan(is_padding=self < 0)


class NoItem(Item):
    """A step in which this rank has no samples."""


class Step:
    """Notes what it is told."""

    accumulate, plan = 1, BETWEEN_BATCHES

    def __init__(self) -> None:
        self.log: list[str] = []

    def confirm(self) -> None:
        self.log.append("confirmed")

    def end_stream(self) -> None:
        self.log.append("no batch follows")


class Numbers(BatchStream[Any, Step]):
    """Batches out of a list; the position is the number of batches."""

    completed = 0

    def _begin_pass(self, consumed: int) -> Iterator[Any]:
        return iter([NoItem() if each is NO_BATCH else Item(each) for each in self.source[consumed:]])

    def _begin_batch(self, leg: Step, item: Any, plan: BatchPlan) -> Any:
        return NO_BATCH if isinstance(item, NoItem) else item


class Counter:
    """A metric that also counts padding, unless that is undone."""

    def __init__(self) -> None:
        self.value = 0

    def remember(self) -> Any:
        before = self.value

        def undo() -> None:
            self.value = before

        return undo


def counted(batches: list[Any]) -> tuple[Numbers, Counter]:
    counter = Counter()
    return Numbers(batches, Step(), lambda: 0, counter.remember), counter


def test_what_padding_changes_is_undone_ahead_of_the_next_batch() -> None:
    stream, counter = counted([1, -1, 1])
    found = []
    for _ in stream.take(None):
        found.append(counter.value)
        counter.value += 1
    assert (found, counter.value) == ([0, 1, 1], 2)


@pytest.mark.parametrize("end", ["confirm_step", "break_off"])
def test_it_is_undone_where_the_loop_stops_at_padding(end: str) -> None:
    stream, counter = counted([1, -1, 1])
    batches = stream.take(None)
    next(batches), next(batches)
    counter.value = 7
    getattr(stream, end)()
    assert counter.value == 0
    counter.value = 8
    batches.close()  # type: ignore[attr-defined]
    assert counter.value == 8, "once"


def test_it_is_undone_when_user_code_raises_but_never_in_the_next_call() -> None:
    stream, counter = counted([-1, 1, 1])
    failed = stream.take(None)
    next(failed)
    counter.value = 7
    kept = stream.take(2)  # something holds on to the traceback, and so to `failed`
    next(kept)
    failed.close()  # type: ignore[attr-defined]
    assert counter.value == 7
    other, counter = counted([-1, 1])
    failed = other.take(None)
    next(failed)
    counter.value = 7
    failed.close()  # type: ignore[attr-defined]
    assert counter.value == 0


def test_a_step_without_a_batch_counts_and_is_not_handed_out() -> None:
    stream, _ = counted([1, NO_BATCH])
    assert list(stream.take(None)) == [1]
    assert (stream.num_steps_taken, stream.num_steps_completed, stream.is_mid_pass) == (2, 2, False)


def test_a_look_ahead_that_fails_loses_no_batch() -> None:
    class Flaky(Numbers):
        def _begin_pass(self, consumed: int) -> Iterator[Any]:
            yield Item(1)
            yield Item(2)
            raise OSError("no file")

    stream = Flaky([], Step(), lambda: 0)
    batches = stream.take(None)
    assert next(batches) == 1
    with pytest.raises(OSError, match="no file"):
        next(batches)
    assert stream.num_steps_taken == 1
    assert list(stream.take(None)) == [2]


def test_a_step_that_fails_before_its_batch_is_handed_out_has_not_begun() -> None:
    class Broken(Numbers):
        def _begin_batch(self, leg: Step, item: Any, plan: BatchPlan) -> Any:
            raise ConnectionError("noticed ahead of the batch")

    stream = Broken([1, 2], Step(), lambda: 0)
    with pytest.raises(ConnectionError):
        next(stream.take(None))
    assert stream.num_steps_completed == 0


def test_the_step_is_told_when_it_is_done_and_when_no_batch_follows() -> None:
    stream, _ = counted([1, 2])
    assert list(stream.take(1)) == [1]
    assert stream.leg.log == ["confirmed", "no batch follows"]


def test_watched_batches_know_whether_they_were_used() -> None:
    watched = WatchedBatches(iter([1, 2]), counted([1, 2])[0])
    assert not watched.was_touched
    assert (next(watched), list(watched), watched.was_touched, watched.is_padding) == (1, [2], True, False)


def test_redrawing_does_not_happen_more_often_than_anyone_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    now, redrawn = [0.0], []
    monkeypatch.setattr(batch_streams.time, "monotonic", lambda: now[0])
    for number in redrawing(iter(range(8)), lambda: redrawn.append(now[0])):
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
