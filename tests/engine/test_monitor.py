"""What the driver sees and does while a call runs, and when the call stops at a step boundary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.engine.liveness import LivenessCheck
from raysgd.engine.monitor import shown_together
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import Heartbeat, Outcome
from raysgd.exceptions import WorkersLostError
from tests.engine.stepping_trainer import Trainer
from tests.helpers.fakes import Lost, read

# -------------------------------------------------------------------------------------------- signs of life


def test_every_rank_is_heard_once_a_second() -> None:
    trainer = Trainer()
    seen: list[list[int]] = []

    def happens(second: int) -> None:
        seen.append(sorted(trainer.controller.monitor.heartbeats))

    trainer.during_calls(3, happens)
    trainer.walk(5)
    assert seen == [[], [], [0, 1, 2]]  # asked in the first second, polled in the second one
    assert trainer.controller.monitor is None


@pytest.mark.parametrize(("num_workers", "first_s"), [(3, 0.2), (20, 0.2), (32, 1.0)])
def test_few_workers_are_asked_soon_and_many_only_after_a_round(num_workers: int, first_s: float) -> None:
    trainer = Trainer(num_slots=num_workers, max_workers=num_workers)
    heard_at: list[float] = []

    def wait(on_wait: Callable[[], None]) -> None:
        began = trainer.clock.now_s
        for _ in range(15):
            trainer.clock.now_s += 0.1
            on_wait()
            if trainer.controller.monitor is not None and trainer.controller.monitor.heartbeats:
                heard_at.append(round(trainer.clock.now_s - began, 1))

    trainer.cluster.while_waiting = wait
    trainer.walk(5)
    assert heard_at[0] == pytest.approx(first_s + 0.1), "asked in one look, and heard in the next"


def test_a_call_that_takes_less_than_a_round_asks_nobody() -> None:
    trainer = Trainer()
    trainer.cluster.while_waiting = lambda on_wait: [on_wait() for _ in range(20)] and None
    trainer.cluster.silent = {0, 1, 2}
    assert trainer.walk(5) == [5, 5, 5]
    assert trainer.group.killed_ranks == []


def test_a_rank_that_is_silent_for_too_long_is_ended_and_everything_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(heartbeat_s=5.0)
    trainer.walk(1)
    trainer.cluster.silent = {1}
    ended_in: list[int] = []

    def happens(second: int) -> None:
        if trainer.group.killed_ranks and not ended_in:
            ended_in.append(second - 1)

    trainer.during_calls(10, happens)
    trainer.cluster.calls.append(Lost((1,), after={0: 2, 2: 2}))
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        trainer.controller.run(trainer.call(5))
    assert trainer.group.killed_ranks[0] == 1
    assert ended_in == [7], "asked in the first second, and silent for more than five after that"
    event = next(event for event in trainer.controller.history.events if event.kind == "hung")
    assert (event.cause, event.old_size) == ("rank 1 did not respond for 6 s", 3)
    text = caplog.records[0].getMessage()
    assert "rank 0: epoch 0, step 0, stepping\nstack of rank 0" in text
    assert "rank 1: no answer yet\n  no answer" in text


def test_ranks_that_hang_together_are_ended_and_told_of_together(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(heartbeat_s=5.0, num_slots=6, max_workers=6)
    trainer.cluster.silent = {1, 2, 3, 4}
    trainer.during_calls(10)
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        trainer.walk(5, Lost((1, 2, 3, 4), after={0: 2, 5: 2}))
    assert trainer.group.killed_ranks[:4] == [1, 2, 3, 4]
    event = next(event for event in trainer.controller.history.events if event.kind == "hung")
    assert event.cause == "ranks 1-4 did not respond for 6 s"
    text = caplog.records[0].getMessage()
    assert text.startswith(f"{event.cause}\n")
    assert "ranks 1-4: no answer yet\n  no answer" in text


def test_ranks_of_a_group_that_ends_while_they_are_told_of_are_not_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(heartbeat_s=5.0)
    trainer.cluster.silent = {1}
    ask = trainer.group.ask_beside

    def end(*args: Any, **kwargs: Any) -> dict[int, Any]:
        trainer.group.is_alive, trainer.cluster.silent = False, set()
        return ask(*args, **kwargs)

    monkeypatch.setattr(trainer.group, "ask_beside", end)
    trainer.during_calls(10)
    trainer.walk(5, Lost((0, 1, 2)))
    assert [group.killed_ranks for group in trainer.cluster.groups] == [[], []]
    assert trainer.kinds == ["restored"]


def test_of_many_ranks_those_are_told_of_that_are_unlike_the_others() -> None:
    alike = {"training": list(range(990)), **{f"elsewhere {number}": [990 + number] for number in range(10)}}
    lines = shown_together(alike).splitlines()
    assert lines[0] == "rank 990: elsewhere 0"
    assert lines[-1] == "992 other ranks are elsewhere"
    assert len(lines) == 9
    assert shown_together({"training": [0, 2], "validating": [1]}) == "ranks 0, 2: training\nrank 1: validating"


@pytest.mark.parametrize(
    ("num_workers", "heartbeat_s", "wanted_s", "expected"),
    [
        (2, 30.0, 1.0, 1.0),
        (2, 2.1, 1.0, 0.7),
        (2, 30.0, 0.25, 0.25),
        (1000, 30.0, 1.0, 10.0),
        (2000, 30.0, 1.0, 10.0),
        (1000, 60.0, 1.0, 10.0),
        (1000, 60.0, 0.25, 10.0),
    ],
)
def test_many_ranks_are_asked_less_often_but_several_times_before_they_count_as_lost(
    num_workers: int, heartbeat_s: float, wanted_s: float, expected: float
) -> None:
    liveness: LivenessCheck[int] = LivenessCheck(heartbeat_s, lambda rank, call: Outcome(rank), lambda: 0.0)
    assert liveness.round_s(num_workers, wanted_s) == pytest.approx(expected)


def test_of_a_rank_that_froze_early_it_is_told_how_far_it_was(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(heartbeat_s=5.0)

    def wait(on_wait: Any) -> None:
        for tenth in range(100):
            trainer.clock.now_s += 0.1
            trainer.cluster.silent = {1} if tenth >= 4 else set()
            on_wait()

    trainer.cluster.while_waiting = wait
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        trainer.walk(5, Lost((1,), after={0: 2, 2: 2}))
    assert "rank 1: epoch 0, step 0, stepping\n  no answer" in caplog.records[0].getMessage()


def test_standby_workers_are_looked_after_while_a_call_runs() -> None:
    trainer = Trainer()
    looks: list[float] = []
    trainer.group.standby.look_after = lambda: looks.append(trainer.clock.now_s)  # type: ignore[method-assign]
    trainer.during_calls(5)
    trainer.walk(5)
    assert len(looks) == 5


def test_a_rank_that_answers_again_in_time_is_left_alone() -> None:
    trainer = Trainer(heartbeat_s=5.0)

    def happens(second: int) -> None:
        trainer.cluster.silent = {1} if second % 5 else set()

    trainer.during_calls(30, happens)
    assert trainer.walk(5) == [5, 5, 5]
    assert trainer.group.killed_ranks == []


def test_a_new_worker_owes_no_answer_of_the_one_whose_rank_it_got() -> None:
    trainer = Trainer(heartbeat_s=5.0)
    trainer.cluster.silent = {1}

    def happens(second: int) -> None:
        if second == 4:
            trainer.group.infos = list(trainer.group.infos)

    trainer.during_calls(8, happens)
    trainer.walk(5)
    assert trainer.group.killed_ranks == []


def test_a_rank_that_freezes_while_a_new_group_is_restored_is_ended_too() -> None:
    trainer = Trainer(heartbeat_s=5.0, continues=False)
    trainer.walk(1)
    trainer.cluster.standby_is_slow = True
    trainer.cluster.restores.append(Lost((1,)))

    def happens(second: int) -> None:
        is_new = len(trainer.cluster.groups) == 2 and not trainer.group.killed_ranks
        trainer.cluster.silent = {1} if is_new else set()

    trainer.during_calls(10, happens)
    assert trainer.walk(5, Lost((0,), after={1: 0, 2: 0})) == [6, 6]
    assert [group.killed_ranks for group in trainer.cluster.groups] == [[], [1]]
    assert trainer.kinds == ["hung", "restored"]


def test_a_driver_that_stood_still_itself_holds_nothing_against_the_ranks() -> None:
    """As after Ctrl-Z: what they answered meanwhile is polled a moment later."""
    trainer = Trainer(heartbeat_s=5.0)

    def happens(second: int) -> None:
        trainer.cluster.silent = {0, 1, 2} if second in (3, 4) else set()
        if second == 4:
            trainer.clock.now_s += 600.0

    trainer.during_calls(10, happens)
    assert trainer.walk(5) == [5, 5, 5]
    assert trainer.group.killed_ranks == []


def test_the_driver_itself_is_never_asked() -> None:
    trainer = Trainer(use_local=True, heartbeat_s=5.0)
    trainer.cluster.silent = {0}
    trainer.during_calls(20)
    assert trainer.walk(5) == [5, 5, 5]
    assert trainer.group.killed_ranks == []


def test_a_short_heartbeat_asks_more_often() -> None:
    trainer = Trainer(heartbeat_s=0.5)
    trainer.cluster.silent = {2}

    def wait(on_wait: Any) -> None:
        for _ in range(10):
            trainer.clock.now_s += 0.1
            on_wait()

    trainer.cluster.while_waiting = wait
    trainer.walk(1, Lost((2,), after={0: 0, 1: 0}))
    assert trainer.group.killed_ranks[0] == 2


# -------------------------------------------------------------------------------------------- numbers


def training(trainer: Trainer, samples_per_s: int, phase: str = "training") -> None:
    """Lets every rank tell of so many samples a second."""
    for rank, replica in enumerate(trainer.group.replicas):

        def heartbeat(rank: int = rank) -> Heartbeat:
            at = trainer.clock.now_s + rank  # no two processes have the same clock
            return Heartbeat(0, 1, phase, num_samples=int(trainer.clock.now_s * samples_per_s), at=at)

        replica.heartbeat = heartbeat


@pytest.mark.parametrize(
    ("samples_per_s", "phase", "expected"),
    [
        (10, "training", [7.0, 7.0, 30.0, 30.0]),  # two moments are needed, and each is polled of a round later
        (0, "training", [7.0] * 4),
        (10, "validating", [7.0] * 4),
    ],
)
def test_while_a_call_counts_samples_its_own_throughput_is_told_and_the_last_ones_otherwise(
    samples_per_s: int, phase: str, expected: list[float]
) -> None:
    trainer = Trainer()
    training(trainer, samples_per_s, phase)
    told: list[float | None] = []
    trainer.controller.observe_with(lambda: told.append(trainer.controller.glance({}, 7.0).samples_per_s))
    trainer.during_calls(4)
    trainer.walk(5)
    assert told == expected
    assert trainer.controller.glance({}, 7.0).samples_per_s == 7.0


def test_a_glance_shows_what_was_heard_last_in_a_training_call() -> None:
    trainer = Trainer()
    last = {0: Heartbeat(own_s=9.0)}
    assert trainer.controller.glance(last, None).workers[0].own_s == 9.0
    training(trainer, 10)
    seen: list[Any] = []
    trainer.controller.observe_with(lambda: seen.append(trainer.controller.glance(last, None).workers[0].heartbeat))
    trainer.during_calls(3)
    trainer.walk(5)
    assert seen[0] == last[0]
    assert seen[2].is_training


def test_whoever_looks_hears_of_a_call_that_failed_for_good() -> None:
    trainer = Trainer()
    kinds: list[str] = []
    trainer.controller.observe_with(lambda: kinds.append(trainer.controller.history.events[-1].kind))
    with pytest.raises(WorkersLostError):
        trainer.walk(5, Lost((1,), after={0: 2, 2: 2}), max_retries=0)
    assert kinds == ["lost"]


# -------------------------------------------------------------------------------------------- holding


def leaving_at(trainer: Trainer, first: int, seconds: int = 12) -> None:
    """Lets node "b" go away in that second of each call."""
    trainer.during_calls(seconds, lambda second: trainer.leaving.add("b") if second >= first else None)


def test_a_step_that_one_rank_is_past_is_given_up_by_all_and_a_later_one_proposed() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    replicas = list(trainer.group.replicas)
    late = replicas[1]
    late.refuses_hold = True

    def happens(second: int) -> None:
        trainer.leaving.add("b")
        if len(late.proposals) == 2:
            late.refuses_hold = False

    trainer.during_calls(12, happens)
    assert trainer.walk(19) == [19, 19, 19]
    assert [replica.proposals for replica in replicas] == [[(2, False), (4, False), (8, True)]] * 3
    assert trainer.kinds == ["left"]


def test_nobody_else_is_asked_when_the_first_rank_cannot_stop() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    replicas = list(trainer.group.replicas)
    replicas[0].refuses_hold = True
    leaving_at(trainer, 2, seconds=3)
    assert trainer.walk(9) == [9, 9, 9]
    assert [len(replica.proposals) for replica in replicas] == [1, 0, 0]


def test_a_rank_that_does_not_answer_in_time_lets_nobody_stop() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    replicas = list(trainer.group.replicas)
    trainer.cluster.silent = {1}
    leaving_at(trainer, 2, seconds=3)
    assert trainer.walk(9) == [9, 9, 9]
    assert (replicas[0].proposals, replicas[2].proposals) == ([(2, False)], [(2, False)])


def test_a_call_that_cannot_be_gone_on_with_is_not_held() -> None:
    trainer = Trainer(nodes=["a", "a", "b"])
    leaving_at(trainer, 2)
    assert trainer.controller.run(Call(read)) == [(0, 0)] * 3
    assert [replica.proposals for replica in trainer.group.replicas] == [[]] * 3


def test_a_call_is_held_to_grow_once_all_who_are_coming_are_ready() -> None:
    trainer = Trainer(num_slots=4, max_workers=4, wait=False, resize_interval_s=60.0)
    trainer.cluster.standby_is_slow = True
    num_proposals: list[int] = []

    def happens(second: int) -> None:
        standby = trainer.group.standby
        if len(trainer.group) != 2:
            return
        if second == 2:
            standby.num_coming = 1
            standby.arrive()
            standby.num_coming = 1  # the other one
        if second == 6:
            standby.arrive()
        num_proposals.append(len(trainer.group.replicas[0].proposals))

    trainer.during_calls(9, happens)
    assert trainer.walk(19, Lost((1, 2), after={0: 2, 3: 2})) == [19, 19, 19, 19]
    assert (max(num_proposals[:6]), trainer.kinds) == (0, ["continued", "grown"])


def test_a_full_group_is_not_held_to_grow() -> None:
    trainer = Trainer(num_slots=6, wait=False, resize_interval_s=1.0)
    trainer.during_calls(6)
    trainer.walk(9)
    assert [replica.proposals for replica in trainer.group.replicas] == [[]] * 3


def test_without_being_told_to_look_a_running_call_does_not_grow() -> None:
    trainer = Trainer()
    trainer.cluster.num_slots = 2
    trainer.during_calls(6, lambda second: setattr(trainer.cluster, "num_slots", 3))
    assert trainer.walk(9, Lost((1,), after={0: 0, 2: 0})) == [9, 9, 9], "the loss itself found the room"
    assert "grown" not in trainer.kinds


# -------------------------------------------------------------------------------------------- snapshots


def test_the_parts_of_a_snapshot_are_collected_once_all_ranks_have_it() -> None:
    trainer = Trainer()
    asked: list[int] = []
    for replica in trainer.group.replicas:
        original = replica.part_of_snapshot
        replica.part_of_snapshot = lambda number, original=original: asked.append(number) or original(number)

    def happens(second: int) -> None:
        for rank, replica in enumerate(trainer.group.replicas):
            replica.snapshot_at = 3 if second >= 2 + rank else 0  # one rank after the other

    trainer.during_calls(8, happens)
    trainer.walk(5)
    assert asked == [3, 3, 3]


@pytest.mark.parametrize(("snapshots_inside", "num_asked"), [(True, 4), (False, 2)])
def test_ranks_that_copy_inside_the_call_are_asked_four_times_a_second(snapshots_inside: bool, num_asked: int) -> None:
    trainer = Trainer(snapshots_inside=snapshots_inside)
    asked: list[float] = []
    heartbeat = trainer.group.replicas[0].heartbeat
    trainer.group.replicas[0].heartbeat = lambda: asked.append(trainer.clock.now_s) or heartbeat()

    def wait(on_wait: Callable[[], None]) -> None:
        for _ in range(13):
            trainer.clock.now_s += 0.1
            on_wait()

    trainer.cluster.while_waiting = wait
    trainer.walk(5)
    assert len(asked) == num_asked


def test_a_part_that_is_not_kept_any_more_makes_no_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(continues=False)
    trainer.group.replicas[1].part_of_snapshot = lambda number: None

    def happens(second: int) -> None:
        for replica in trainer.group.replicas:
            replica.snapshot_at = 3

    trainer.during_calls(4, happens)
    assert trainer.walk(5, Lost((0, 1, 2))) == [5, 5, 5]
    assert trainer.group.functions == ["restore", "walk"]
    assert caplog.text.count("a larger `snapshot_every_n_steps`") == 1


def test_a_snapshot_on_its_way_lands_while_a_call_runs() -> None:
    trainer = Trainer(is_large=True)
    trainer.cluster.transfer_s = 3600.0
    trainer.walk(1)
    is_coming = []

    def happens(second: int) -> None:
        trainer.cluster.transfer_s = 0.0
        is_coming.append(trainer.controller.snapshots.is_coming)

    trainer.during_calls(4, happens)
    trainer.walk(5)
    assert (is_coming[0], is_coming[-1]) == (True, False)


def test_a_snapshot_on_its_way_is_not_overtaken_by_one_from_inside() -> None:
    trainer = Trainer(is_large=True)
    trainer.cluster.transfer_s = 3600.0
    trainer.walk(1)

    def happens(second: int) -> None:
        for replica in trainer.group.replicas:
            replica.snapshot_at = 3

    trainer.during_calls(4, happens)
    trainer.walk(5)
    assert trainer.controller.snapshots.landed is None or not trainer.controller.snapshots.is_inside
