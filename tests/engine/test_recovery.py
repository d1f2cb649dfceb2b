"""What follows the loss of workers, in a scripted group: who goes on in place, and what is restored where no one can.

Covers `raysgd.engine.recovery`, through the controller that asks for it."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.engine.transfers import LostPartError
from raysgd.exceptions import TrainerShutdownError, WorkerError, WorkersLostError
from tests.engine.stepping_trainer import Trainer
from tests.helpers.fakes import (
    Event,
    Interrupted,
    Lost,
    Raised,
    ShutDown,
    Stopper,
    add,
    read,
    walk,
    walk_on,
)

HOURS = 3600.0


# -------------------------------------------------------------------------------------------- going on after a loss


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1)])
def test_survivors_go_on_where_they_are_and_a_new_worker_takes_their_state(lost: tuple[int, ...]) -> None:
    trainer = Trainer()
    survivors = list(range(3 - len(lost)))
    before = [replica for rank, replica in enumerate(trainer.group.replicas) if rank not in lost]
    assert trainer.walk(5, Lost(lost, after={0: 2, 1: 2, 2: 2})) == [5, 5, 5]
    assert [trainer.group.replicas[rank] for rank in survivors] == before, "the same processes"
    assert all(replica.is_primed for replica in trainer.group.replicas[len(survivors) :])
    assert trainer.group.functions == ["walk", "walk_on"]
    assert trainer.kinds == ["continued"]
    assert trainer.controller.history.num_failures == 1
    assert trainer.controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_all_go_on_from_the_most_advanced_survivor() -> None:
    trainer = Trainer()
    assert trainer.walk(5, Lost((0,), after={1: 2, 2: 3})) == [5, 5, 5]
    [handover] = trainer.group.handovers
    assert (handover.source, handover.takers) == (1, (0, 2))  # by new rank: the third one is new


def test_a_survivor_that_had_finished_gives_its_answer_again_and_nothing_is_counted_twice() -> None:
    trainer = Trainer()
    assert trainer.walk(5, Lost((2,), after={1: 4})) == [5, 5, 5]
    assert trainer.totals == [5, 5, 5]
    assert trainer.group.replicas[0].num_own_calls == 1


def test_calls_from_another_thread_wait_for_the_running_one() -> None:
    trainer = Trainer()
    seen = []

    def save_meanwhile(on_wait: Callable[[], None]) -> None:
        thread = threading.Thread(target=lambda: seen.append(trainer.controller.snapshot()))
        thread.start()
        thread.join(0.2)
        seen.append(thread)
        assert trainer.controller.monitor is not None, "somebody looks after the running call all the time"

    trainer.cluster.while_waiting = save_meanwhile
    trainer.walk(5)
    [thread, *_] = seen
    assert isinstance(thread, threading.Thread), "it came first"
    thread.join(60)
    assert seen[1].shared_state == 5
    assert trainer.controller.monitor is None


def test_without_room_the_survivors_go_on_alone() -> None:
    trainer = Trainer()
    sizes: list[int] = []

    def args_for(worlds: Sequence[World]) -> list[tuple[int]]:
        sizes.append(len(worlds))
        return [(5,)] * len(worlds)

    trainer.cluster.calls = deque([Lost((1,), after={0: 2, 2: 2})])
    trainer.cluster.num_slots = 2
    assert trainer.controller.run(Call(walk, args_for, changes_state=True, resume=walk_on)) == [5, 5]
    assert sizes == [3, 2], "the arguments are made anew"
    assert trainer.controller.num_workers == 2


def test_a_lost_connection_of_all_keeps_all() -> None:
    trainer = Trainer()
    assert trainer.walk(5, Lost((0, 1, 2), "disconnected")) == [5, 5, 5]
    assert (trainer.kinds, len(trainer.cluster.groups)) == (["continued"], 1)


@pytest.mark.parametrize(
    ("num_steps_between", "stuck", "num_rejoined"),
    [(1, (), 4), (1, (1,), 3), (2, (), 8), (2, (1,), 3)],
    ids=["dies at every step", "hangs at every step", "dies now and then", "hangs now and then"],
)
def test_a_rank_that_fails_at_every_step_or_hangs_again_and_again_uses_up_the_retries(
    num_steps_between: int, stuck: tuple[int, ...], num_rejoined: int
) -> None:
    trainer = Trainer()
    trainer.cluster.stuck = set(stuck)
    done = range(num_steps_between, 8 * num_steps_between + 1, num_steps_between)
    kind, lost = ("disconnected", (0,)) if stuck else ("died", (1,))
    losses = [Lost(lost, kind, dict.fromkeys(range(3), num_steps)) for num_steps in done]
    if num_rejoined == len(losses):
        assert trainer.walk(20, *losses) == [20, 20, 20]
    else:
        with pytest.raises(WorkersLostError, match="the 3 allowed retries of this call are used up"):
            trainer.walk(20, *losses)
    assert trainer.kinds.count("continued") == num_rejoined


def test_a_call_that_changes_nothing_is_begun_again_by_the_survivors() -> None:
    trainer = Trainer()
    trainer.walk(2)
    trainer.cluster.calls = deque([Lost((1,))])
    assert trainer.controller.run(Call(read)) == [(2, 1), (2, 1), (2, 0)]  # what the lost rank had for itself is gone
    assert (trainer.kinds, trainer.group.functions) == (["continued"], ["walk", "read", "read"])


def test_a_call_that_changes_the_state_and_cannot_be_gone_on_with_needs_the_snapshot() -> None:
    trainer = Trainer()
    trainer.walk(2)
    trainer.cluster.calls = deque([Lost((1,), after={0: 1, 2: 1})])
    assert trainer.controller.run(Call(walk, lambda worlds: [(3,)] * len(worlds), changes_state=True)) == [5, 5, 5]
    assert trainer.kinds == ["restored"]


def test_the_policy_may_ask_for_new_workers_always() -> None:
    trainer = Trainer(continues=False)
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2})) == [5, 5, 5]
    assert (trainer.kinds, trainer.cluster.sizes) == (["restored"], [3, 3])


def test_an_exception_of_the_user_is_never_gone_on_from() -> None:
    trainer = Trainer()
    with pytest.raises(ZeroDivisionError):
        trainer.walk(5, Raised(1, ZeroDivisionError("by zero")))
    assert "continued" not in trainer.kinds


ENDED = (
    "The workers were ended, because they are not in the same state any more. The next call starts new ones, from the "
    "last completed call."
)


@pytest.mark.parametrize(
    ("rank", "num_done", "is_whole", "is_kept"),
    [
        (None, (3, 3, 3), (True, True, True), True),
        (1, (3, 3, 3), (True, True, True), False),
        (None, (3, 3, 2), (True, True, True), False),
        (None, (3, 3, 3), (True, False, True), False),
        (None, (3, 3, 3), (False, False, False), False),
    ],
)
def test_after_an_exception_replicas_are_kept_only_if_all_failed_alike(
    rank: int | None, num_done: Sequence[int], is_whole: Sequence[bool], is_kept: bool
) -> None:
    trainer = Trainer()
    trainer.walk(2)
    for replica, done, whole in zip(trainer.group.replicas, num_done, is_whole, strict=True):
        replica.num_done, replica.is_whole = done, whole
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        trainer.walk(5, Raised(rank, ZeroDivisionError("by zero")))
    assert trainer.group.is_alive == is_kept
    assert (ENDED in str(caught.value)) == (not is_kept)
    assert ENDED in str(pickle.loads(pickle.dumps(caught.value))) or is_kept
    assert trainer.walk(1) == [3, 3, 3]
    assert len(trainer.cluster.groups) == (1 if is_kept else 2)


def test_what_failed_is_told_before_what_became_of_the_workers() -> None:
    trainer = Trainer()
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.walk(5, Raised(1, ZeroDivisionError("by zero")))
    lines = str(caught.value).splitlines()
    assert lines[0] == "ZeroDivisionError: by zero"
    assert lines[3] == ENDED
    assert trainer.controller.history.events[-1].cause == "rank 1 raised ZeroDivisionError while others were elsewhere"


def test_a_state_that_is_still_on_its_way_arrives_before_the_workers_are_ended() -> None:
    trainer = Trainer(is_large=True)
    trainer.walk(1)
    trainer.controller.snapshots.poll()
    trainer.cluster.transfer_s = 2.0
    trainer.walk(1)
    with pytest.raises(ZeroDivisionError):
        trainer.walk(5, Raised(1, ZeroDivisionError("by zero")))
    assert trainer.controller.snapshots.landed.shared_state == 2
    assert trainer.controller.snapshots.calls_since == ()


def test_a_driver_that_is_alone_has_nothing_to_go_back_to_and_is_kept() -> None:
    trainer = Trainer(use_local=True, max_workers=1)
    trainer.group.replicas[0].is_whole = False
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.walk(5, Raised(0, ZeroDivisionError("by zero")))
    assert trainer.group.is_alive
    assert ENDED not in str(caught.value)


def test_all_who_are_lost_are_named_also_where_others_saw_only_the_connection_break() -> None:
    trainer = Trainer()
    trainer.cluster.silent = {2}
    assert trainer.walk(5, Lost((0,), "disconnected", after={1: 2, 2: 2})) == [5, 5, 5]
    assert trainer.controller.history.events[-1].cause == (
        "lost rank 2; rank 0 reports: connection to another rank lost (RuntimeError: the process is gone); rank 2 does "
        "not answer any more"
    )


def test_who_is_lost_is_named_also_where_no_retry_is_left_to_ask_the_survivors() -> None:
    trainer = Trainer()
    trainer.cluster.silent = {2}
    with pytest.raises(WorkersLostError, match=r"^lost rank 2; rank 0 reports: connection .*the 0 allowed retries"):
        trainer.walk(5, Lost((0,), "disconnected", after={1: 2, 2: 2}), max_retries=0)
    assert trainer.controller.history.events[-1].cause.startswith("lost rank 2; rank 0 reports: connection")


def test_why_survivors_could_not_go_on_is_told_with_the_loss() -> None:
    trainer = Trainer()
    trainer.group.replicas[0].obstacle = "a hook of its own"
    trainer.cluster.stands = deque([Lost((2,))])
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    assert trainer.controller.history.events[-1].cause == (
        "lost rank 1, 2 (RuntimeError: the process is gone); the survivors cannot continue by themselves: "
        "a hook of its own"
    )


@pytest.mark.parametrize("how", ["dies", "freezes"])
def test_who_is_lost_while_somebody_new_is_awaited_is_left_out_and_the_others_go_on(how: str) -> None:
    trainer = Trainer(max_workers=4, num_slots=4)
    trainer.cluster.standby_is_slow = True
    survivor = trainer.group.replicas[2]
    if how == "dies":
        trainer.cluster.waits = deque([Lost((0,))])
    else:
        arrive = trainer.group.standby.arrive

        def arrive_late() -> None:
            trainer.cluster.silent = {0}
            arrive()

        trainer.group.standby.arrive = arrive_late  # type: ignore[method-assign]
    assert trainer.walk(5, Lost((1, 3), after={0: 3, 2: 2})) == [5, 5, 5, 5]
    assert trainer.kinds == ["continued"]
    assert trainer.group.replicas[0] is survivor
    assert (trainer.group.handovers[0].source, trainer.group.handovers[0].takers) == (0, (1, 2, 3))
    event = trainer.controller.history.events[-1]
    assert (event.cause, event.detail) == ("lost rank 0, 1, 3 (RuntimeError: the process is gone)", "2 steps done")


# -------------------------------------------------------------------------------------------- the budget


def test_survivors_that_completed_no_step_are_replaced_at_the_next_loss() -> None:
    trainer = Trainer()
    trainer.walk(1)
    losses = [Lost((1,), after={0: 3, 2: 3})] * 2
    assert trainer.walk(5, *losses, max_retries=1) == [6, 6, 6]
    assert trainer.kinds == ["continued", "restored"]
    assert "no step was completed since the survivors went on" in trainer.controller.history.events[-1].cause


# -------------------------------------------------------------------------------------------- where it cannot be done

OBSTACLES: dict[str, Callable[[Trainer], Any]] = {
    "nobody is left": lambda trainer: None,
    "an obstacle": lambda trainer: setattr(trainer.group.replicas[0], "obstacle", "a `train_epoch` of its own"),
    "no state is whole": lambda trainer: [setattr(replica, "is_whole", False) for replica in trainer.group.replicas],
    "a survivor raises": lambda trainer: trainer.cluster.stands.append(Raised(0, ValueError("x"))),
    "all die while the group is formed": lambda trainer: trainer.cluster.regroups.append(Lost((0, 1, 2))),
    "the connection fails though all live": lambda trainer: trainer.cluster.regroups.append(Lost((0,), "disconnected")),
    "a survivor raises while the group is formed": lambda trainer: trainer.cluster.regroups.append(
        Raised(0, ValueError("x"))
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_where_survivors_cannot_go_on_new_workers_begin_the_call_again(name: str) -> None:
    trainer = Trainer()
    trainer.walk(1)
    OBSTACLES[name](trainer)
    lost = (0, 1, 2) if name == "nobody is left" else (1,)
    assert trainer.walk(5, Lost(lost, after={0: 2, 2: 2}), max_retries=1) == [6, 6, 6]
    assert trainer.kinds == ["restored"]
    assert [group.ended_by for group in trainer.cluster.groups] == ["kill", None]
    assert trainer.controller.history.num_failures == 1


def test_whoever_came_in_vain_is_sent_away_where_too_few_go_on() -> None:
    trainer = Trainer(min_workers=3)
    trainer.cluster.num_slots = 2
    group = trainer.group
    trainer.clock.at_sleep = lambda seconds: setattr(trainer.cluster, "num_slots", 3)
    assert trainer.walk(5, Lost((1, 2), after={0: 2})) == [5, 5, 5]
    assert len(group.standby.killed_standby) == 1
    assert trainer.kinds == ["restored"]


def test_ctrl_c_while_the_group_is_formed_anew_gives_it_up() -> None:
    for moment in ("stands", "regroups"):
        trainer = Trainer()
        trainer.walk(1)
        setattr(trainer.cluster, moment, deque([Interrupted()]))
        with pytest.raises(KeyboardInterrupt):
            trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
        assert trainer.group.ended_by == "kill"
        assert trainer.walk(2) == [3, 3, 3]
        assert len(trainer.cluster.groups) == 2


# -------------------------------------------------------------------------------------------- the driver as a worker


def test_the_driver_goes_on_with_whoever_steps_in() -> None:
    trainer = Trainer(use_local=True)
    driver = trainer.group.local_replica
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 3})) == [5, 5, 5]
    assert trainer.group.replicas[0] is driver
    assert trainer.kinds == ["continued"]


# -------------------------------------------------------------------------------------------- spares


def test_spares_are_called_up_at_the_start_step_in_and_are_called_up_again() -> None:
    trainer = Trainer(num_slots=4, num_spares=1)
    assert trainer.group.standby.num_ready == 1
    [spare] = trainer.group.standby.ready
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2})) == [5, 5, 5]
    assert trainer.group.replicas[2] is spare
    assert trainer.group.standby.num_ready == 1, "in the slot of the lost one"
    assert trainer.group.standby.ready != [spare]


def test_a_spare_that_fails_to_start_is_not_called_up_again_and_again() -> None:
    trainer = Trainer(num_slots=4, num_spares=1)
    trainer.cluster.standby_is_slow = True
    standby, seen = trainer.group.standby, []

    def happens(second: int) -> None:
        seen.append(standby.num_coming)
        standby.num_coming = 0

    trainer.during_calls(4, happens)
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    assert seen == [0, 0, 0, 0, 0, 1, 0, 0]


def test_a_spare_that_was_used_up_at_the_end_of_a_call_is_called_up_behind_it() -> None:
    trainer = Trainer(num_slots=4, num_spares=1)
    trainer.cluster.while_waiting = lambda on_wait: None
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    assert trainer.group.standby.num_ready == 1


def test_a_rebuilt_group_has_spares_as_far_as_there_is_room() -> None:
    trainer = Trainer(num_slots=4, num_spares=2)
    assert trainer.group.num_spares == 2
    trainer.cluster.num_slots = 4
    trainer.cluster.regroups = deque([Raised(0, ValueError("the spares cannot be set up again"))])
    trainer.walk(5, Lost((0, 1, 2)))
    assert (trainer.controller.num_workers, trainer.group.num_spares) == (3, 1)


def test_where_no_one_is_left_but_standby_workers_these_go_on_from_the_last_snapshot() -> None:
    trainer = Trainer(num_slots=5, num_spares=2)
    trainer.walk(2)
    assert trainer.walk(5, Lost((0, 1, 2))) == [7, 7, 7]
    assert (len(trainer.cluster.groups), trainer.kinds) == (1, ["restored"])
    assert trainer.controller.history.events[-1].num_kept == 0


def test_the_driver_does_not_leave_its_group_for_standby_workers() -> None:
    trainer = Trainer(num_slots=4, num_spares=1, use_local=True)
    trainer.cluster.stands = deque([Raised(0, ValueError("it cannot say how far it is"))])
    assert trainer.walk(5, Lost((1, 2))) == [5, 5, 5]
    assert (len(trainer.cluster.groups), trainer.kinds) == (2, ["restored"])


def test_a_spare_that_was_lost_is_replaced_before_the_next_call() -> None:
    trainer = Trainer(num_slots=4, num_spares=1)
    standby = trainer.group.standby
    standby.kill(standby.take_ready(1)[0])
    trainer.walk(2)
    assert trainer.group.standby.num_ready == 1


def test_whoever_is_slow_is_waited_for_unless_workers_may_step_in_later() -> None:
    waiting = Trainer()
    waiting.cluster.standby_is_slow = True
    assert waiting.walk(5, Lost((1,), after={0: 2, 2: 2})) == [5, 5, 5]
    going_on = Trainer(wait=False, resize_interval_s=60.0)
    going_on.cluster.standby_is_slow = True
    assert going_on.walk(5, Lost((1,), after={0: 2, 2: 2})) == [5, 5]
    assert going_on.group.standby.num_coming == 1


def four(keeps_global_batch: bool = True, **options: Any) -> Trainer:
    """Four workers, and new ones that are ready only when somebody waits for them."""
    trainer = Trainer(
        num_slots=4,
        max_workers=4,
        wait="auto",
        resize_interval_s=60.0,
        keeps_global_batch=lambda: keeps_global_batch,
        **options,
    )
    trainer.cluster.standby_is_slow = True
    return trainer


@pytest.mark.parametrize(
    ("options", "lost", "num_workers"),
    [
        ({}, (1,), 3),
        ({}, (1, 2), 2),
        ({"keeps_global_batch": False}, (1,), 4),
        ({"min_workers": 4}, (1,), 4),
        ({"use_local": True}, (1,), 3),
    ],
)
def test_survivors_go_on_at_once_where_steps_stay_the_same(
    options: dict[str, Any], lost: tuple[int, ...], num_workers: int
) -> None:
    trainer = four(**options)
    after = {rank: 2 for rank in range(4) if rank not in lost}
    assert trainer.walk(5, Lost(lost, after=after)) == [5] * num_workers
    assert trainer.kinds == ["continued"]


def test_replicas_that_cannot_go_on_in_place_wait_for_all() -> None:
    trainer = four(renews=True)
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2, 3: 2})) == [5, 5, 5, 5]
    assert trainer.kinds == ["restored"]


def test_a_smaller_group_looks_for_room_at_once_and_is_grown_into_when_a_worker_is_ready() -> None:
    trainer = four()
    trainer.cluster.num_slots = 3  # the slot of the lost worker is gone

    def happens(second: int) -> None:
        trainer.cluster.num_slots = 4
        if second == 3:
            trainer.group.standby.arrive()

    trainer.during_calls(4, happens)
    assert trainer.walk(9, Lost((1,), after={0: 2, 2: 2, 3: 2})) == [9, 9, 9, 9]
    assert trainer.kinds == ["continued", "grown"]


def test_a_call_that_can_grow_inside_does_not_wait_for_workers_that_are_not_ready() -> None:
    trainer = four()
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2, 3: 2})) == [5, 5, 5]
    began = trainer.clock.now_s
    assert trainer.walk(1) == [6, 6, 6]
    assert trainer.clock.now_s == began
    trainer.controller.run(Call(add, lambda worlds: [(1.0,)] * len(worlds), changes_state=True))
    assert trainer.clock.now_s - began == pytest.approx(30, abs=1), "this one cannot be held"
    trainer.group.standby.arrive()
    assert trainer.walk(1) == [8, 8, 8, 8]


def test_memory_that_runs_out_in_the_first_step_after_going_on_leads_to_waiting() -> None:
    trainer = four()
    began = Lost((1,), after={0: 2, 2: 2, 3: 2})
    assert trainer.walk(5, began, Raised(None, MemoryError("no room")), max_retries=1) == [5, 5, 5, 5]
    assert trainer.kinds == ["continued", "grown"]
    event = trainer.controller.history.events[-1]
    assert event.cause == "with 3 workers rank 0, 1, 2 raised MemoryError: no room"
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2, 3: 2})) == [10, 10, 10, 10], "they know better now"
    assert trainer.kinds == ["continued", "grown", "continued"]


def test_memory_that_runs_out_again_though_nobody_has_come_is_an_error() -> None:
    trainer = four()
    trainer.cluster.num_slots = 3
    losses = Lost((1,), after={0: 2, 2: 2, 3: 2}), Raised(None, MemoryError()), Raised(None, MemoryError())
    with pytest.raises(MemoryError):
        trainer.walk(5, *losses)
    assert trainer.kinds[0] == "continued"


@pytest.mark.parametrize(
    ("options", "events"),
    [
        ({}, [Raised(None, MemoryError())]),
        ({}, [Lost((1,), after={0: 2, 2: 2, 3: 2}), Raised(None, ValueError())]),
        ({"keeps_global_batch": False}, [Lost((1,), after={0: 2, 2: 2, 3: 2}), Raised(None, MemoryError())]),
    ],
)
def test_other_exceptions_are_the_users(options: dict[str, Any], events: list[Any]) -> None:
    with pytest.raises((MemoryError, ValueError)):
        four(**options).walk(5, *events)


def test_memory_that_runs_out_steps_after_going_on_is_the_users_error() -> None:
    trainer = four()

    def wait(on_wait: Callable[[], None]) -> None:
        for replica in trainer.group.replicas:
            replica.num_done = 4 if trainer.kinds else replica.num_done
        on_wait()

    trainer.cluster.while_waiting = wait
    with pytest.raises(MemoryError):
        trainer.walk(9, Lost((1,), after={0: 2, 2: 2, 3: 2}), Raised(None, MemoryError()))


@pytest.mark.parametrize("stands", [Raised(0, ValueError("it cannot say how far it is")), Lost((0, 1, 2))])
def test_where_nobody_can_wait_for_memory_all_start_anew(stands: Any) -> None:
    trainer = four()
    trainer.cluster.stands = deque([None, stands])
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2, 3: 2}), Raised(None, MemoryError())) == [5, 5, 5, 5]
    assert len(trainer.cluster.groups) == 2


# -------------------------------------------------------------------------------------------- between two calls


def test_between_two_calls_workers_step_in_without_a_new_group() -> None:
    trainer = Trainer()
    trainer.cluster.num_slots = 2
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2})) == [5, 5]
    trainer.cluster.num_slots = 3
    assert trainer.walk(1, max_retries=0) == [6, 6, 6]
    assert (trainer.kinds, len(trainer.cluster.groups)) == (["continued", "grown"], 1)
    assert trainer.controller.history.num_failures == 1


def test_growing_in_place_waits_for_those_that_are_made_ready_but_not_for_ever() -> None:
    trainer = Trainer()
    trainer.cluster.num_slots = 2
    trainer.walk(1, Lost((1,), after={0: 0, 2: 0}))
    trainer.cluster.num_slots, trainer.cluster.standby_is_slow = 3, True
    began = trainer.clock.now_s
    assert trainer.walk(1) == [2, 2]
    assert trainer.clock.now_s - began == pytest.approx(30, abs=1)
    trainer.group.standby.arrive()
    assert trainer.walk(1) == [3, 3, 3]


def test_replicas_that_cannot_go_on_elsewhere_grow_from_the_snapshot() -> None:
    trainer = Trainer()
    trainer.group.replicas[0].obstacle = "a hook of its own"
    trainer.cluster.num_slots = 2
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    trainer.group.replicas[0].obstacle = "a hook of its own"
    trainer.cluster.num_slots = 3
    assert trainer.walk(1, max_retries=0) == [6, 6, 6]
    assert (trainer.kinds, trainer.cluster.sizes) == (["restored", "grown"], [3, 2, 3])


def test_what_was_asked_for_and_came_is_grown_into_in_place() -> None:
    trainer = Trainer()
    trainer.group.replicas[0].obstacle = "a hook of its own"
    trainer.cluster.num_slots = 1
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    assert trainer.group.slots.num_asked == 2
    trainer.cluster.num_slots = 2
    assert trainer.walk(1) == [6, 6]
    assert trainer.group.slots.num_asked == 1
    trainer.cluster.num_slots = 3
    assert trainer.walk(1) == [7, 7, 7]
    assert (trainer.group.slots.num_asked, trainer.kinds) == (0, ["restored", "grown", "grown"])


def test_growing_that_fails_in_place_goes_on_from_the_snapshot() -> None:
    trainer = shrunk()
    trainer.cluster.regroups = deque([Lost((0,), "disconnected")])
    assert trainer.walk(1, max_retries=0) == [6, 6, 6]
    assert (trainer.kinds, len(trainer.cluster.groups)) == (["continued", "restored"], 2)
    cause = trainer.controller.history.events[-1].cause
    assert cause.startswith("there is room for more workers; could not form a new group: rank 0 reports")


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["b", "a", "a"]], ids=["of the last rank", "of rank 0"])
def test_a_node_that_is_going_away_is_left_before_the_next_call(nodes: Sequence[str]) -> None:
    trainer = Trainer(nodes=nodes)
    trainer.cluster.num_slots = 2
    trainer.walk(1)
    trainer.leaving = {"b"}
    trainer.clock.now_s += 60
    assert trainer.walk(1, max_retries=0) == [2, 2]
    assert (trainer.kinds, len(trainer.cluster.groups)) == (["left"], 1)
    assert {info.node_id for info in trainer.group.infos} == {"a"}
    assert trainer.controller.snapshot().shared_state == 2


def test_nobody_leaves_where_nobody_would_be_left_or_the_driver_is_bound() -> None:
    everywhere = Trainer(nodes=["a", "a", "a"])
    bound = Trainer(nodes=["a", "b", "b"], use_local=True)
    for trainer in (everywhere, bound):
        trainer.leaving = {"a"}
        trainer.clock.now_s += 60
        trainer.walk(1)
        assert trainer.kinds == []


def shrunk() -> Trainer:
    """A trainer that lost one of three workers, and has room for another one since."""
    trainer = Trainer()
    trainer.cluster.num_slots = 2
    trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    trainer.cluster.num_slots = 3
    return trainer


def test_a_loss_that_is_found_while_the_group_grows_is_counted_and_named() -> None:
    trainer = shrunk()
    trainer.cluster.stands = deque([Lost((0,))])
    assert trainer.walk(3, max_retries=0) == [8, 8, 8]
    assert trainer.kinds == ["continued", "continued"]
    assert trainer.controller.history.num_failures == 2
    assert trainer.controller.history.events[-1].cause == "lost rank 0; there is room for more workers"


def test_a_loss_on_the_way_from_a_node_that_is_going_away_is_counted_and_named() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    trainer.cluster.num_slots = 2
    trainer.walk(1)
    trainer.leaving = {"b"}
    trainer.clock.now_s += 60
    trainer.cluster.stands = deque([Lost((0,))])
    trainer.walk(1, max_retries=0)
    assert trainer.kinds == ["continued"]
    assert trainer.controller.history.events[-1].cause == "lost rank 0; a node is going away"


# -------------------------------------------------------------------------------------------- held inside a call


def test_a_call_is_held_for_workers_that_are_ready_and_gone_on_with() -> None:
    trainer = Trainer(wait=False, resize_interval_s=2.0)
    trainer.cluster.num_slots = 2
    trainer.walk(1, Lost((1,), after={0: 0, 2: 0}))
    trainer.cluster.standby_is_slow = True

    def happens(second: int) -> None:
        trainer.cluster.num_slots = 3
        if second == 4:
            trainer.group.standby.arrive()

    trainer.clock.sleep = lambda seconds: None  # type: ignore[method-assign]  # nobody is ready before the call
    trainer.during_calls(6, happens)
    assert trainer.walk(9, max_retries=0) == [10, 10, 10]
    assert trainer.kinds == ["continued", "grown"]
    assert trainer.group.functions == ["walk", "walk_on", "replica_progress", "walk", "walk_on"]
    assert trainer.controller.history.num_failures == 1


def test_a_call_is_held_to_leave_a_node_and_gone_on_with_by_the_rest() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    trainer.cluster.num_slots = 2
    trainer.during_calls(4, lambda second: trainer.leaving.add("b") if second == 2 else None)
    assert trainer.walk(9, max_retries=0) == [9, 9]
    assert trainer.kinds == ["left"]
    [event] = [event for event in trainer.controller.history.events if event.kind == "left"]
    assert event.cause == "a node is going away"
    assert event.detail == "2 steps done"
    assert len(trainer.cluster.groups) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_what_those_measured_who_left_is_handed_on_again_where_another_one_dies_over_it(lost: int) -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    trainer.cluster.num_slots = 2
    trainer.during_calls(4, lambda second: trainer.leaving.add("b") if second == 2 else None)
    trainer.cluster.regroups = deque([Lost((lost,))])
    assert trainer.walk(9, max_retries=0) == [9, 9]
    assert [handover.orphans for handover in trainer.group.handovers] == [(2,), (2,)], "two steps of the one that left"


def test_a_held_call_whose_group_cannot_be_formed_anew_goes_on_from_the_snapshot_of_that_very_step() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])

    def happens(second: int) -> None:
        if second == 2:
            trainer.leaving, trainer.cluster.nodes = {"b"}, []  # nobody is placed there any more

    trainer.during_calls(4, happens)
    trainer.cluster.regroups = deque([Lost((0,), "disconnected")])
    assert trainer.walk(9, max_retries=0) == [9, 9, 9]
    assert trainer.kinds == ["restored"]
    assert "a node is going away; could not form a new group" in trainer.controller.history.events[-1].cause
    assert trainer.cluster.groups[1].functions == ["restore_inside", "walk_on"]
    assert [replica.num_own_calls for replica in trainer.group.replicas] == [1, 1, 1]


# -------------------------------------------------------------------------------------------- snapshots inside a call


def snapshots_after(trainer: Trainer, num_steps: int) -> None:
    """Lets all ranks take a snapshot inside the running call after so many steps, in time for the driver."""

    def happens(second: int) -> None:
        for replica in trainer.group.replicas:
            replica.snapshot_at = num_steps if second >= 2 else 0

    trainer.during_calls(4, happens)


def test_new_workers_go_on_from_a_snapshot_taken_inside_the_call() -> None:
    trainer = Trainer(continues=False)
    trainer.walk(10)
    snapshots_after(trainer, 3)
    assert trainer.walk(5, Lost((0, 1, 2)), max_retries=1) == [15, 15, 15]
    assert trainer.group.functions == ["restore_inside", "walk_on"]


def test_a_second_loss_goes_on_from_the_newest_of_them() -> None:
    trainer = Trainer(continues=False)
    snapshots_after(trainer, 3)
    trainer.cluster.calls = deque([Lost((0, 1, 2)), Lost((0, 1, 2))])
    assert trainer.controller.run(trainer.call(5)) == [5, 5, 5]
    assert trainer.cluster.groups[2].functions == ["restore_inside", "walk_on"]


def test_a_completed_call_with_a_snapshot_inside_is_finished_from_there_before_the_next_one() -> None:
    trainer = Trainer(continues=False, is_large=True)
    trainer.controller.snapshot()
    snapshots_after(trainer, 3)
    trainer.cluster.transfer_s = HOURS  # that of the completed call does not come in time
    assert trainer.walk(5) == [5, 5, 5]
    trainer.cluster.while_waiting = lambda on_wait: on_wait()
    assert trainer.walk(2, Lost((0, 1, 2))) == [7, 7, 7]
    assert trainer.group.functions == ["restore_inside", "walk_on", "walk"]


@pytest.mark.parametrize(("event", "error"), [(Interrupted(), KeyboardInterrupt), (Lost((0, 1, 2)), WorkersLostError)])
def test_a_call_broken_off_for_good_is_not_gone_on_with_by_the_next_one(
    event: Event, error: type[BaseException]
) -> None:
    trainer = Trainer()
    snapshots_after(trainer, 3)
    with pytest.raises(error):
        trainer.walk(5, event, max_retries=0)
    trainer.cluster.while_waiting = lambda on_wait: on_wait()
    assert trainer.walk(5, Lost((0, 1, 2))) == [8, 8, 8], "from the state of the snapshot, with a call of its own"
    assert trainer.group.functions == ["restore", "walk"]


@pytest.mark.parametrize("moment", ["calls", "stands", "regroups", "waits"])
def test_a_group_that_another_thread_shuts_down_while_it_is_formed_is_left(moment: str) -> None:
    trainer = Trainer()
    trainer.cluster.standby_is_slow = True
    stopper = Stopper(trainer.controller, trainer.cluster)
    shut_down = ShutDown(stopper.stop)
    if moment != "calls":
        getattr(trainer.cluster, moment).append(shut_down)
    with pytest.raises(TrainerShutdownError):
        trainer.walk(3, shut_down if moment == "calls" else Lost((1,), after={0: 1, 2: 1}))
    stopper.join()
    assert [group.is_alive for group in trainer.cluster.groups] == [False]


def test_survivors_keep_their_processes_and_all_go_back_to_the_last_snapshot() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    before, kept = trainer.group.replicas, [trainer.group.infos[rank] for rank in (0, 2)]
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 3})) == [7, 7, 7]
    assert (len(trainer.cluster.groups), trainer.group.infos[:2]) == (1, kept)
    assert not any(replica in before for replica in trainer.group.replicas), "what they were is of no use"
    assert trainer.group.functions == ["walk", "walk", "restore", "walk"]
    assert trainer.controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    event = trainer.controller.history.events[-1]
    assert (event.kind, event.old_size, event.new_size, event.num_kept) == ("restored", 3, 3, 2)
    assert trainer.walk(1) == [8, 8, 8]


def test_a_place_on_a_node_that_is_gone_is_no_room_to_grow() -> None:
    trainer = Trainer(renews=True)
    trainer.cluster.num_slots = 2
    trainer.walk(5, Lost((1,)))
    assert len(trainer.group.slots) == 3
    assert trainer.walk(1) == [6, 6]
    assert trainer.kinds == ["restored"]
    trainer.cluster.num_slots = 3
    assert trainer.walk(1) == [7, 7, 7]
    assert trainer.kinds == ["restored", "grown"]


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        ((0, 1, 2), []),
        ((1,), [Lost((0, 1, 2))] * 4),
        ((1,), [Raised(0, ValueError("`setup` does not run twice in a process"))]),
    ],
    ids=["no one is left", "all die, and so do those in their place", "set-up fails"],
)
def test_where_no_process_can_be_kept_all_are_new(lost: tuple[int, ...], then: list[Event]) -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.cluster.regroups = deque(then)
    assert trainer.walk(5, Lost(lost)) == [7, 7, 7]
    first, second = trainer.cluster.groups
    assert (first.ended_by, second.is_alive, trainer.kinds) == ("kill", True, ["restored"])
    assert trainer.controller.history.events[-1].num_kept == 0


def test_replicas_made_while_calls_are_run_again_are_not_asked_for_copies_of_those_before_them() -> None:
    trainer = Trainer(is_large=True)
    trainer.cluster.transfer_s = 1000.0
    trainer.cluster.standby_is_slow = True
    trainer.walk(2)
    assert trainer.walk(5, Lost((0, 1, 2)), Lost((1,))) == [7, 7]
    assert trainer.group.replicas[0].landed_tokens == [None], "a copy was taken as if there were none on its way"


def test_a_part_that_no_node_has_any_more_is_told_with_the_last_file() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.controller.snapshots.last_file = "`epoch-2`"
    trainer.cluster.restores = deque([Raised(1, LostPartError("The last snapshot is lost."))])
    with pytest.raises(WorkersLostError, match=r"is lost\. The last file is `epoch-2`: `load` it into") as caught:
        trainer.walk(5, Lost((1,)))
    assert not isinstance(caught.value, WorkerError), "it is no exception of the user's code"


def test_too_few_survivors_wait_for_room_as_new_workers_do() -> None:
    trainer = Trainer(renews=True, min_workers=3)
    trainer.walk(2)
    trainer.cluster.num_slots = 2

    def make_room(seconds: float) -> None:
        trainer.cluster.num_slots = 3

    trainer.clock.at_sleep = make_room
    assert trainer.walk(5, Lost((1,))) == [7, 7, 7]
    assert trainer.kinds == ["restored"]
    assert not trainer.cluster.groups[0].is_alive


def test_a_state_that_no_snapshot_has_is_never_replaced_by_an_older_one() -> None:
    trainer = Trainer(renews=True, snapshot_every_s=None)
    trainer.walk(2)
    trainer.controller.snapshot()
    trainer.walk(1)
    with pytest.raises(WorkersLostError, match="snapshot_every_s=None"):
        trainer.walk(5, Lost((1,)))
