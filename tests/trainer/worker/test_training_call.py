"""One call of `train` on one worker: how far it is, where it stops, and what another one needs to go on with it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary
from raysgd.torch.data.feed import DividedLoaderSource, TorchFeed
from raysgd.torch.data.sampling import ShardedLoader, shard_loader
from raysgd.torch.objects import metric_objects
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.messages.epochs import EpochAnswer, merged
from raysgd.trainer.worker.feed import DataCursor
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.rank_rows import Row
from raysgd.trainer.worker.replica_state import StateCopies
from raysgd.trainer.worker.step_loop import StepLoop, StepParts
from raysgd.trainer.worker.training_call import Gate, Held, RunState, TrainingCall
from raysgd.utils import BATCH_COUNT
from tests.helpers.processes import wait_until

PATIENCE_S = 60.0

# ------------------------------------------------------------------------------------------------ the gate


def test_an_agreed_step_stops_there_and_not_before_and_one_that_was_not_agreed_on_is_forgotten() -> None:
    gate = Gate()
    gate.resolve(False)  # harmless, as nobody proposed anything
    assert [gate.stops(step) for step in range(5)] == [False] * 5
    assert gate.propose(3, lambda: 1)
    gate.resolve(False)
    assert not gate.stops(3)
    assert gate.propose(5, lambda: 3)
    gate.resolve(True)
    assert [gate.stops(step) for step in (3, 4, 5)] == [False, False, True]


@pytest.mark.parametrize("completed", [3, 4])
def test_a_step_that_may_have_been_passed_is_refused_and_holds_nobody_up(completed: int) -> None:
    gate = Gate()
    assert not gate.propose(3, lambda: completed)
    assert not gate.stops(completed + 1)


class Walker:
    """A training thread that takes steps until its gate stops it, or until the last one."""

    def __init__(self, gate: Gate, num_steps: float) -> None:
        self.gate, self.num_steps = gate, num_steps
        self.completed = 0
        self.stopped_at: int | None = None
        self.thread = threading.Thread(target=self._walk, daemon=True)

    def _walk(self) -> None:
        while self.completed < self.num_steps:
            self.completed += 1
            if self.gate.stops(self.completed):
                self.stopped_at = self.completed
                return
            time.sleep(0)  # lets others run

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "it waits for ever"


@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_rank_that_comes_to_a_proposed_step_waits_until_it_is_settled(is_agreed: bool) -> None:
    gate = Gate()
    walker = Walker(gate, 10)
    assert gate.propose(4, lambda: walker.completed)
    walker.thread.start()
    wait_until(lambda: walker.completed == 4)
    assert walker.thread.is_alive()
    gate.resolve(is_agreed)
    walker.join()
    assert (walker.stopped_at, walker.completed) == ((4, 4) if is_agreed else (None, 10))


@pytest.mark.parametrize("margin", [1, 3, 1000])
def test_ranks_that_run_at_their_own_pace_stop_at_one_step_or_none_does(margin: int) -> None:
    for _ in range(20):
        walkers = [Walker(Gate(), float("inf")) for _ in range(2)]
        for walker in walkers:
            walker.thread.start()
        at = walkers[0].completed + margin
        agreed = all([walker.gate.propose(at, lambda walker=walker: walker.completed) for walker in walkers])
        for walker in walkers:
            walker.gate.resolve(agreed)
            if not agreed:
                walker.num_steps = 0
            walker.join()
        assert [walker.stopped_at for walker in walkers] == [at if agreed else None] * 2


class Meanwhile(threading.Condition):
    """Lets something happen at the moment in which somebody comes to wait."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = [happens]

    def __enter__(self) -> bool:
        if self._happens:
            self._happens.pop()()
        return super().__enter__()


def test_a_rank_does_not_stop_at_a_step_whose_proposal_is_withdrawn_for_a_later_one_as_it_comes_there() -> None:
    gate = Gate()
    assert gate.propose(3, lambda: 1)

    def propose_later_step() -> None:
        gate.resolve(False)
        assert gate.propose(5, lambda: 3)
        gate.resolve(True)

    gate._changed = Meanwhile(propose_later_step)
    assert [gate.stops(step) for step in (3, 4, 5)] == [False, False, True]


class Withdrawn(Gate):
    """A gate whose proposal for step 3 is there for a single look."""

    looks = 0

    @property  # type: ignore[override]
    def proposed(self) -> int | None:
        self.looks += 1
        return 3 if self.looks == 1 else None

    @proposed.setter
    def proposed(self, at: int | None) -> None: ...


def test_a_proposal_may_be_withdrawn_while_a_rank_looks_at_it() -> None:
    assert not Withdrawn().stops(1)


def test_a_run_that_goes_on_in_another_group_does_not_stop_where_the_last_group_had_agreed_to() -> None:
    run = a_run(5)
    assert run.gate.propose(2, lambda: 1)
    run.gate.resolve(True)
    run.detach()
    assert not run.gate.stops(2)


def test_the_end_of_an_epoch_passes_by_user_code_that_catches_exceptions() -> None:
    assert not issubclass(Held, Exception)


# ------------------------------------------------------------------------------------------------ the run


def stream_of(num_samples: int = 10, batch_size: int = 1) -> DataCursor:
    sharded = shard_loader(DataLoader(range(num_samples), batch_size), rank=0, world_size=1, training=True)
    assert isinstance(sharded, ShardedLoader)
    return DataCursor(DividedLoaderSource(sharded, 7), lambda: 0)


def a_run(num_steps: int | None = None, name: str = "a", epoch_idx: int = 2) -> TrainingCall:
    internals = SimpleNamespace(new_meters=AverageMeterCollection)
    hosted: Any = SimpleNamespace(name=name, operator=SimpleNamespace(_raysgd=internals))
    return TrainingCall(hosted, StateCopies(None, Ledger()), RunState(0, epoch_idx, num_steps))


def take(
    cursor: DataCursor, num_steps: int | None, committed: Callable[[bool], None] = lambda is_last: None
) -> Iterator[Any]:
    """The batches of so many steps."""
    parts = StepParts(TorchFeed(lambda name: None, Strategy(), 1), Leg())
    return StepLoop(cursor, parts, num_steps, committed).batches()


def begun(run: TrainingCall, stream: DataCursor) -> Iterator[Any]:
    """The batches of a run that begins, or goes on, with `stream`."""
    run.attach(stream)
    return take(stream, run.num_batches_left)


def test_a_run_counts_the_steps_that_were_completed() -> None:
    run = a_run()
    assert (run.num_batches_completed, run.num_batches_left) == (0, None)
    run.attach(stream_of())
    run.detach()
    assert not run.progress.is_exhausted
    batches = begun(run, stream_of())
    for _ in range(3):
        next(batches)
    assert run.num_batches_completed == 2, "the third one is in flight"


def test_steps_of_the_call_before_do_not_count() -> None:
    stream = stream_of()
    list(take(stream, 4))
    run = a_run(5)
    next(begun(run, stream))
    assert (run.num_batches_completed, run.num_batches_left) == (0, 5)


@pytest.mark.parametrize("num_steps", [6, 10, 13, None])
def test_a_run_takes_the_steps_that_are_left_however_often_it_is_broken_off(num_steps: int | None) -> None:
    run, stream, seen = a_run(num_steps), stream_of(), []
    for num_completed in (2, 4):
        batches = begun(run, stream)
        seen += [next(batches)[0].item(), next(batches)[0].item()]
        next(batches)  # in flight
        stream.break_off()
        run.detach()
        left = None if num_steps is None else num_steps - num_completed
        assert (run.num_batches_completed, run.num_batches_left) == (num_completed, left)
        assert not run.progress.is_exhausted
    seen += [batch[0].item() for batch in begun(run, stream)]
    assert seen == [number % 10 for number in range(num_steps or 10)]
    assert run.num_batches_left == (None if num_steps is None else 0)


def test_what_was_measured_of_a_window_that_broke_off_is_forgotten() -> None:
    run, stream = a_run(), stream_of()
    batches = begun(run, stream)
    for loss in (1.0, 2.0):
        next(batches)
        run.meters.update({"loss": loss})
    run.meters.add_pending({"loss": 9.0})
    stream.break_off()
    run.detach()
    run.meters.count_pending()
    assert run.meters.summary()["loss"] == 1.5
    assert run.meters.num_batches == 2


@pytest.mark.parametrize("num_steps", [10, None])
def test_a_run_without_steps_left_is_exhausted_though_it_was_not_finished(num_steps: int | None) -> None:
    run, stream = a_run(num_steps), stream_of()
    list(begun(run, stream))
    stream.break_off()
    run.detach()
    assert run.progress.is_exhausted
    assert not run.progress.is_finished


def test_a_run_that_broke_off_in_its_last_step_has_that_one_left() -> None:
    run, stream = a_run(), stream_of()
    batches = begun(run, stream)
    for _ in range(10):
        next(batches)
    stream.break_off()
    run.detach()
    assert (run.num_batches_completed, run.progress.is_exhausted) == (9, False)
    assert [batch[0].item() for batch in begun(run, stream)] == [9]


@pytest.mark.parametrize("num_steps", [10, None])
def test_what_a_run_says_of_itself_at_its_last_boundary_leaves_nothing_to_do(num_steps: int | None) -> None:
    run, stream = a_run(num_steps), stream_of()
    states: list[RunState] = []
    run.attach(stream)
    list(take(stream, run.num_batches_left, lambda is_last: states.append(run.state(with_metrics=False))))
    assert [state.is_exhausted for state in states] == [False] * 9 + [True]


def test_another_worker_goes_on_from_what_a_run_says_of_itself() -> None:
    first, stream = a_run(8), stream_of()
    batches = begun(first, stream)
    for _ in range(4):
        first.meters.update({"loss": 2.0})
        next(batches)
    stream.break_off()
    first.detach()
    state = first.state(with_metrics=False)
    assert state == RunState(num_steps=3, epoch_idx=2, num_requested=8, name="a")
    second = a_run(name="b", epoch_idx=0)
    second.take_over(state)
    assert (second.progress.epoch_idx, second.num_batches_completed, second.num_batches_left) == (2, 3, 5)
    assert second.meters.num_batches == 3


def test_what_was_measured_travels_only_when_asked_for_and_stays_where_it_was_measured() -> None:
    run = a_run(8)
    run.meters.update({"loss": 2.0}, n=4)
    assert run.state(with_metrics=False).metrics is None
    summary = run.state(with_metrics=True).metrics
    assert summary is not None
    assert summary.totals == {"loss": (8.0, 4.0)}
    run.take_over(RunState(5, 1, 8))
    assert run.meters.summary()["loss"] == 2.0
    assert run.meters.summary()[BATCH_COUNT] == 5


def test_a_run_that_is_taken_over_again_forgets_its_own_answer() -> None:
    run = a_run(8)
    run.answer = EpochAnswer(None, None, 8)
    run.note(is_finished=True)
    run.take_over(RunState(5, 2, 8))
    assert (run.answer, run.progress.is_finished, run.num_batches_left) == (None, False, 3)
    run.take_over(RunState(8, 2, 8, is_exhausted=True, is_finished=True))
    assert (run.progress.is_exhausted, run.progress.is_finished) == (True, True)


# ------------------------------------------------------------------------------------------------ lost ranks


def told(name: str, run: TrainingCall) -> tuple[str, Row]:
    run.meters.add_pending({"loss": 3.0}, 2)
    layout, numbers = run.meters.tally()
    run.meters.drop_pending()
    return name, Row(layout, np.array(numbers))


def after_steps(name: str, num_steps: int, loss: float) -> TrainingCall:
    """A run that has completed so many steps, in each of which it has told what it measured."""
    run = a_run(name=name)
    run.note(num_steps=num_steps)
    for _ in range(num_steps):
        run.meters.update({"loss": loss}, n=2)
    return run


def averages(**totals: float) -> MetricSummary:
    return MetricSummary({"num_samples": 4, **totals}, {name: (4 * value, 4.0) for name, value in totals.items()})


def test_the_rank_that_answers_for_lost_ranks_counts_what_they_had_told() -> None:
    run, other, gone = (after_steps(name, 2, loss) for name, loss in (("a", 1.0), ("b", 5.0), ("c", 7.0)))
    run.rows.note(1, dict([told("a", run), told("b", other), told("c", gone)]))
    run.keep_lost({"a", "b", "new"})
    answer = run.with_lost(EpochAnswer(averages(loss=1.0), None, 2), 0)
    assert answer.metrics is not None
    assert answer.metrics == {"num_samples": 10, "loss": (4 * 1.0 + 2 * 2 * 7.0 + 2 * 3.0) / 10}
    assert answer.num_inherited == 6
    assert merged([answer], reduce_results=False) == [{**answer.metrics, "inherited_samples": 6}]


def test_a_rank_that_is_behind_counts_its_own_batch_of_the_step_that_others_completed() -> None:
    source, behind = after_steps("a", 3, 1.0), after_steps("b", 2, 5.0)
    source.rows.note(2, dict([told("a", source), told("b", behind)]))
    behind.take_over(source.state(with_metrics=False))
    assert behind.meters.summary().totals == {"loss": (2 * 2 * 5.0 + 2 * 3.0, 6.0)}
    assert behind.num_batches_completed == 3
    again = after_steps("b", 3, 5.0)
    again.take_over(source.state(with_metrics=False))
    assert again.meters.summary().totals == {"loss": (30.0, 6.0)}, "one that is not behind knows it best"


def test_whoever_steps_in_knows_what_was_told_and_who_was_lost_before() -> None:
    source, gone, new = (
        after_steps("a", 1, 1.0),
        after_steps("b", 1, 5.0),
        a_run(name="new"),
    )
    source.rows.lost["long ago"] = gone.meters.summary()
    source.rows.note(0, dict([told("a", source), told("b", gone)]))
    new.take_over(pickle.loads(pickle.dumps(source.state(with_metrics=False))))
    new.keep_lost({"new"})
    assert {name: lost["num_samples"] for name, lost in new.rows.lost.items()} == {"long ago": 2, "a": 4, "b": 4}


def test_a_metric_object_that_lacks_what_lost_workers_had_seen_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run, gone = after_steps("a", 1, 1.0), after_steps("b", 1, 5.0)
    metric = torchmetrics.CatMetric()
    metric.update(torch.tensor([1.0]))
    run.meters = AverageMeterCollection(None, metric_objects.capture)
    run.meters.update({"grows": metric}, n=2)
    run.rows.note(0, dict([told("b", gone)]))
    run.keep_lost({"a"})
    run.with_lost(EpochAnswer(averages(loss=1.0), None, 1), 0)
    assert "the metric object `grows` does not cover the samples that lost workers had processed" in caplog.text
