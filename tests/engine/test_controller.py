"""The controller with a scripted group, without Ray.

Covers `raysgd.engine.lifecycle` and `raysgd.engine.recovery`: a scripted group shows what they do.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any, cast

import pytest

from raysgd.engine.controller import ElasticController
from raysgd.engine.policies import RetryBudget, ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import ClusterView, World
from raysgd.exceptions import (
    RanksDifferError,
    ReservationTimeoutError,
    TrainerShutdownError,
    WorkerError,
    WorkersLostError,
)
from tests.helpers.fakes import (
    WORDS,
    CountingReplica,
    Denied,
    Event,
    FakeClock,
    FakeCluster,
    FakeGroup,
    Interrupted,
    Lost,
    NullConnection,
    Raised,
    ShutDown,
    Stopper,
    add,
    read,
)

HOURS = 3600.0


class Trainer:
    """A front end without words: a controller over a fake cluster."""

    def __init__(
        self,
        cluster: FakeCluster | None = None,
        *,
        is_large: bool = False,
        use_local: bool = False,
        captures: bool = True,
        snapshot_every_s: float = 0.0,
        max_workers: int = 3,
        start_budget: RetryBudget | None = None,
        **scaling: Any,
    ) -> None:
        self.cluster = cluster or FakeCluster()
        self.clock = FakeClock()
        self.controller = ElasticController(
            GroupSpec(
                NullConnection(),
                partial(CountingReplica, is_large=is_large),
                use_local=use_local,
                captures=captures,
                snapshot_every_s=snapshot_every_s,
                words=WORDS,
            ),
            ScalingPolicy(max_workers, num_local=int(use_local), **scaling),
            make_group=self.cluster.make_group,
            view=lambda: self.cluster.view(),
            clock=self.clock.as_clock(),
            start_budget=start_budget,
        )

    def start(self) -> Trainer:
        self.controller.start()
        return self

    def add(self, amount: float, max_retries: int = 3) -> list[float]:
        call = Call(add, lambda worlds: [(amount,)] * len(worlds), changes_state=True)
        return self.controller.run(call, max_retries=max_retries)

    def read(self, max_retries: int = 3) -> list[tuple[float, int]]:
        return self.controller.run(Call(read), max_retries=max_retries)

    @property
    def group(self) -> FakeGroup:
        """The group that was made last."""
        return self.cluster.groups[-1]

    @property
    def last_event(self) -> tuple[str, int, int, str]:
        event = self.controller.history.events[-1]
        return event.kind, event.old_size, event.new_size, event.cause

    @property
    def waited_for(self) -> list[tuple[int, float]]:
        """For how many workers it waited, and for how long at most, each time."""
        return [
            (each.first_size, each.slots.awaited_s) for each in self.cluster.groups if each.slots.awaited_s is not None
        ]

    def next_calls(self, *events: Event) -> None:
        self.cluster.calls = deque(events)


def started(*args: Any, **options: Any) -> Trainer:
    return Trainer(*args, **options).start()


# -------------------------------------------------------------------------------------------- plain calls


def test_values_come_back_in_rank_order() -> None:
    def rank_times(replica: CountingReplica, factor: int) -> int:
        return replica.world.rank * factor

    call = Call(rank_times, lambda worlds: [(10 + world.rank,) for world in worlds])
    assert started().controller.run(call, max_retries=0) == [0, 11, 24]


def test_the_set_up_answers_are_kept_as_facts() -> None:
    assert started().controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_a_call_for_one_rank_reaches_only_that_rank() -> None:
    def who(replica: CountingReplica) -> int:
        return replica.world.rank

    assert started().controller.run(Call(who, rank=1), max_retries=0) == [1]


def test_the_driver_hears_a_tick_while_it_waits() -> None:
    ticks: list[None] = []
    started().controller.run(Call(read, on_wait=lambda: ticks.append(None)), max_retries=0)
    assert ticks == [None]


# -------------------------------------------------------------------------------------------- lost workers


def test_after_a_death_new_workers_run_the_call_again_from_the_last_state() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((1,)))
    assert trainer.add(10) == [11, 11, 11]
    assert trainer.cluster.sizes == [3, 3]
    assert trainer.cluster.groups[0].ended_by == "kill"
    assert trainer.controller.history.num_failures == 1


def test_a_smaller_cluster_gives_a_smaller_group_and_the_arguments_are_made_anew_for_it() -> None:
    trainer = started()
    sizes: list[int] = []

    def args_for(worlds: Sequence[World]) -> list[tuple[float]]:
        sizes.append(len(worlds))
        return [(1.0,)] * len(worlds)

    def shrink(replica: CountingReplica, amount: float) -> float:
        trainer.cluster.num_slots = 2
        return add(replica, amount)

    trainer.next_calls(Lost((2,)))
    values = trainer.controller.run(Call(shrink, args_for, changes_state=True), max_retries=1)
    assert values == [1, 1]
    assert sizes == [3, 2]
    assert trainer.controller.num_workers == 2
    assert trainer.controller.facts == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_the_budget_is_the_number_of_new_starts_of_one_call(max_retries: int) -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(*[Lost((1,))] * (max_retries + 1))
    words = r".*\(words for spent retries\)$"
    with pytest.raises(WorkersLostError, match=f"lost rank 1.*the {max_retries} allowed retries{words}"):
        trainer.add(1, max_retries)
    assert trainer.controller.history.num_failures == max_retries
    assert len(trainer.cluster.groups) == 1 + max_retries
    assert not trainer.group.is_alive
    last = trainer.controller.history.events[-1]
    assert (last.kind, last.old_size, last.new_size, last.detail) == ("lost", 3, 0, "(what is left)")
    assert last.cause.startswith("lost rank 1")


def test_a_failed_call_chains_what_the_worker_said() -> None:
    trainer = started()
    trainer.next_calls(Lost((1,)))
    with pytest.raises(WorkersLostError) as caught:
        trainer.add(1, max_retries=0)
    assert str(caught.value.__cause__) == "the process is gone"
    assert str(caught.value).startswith("lost rank 1")


def test_after_a_spent_budget_the_next_call_goes_on_from_the_last_state() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((1,)))
    with pytest.raises(WorkersLostError):
        trainer.add(10, max_retries=0)
    assert trainer.controller.snapshot().shared_state == 1
    assert len(trainer.cluster.groups) == 1, "the state can be had without workers"
    assert trainer.add(100, max_retries=0) == [101, 101, 101]


def test_the_last_state_can_be_had_without_workers_also_if_something_was_done_to_them_since() -> None:
    """As by an evaluation, which draws random numbers: they are lost with the workers, the state is not."""
    trainer = started()
    trainer.add(1)
    trainer.controller.snapshots.touch()
    trainer.cluster.num_slots = 0
    trainer.next_calls(Lost((0, 1, 2)))
    with pytest.raises(WorkersLostError, match="Too few workers can be had"):
        trainer.add(10)
    waited = len(trainer.clock.sleeps)
    assert trainer.controller.snapshot().shared_state == 1
    assert len(trainer.clock.sleeps) == waited, "it looked for no workers"


def test_a_recovery_says_what_was_lost_and_how_the_size_changed(caplog: pytest.LogCaptureFixture) -> None:
    trainer = started()
    trainer.next_calls(Lost((2,)))
    with caplog.at_level(logging.INFO, logger="raysgd"):
        trainer.add(1)
    [line] = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    cause = "lost rank 2 (RuntimeError: the process is gone)"
    resumed = "restarted all workers and resumed with 3 workers after 0.00 s"
    assert line == f"{cause}; {resumed}; from the last completed call"


# -------------------------------------------------------------------------------------------- user errors


def test_an_exception_of_the_user_is_raised_at_once_as_its_own_class() -> None:
    trainer = started()
    trainer.next_calls(Raised(1, ZeroDivisionError("by zero")))
    with pytest.raises(ZeroDivisionError, match=r"by zero\n  raised at model.py:7.*\n  on rank 1") as caught:
        trainer.add(1)
    assert isinstance(caught.value, WorkerError)
    assert trainer.group.functions == ["add"]
    assert trainer.controller.history.num_failures == 0


def test_a_group_that_answered_on_every_rank_is_kept_after_an_exception() -> None:
    trainer = started()
    trainer.next_calls(Raised(1, ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        trainer.add(1)
    assert trainer.group.is_alive
    trainer.read(max_retries=0)
    assert len(trainer.cluster.groups) == 1


def test_a_group_with_a_rank_that_is_stuck_is_given_up_and_replaced_from_the_last_state() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Raised(1, ValueError("x"), others_answered=False))
    with pytest.raises(ValueError, match="x"):
        trainer.add(10)
    assert not trainer.group.is_alive
    assert trainer.last_event == ("ended", 3, 0, "rank 1 raised ValueError while others were inside the call")
    assert trainer.read(max_retries=0) == [(1, 1)] * 3
    assert trainer.controller.history.num_failures == 0


def test_what_a_failed_call_left_behind_is_the_state_when_the_group_is_kept() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Raised(1, ValueError("early stop")))
    with pytest.raises(ValueError, match="early stop"):
        trainer.add(10)
    assert trainer.controller.snapshot().shared_state == 11  # rank 0 did its part


def test_a_failed_call_that_changes_nothing_leaves_the_snapshot_as_it_is() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Raised(1, ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        trainer.read()
    trainer.controller.snapshot()
    assert trainer.group.functions == ["add", "read"]


def test_an_exception_while_new_workers_are_set_up_is_raised_not_retried() -> None:
    trainer = started()
    trainer.next_calls(Lost((1,)))
    trainer.cluster.starts.append(Raised(0, KeyError("data")))
    with pytest.raises(KeyError):
        trainer.add(1)
    assert len(trainer.cluster.groups) == 2


def test_an_exception_while_the_state_is_restored_is_raised_and_the_group_given_up() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((1,)))
    trainer.cluster.restores.append(Raised(0, KeyError("weight")))
    with pytest.raises(KeyError):
        trainer.add(1)
    assert not trainer.group.is_alive
    assert trainer.add(1) == [2, 2, 2]


# -------------------------------------------------------------------------------------------- interruptions


def test_an_interrupted_group_is_given_up_and_the_next_call_starts_from_the_last_state() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(10)
    assert trainer.cluster.groups[0].ended_by == "kill"
    assert trainer.last_event == ("ended", 3, 0, "KeyboardInterrupt")
    assert trainer.add(100) == [101, 101, 101]
    assert trainer.controller.history.num_failures == 0


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("asked", "max_retries"), [("ask_beside", 3), ("answering", 0)], ids=["who is stuck", "who is lost"]
)
def test_a_group_is_given_up_where_the_driver_is_interrupted_while_it_asks_about_a_loss(
    asked: str, max_retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks have completed the call, and some have not."""
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((1,), "disconnected"))
    monkeypatch.setattr(trainer.group, asked, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.add(10, max_retries)
    assert trainer.group.ended_by == "kill"
    assert trainer.last_event == ("ended", 3, 0, "KeyboardInterrupt")
    assert trainer.add(100) == [101, 101, 101]


def test_a_group_is_given_up_where_the_driver_is_interrupted_while_a_copy_from_it_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(is_large=True).start()
    trainer.add(1)
    trainer.cluster.transfer_s = HOURS
    trainer.add(10)
    trainer.next_calls(Lost((1,)))
    keeper = trainer.controller.snapshots
    poll = keeper.poll
    monkeypatch.setattr(keeper, "poll", lambda timeout_s=0.0: (interrupt if timeout_s else poll)())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(100)
    monkeypatch.undo()
    assert trainer.group.ended_by == "kill"
    kind, old_size, new_size, cause = trainer.last_event
    assert (kind, old_size, new_size) == ("ended", 3, 0)
    assert cause.endswith("; KeyboardInterrupt")
    assert trainer.add(1000) == [1011, 1011, 1011]


def test_an_exception_in_the_driver_gives_the_group_up_too() -> None:
    def on_wait() -> None:
        raise OSError("the terminal is gone")

    trainer = started()
    with pytest.raises(OSError, match="terminal"):
        trainer.controller.run(Call(read, on_wait=on_wait), max_retries=3)
    assert not trainer.group.is_alive
    assert trainer.last_event == ("ended", 3, 0, "OSError")


@pytest.mark.parametrize(("error_cls", "kept"), [(ArithmeticError, 3), (RanksDifferError, 1)])
def test_values_that_do_not_pass_the_check_of_their_call_do_not_count(error_cls: type[Exception], kept: int) -> None:
    """Nor do calls since the last snapshot, where ranks may have parted in any of them."""

    def refuse(values: Sequence[float]) -> None:
        raise error_cls(f"{values}")

    trainer = started(snapshot_every_s=3600.0)
    trainer.add(1)
    trainer.add(2)
    call = Call(add, lambda worlds: [(10,)] * len(worlds), changes_state=True, check=refuse)
    with pytest.raises(error_cls, match="13"):
        trainer.controller.run(call, max_retries=3)
    assert trainer.last_event == ("ended", 3, 0, error_cls.__name__)
    assert trainer.add(100) == [100 + kept] * 3


def test_arguments_that_cannot_be_made_leave_the_group_alone() -> None:
    def args_for(worlds: Sequence[World]) -> Sequence[Sequence[Any]]:
        raise ValueError("no shards")

    trainer = started()
    with pytest.raises(ValueError, match="no shards"):
        trainer.controller.run(Call(read, args_for), max_retries=3)
    assert trainer.group.is_alive


def test_the_driver_as_the_only_worker_is_kept_as_the_interruption_left_it() -> None:
    trainer = started(FakeCluster(), use_local=True, max_workers=1, captures=False)
    trainer.add(1)
    assert trainer.controller.snapshot().shared_state == 1
    trainer.group.replicas[0].total = 5  # how far it came
    trainer.next_calls(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(10)
    assert trainer.group.is_alive
    assert trainer.last_event[0] == "started", "nobody was ended"
    assert trainer.controller.snapshot().shared_state == 5


def test_an_interruption_while_the_state_is_restored_leaves_no_group_without_it() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((1,)))
    trainer.cluster.restores.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(10)
    assert not trainer.group.is_alive
    kind, old_size, new_size, cause = trainer.last_event
    assert (kind, old_size, new_size) == ("ended", 3, 0)
    assert cause.startswith("lost rank 1")
    assert cause.endswith("; KeyboardInterrupt")
    assert trainer.add(100) == [101, 101, 101]


def test_an_interruption_while_waiting_for_resources_loses_nothing() -> None:
    trainer = started()
    trainer.add(1)
    trainer.next_calls(Lost((0,)))
    trainer.cluster.num_taken = 3
    trainer.clock.at_sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.add(10)
    assert trainer.last_event[0] == "ended"
    assert "lost rank 0" in trainer.last_event[3]
    trainer.clock.at_sleep = lambda seconds: None
    trainer.cluster.num_taken = 0
    assert trainer.add(100) == [101, 101, 101]


# -------------------------------------------------------------------------------------------- starting


def test_the_first_start_has_the_full_number_whatever_seems_to_be_free() -> None:
    trainer = started(FakeCluster(num_slots=0))
    assert trainer.cluster.sizes == [3]


def test_a_worker_that_dies_while_starting_is_tried_again() -> None:
    cluster = FakeCluster(starts=deque([Lost((0,)), Lost((1, 2))]))
    trainer = started(cluster)
    assert len(cluster.groups) == 3
    assert trainer.add(1) == [1, 1, 1]
    assert trainer.controller.history.num_failures == 0


def test_after_some_deaths_starting_ends_with_a_runtime_error() -> None:
    cluster = FakeCluster(starts=deque([Lost((0,))] * 10))
    with pytest.raises(RuntimeError, match="a worker process died, and the 3 allowed retries"):
        started(cluster)
    assert len(cluster.groups) == 4


@pytest.mark.parametrize("num_restarts", [0, 2])
def test_a_budget_for_starts_is_what_they_cost(num_restarts: int) -> None:
    cluster, budget = FakeCluster(starts=deque([Lost((0,))] * 10)), RetryBudget(num_restarts)
    with pytest.raises(WorkersLostError, match=f"the {num_restarts} allowed retries are used up"):
        started(cluster, start_budget=budget)
    assert len(cluster.groups) == 1 + num_restarts
    assert (budget.num_spent, budget.num_refused) == (num_restarts, 1)


def test_a_start_on_what_there_is_room_for_costs_the_same() -> None:
    budget = RetryBudget(1)
    trainer = Trainer(FakeCluster(2, starts=deque([Lost((0,))])), start_budget=budget)
    trainer.controller.start(as_fits=True)
    assert (trainer.cluster.sizes, budget.num_spent) == ([2, 2], 1)
    assert [event.kind for event in trainer.controller.history.events] == ["started"]


def test_without_an_end_of_the_budget_a_start_is_tried_until_it_works() -> None:
    cluster, budget = FakeCluster(starts=deque([Lost((0,))] * 10)), RetryBudget(float("inf"))
    trainer = started(cluster, start_budget=budget)
    assert (len(cluster.groups), budget.num_spent) == (11, 10)
    trainer.next_calls(Lost((1,)))
    cluster.starts = deque([Lost((0,))] * 20)  # more than the attempts to find room, which these are not
    assert trainer.controller.run(Call(read), budget=budget) == [(0, 0)] * 3
    assert (len(cluster.groups), budget.num_spent) == (32, 31)
    first = trainer.controller.history.events[0]
    assert (first.kind, first.old_size, first.new_size) == ("started", 0, 3)


def test_deaths_at_the_start_of_new_workers_are_paid_for_out_of_what_the_loss_has_left() -> None:
    budget = RetryBudget(3)
    trainer = started(start_budget=budget)
    trainer.next_calls(Lost((1,)))
    trainer.cluster.starts = deque([Lost((0,)), Lost((2,)), Lost((1,)), Lost((0,))])
    with pytest.raises(WorkersLostError, match="start-up failed"):
        trainer.controller.run(Call(read), budget=budget)
    assert len(trainer.cluster.groups) == 1 + 3
    assert (budget.num_spent, budget.num_refused) == (3, 1)
    budget.renew()
    trainer.cluster.starts = deque([Denied(), Lost((0,))])
    assert trainer.controller.run(Call(read), budget=budget) == [(0, 0)] * 3
    assert budget.num_spent == 1, "it costs nothing that somebody else was faster"


def test_an_exception_in_the_first_set_up_is_raised_at_once() -> None:
    cluster = FakeCluster(starts=deque([Raised(2, FileNotFoundError("no data"))]))
    with pytest.raises(FileNotFoundError, match="no data"):
        started(cluster)
    assert len(cluster.groups) == 1


def test_a_first_reservation_that_is_not_granted_is_an_error() -> None:
    cluster = FakeCluster(starts=deque([Denied()]))
    with pytest.raises(TimeoutError):
        started(cluster)
    assert len(cluster.groups) == 1


# -------------------------------------------------------------------------------------------- waiting


def starved(trainer: Trainer) -> Trainer:
    """The last death took all slots with it."""
    trainer.next_calls(Lost((0, 1, 2)))
    trainer.cluster.num_slots = 0
    return trainer


def test_without_resources_the_waits_double_until_it_gives_up() -> None:
    trainer = starved(started())
    with pytest.raises(WorkersLostError):
        trainer.add(1)
    assert trainer.clock.sleeps == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_while_it_waits_it_asks_for_as_many_workers_as_it_needs_and_no_longer() -> None:
    trainer = starved(started(min_workers=2))
    trainer.clock.at_sleep = lambda seconds: setattr(trainer.cluster, "num_slots", len(trainer.clock.sleeps))
    trainer.add(1)
    assert trainer.waited_for == [(2, 1), (2, 2)]
    assert trainer.cluster.sizes == [3, 2]
    assert trainer.group.slots.num_asked == 1, "for the one that is missing still"


def test_giving_up_says_what_was_asked_for_and_what_there_is() -> None:
    trainer = starved(started(num_attempts=2))
    with pytest.raises(WorkersLostError) as caught:
        trainer.add(1)
    message = str(caught.value)
    assert "0 of at least 1 workers fit after 2 attempts" in message
    assert "requested:  3 x {'CPU': 1.0}" in message
    assert "node 10.0.0.1:  free {'CPU': 0.0} of {'CPU': 0.0}" in message
    assert message.endswith("\n(words for too few workers)")


def test_after_giving_up_the_state_is_there_and_the_next_call_looks_again() -> None:
    trainer = started(num_attempts=2)
    trainer.add(1)
    starved(trainer)
    for _ in range(2):
        with pytest.raises(WorkersLostError):
            trainer.add(10)
    assert trainer.controller.snapshot().shared_state == 1
    trainer.cluster.num_slots = 3
    assert trainer.add(100) == [101, 101, 101]
    assert trainer.controller.history.num_failures == 0, "nothing was tried again"
    assert [event.kind for event in trainer.controller.history.events] == ["started", "lost", "lost", "restarted"]


def test_the_view_gets_a_moment_to_catch_up_with_what_was_given_back() -> None:
    trainer = started()
    late: list[ClusterView] = []
    view_now = trainer.cluster.view

    def view() -> ClusterView:
        late.append(view_now())
        trainer.cluster.num_taken = 0 if len(late) >= 3 else 2  # Ray still counts the dead as holders
        return late[-1]

    trainer.next_calls(Lost((1,)))
    trainer.cluster.view = view  # type: ignore[method-assign]
    trainer.cluster.num_taken = 2
    assert trainer.add(1) == [1, 1, 1]
    assert 0 < sum(trainer.clock.sleeps) <= 1


def test_when_others_hold_resources_the_view_is_taken_as_it_is_after_a_second() -> None:
    trainer = started()
    trainer.next_calls(Lost((1,)))
    trainer.cluster.num_taken = 1
    assert trainer.add(1) == [1, 1]
    assert sum(trainer.clock.sleeps) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("settles_after_s", "size"), [(4.0, 3), (HOURS, 1)])
def test_what_was_given_back_and_is_not_free_yet_is_waited_for_within_reason(settles_after_s: float, size: int) -> None:
    trainer = started()
    trainer.next_calls(Lost((1,)))
    trainer.cluster.num_taken, trainer.cluster.is_settling = 2, True

    def settle(seconds: float) -> None:
        if sum(trainer.clock.sleeps) >= settles_after_s:
            trainer.cluster.num_taken, trainer.cluster.is_settling = 0, False

    trainer.clock.at_sleep = settle
    assert trainer.add(1) == [1] * size
    assert sum(trainer.clock.sleeps) == pytest.approx(min(10, settles_after_s), abs=0.1)


@pytest.mark.parametrize("event", [Lost((0,)), Denied()])
def test_new_groups_are_tried_only_so_often(event: Event) -> None:
    trainer = started(num_attempts=4)
    trainer.next_calls(Lost((1,)))
    trainer.cluster.starts = deque([event] * 10)
    with pytest.raises(WorkersLostError, match="No group could be started in 4 attempts after: lost rank 1"):
        trainer.add(1)
    assert len(trainer.cluster.groups) == 5


# -------------------------------------------------------------------------------------------- growing


def shrunk(trainer: Trainer, num_slots: int = 2) -> Trainer:
    """A trainer that lost a worker together with its place."""
    trainer.cluster.num_slots = num_slots
    trainer.next_calls(Lost((2,)))
    trainer.add(1)
    trainer.clock.sleeps.clear()
    return trainer


def test_a_shrunk_group_grows_when_there_is_room_and_spends_no_retry() -> None:
    trainer = shrunk(started())
    assert trainer.controller.num_workers == 2
    trainer.cluster.num_slots = 3
    assert trainer.add(10, max_retries=0) == [11, 11, 11]
    assert trainer.cluster.sizes == [3, 2, 3]
    assert trainer.controller.history.num_failures == 1


def test_a_group_that_would_gain_nobody_is_left_alone() -> None:
    trainer = shrunk(started())
    for _ in range(3):
        trainer.add(1)
    assert trainer.cluster.sizes == [3, 2]


def test_calls_that_change_nothing_do_not_grow() -> None:
    trainer = shrunk(started())
    trainer.cluster.num_slots = 3
    trainer.read()
    assert trainer.cluster.sizes == [3, 2]


def test_the_driver_alone_grows_back_when_there_is_room_for_two() -> None:
    trainer = started(use_local=True)
    trainer.cluster.num_slots = 0
    trainer.next_calls(Lost((1,)))
    assert trainer.add(1) == [1]
    assert trainer.group.is_driver_only
    trainer.cluster.num_slots = 1
    trainer.add(1)
    assert trainer.cluster.sizes == [3, 1]
    trainer.cluster.num_slots = 2
    assert trainer.add(1) == [3, 3]


# -------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("is_large", [False, True])
def test_a_snapshot_that_is_current_costs_no_call(is_large: bool) -> None:
    trainer = started(is_large=is_large)
    trainer.add(3)
    first = trainer.controller.snapshot()
    assert (first.shared_state, first.rank_states) == (3, (1, 1, 1))
    assert trainer.controller.snapshot() is first
    assert trainer.group.functions == ["add"]


def test_touching_makes_the_next_snapshot_look_again_once() -> None:
    trainer = started()
    trainer.controller.snapshot()
    for replica in trainer.group.replicas:
        replica.total = 42
    assert trainer.controller.snapshot().shared_state == 0
    trainer.controller.snapshots.touch()
    assert trainer.controller.snapshot().shared_state == 42
    trainer.controller.snapshot()
    assert trainer.group.functions == ["nothing"]


def test_without_captures_a_snapshot_is_taken_when_it_is_asked_for() -> None:
    trainer = started(captures=False)
    trainer.add(1)
    assert trainer.controller.snapshot().shared_state == 1
    trainer.add(1)
    assert trainer.controller.snapshot().shared_state == 2
    assert trainer.group.functions == ["add", "nothing", "add", "nothing"]


def test_a_slow_transfer_is_not_overtaken_by_the_next_ones() -> None:
    trainer = started(is_large=True)
    trainer.controller.snapshot()
    trainer.cluster.transfer_s = HOURS
    for amount in (1, 10, 100):
        trainer.add(amount)
    trainer.cluster.transfer_s = 0
    trainer.read()  # looks whether something arrived
    assert len(trainer.controller.snapshots.calls_since) == 2
    assert trainer.controller.snapshot().shared_state == 111


def test_a_transfer_that_is_nearly_there_is_waited_for_before_its_group_is_given_up() -> None:
    trainer = started(is_large=True)
    trainer.controller.snapshot()
    trainer.cluster.transfer_s = 0.5
    trainer.add(1)
    trainer.next_calls(Lost((1,)))
    trainer.read()
    assert trainer.group.functions == ["restore", "read"]


def test_a_worker_hears_which_of_its_states_has_landed_and_nothing_of_another_workers() -> None:
    trainer = started(is_large=True)
    for _ in range(3):
        trainer.add(1)
    assert trainer.group.replicas[0].landed_tokens == [None, 1, 2, 3]
    trainer.next_calls(Lost((1,)))
    for _ in range(2):
        trainer.add(1)
    assert trainer.group.replicas[0].landed_tokens == [None, None, 2]


# -------------------------------------------------------------------------------------------- stopping


def test_stopping_twice_does_nothing_more() -> None:
    trainer = started()
    trainer.controller.stop()
    trainer.group.ended_by = None
    trainer.controller.stop(force=True)
    assert trainer.group.ended_by is None


def test_stopping_works_before_the_start_and_after_the_group_was_given_up() -> None:
    Trainer().controller.stop()
    trainer = started()
    trainer.next_calls(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(1)
    trainer.controller.stop()
    assert len(trainer.cluster.groups) == 1


@pytest.mark.parametrize("moment", ["calls", "starts", "restores"])
def test_a_call_that_another_thread_shuts_down_says_so_and_leaves_no_group(moment: str) -> None:
    trainer = started()
    stopper = Stopper(trainer.controller, trainer.cluster)
    trainer.next_calls(Lost((1,)))
    getattr(trainer.cluster, moment).append(ShutDown(stopper.stop))
    with pytest.raises(TrainerShutdownError, match="shut down"):
        trainer.add(1)
    stopper.join()
    assert not any(group.is_alive for group in trainer.cluster.groups)
    assert [group.was_started for group in trainer.cluster.groups][2:] in ([], [False])


def test_nobody_waits_for_room_or_starts_a_group_after_the_trainer_was_shut_down() -> None:
    def shut_down(seconds: float) -> None:
        if seconds == 2:
            stopper.stop()

    trainer = Trainer()
    trainer.clock.at_sleep = shut_down
    trainer.start()
    stopper = Stopper(trainer.controller, trainer.cluster)
    trainer.cluster.num_slots = 0
    trainer.next_calls(Lost((0, 1, 2)))
    with pytest.raises(TrainerShutdownError):
        trainer.add(1)
    stopper.join()
    assert trainer.clock.sleeps[-2:] == [1, 2]
    assert trainer.cluster.sizes == [3]


def test_no_call_of_another_thread_comes_between_those_of_a_turn() -> None:
    trainer = started()
    other = Thread(target=lambda: trainer.add(10))
    with trainer.controller.turns.take_turn():
        trainer.add(1)
        other.start()
        other.join(0.05)
        trainer.add(2)
        assert trainer.group.functions == ["add", "add"]
        assert other.is_alive()
    other.join(60)
    assert trainer.group.functions == ["add", "add", "add"]


def test_a_call_that_the_driver_alone_works_on_ends_by_itself_and_keeps_its_result() -> None:
    trainer = started(use_local=True, max_workers=1)
    thread = Thread(target=trainer.controller.stop)

    def stop() -> None:
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waited for a call that nobody can end"

    trainer.next_calls(ShutDown(stop))
    assert trainer.add(1) == [1]
    assert trainer.group.ended_by == "kill"


USES: list[Callable[[Trainer], Any]] = [
    lambda trainer: trainer.add(1),
    lambda trainer: trainer.read(),
    lambda trainer: trainer.controller.snapshot(),
    lambda trainer: trainer.controller.ensure_group(),
]


@pytest.mark.parametrize("use", USES)
def test_a_stopped_trainer_says_so_when_it_is_used(use: Callable[[Trainer], Any]) -> None:
    trainer = started()
    trainer.controller.stop()
    with pytest.raises(TrainerShutdownError, match="This trainer was shut down") as caught:
        use(trainer)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value).endswith("was shut down. (words for a trainer that was shut down)")
    assert len(trainer.cluster.groups) == 1


def test_a_group_that_was_killed_is_replaced_for_whoever_needs_one_and_not_by_a_look() -> None:
    trainer = started()
    assert cast(Any, trainer.controller.group) is trainer.group
    trainer.next_calls(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.add(1)
    assert trainer.controller.group is None
    assert len(trainer.cluster.groups) == 1
    assert cast(Any, trainer.controller.ensure_group()) is trainer.cluster.groups[1]
    assert cast(Any, trainer.controller.group) is trainer.cluster.groups[1]


def test_while_there_is_no_group_the_number_of_workers_is_the_one_asked_for() -> None:
    trainer = Trainer()
    assert trainer.controller.num_workers == 3
    shrunk(trainer.start())
    assert trainer.controller.num_workers == 2


def test_a_trainer_whose_ray_session_has_ended_says_so_and_leaves_the_next_session_alone() -> None:
    trainer = started()
    trainer.controller._session = "one that has ended"
    functions = list(trainer.group.functions)
    for use in (trainer.add, lambda _: trainer.controller.ensure_group(), lambda _: trainer.controller.snapshot()):
        with pytest.raises(TrainerShutdownError, match="The Ray session of this trainer has ended"):
            use(1.0)
    assert "workers:    its Ray session has ended\n" in str(trainer.controller.status(None))
    trainer.controller.stop()
    assert (trainer.group.functions, trainer.group.ended_by) == (functions, "kill")  # not asked to close
    with pytest.raises(TrainerShutdownError, match="was shut down"):
        trainer.controller.status(None)


def test_an_idle_trainer_of_the_program_gives_way_and_goes_on_from_its_snapshot() -> None:
    first = started(max_workers=2)
    first.add(5.0)
    second = beside(first, max_workers=2).start()
    assert (first.controller.group, first.cluster.num_free) == (None, 1)
    assert "needs the room; the next call starts its workers again" in first.controller.history.events[-1].cause
    second.add(1.0)
    assert first.add(2.0) == [7.0, 7.0]
    assert second.controller.group is None
    assert second.read() == [(1.0, 1), (1.0, 1)]
    assert beside(second).start().controller.group is not None


@pytest.mark.parametrize("options", [{"use_local": True}, {"captures": False}])
def test_a_trainer_that_cannot_give_way_is_named_where_the_room_is_not_granted(options: dict[str, Any]) -> None:
    first = started(max_workers=3, **options)
    first.cluster.starts.append(Denied())
    with pytest.raises(ReservationTimeoutError, match=r"itself: call `shutdown\(\)` of a trainer first"):
        beside(first, max_workers=2).start()
    assert first.controller.group is not None


def test_a_trainer_that_is_in_a_call_does_not_give_way() -> None:
    first, failed = started(max_workers=3), list[str]()

    def start_another(on_wait: Callable[[], None]) -> None:
        first.cluster.starts.append(Denied())
        with pytest.raises(ReservationTimeoutError) as caught:
            beside(first, max_workers=2).start()
        failed.append(str(caught.value))

    first.cluster.while_waiting = start_another
    assert first.add(1.0) == [1.0] * 3
    assert "holds the room itself" in failed[0]


def test_no_trainer_gives_way_in_vain() -> None:
    first = started(max_workers=2)
    first.cluster.starts.append(Denied())
    with pytest.raises(ReservationTimeoutError, match=r"^not granted$"):
        beside(first, max_workers=50).start()
    assert first.controller.group is not None


def beside(first: Trainer, max_workers: int = 3) -> Trainer:
    """Another trainer of the program, in the same cluster."""
    trainer = Trainer(first.cluster, max_workers=max_workers)
    trainer.controller.view = first.controller.view
    return trainer
