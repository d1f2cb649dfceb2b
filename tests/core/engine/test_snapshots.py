"""Snapshots: what is kept of them, after which calls they are taken, and what a trainer makes of them."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raysgd.core.engine.shared.interface import Call, Capture
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, SnapshotPace, Snapshots, is_due
from raysgd.core.history.status import glance
from raysgd.exceptions import WorkersLostError
from tests.core.engine.trainer import RESTARTS, Trainer, befalls, dies
from tests.helpers.fakes import FakeClock, no_snapshots
from tests.simulator.processes import Process
from tests.simulator.replica import SimReplica

ON_ITS_WAY = TimeoutError("on its way")


@dataclass
class Transfer:
    """A transfer that a test lets arrive or be lost."""

    token: int
    outcome: Any = ON_ITS_WAY
    waits: list[float | None] = field(default_factory=list)
    reference: None = None

    def result(self, timeout_s: float | None) -> Any:
        self.waits.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Wire:
    """The part of a group that starts transfers. It keeps them."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def fetch(self, rank: int, function: Any, token: int) -> Transfer:
        self.transfers.append(Transfer(token))
        return self.transfers[-1]


never: Any = None  # there is no group, because nothing has to be fetched


def inline(state: Any, *others: Any) -> list[Capture]:
    return [Capture("own 0", shared_state=state), *(Capture(other) for other in others)]


def keeper_with_landed_state() -> Snapshots:
    keeper = no_snapshots()
    keeper.take_captures(inline("start"), never, is_first=True)
    return keeper


def test_a_small_state_lands_at_once_with_what_each_rank_had() -> None:
    keeper = no_snapshots()
    keeper.completed(Call("call"))
    keeper.take_captures(inline("state", "own 1"), never)
    assert keeper.landed == Snapshot("state", ("own 0", "own 1"))
    assert keeper.is_current
    assert keeper.calls_since == ()


def test_a_call_makes_the_snapshot_old_until_the_next_one() -> None:
    keeper = keeper_with_landed_state()
    assert keeper.is_current
    keeper.completed(Call("call"))
    assert not keeper.is_current
    keeper.take_captures(inline("next"), never)
    assert keeper.is_current


def test_random_numbers_that_were_drawn_make_old_only_what_each_rank_has_for_itself() -> None:
    keeper = keeper_with_landed_state()
    keeper.touch_ranks()
    assert (keeper.is_current, keeper.shares_current) == (False, True)
    keeper.take_captures(inline("next"), never)
    assert keeper.is_current
    keeper.touch()
    assert not keeper.shares_current


def test_where_all_begin_again_nothing_of_before_is_left() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed(Call("call"))
    keeper.begin_again()
    assert (keeper.landed, keeper.landed_token, keeper.calls_since, keeper.has_any) == (None, None, (), False)


def test_touching_makes_the_snapshot_old_without_a_call() -> None:
    keeper = keeper_with_landed_state()
    keeper.touch()
    assert not keeper.is_current
    assert keeper.calls_since == ()


def test_calls_that_never_have_to_be_run_again_are_not_kept() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed(None)
    assert keeper.calls_since == ()
    assert not keeper.is_current


def test_until_a_large_state_has_landed_its_calls_are_kept() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("first"))
    keeper.take_captures([Capture("own", token=5)], wire)
    assert keeper.is_coming
    assert keeper.is_current
    keeper.completed(Call("second"))
    assert list(keeper.calls_since) == [Call("first"), Call("second")]
    assert keeper.landed == Snapshot("start", ("own 0",))
    wire.transfers[0].outcome = "large"
    keeper.poll()
    assert keeper.landed == Snapshot("large", ("own",))
    assert keeper.landed_token == 5
    assert keeper.calls_since == (Call("second"),)
    assert not keeper.is_current


def test_looking_does_not_wait_unless_told_to() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take_captures([Capture(token=1)], wire)
    keeper.poll()
    keeper.poll(2.5)
    keeper.poll(None)
    assert wire.transfers[0].waits == [0.0, 2.5, None]


def test_where_ray_is_stopped_what_is_on_its_way_is_given_up_without_a_look_at_it() -> None:
    is_cut_off, wire = [False], Wire()
    keeper = Snapshots(no_snapshots()._spec, is_cut_off=lambda: is_cut_off[0])
    keeper.take_captures([Capture(token=1)], wire)
    keeper.poll()
    is_cut_off[0] = True
    keeper.poll()
    assert (keeper.is_coming, len(wire.transfers[0].waits)) == (False, 1)


def test_a_lost_transfer_leaves_the_state_before_it_and_its_calls() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=1)], wire)
    wire.transfers[0].outcome = ConnectionError("gone")
    keeper.poll()
    assert keeper.landed == Snapshot("start", ("own 0",))
    assert keeper.calls_since == (Call("call"),)
    assert not keeper.is_current
    assert not keeper.is_coming


def test_what_new_workers_captured_before_calls_were_run_again_covers_none_of_them() -> None:
    keeper, wire = no_snapshots(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=1)], wire, is_first=True)
    wire.transfers[0].outcome = "as set up"
    keeper.poll()
    assert keeper.landed == Snapshot("as set up", (None,))
    assert keeper.calls_since == (Call("call"),)
    assert not keeper.is_current


def test_leaving_a_group_forgets_its_tokens_but_not_what_landed() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=7)], wire)
    wire.transfers[0].outcome = "state"
    keeper.poll()
    keeper.drop_incoming()
    assert keeper.landed_token is None
    assert keeper.landed == Snapshot("state", (None,))
    assert keeper.is_current


def test_leaving_a_group_gives_up_what_is_on_its_way() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=1)], wire)
    keeper.drop_incoming()
    wire.transfers[0].outcome = "too late"
    keeper.poll(None)
    assert keeper.landed == Snapshot("start", ("own 0",))
    assert keeper.calls_since == (Call("call"),)
    assert not keeper.is_current


def test_forgetting_lets_go_of_everything() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=1)], wire)
    keeper.clear()
    assert (keeper.landed, keeper.has_any, keeper.is_current, keeper.calls_since) == (None, False, False, ())


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_memory_of_a_replaced_state_is_freed_unless_the_program_ends(is_kept: bool) -> None:
    """Ray may be gone then, and ends a program that gives memory of its store back."""
    keeper = no_snapshots()
    states = [np.zeros(3), np.zeros(3)]
    freed = [weakref.ref(state) for state in states]
    keeper.take_captures(inline(states.pop(0)), never, is_first=True)
    keeper.keeps_replaced = is_kept
    keeper.take_captures(inline(states.pop(0)), never)
    assert (freed[0]() is None) is not is_kept
    keeper.clear()
    assert (freed[1]() is None) is not is_kept
    keeper.keeps_replaced = False
    keeper.take_captures(inline("of the next call"), never)
    assert freed[0]() is freed[1]() is None


# -------------------------------------------------------------------------------------------- inside a call


def inside(state: Any, *progress: int) -> list[Capture]:
    first, *others = progress
    return [Capture("own 0", state, first), *(Capture("own", progress=other) for other in others)]


def test_a_snapshot_taken_inside_a_call_says_so_and_covers_the_calls_before() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed(Call("first"))
    assert not keeper.is_inside
    keeper.take_captures(inside("state", 3, 3), never)
    assert keeper.landed == Snapshot("state", ("own 0", "own"), (3, 3))
    assert keeper.is_inside
    assert keeper.calls_since == ()


def test_the_call_itself_is_still_to_be_finished_when_it_completes() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take_captures(inside("state", 3), never)
    keeper.completed(Call("call"))
    assert (keeper.is_inside, keeper.calls_since) == (True, (Call("call"),))
    keeper.take_captures([Capture(token=1)], wire)
    wire.transfers[0].outcome = "after"
    keeper.poll()
    assert (keeper.is_inside, keeper.calls_since) == (False, ())


def test_a_large_state_from_inside_lands_with_its_progress() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take_captures([Capture(progress=4, token=1)], wire)
    assert (keeper.is_coming, keeper.is_inside) == (True, False)
    wire.transfers[0].outcome = "state"
    keeper.poll()
    assert keeper.landed == Snapshot("state", (None,), (4,))


def test_after_a_call_that_was_broken_off_for_good_nobody_goes_on_inside() -> None:
    keeper = keeper_with_landed_state()
    keeper.take_captures(inside("state", 3), never)
    keeper.leave_call()
    assert keeper.landed == Snapshot("state", ("own 0",))


def test_a_part_of_a_call_that_was_broken_off_for_good_is_not_waited_for() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take_captures([Capture(progress=4, token=1)], wire)
    keeper.leave_call()
    assert not keeper.is_coming
    wire.transfers[0].outcome = "state"
    keeper.poll(None)
    assert keeper.landed == Snapshot("start", ("own 0",))


def test_a_part_of_a_broken_call_that_is_dropped_leaves_no_completed_call_covered() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(progress=4, token=1)], wire)
    keeper.leave_call()
    assert not keeper.shares_current, "a file that is written now has to have what the call did"
    assert keeper.calls_since == (Call("call"),)
    assert keeper.must_follow


def test_a_completed_call_is_finished_from_inside_whatever_becomes_of_the_next_one() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take_captures(inside("state", 3), never)
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(token=1)], wire)
    keeper.leave_call()
    assert keeper.is_coming, "that one covers the completed call"
    assert (keeper.is_inside, keeper.calls_since) == (True, (Call("call"),))


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [("a", 10, (10, 20, 30))]),
        (2, [("a", 10, (10, 30)), ("b", 10, (20,))]),
        (4, [("a", 10, (10,)), ("b", 10, (20,)), ("c", 10, (30,)), (None, 10, ())]),
    ],
)
def test_each_rank_takes_its_own_part_and_what_it_counts_for_others(num_ranks: int, expected: list[Any]) -> None:
    inside, between = Snapshot(0, ("a", "b", "c"), (10, 20, 30)), Snapshot(0, ("a", "b", "c"))
    assert inside.for_ranks(num_ranks) == expected
    assert between.for_ranks(num_ranks) == [(own,) for own, *_ in expected]


class Divided:
    """The part of a group that fetches the parts of all ranks."""

    def __init__(self) -> None:
        self.wanted: list[Any] = []

    def fetch_parts(self, function: Any, tokens: Any) -> Transfer:
        self.wanted.append(tokens)
        return Transfer(0, outcome=("part 0", "part 1"))


def test_what_the_ranks_divide_is_fetched_from_all_of_them() -> None:
    keeper, group = keeper_with_landed_state(), Divided()
    keeper.completed(Call("call"))
    keeper.take_captures([Capture(f"own {rank}", token=3 + rank, is_part=True) for rank in range(2)], group)
    keeper.poll()
    assert group.wanted == [[3, 4]]
    assert keeper.landed == Snapshot(("part 0", "part 1"), ("own 0", "own 1"))
    assert keeper.landed_token == 3


@pytest.mark.parametrize(
    ("every_s", "copy_s", "since_s", "replay_s", "num_calls", "expected"),
    [
        ("auto", 0.0005, 0.08, 0.0, 1, False),
        ("auto", 0.1, 16.6, 16.6, 1, False),
        ("auto", 0.1, 16.7, 16.7, 1, True),  # 0.6 %
        ("auto", 2.0, 31.0, 29.0, 3, False),
        ("auto", 2.0, 31.0, 30.5, 3, True),  # too much to repeat
        ("auto", 2.0, 10.0, 9.0, 10_001, True),  # too many calls to remember
        (60, 0.0, 59.0, 59.0, 1, False),
        (60, 9.0, 60.0, 1.0, 1, True),
        (0, 9.0, 0.0, 0.0, 1, True),
        (None, 0.0, 1e6, 1e6, 10**6, False),
    ],
)
def test_a_snapshot_is_due_when_it_is_cheap_or_too_much_would_be_repeated(
    every_s: Any, copy_s: float, since_s: float, replay_s: float, num_calls: int, expected: bool
) -> None:
    assert is_due(every_s, copy_s, since_s, replay_s, num_calls) is expected


@pytest.mark.parametrize(
    ("every_s", "copy_s", "words"),
    [
        ("auto", None, "after each call"),
        ("auto", 0.0004, "every 0.067 s, because a copy takes 0.0004 s"),
        ("auto", 0.1, "every 17 s, because a copy takes 0.1 s"),
        ("auto", 5.0, "every 30 s, because a copy takes 5 s"),
        (0, 1.0, "after each call"),
        (60, 1.0, "every 60 s"),
        (None, None, "switched off"),
    ],
)
def test_the_pace_is_told(every_s: Any, copy_s: float | None, words: str) -> None:
    pace = SnapshotPace(every_s, FakeClock().monotonic)
    pace.copy_s = copy_s
    assert pace.words() == words


def test_a_call_is_expected_to_take_as_long_as_the_last_one_of_its_function() -> None:
    clock = FakeClock()
    pace = SnapshotPace("auto", clock.monotonic)
    assert pace.is_due("train", []), "nothing is known of it"
    pace.note_copy(0.1)
    assert pace.is_due("train", [])
    pace.note_call("train", 1.0)
    assert not pace.is_due("train", [])
    assert pace.is_due("validate", [])
    clock.now_s += 15.5
    assert not pace.is_due("train", [1] * 15)
    clock.now_s += 1.0
    assert pace.is_due("train", [1] * 16)
    pace.note_copy(0.1)
    assert not pace.is_due("train", [])


def test_a_heartbeat_shorter_than_a_copy_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = SnapshotPace(0.0, FakeClock().monotonic, heartbeat_s=2)
    with caplog.at_level(logging.WARNING):
        pace.note_copy(1.9)
        assert not caplog.messages
        pace.note_copy(2.5)
        pace.note_copy(2.6)
    assert len(caplog.messages) == 1
    assert "`heartbeat_s=2` is shorter than a copy of the state, which took 2.5 s" in caplog.text
    assert "`heartbeat_s=8`" in caplog.text


# -------------------------------------------------------------------------------------------- of a trainer


def test_copies_take_half_a_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, capture = list[int](), SimReplica.capture

    def counted(replica: SimReplica, landed_token: int | None) -> Capture:
        taken.append(replica.world.rank)
        return capture(replica, landed_token)

    monkeypatch.setattr(SimReplica, "capture", counted)
    trainer = Trainer(snapshot_every_s="auto", copy_s=0.1).started()
    began = trainer.kernel.now
    for _ in range(60):
        trainer.walk(7)
    every_s = (trainer.kernel.now - began) / taken.count(0)
    # One of the start, one behind the first call, whose length is not known, and then one for every 17 s.
    assert 10.0 < every_s < 20.0


def test_the_calls_that_no_snapshot_covers_are_run_again_and_the_history_says_so() -> None:
    trainer = Trainer(snapshot_every_s="auto", copy_s=0.1).started()
    for number in (1, 10, 100):
        trainer.note(number)
    status = " ".join(str(glance(trainer.controller, {}, None)).split())
    assert re.search(r"2 calls \(0\.\d s\) since; every 17 s, because a copy takes 0\.1 s", status)
    trainer.look(dies(0, 1, 2, at="look", nth=[1]))
    assert trainer.look() == [(1, 10, 100)] * 3
    event = trainer.controller.history.events[-1]
    assert event.detail == "from the last snapshot, with 2 completed calls since run again"
    assert glance(trainer.controller, {}, None).failures == (event.detail,)


def test_a_call_that_took_much_longer_than_expected_is_followed_by_a_snapshot() -> None:
    trainer = Trainer(snapshot_every_s="auto", copy_s=0.1).started()
    trainer.walk(2)
    trainer.walk(300)
    assert trainer.controller.snapshots.calls_since == ()


def slow_to_send(trainer: Trainer) -> NewestSnapshot:
    """The newest snapshot, which takes some seconds to arrive."""
    trainer.controller.snapshot()
    trainer.note(1, befalls(trainer.load_for(6.0), 0, at="send", nth=[1]))
    return trainer.controller.newest_snapshot()


def test_a_state_on_its_way_is_had_as_soon_as_it_is_copied() -> None:
    trainer = Trainer(is_large=True).started()
    newest = slow_to_send(trainer)
    assert newest.landed is None
    with pytest.raises(TimeoutError):
        newest.result(0.1)
    assert newest.result().shared_state.noted == (1,)


class SlowToArrive(Trainer):
    """What its workers send is on its way for a while, beside their work."""

    def point_of(self, label: str, process: Process) -> Iterable[float]:
        yield from super().point_of(label, process)
        if label == "on its way":
            yield 6.0


def test_workers_are_not_ended_while_a_file_waits_for_their_state() -> None:
    trainer = SlowToArrive(is_large=True, **RESTARTS).started()
    trainer.note(1)
    newest = trainer.controller.newest_snapshot()
    trainer.look(dies(1, at="look", nth=[1]))
    assert trainer.controller.snapshots.landed.shared_state.noted == (1,)
    assert newest.result(0.0).shared_state.noted == (1,)


def test_a_state_that_was_lost_on_its_way_is_told() -> None:
    trainer = Trainer(is_large=True).started()
    newest = slow_to_send(trainer)
    trainer.controller.kill_group()
    with pytest.raises(WorkersLostError, match="lost with its worker"):
        newest.result()


@pytest.mark.parametrize("num_lost", [3, 4])
def test_a_state_that_is_lost_on_its_way_is_copied_three_times_more(num_lost: int) -> None:
    trainer = Trainer(is_large=True, snapshot_every_s=None).started()
    trainer.note(1)
    trainer.expect(befalls(OSError("no space"), 0, at="send", nth=range(1, num_lost + 1)))
    if num_lost == 3:
        assert trainer.controller.snapshot().shared_state.noted == (1,)
    else:
        with pytest.raises(WorkersLostError, match="lost on its way to the driver 4 times"):
            trainer.controller.snapshot()


@pytest.mark.parametrize("num_lost", [4, 5])
def test_workers_whose_state_never_arrives_are_ended_after_four_copies(
    num_lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, sent = Trainer(is_large=True, **RESTARTS), list[str]()

    def is_lost(label: str, process: Process) -> Exception | None:
        sent.extend([label] if label == "send" else [])
        return OSError("no space") if label == "send" and len(sent) <= num_lost else None

    trainer.started()
    trainer.controller.snapshot()
    trainer.controller.snapshots.landed = None  # as of a trainer that another process has taken over
    trainer.controller.snapshots.completed(None)
    trainer.rule, death = is_lost, dies(1, at="look", nth=[1])
    if num_lost == 4:
        assert trainer.look(death) == [()] * 3
    else:
        with pytest.raises(WorkersLostError, match="the state was lost with the workers"):
            trainer.look(death)
        assert "cannot be fetched: it was lost in transit 4 times" in caplog.text
    assert len(sent) == 5, "one before the call, and four before workers are ended"


# ------------------------------------------------------------------------------------------------- switched off


def test_without_snapshots_a_loss_raises_and_names_the_last_file() -> None:
    trainer = Trainer(snapshot_every_s=None, **RESTARTS).started()
    trainer.note(1)
    death = dies(1, at="look", nth=[1])
    with pytest.raises(WorkersLostError, match=r"`snapshot_every_s=None` switches.*No file was saved"):
        trainer.look(death)
    trainer.controller.snapshots.last_file = "last.pt"
    with pytest.raises(WorkersLostError, match=r"The last file is last\.pt: `load` it into a new trainer"):
        trainer.look()
    assert trainer.num_started == 3, "no worker that would begin from the start, unnoticed"


def test_without_snapshots_what_was_requested_or_never_trained_can_be_restored_until_the_next_call() -> None:
    trainer, death = Trainer(snapshot_every_s=None, **RESTARTS).started(), dies(1, at="look", nth=[1])
    assert trainer.look(death) == [()] * 3
    trainer.note(1)
    assert trainer.controller.snapshot().shared_state.noted == (1,)
    assert trainer.look(death) == [(1,)] * 3
    trainer.note(10)
    with pytest.raises(WorkersLostError, match="switches snapshots off"):
        trainer.look(death)


def test_without_snapshots_the_end_of_workers_that_are_apart_is_told() -> None:
    trainer = Trainer(snapshot_every_s=None).started()
    trainer.note(1)
    with pytest.raises(ValueError, match=r"their state is lost: `snapshot_every_s=None`"):
        trainer.note(10, befalls(ValueError("mine"), 1, at="noted", nth=[1]))
