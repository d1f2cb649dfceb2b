"""What a program sees of the controller: values, errors, events, and when workers are replaced or left alone.

That nothing is lost, that retries are paid for, and that nothing is left over, `tests/simulator` checks whatever
happens. Here is what it does not ask: words, and what is not done.
"""

from __future__ import annotations

import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.cluster.resources import ClusterView
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.policies import RetryBudget
from raysgd.core.engine.shared.interface import Call, Left
from raysgd.core.engine.shared.types import World
from raysgd.core.history.status import ask_status
from raysgd.exceptions import (
    RanksDifferError,
    ReservationTimeoutError,
    TrainerShutdownError,
    WorkerError,
    WorkersLostError,
)
from tests.core.engine.trainer import RESTARTS, Befall, Trainer, befalls, die, dies, disconnect, in_note, press_ctrl_c
from tests.simulator.processes import Process
from tests.simulator.replica import SimReplica, State, look

HOURS = 3600.0


# -------------------------------------------------------------------------------------------- plain calls


def times(replica: SimReplica, factor: int) -> int:
    return replica.world.rank * factor


def test_a_call_runs_on_its_ranks_with_their_arguments_and_values_come_in_rank_order() -> None:
    controller = Trainer().started().controller
    call = Call(times, lambda worlds: [(10 + world.rank,) for world in worlds])
    assert controller.run(call) == [0, 11, 24]
    assert controller.run(replace(call, rank=1)) == [11]
    assert controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_no_call_of_another_thread_comes_between_those_of_a_turn() -> None:
    trainer = Trainer().started()
    with trainer.controller.turns.take_turn():
        trainer.note(1)
        other = trainer.kernel.run_thread(lambda: trainer.note(10))
        trainer.kernel.sleep(5.0)
        assert trainer.note(2)[0] == (1, 2)
    trainer.kernel.block(lambda: other.is_over)
    assert trainer.look()[0] == (1, 2, 10)


# -------------------------------------------------------------------------------------------- lost workers


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_loss_too_many_is_told_with_what_is_left(max_retries: int) -> None:
    trainer = Trainer(**RESTARTS).started()
    trainer.note(1)
    deaths = befalls(die, 1, at="note", nth=range(1, 10))
    told = rf"(?s)^lost rank 1 .*the {max_retries} allowed retries of this call are used up.*too little memory"
    with pytest.raises(WorkersLostError, match=told + r".*\(words for spent retries\)$"):
        trainer.note(10, deaths, max_retries=max_retries)
    assert trainer.num_started == 3 * (1 + max_retries)
    assert trainer.controller.history.num_failures == max_retries
    last = trainer.controller.history.events[-1]
    assert (last.kind, last.old_size, last.new_size, last.detail) == ("lost", 3, 0, "(what is left)")
    assert last.cause.startswith("lost rank 1")


def test_a_connection_that_was_lost_is_the_cause_of_the_error() -> None:
    trainer = Trainer(**RESTARTS).started()
    with pytest.raises(WorkersLostError) as caught:
        trainer.walk(5, befalls(disconnect, 1), max_retries=0)
    assert str(caught.value.__cause__) == "Connection closed by peer"


@pytest.mark.parametrize("is_touched", [False, True])
def test_after_it_the_state_can_be_had_without_workers_and_the_next_call_goes_on_from_there(is_touched: bool) -> None:
    """Also where an evaluation drew random numbers since: they are lost with the workers, the state is not."""
    trainer = Trainer(**RESTARTS).started()
    trainer.note(1)
    if is_touched:
        trainer.controller.snapshots.touch()
    with pytest.raises(WorkersLostError):
        trainer.note(10, in_note(die, 1), max_retries=0)
    assert trainer.controller.snapshot().shared_state.noted == (1,)
    assert (trainer.num_started, trainer.controller.num_workers) == (3, 3)
    assert trainer.note(2, max_retries=0) == [(1, 2)] * 3
    assert trainer.kinds == ["lost", "restarted"]


def test_a_recovery_says_what_was_lost_and_how_the_size_changed(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(nodes=(2, 1), **RESTARTS).started()
    with caplog.at_level(logging.INFO, logger="raysgd"):
        trainer.note(1, in_note(trainer.lose_node("n1"), 2))
    [line] = [record.getMessage() for record in caplog.records if "resumed" in record.getMessage()]
    assert line.startswith("lost rank 2 (node address of n1 died); ")
    assert " restarted all workers and resumed with 2 instead of 3 workers after " in line
    assert line.endswith(" s; from the last completed call")


# -------------------------------------------------------------------------------------------- user errors

ENDED = (
    "The workers were ended, because they are not in the same state any more. The next call starts new ones, from the "
    "last completed call."
)


@pytest.mark.parametrize(
    ("call", "ranks", "at", "parted"),
    [
        ("note", (0, 1, 2), "noted", None),
        ("note", (1,), "noted", "elsewhere"),
        ("walk", (1,), "step", "inside the call"),
        ("walk", (0, 1, 2), "step", None),
    ],
)
def test_after_an_exception_workers_are_kept_only_if_all_failed_alike(
    call: str, ranks: tuple[int, ...], at: str, parted: str | None
) -> None:
    trainer = Trainer().started()
    trainer.note(1)
    group = trainer.group
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        getattr(trainer, call)(2, befalls(ZeroDivisionError("by zero"), *ranks, at=at, nth=[1]))
    assert isinstance(caught.value, WorkerError)
    assert str(caught.value).splitlines()[0] == "ZeroDivisionError: by zero"
    assert (ENDED in str(caught.value)) == (ENDED in str(pickle.loads(pickle.dumps(caught.value)))) == bool(parted)
    assert (trainer.controller.group is group) == (parted is None)
    if parted is not None:
        cause = f"rank 1 raised ZeroDivisionError while others were {parted}"
        assert trainer.last_event == ("ended", 3, 0, cause)
    is_changed = call == "note" and parted is None
    assert trainer.controller.snapshot().shared_state.noted == ((1, 2) if is_changed else (1,))
    assert trainer.controller.history.num_failures == 0


def test_a_failed_call_that_changes_nothing_leaves_the_snapshot_as_it_is() -> None:
    trainer = Trainer().started()
    trainer.note(1)
    before = trainer.controller.snapshot()
    with pytest.raises(ValueError, match="x"):
        trainer.look(befalls(ValueError("x"), 1, at="look", nth=[1]))
    trainer.expect()
    assert trainer.controller.snapshot() == before
    assert not trainer.seen, "no worker was asked"


@pytest.mark.parametrize("method", ["setup", "restore"])
def test_an_exception_while_replicas_are_made_again_is_raised_and_leaves_no_group(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("weight")

    trainer = Trainer(**RESTARTS).started()
    trainer.note(1)
    monkeypatch.setattr(SimReplica, method, fail)
    with pytest.raises(KeyError):
        trainer.note(2, in_note(die, 1))
    monkeypatch.undo()
    assert (trainer.controller.group, trainer.num_started) == (None, 6)
    assert trainer.note(3) == [(1, 3)] * 3


def test_an_exception_in_the_first_set_up_is_raised_at_once() -> None:
    trainer = Trainer()
    with pytest.raises(FileNotFoundError, match="no data"):
        trainer.started(befalls(FileNotFoundError("no data"), 2, at="built", nth=[1]))
    assert trainer.num_started == 3


# -------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the terminal is gone")], ids=repr)
def test_what_is_raised_in_the_driver_gives_the_group_up(error: BaseException) -> None:
    def on_wait() -> None:
        raise error

    trainer = Trainer().started()
    trainer.note(1)
    with pytest.raises((KeyboardInterrupt, OSError)) as caught:
        trainer.controller.run(replace(trainer.walking(10), on_wait=on_wait))
    assert trainer.last_event == ("ended", 3, 0, caught.type.__name__)
    assert trainer.controller.group is None, "nothing is started before the next call"
    assert trainer.note(2) == [(1, 2)] * 3
    assert trainer.controller.history.num_failures == 0


def test_ctrl_c_while_a_loss_is_mended_is_told_with_it() -> None:
    trainer = Trainer(**RESTARTS).started()
    trainer.note(1)
    with pytest.raises(KeyboardInterrupt):
        trainer.note(10, in_note(die, 1), befalls(press_ctrl_c, 0, at="built", nth=[1]))
    kind, old_size, new_size, cause = trainer.last_event
    assert (kind, old_size, new_size) == ("ended", 3, 0)
    assert cause.startswith("lost rank 1")
    assert cause.endswith("; KeyboardInterrupt")
    assert trainer.note(2) == [(1, 2)] * 3


@pytest.mark.parametrize(("error_cls", "kept"), [(ArithmeticError, (1, 2)), (RanksDifferError, (1,))])
def test_values_that_do_not_pass_the_check_of_their_call_do_not_count(
    error_cls: type[Exception], kept: tuple[int, ...]
) -> None:
    """Nor do calls since the last snapshot, where ranks may have parted in any of them."""

    def refuse(values: Sequence[Any]) -> None:
        raise error_cls(f"{values[0].noted}")

    trainer = Trainer(snapshot_every_s=HOURS).started()
    trainer.note(1)
    trainer.note(2)
    with pytest.raises(error_cls, match=r"\(1, 2, 10\)"):
        trainer.controller.run(replace(trainer.noting(10), check=refuse))
    assert trainer.last_event == ("ended", 3, 0, error_cls.__name__)
    assert trainer.note(3) == [(*kept, 3)] * 3


def test_arguments_that_cannot_be_made_leave_the_group_alone() -> None:
    def args_for(worlds: Sequence[World]) -> Sequence[Sequence[Any]]:
        raise ValueError("no shards")

    trainer = Trainer().started()
    group = trainer.group
    with pytest.raises(ValueError, match="no shards"):
        trainer.controller.run(Call(look, args_for))
    assert trainer.controller.group is group


def alone() -> Trainer:
    """The driver as the only worker."""
    return Trainer(num_workers=1, nodes=(1,), use_local=True, spec={"captures": False}).started()


@pytest.mark.parametrize("ends", ["interrupted", "failed"])
def test_the_driver_as_the_only_worker_is_kept_as_it_was_left(ends: str) -> None:
    trainer = alone()
    act = press_ctrl_c if ends == "interrupted" else ZeroDivisionError("by zero")
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)) as caught:
        trainer.walk(5, befalls(act, 0))
    assert ENDED not in str(caught.value)
    assert trainer.last_event[0] == "started", "nobody was ended"
    assert trainer.controller.snapshot().shared_state.steps == 2


def test_a_call_that_the_driver_alone_works_on_ends_by_itself_and_keeps_its_result() -> None:
    trainer = alone()
    has_returned: list[bool] = []
    look = befalls(lambda process: has_returned.append(trainer.kernel.threads[-1].is_over), 0, nth=[5])
    assert trainer.walk(5, befalls(trainer.stop, 0), look) == [5]
    assert has_returned == [True], "`stop` does not wait for a call that nobody can end"
    assert (trainer.controller.stopped.is_set(), trainer.controller.group) == (True, None)


# -------------------------------------------------------------------------------------------- starting


def test_the_first_start_waits_for_the_full_number_and_no_longer_than_told() -> None:
    trainer = Trainer(nodes=(2,))
    began = trainer.kernel.now
    with pytest.raises(ReservationTimeoutError):
        trainer.started()
    assert (trainer.kernel.now - began, trainer.num_started) == (pytest.approx(20, abs=1), 0)


@pytest.mark.parametrize("num_retries", [0, 2])
def test_a_budget_for_starts_is_what_they_cost(num_retries: int) -> None:
    budget = RetryBudget(num_retries)
    trainer = Trainer(start_budget=budget, **RESTARTS)
    told = f"start-up failed.*the {num_retries} allowed retries are used up"
    with pytest.raises(WorkersLostError, match=told):
        trainer.started(dies(0, at="built", nth=range(1, 11)))
    assert trainer.num_started == 3 * (1 + num_retries)
    assert (budget.num_spent, budget.num_refused) == (num_retries, 1)


def test_a_start_on_what_there_is_room_for_costs_the_same() -> None:
    budget = RetryBudget(1)
    trainer = Trainer(nodes=(2,), start_budget=budget, **RESTARTS)
    trainer.started(dies(0, at="built", nth=[1]), as_fits=True)
    assert (trainer.num_started, budget.num_spent) == (4, 1)
    [event] = trainer.controller.history.events
    assert (event.kind, event.old_size, event.new_size) == ("started", 0, 2)


def test_without_an_end_of_the_budget_a_start_is_tried_until_it_works() -> None:
    budget = RetryBudget(float("inf"))
    trainer = Trainer(start_budget=budget, **RESTARTS).started(dies(0, at="built", nth=range(1, 11)))
    assert (trainer.num_started, budget.num_spent) == (33, 10)
    # More than the attempts to find room, which these are not.
    trainer.look(dies(1, at="look", nth=[1]), dies(0, at="built", nth=range(1, 21)), budget=budget)
    assert (trainer.num_started, budget.num_spent) == (96, 31)


def test_deaths_at_the_start_of_new_workers_are_paid_for_out_of_what_the_loss_has_left() -> None:
    budget = RetryBudget(3)
    trainer = Trainer(start_budget=budget, **RESTARTS).started()
    with pytest.raises(WorkersLostError, match="start-up failed"):
        trainer.look(dies(1, at="look", nth=[1]), dies(0, at="built", nth=range(1, 5)), budget=budget)
    assert (trainer.num_started, budget.num_spent, budget.num_refused) == (12, 3, 1)


def test_new_groups_are_tried_only_so_often() -> None:
    trainer = Trainer(scaling={"num_attempts": 4}, **RESTARTS).started()
    deaths = dies(0, at="built", nth=range(1, 11))
    with pytest.raises(WorkersLostError, match=r"No group could be started in 4 attempts after: lost rank 1"):
        trainer.note(1, in_note(die, 1), deaths)
    assert trainer.num_started == 3 * 5


# -------------------------------------------------------------------------------------------- another program is faster


def others_take(trainer: Trainer, name: str, num_free: int) -> None:
    """Lets another program take what is free on a node, once the driver has seen that there is room for so many."""
    view, node = trainer.controller.view, trainer.cluster.nodes[name]

    def view_of_before() -> ClusterView:
        seen = view()
        if trainer.cluster.room == num_free:
            node.num_taken, trainer.controller.view = trainer.cluster.num_free(node), view
        return seen

    trainer.controller.view = view_of_before


def test_room_that_another_program_took_first_costs_no_retry_and_leads_to_a_smaller_group() -> None:
    budget = RetryBudget(1)
    trainer = Trainer(nodes=(2, 1), start_budget=budget, **RESTARTS).started()
    others_take(trainer, "n1", num_free=3)
    began = trainer.kernel.now
    assert trainer.note(1, in_note(die, 1), budget=budget) == [(1,)] * 2
    assert (trainer.kinds, trainer.num_started, budget.num_spent) == (["restored"], 5, 1)
    assert trainer.kernel.now - began == pytest.approx(10 + 1, abs=1), "it was waited for"
    trainer.cluster.nodes["n1"].num_taken = 0
    assert trainer.note(2) == [(1, 2)] * 3


def test_room_that_is_free_only_to_the_eye_is_asked_for_only_so_often() -> None:
    trainer = Trainer(scaling={"num_attempts": 4}, **RESTARTS)
    free = trainer.cluster.view()
    trainer.started()
    trainer.controller.view, trainer.cluster.nodes["n0"].num_taken = lambda: free, 2
    began = trainer.kernel.now
    with pytest.raises(WorkersLostError, match=r"No group could be started in 4 attempts after: lost rank 1"):
        trainer.note(1, in_note(die, 1))
    assert (trainer.kinds, trainer.num_started, trainer.cluster.reservations) == (["lost"], 3, [])
    assert trainer.kernel.now - began == pytest.approx(4 * 10, abs=1)


def test_room_to_grow_that_another_program_took_first_is_left_to_it() -> None:
    trainer = Trainer(nodes=(2, 1)).started()
    trainer.walk(5, befalls(trainer.lose_node("n1"), 2))
    trainer.add_node(1)
    others_take(trainer, "n2", num_free=1)
    began = trainer.kernel.now
    assert trainer.walk(1) == [6] * 2
    assert trainer.kernel.now - began < 3
    trainer.cluster.nodes["n2"].num_taken = 0
    assert trainer.walk(1) == [7] * 3


# -------------------------------------------------------------------------------------------- waiting


def lose_all(trainer: Trainer) -> Befall:
    return in_note(trainer.lose_node("n0"), 0)


def test_giving_up_says_what_was_requested_and_the_next_call_looks_again() -> None:
    trainer = Trainer().started()
    trainer.note(1)
    began = trainer.kernel.now
    with pytest.raises(WorkersLostError) as caught:
        trainer.note(2, lose_all(trainer))
    assert trainer.kernel.now - began == pytest.approx(1 + 2 + 4 + 8 + 16 + 32 + 3 * 60, abs=20)
    message = str(caught.value)
    assert "0 of at least 1 workers fit after 10 attempts" in message
    assert "requested:  3 x {'CPU': 1.0}" in message
    assert message.endswith("\n(words for too few workers)")
    with pytest.raises(WorkersLostError):
        trainer.note(2)
    trainer.add_node(3)
    assert trainer.note(3) == [(1, 3)] * 3
    assert (trainer.kinds, trainer.controller.history.num_failures) == (["lost", "lost", "restarted"], 0)


def test_a_start_that_never_fits_says_at_once_what_would(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(nodes=(3,), num_workers=5, min_workers=4)
    trainer.kernel.after(20.0, lambda: trainer.add_node(2))
    trainer.started(as_fits=True)
    assert len(trainer.note(1)) == 5
    warnings = [
        record.getMessage() for record in caplog.records if "even when nothing else runs" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert warnings[0].endswith(
        "Ask for 3 workers at most (spares count too), or for less per worker: `num_cpus_per_worker=0.75`."
    )


def test_while_it_waits_it_requests_as_many_workers_as_it_needs_and_no_longer() -> None:
    trainer = Trainer(min_workers=2, **RESTARTS).started()
    trainer.kernel.after(20.0, lambda: trainer.add_node(2))
    began = trainer.kernel.now
    assert trainer.note(1, lose_all(trainer)) == [(1,)] * 2
    assert trainer.kernel.now - began == pytest.approx(21, abs=2)


def test_nodes_are_requested_for_the_workers_that_are_missing_and_for_no_more() -> None:
    alone = Trainer(num_workers=1, use_local=True).started()
    assert alone.group.slots._asked == []
    trainer = Trainer(nodes=(1, 1, 1))
    all_free = trainer.cluster.view()
    trainer.started()

    def lose_two(process: Process) -> None:
        trainer.cluster.lose_node("n1")
        trainer.cluster.lose_node("n2")

    raises = befalls(ZeroDivisionError("it cannot go on where it is"), 0, at="leave", nth=[1])
    assert trainer.walk(5, befalls(lose_two, 1), raises) == [5]
    requested = [len(trainer.group.slots._asked)]
    view, trainer.controller.view = trainer.controller.view, lambda: all_free  # another program is faster
    assert trainer.walk(1) == [6]
    trainer.controller.view = view
    requested.append(len(trainer.group.slots._asked))
    for num_workers in (2, 3):
        trainer.add_node(1)
        assert len(trainer.walk(1)) == num_workers
        requested.append(len(trainer.group.slots._asked))
    assert requested == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("is_settling", "settles_after_s", "size"), [(False, 0.5, 3), (False, HOURS, 1), (True, 4.0, 3), (True, HOURS, 1)]
)
def test_what_was_given_back_and_is_not_seen_as_free_yet_is_waited_for_within_reason(
    is_settling: bool, settles_after_s: float, size: int
) -> None:
    trainer = Trainer(**RESTARTS).started()
    asked: list[float] = []

    def view() -> ClusterView:
        asked.append(trainer.kernel.now)
        [node] = trainer.cluster.view().nodes
        if asked[-1] < asked[0] + settles_after_s:
            node = replace(node, available={"CPU": 1.0}, is_settling=is_settling)
        return ClusterView((node,))

    trainer.controller.view = view
    assert trainer.note(1, in_note(die, 1)) == [(1,)] * size
    most_s = 10.0 if is_settling else 1.0
    assert asked[-1] - asked[0] == pytest.approx(min(most_s, settles_after_s), abs=0.1)


# -------------------------------------------------------------------------------------------- growing


def test_a_driver_that_was_left_alone_grows_back_when_there_is_room_for_two() -> None:
    trainer = Trainer(nodes=(1, 2), use_local=True).started()
    assert trainer.walk(5, befalls(trainer.lose_node("n1"), 1)) == [5]
    assert trainer.walk(2) == [7], "there is room for the driver only"
    assert trainer.group.is_driver_only
    trainer.add_node(1)
    assert trainer.walk(2) == [9, 9]
    assert trainer.kinds == ["continued", "grown"]


def test_only_a_call_that_changes_something_grows_and_that_spends_no_retry() -> None:
    trainer = Trainer(nodes=(2, 1), **RESTARTS).started()
    assert trainer.note(1, in_note(trainer.lose_node("n1"), 2)) == [(1,)] * 2
    assert trainer.note(2) == [(1, 2)] * 2
    assert trainer.num_started == 5, "it would gain nobody"
    trainer.add_node(1)
    assert len(trainer.look()) == 2
    assert trainer.note(3, max_retries=0) == [(1, 2, 3)] * 3
    assert (trainer.kinds, trainer.num_started) == (["restored", "grown"], 8)


# -------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("is_large", [False, True])
def test_a_snapshot_that_is_current_is_not_taken_again(is_large: bool) -> None:
    trainer = Trainer(is_large=is_large).started()
    trainer.note(3)
    first = trainer.controller.snapshot()
    assert (first.shared_state.noted, first.rank_states) == ((3,), ((0, 0), (1, 0), (2, 0)))
    assert trainer.controller.snapshot() is first
    trainer.controller.snapshots.touch()
    second = trainer.controller.snapshot()
    assert (second is first, second == first) == (False, True)
    assert trainer.controller.snapshot() is second


def test_without_captures_a_snapshot_is_taken_when_it_is_requested() -> None:
    trainer = Trainer(spec={"captures": False}).started()
    for number in (1, 2):
        trainer.note(number)
        assert not trainer.controller.snapshots.is_current
        assert trainer.controller.snapshot().shared_state.noted[-1] == number


# -------------------------------------------------------------------------------------------- stopping

USES: list[Callable[[Trainer], Any]] = [
    lambda trainer: trainer.note(1),
    lambda trainer: trainer.look(),
    lambda trainer: trainer.controller.snapshot(),
    lambda trainer: trainer.controller.ensure_group(),
]


@pytest.mark.parametrize("use", USES)
def test_a_stopped_trainer_says_so_when_it_is_used(use: Callable[[Trainer], Any]) -> None:
    trainer = Trainer().started()
    trainer.controller.stop()
    trainer.controller.stop(force=True)
    with pytest.raises(TrainerShutdownError) as caught:
        use(trainer)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == "This trainer was shut down. (words for a trainer that was shut down)"
    assert trainer.num_started == 3


def test_a_call_that_another_thread_shuts_down_says_so() -> None:
    trainer = Trainer().started()
    with pytest.raises(TrainerShutdownError, match=r"(?s)shut down while.*\(words for an interrupted call\)$"):
        trainer.walk(5, befalls(trainer.stop, 0))
    assert trainer.controller.group is None


def test_a_stop_while_room_is_looked_for_starts_no_group() -> None:
    trainer = Trainer(**RESTARTS).started()
    view = trainer.controller.view

    def stop_first() -> ClusterView:
        if not trainer.controller.stopped.is_set():
            trainer.kernel.run_thread(trainer.controller.stop)
            trainer.kernel.sleep(1.0)
        return view()

    trainer.controller.view = stop_first
    with pytest.raises(TrainerShutdownError):
        trainer.note(1, in_note(die, 1))
    assert trainer.num_started == 3


def test_a_trainer_whose_ray_session_has_ended_says_so_and_leaves_the_next_session_alone() -> None:
    trainer = Trainer().started()
    trainer.controller._session = "one that has ended"
    for use in USES:
        with pytest.raises(TrainerShutdownError, match="The Ray session of this trainer has ended"):
            use(trainer)
    assert "workers:    its Ray session has ended\n" in str(ask_status(trainer.controller, None))
    trainer.controller.stop()
    assert all(process.is_killed for process in trainer.cluster.processes), "not asked to close"
    with pytest.raises(TrainerShutdownError, match="was shut down"):
        ask_status(trainer.controller, None)


# -------------------------------------------------------------------------------------------- two trainers


def beside(first: Trainer, num_workers: int) -> ElasticController:
    """Another trainer of the program, in the same cluster."""
    other = Trainer(num_workers=num_workers, spec={"make_replica": lambda world: None}, **RESTARTS)
    for name in ("kernel", "network", "cluster", "platform"):
        setattr(other, name, getattr(first, name))
    return other._controller()


def test_an_idle_trainer_of_the_program_gives_way_and_goes_on_from_its_snapshot() -> None:
    first = Trainer(num_workers=2, **RESTARTS).started()
    first.note(5)
    second = beside(first, 2)
    second.start()
    assert first.controller.group is None
    assert "needs the room; the next call starts its workers again" in first.last_event[3]
    assert first.note(2) == [(5, 2)] * 2
    assert second.group is None
    second.stop()


@pytest.mark.parametrize("options", [{"use_local": True}, {"spec": {"captures": False}}])
def test_a_trainer_that_cannot_give_way_is_named_where_the_room_is_not_granted(options: dict[str, Any]) -> None:
    first = Trainer(**RESTARTS, **options).started()
    with pytest.raises(ReservationTimeoutError, match=r"itself: call `shutdown\(\)` of a trainer first"):
        beside(first, 2).start()
    assert first.controller.group is not None


def test_a_trainer_that_is_in_a_call_does_not_give_way() -> None:
    first, failed = Trainer(**RESTARTS).started(), list[str]()

    def start_another() -> None:
        if not failed:
            with pytest.raises(ReservationTimeoutError) as caught:
                beside(first, 2).start()
            failed.append(str(caught.value))

    first.controller.run(replace(first.walking(10), on_wait=start_another))
    assert "holds the room itself" in failed[0]


@pytest.mark.parametrize("why", ["never started", "driver only", "session has ended"])
def test_a_trainer_that_holds_no_room_is_not_told_to_give_way(why: str) -> None:
    alone: dict[str, Any] = {"num_workers": 1, "use_local": True} if why == "driver only" else {"num_workers": 2}
    first = Trainer(**alone)
    if why != "never started":
        first.started()
    if why == "session has ended":
        first.controller._session = "one that has ended"
    first.cluster.nodes["n0"].num_taken = first.cluster.room - 1
    with pytest.raises(ReservationTimeoutError, match=r"^not granted$"):
        beside(first, 2).start()


def test_no_trainer_gives_way_for_nothing() -> None:
    first = Trainer(num_workers=2, **RESTARTS).started()
    with pytest.raises(ReservationTimeoutError, match=r"^not granted$"):
        beside(first, 50).start()
    assert first.controller.group is not None


# -------------------------------------------------------------------------------------------- calls that are left


class TestACallThatIsLeft:
    def leave(self, trainer: Trainer, *befall: Befall) -> tuple[int, int]:
        """Walk until rank 0 has taken some steps, and ask to leave; return how many ranks came to which step."""
        trainer.expect(*befall)
        call = replace(trainer.walking(60), leaves=lambda: trainer.seen["step", 0] >= 12)
        ended = trainer.controller.run_or_leave(call)
        assert isinstance(ended, Left)
        captures = ended.parts
        assert not trainer.controller.monitor.is_on
        landed = trainer.controller.snapshots.landed
        assert landed is not None
        assert landed.progress is None, "no call goes on inside"
        assert {each.progress.steps for each in captures} == {landed.shared_state.steps}
        return len(captures), landed.shared_state.steps

    def test_stops_all_ranks_at_one_step_whose_state_the_driver_has(self) -> None:
        trainer = Trainer().started()
        num_ranks, step = self.leave(trainer)
        assert num_ranks == 3
        assert 12 <= step < 20
        assert trainer.kinds == []

    def test_leaves_the_ranks_ready_for_another_call(self) -> None:
        trainer = Trainer().started()
        _, step = self.leave(trainer)
        assert trainer.walk(5) == [step + 5] * 3

    @pytest.mark.parametrize("lost", [(1,), (0,), (0, 2)])
    def test_is_left_with_those_who_live_where_workers_die_over_it(self, lost: tuple[int, ...]) -> None:
        trainer = Trainer().started()
        num_ranks, _ = self.leave(trainer, befalls(trainer.lose(*lost), lost[0], nth=[12]))
        assert num_ranks == 3 - len(lost)
        assert trainer.num_started == 3, "no one is replaced"

    def test_with_one_worker_ends_after_the_step_that_runs(self) -> None:
        trainer = Trainer(num_workers=1, nodes=(1,)).started()
        asked_at: list[int] = []

        def leaves() -> bool:
            step = trainer.seen["step", 0]
            asked_at.extend([step] if step >= 12 and not asked_at else [])
            return step >= 12

        ended = trainer.controller.run_or_leave(replace(trainer.walking(60), leaves=leaves))
        assert isinstance(ended, Left)
        assert ended.parts[0].progress.steps == asked_at[0]

    def test_is_ended_with_an_error_where_its_state_never_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fetch(replica: SimReplica, token: int) -> State:
            raise OSError("the store is full")

        trainer = Trainer(is_large=True).started()
        before = [each.pid for each in trainer.group.infos]
        with monkeypatch.context() as patched:
            patched.setattr(SimReplica, "fetch", fetch)
            with pytest.raises(WorkersLostError, match="on its way to the driver 4 times"):
                self.leave(trainer)
        assert trainer.seen["step", 0] < 30, "a stop for each copy, and no more"
        assert [each.pid for each in trainer.group.infos] == before, "the workers were waiting between two steps"
        assert len({*trainer.walk(5)}) == 1

    def test_goes_on_with_those_who_have_finished_it_and_new_workers_where_they_are_too_few(self) -> None:
        trainer = Trainer(nodes=(6,), min_workers=2, snapshot_every_s=None).started()
        call = replace(trainer.walking(20), leaves=lambda: trainer.seen["last", 1] > 0)
        trainer.expect(dies(1, 2, at="last", nth=[1]))
        trainer.invariants.may_only_copy = True
        states = trainer.controller.run(call)
        assert {each.state.steps for each in states} == {20}
        assert trainer.kinds == ["continued"]

    @pytest.mark.parametrize("is_validation", [False, True])
    def test_is_given_up_soon_where_ray_is_gone_and_no_worker_answers(self, is_validation: bool) -> None:
        trainer = Trainer(heartbeat_s=30.0).started()
        trainer.walk(10)
        trainer.controller.is_ending = trainer.cluster.is_head_gone = True
        freezes = befalls(Process.freeze, 0, 1, 2, nth=[12])
        began = trainer.kernel.now
        with pytest.raises(WorkersLostError, match=r"Ray was stopped, and no worker has responded for \d+ s"):
            self.leave(trainer, freezes) if not is_validation else trainer.walk(60, freezes)
        assert trainer.kernel.now - began < 25.0, "of the simulator's clock: before a worker counts as hung"
        landed = trainer.controller.snapshots.landed
        assert landed is not None
        assert landed.shared_state.steps == 10

    def test_stops_at_a_step_where_ray_is_gone_and_the_workers_answer(self) -> None:
        trainer = Trainer(heartbeat_s=30.0).started()
        trainer.controller.is_ending = trainer.cluster.is_head_gone = True
        num_ranks, step = self.leave(trainer)
        assert num_ranks == 3
        assert 12 <= step < 20

    def test_copies_its_state_no_more_where_ray_is_gone_and_a_worker_has_died(self) -> None:
        trainer = Trainer(heartbeat_s=30.0, is_large=True).started()
        trainer.walk(10)
        trainer.controller.is_ending = trainer.cluster.is_head_gone = True
        began = trainer.kernel.now
        with pytest.raises(WorkersLostError, match="Ray was stopped before the state of the last step"):
            self.leave(trainer, dies(1, nth=[12]))
        assert trainer.kernel.now - began < 5.0
        assert trainer.seen["leave", 0] == 1, "the survivors form one group"

    def test_waits_for_a_slow_worker_as_ever_where_ray_is_there(self) -> None:
        trainer = Trainer(heartbeat_s=30.0).started()
        trainer.controller.is_ending = True

        def stall(process: Process) -> None:
            process.freeze()
            trainer.kernel.after(20.0, process.thaw)

        num_ranks, _ = self.leave(trainer, befalls(stall, 0, 1, 2, nth=[12]))
        assert num_ranks == 3

    def test_keeps_the_states_before_until_the_next_call(self) -> None:
        trainer = Trainer().started()
        trainer.walk(10)
        landed = trainer.controller.snapshots.landed
        assert landed is not None
        before = weakref.ref(landed)
        del landed

        def leaves() -> bool:
            is_due = trainer.seen["step", 0] >= 12
            trainer.controller.expect_end(is_due)
            return is_due

        trainer.controller.run_or_leave(replace(trainer.walking(60), leaves=leaves))
        trainer.controller.expect_end(False)
        assert before() is not None
        trainer.walk(10)
        gc.collect()
        assert before() is None

    def test_looks_for_room_no_longer_where_the_program_ends_meanwhile(self) -> None:
        trainer = Trainer(min_workers=2, **RESTARTS).started()
        trainer.kernel.after(2.0, lambda: setattr(trainer.controller, "is_ending", True))
        began = trainer.kernel.now
        with pytest.raises(WorkersLostError, match="the program is about to end, so no other workers are started"):
            trainer.note(1, lose_all(trainer))
        assert trainer.kernel.now - began < 5

    @pytest.mark.parametrize("is_left", [False, True])
    def test_waits_for_ray_itself_until_the_program_ends(self, is_left: bool) -> None:
        trainer = Trainer(**RESTARTS).started()

        def stop_ray(process: Process) -> None:
            trainer.cluster.is_head_gone = True
            process.die(0.01)

        back = (trainer.controller, "is_ending", True) if is_left else (trainer.cluster, "is_head_gone", False)
        began = trainer.kernel.now
        trainer.kernel.after(20.0, lambda: setattr(*back))
        if is_left:
            with pytest.raises(WorkersLostError, match="Ray was stopped, and the program is about to end"):
                trainer.note(1, in_note(stop_ray, 1))
            assert trainer.kernel.now - began < 25.0
        else:
            assert trainer.note(1, in_note(stop_ray, 1)) == [(1,)] * 3

    def test_starts_no_worker_where_all_are_lost_and_the_program_ends(self) -> None:
        trainer = Trainer().started()
        trainer.walk(10)
        trainer.controller.is_ending = True
        with pytest.raises(WorkersLostError, match="the program is about to end, so no other workers are started"):
            self.leave(trainer, befalls(trainer.lose(0, 1, 2), 0, nth=[12]))
        assert trainer.num_started == 3
        landed = trainer.controller.snapshots.landed
        assert landed is not None
        assert landed.shared_state.steps == 10
