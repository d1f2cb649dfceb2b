"""What follows the loss of workers: who goes on in place, who waits for whom, and what is told of it.

That nothing is lost or counted twice, and who is the source of whose state, `tests/simulator` checks whatever happens.
Here is what it does not ask: words, and whether less would have done.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.cluster import keeper
from raysgd.core.cluster.keeper import Keeper
from raysgd.core.engine.shared.types import ReplicaProgress
from raysgd.core.engine.transfers import LostPartError
from raysgd.exceptions import WorkerError, WorkersLostError
from tests.core.engine.trainer import RESTARTS, Befall, Trainer, befalls, die, dies, disconnect
from tests.simulator.processes import Process
from tests.simulator.replica import SimReplica

RENEWS: Any = {**RESTARTS, "renews": True}
"""Of a trainer whose replicas are made again in the processes that are left."""

# -------------------------------------------------------------------------------------------- going on after a loss


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1)])
def test_survivors_go_on_where_they_are_with_new_workers_behind_them(lost: tuple[int, ...]) -> None:
    trainer = Trainer().started()
    before = trainer.pids
    assert trainer.walk(5, befalls(trainer.lose(*lost), lost[0])) == [5, 5, 5]
    survivors = [pid for rank, pid in enumerate(before) if rank not in lost]
    assert trainer.pids[: len(survivors)] == survivors
    assert sorted(trainer.pids[len(survivors) :]) == [*range(103, 103 + len(lost))]
    assert (trainer.kinds, trainer.controller.history.num_failures) == (["continued"], 1)
    assert trainer.controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_a_lost_connection_of_all_keeps_all() -> None:
    trainer = Trainer().started()
    assert trainer.walk(5, befalls(disconnect, 0, 1, 2)) == [5, 5, 5]
    assert (trainer.kinds, trainer.num_started) == (["continued"], 3)


@pytest.mark.parametrize(
    ("call", "at", "options", "kind"),
    [
        ("look", "look", {}, "continued"),
        ("note", "note", {}, "restored"),  # it can only be begun again, from the snapshot
        ("walk", "step", {"continues": False}, "restored"),
    ],
)
def test_calls_that_cannot_be_gone_on_with_need_the_snapshot(
    call: str, at: str, options: dict[str, Any], kind: str
) -> None:
    trainer = Trainer(**options).started()
    trainer.note(1)
    args = () if call == "look" else (5,)
    getattr(trainer, call)(*args, dies(1, at=at, nth=[1]))
    assert trainer.look()[0] == ((1, 5) if call == "note" else (1,))
    assert (trainer.kinds, trainer.num_started) == ([kind], 4 if kind == "continued" else 6)


@pytest.mark.parametrize("max_retries", [3, 0])
def test_all_who_are_lost_are_named_also_where_others_saw_only_the_connection_break(max_retries: int) -> None:
    trainer = Trainer(tells=False).started()
    befall = befalls(Process.freeze, 2), befalls(disconnect, 0)
    told = r"^lost rank 2; ranks? 0.* reports?: connection to another rank lost \(.*"
    if max_retries:
        assert trainer.walk(5, *befall) == [5, 5, 5]
        told += "; rank 2 does not answer any more$"
    else:
        with pytest.raises(WorkersLostError, match=told + "the 0 allowed retries"):
            trainer.walk(5, *befall, max_retries=0)
    [cause] = [event.cause for event in trainer.controller.history.events if event.kind in ("continued", "lost")]
    assert re.match(told, cause)


OBSTACLES: dict[str, tuple[str, Any, str]] = {
    "an obstacle": (
        "replica_progress",
        lambda replica: ReplicaProgress(0, True, "a hook of its own"),
        "; the survivors cannot continue by themselves: a hook of its own",
    ),
    "a survivor raises": (
        "replica_progress",
        lambda replica: 1 / 0,
        "; a surviving worker could not report its progress",
    ),
    "a survivor raises while the group is formed": ("regroup", lambda *args: 1 / 0, "; could not form a new group: "),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_where_survivors_cannot_go_on_new_workers_begin_the_call_again_and_why_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, replacement, told = OBSTACLES[name]
    trainer = Trainer().started()
    trainer.walk(1)
    monkeypatch.setattr(SimReplica, method, replacement)
    assert trainer.walk(5, dies(1), max_retries=1) == [6, 6, 6]
    assert (trainer.kinds, trainer.controller.history.num_failures) == (["restored"], 1)
    assert trainer.last_event[3].startswith("lost rank 1 (")
    assert told in trainer.last_event[3]
    assert trainer.pids[0] >= 103, "all are new"


def test_replicas_that_cannot_go_on_elsewhere_grow_from_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(nodes=(2, 1)).started()
    monkeypatch.setattr(SimReplica, "replica_progress", OBSTACLES["an obstacle"][1])
    assert trainer.walk(5, befalls(trainer.lose_node("n1"), 2)) == [5, 5]
    trainer.add_node(1)
    assert trainer.walk(1, max_retries=0) == [6, 6, 6]
    assert trainer.kinds == ["restored", "grown"]
    assert trainer.last_event[3] == "resources for 3 workers are free"


def test_a_state_that_is_on_its_way_arrives_before_workers_that_are_apart_are_ended() -> None:
    trainer = Trainer(is_large=True).started()
    trainer.note(1)
    trainer.controller.snapshot()
    trainer.note(2)
    with pytest.raises(ZeroDivisionError):
        trainer.note(3, befalls(ZeroDivisionError(), 1, at="noted", nth=[1]))
    assert trainer.controller.snapshots.landed.shared_state.noted == (1, 2)
    assert trainer.controller.snapshots.calls_since == ()


# -------------------------------------------------------------------------------------------- spares


def test_a_spare_steps_in_and_another_one_is_called_up_in_the_slot_of_the_lost_worker() -> None:
    trainer = Trainer(nodes=(4,), num_spares=1).started()
    trainer.kernel.sleep(5.0)
    assert trainer.group.standby.num_ready == 1
    assert trainer.walk(5, dies(1)) == [5, 5, 5]
    assert trainer.pids == [100, 102, 103]
    trainer.kernel.sleep(5.0)
    assert (trainer.group.standby.num_ready, trainer.num_started) == (1, 5)


def test_a_spare_that_fails_to_start_is_called_up_again_before_the_next_call_and_not_again_and_again() -> None:
    trainer = Trainer(nodes=(4,), num_spares=1).started()
    trainer.kernel.sleep(5.0)
    fails = befalls(die, -1, at="prepare", nth=range(1, 10))
    assert trainer.walk(60, dies(1), fails) == [60] * 3
    assert trainer.num_started == 5
    trainer.walk(2)
    assert trainer.num_started == 6


def test_a_spare_that_dies_while_it_waits_is_replaced() -> None:
    trainer = Trainer(nodes=(4,), num_spares=1).started()
    trainer.kernel.sleep(5.0)
    die(trainer.cluster.processes[-1])
    trainer.walk(60)
    trainer.walk(2)
    trainer.kernel.sleep(5.0)
    assert (trainer.group.standby.num_ready, trainer.num_started) == (1, 5)


def test_a_rebuilt_group_has_spares_as_far_as_there_is_room() -> None:
    trainer = Trainer(nodes=(5,), num_spares=2).started()
    trainer.controller.kill_group()
    trainer.cluster.nodes["n0"].num_taken = 1
    assert trainer.walk(5) == [5] * 3
    trainer.kernel.sleep(5.0)
    assert trainer.group.standby.num_ready == 1


@pytest.mark.parametrize(("use_local", "is_same_group"), [(False, True), (True, False)])
def test_where_no_one_is_left_but_spares_these_go_on_from_the_last_snapshot_without_a_driver(
    use_local: bool, is_same_group: bool
) -> None:
    trainer = Trainer(nodes=(5,), num_spares=2, use_local=use_local).started()
    trainer.kernel.sleep(5.0)
    trainer.walk(2)
    group, remote = trainer.group, (1, 2) if use_local else (0, 1, 2)
    raised = {} if not use_local else befalls(ZeroDivisionError(), 0, at="leave", nth=[1])
    assert trainer.walk(5, befalls(trainer.lose(*remote), 1), raised) == [7, 7, 7]
    assert trainer.kinds == ["restored"]
    assert (trainer.group is group) == is_same_group
    assert trainer.controller.history.events[-1].num_kept == 0


# -------------------------------------------------------------------------------------------- waiting for new workers


def four(keeps_global_batch: bool = True, **options: Any) -> Trainer:
    """Four workers; survivors of a loss choose whether they wait."""
    trainer = Trainer(**{"num_workers": 4, "nodes": (4,), "resize_interval_s": "auto", **options})
    rules = trainer.controller.rules
    trainer.controller.rules = replace(rules, keeps_global_batch=lambda: keeps_global_batch)
    return trainer.started()


def slowly(trainer: Trainer, seconds: float = 10.0) -> Befall:
    """New workers take so long to load."""
    return befalls(trainer.load_for(seconds), -1, at="prepare", nth=range(1, 9))


@pytest.mark.parametrize(
    ("options", "lost", "num_workers"),
    [
        ({}, (1,), 3),
        ({}, (1, 2), 2),
        ({"keeps_global_batch": False}, (1,), 4),
        ({"min_workers": 4}, (1,), 4),
        ({"use_local": True}, (1,), 3),
        ({"resize_interval_s": None}, (1,), 4),
        ({"resize_interval_s": 60.0, "keeps_global_batch": False}, (1,), 3),
        (RENEWS, (1,), 4),
    ],
)
def test_survivors_go_on_at_once_where_steps_stay_the_same_or_they_are_told_to(
    options: dict[str, Any], lost: tuple[int, ...], num_workers: int
) -> None:
    trainer = four(**options)
    assert trainer.walk(5, befalls(trainer.lose(*lost), 1), slowly(trainer)) == [5] * num_workers
    assert trainer.kinds == ["restored" if options is RENEWS else "continued"]


@pytest.mark.parametrize(("num_dead", "kind"), [(1, "continued"), (4, "restored")])
def test_new_processes_start_instead_of_spares_that_died_with_workers(num_dead: int, kind: str) -> None:
    trainer = four(keeps_global_batch=False, nodes=(5,), num_spares=1)
    trainer.kernel.sleep(5.0)
    trainer.walk(2)

    def lose(process: Process) -> None:
        for each in trainer.cluster.processes[5 - num_dead - 1 : 5]:
            die(each)

    assert trainer.walk(5, befalls(lose, 3)) == [7] * 4
    assert trainer.kinds == [kind]


def test_a_smaller_group_looks_for_room_at_once_and_is_grown_into_when_a_worker_is_ready() -> None:
    trainer = four(nodes=(3, 1))

    def replace_node(process: Process) -> None:
        trainer.cluster.lose_node("n1")
        trainer.add_node(1)

    assert trainer.walk(60, befalls(replace_node, 3)) == [60] * 4
    assert trainer.kinds == ["continued", "grown"]


def test_a_call_that_can_grow_inside_does_not_wait_for_workers_that_are_not_ready() -> None:
    trainer = four()
    assert trainer.walk(5, dies(1), slowly(trainer, 100.0)) == [5] * 3
    began = trainer.kernel.now
    assert trainer.walk(1) == [6] * 3
    assert trainer.kernel.now - began < 3
    assert len(trainer.note(1)) == 3
    assert trainer.kernel.now - began == pytest.approx(31, abs=3), "this one cannot be held"
    trainer.kernel.sleep(100.0)
    assert trainer.walk(1) == [7] * 4


def test_the_next_call_waits_for_no_spares_where_enough_workers_are_ready() -> None:
    trainer = Trainer(num_workers=2, nodes=(4,), num_spares=2).started()
    trainer.kernel.sleep(5.0)
    trainer.walk(2)
    assert trainer.walk(5, befalls(trainer.lose_but_first, 0), *trainer.starting(40.0, 300.0)) == [7]
    trainer.kernel.sleep(15.0)
    began = trainer.kernel.now
    assert trainer.walk(1) == [8] * 2
    assert trainer.kernel.now - began < 3


def test_spares_that_found_no_room_after_a_restart_start_when_there_is_some() -> None:
    trainer = Trainer(num_workers=2, nodes=(2, 1), num_spares=1).started()
    trainer.kernel.sleep(5.0)

    def lose_all(process: Process) -> None:
        trainer.cluster.lose_node("n1")
        for each in trainer.cluster.live:
            die(each)

    assert trainer.note(1, befalls(lose_all, 0, at="note", nth=[1])) == [(1,)] * 2
    trainer.add_node(2)
    for _ in range(2):
        trainer.walk(1)
        trainer.kernel.sleep(5.0)
    assert (len(trainer.group), trainer.group.standby.num_ready, len(trainer.group.slots)) == (2, 1, 3)


@pytest.mark.parametrize("node_comes", [False, True])
def test_another_process_that_finds_the_group_knows_of_all_its_room(
    node_comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, kept = Trainer(nodes=(2,), resize_interval_s=0.5), list[set[int]]()

    def room() -> set[int]:
        slots = trainer.group.slots
        return {id(each) for each in (*slots._reservations, *slots._asked)}

    kept_by = Keeper("run", lambda group: None)
    monkeypatch.setattr(kept_by, "keep_group", lambda group: kept.append(room()))
    monkeypatch.setattr(keeper, "_KEEPER", kept_by)
    trainer.started(as_fits=True)
    assert (kept[-1], len(kept[-1])) == (room(), 2)
    if node_comes:
        trainer.add_node(1)
        seen: list[bool] = []
        trainer.walk(100, befalls(lambda process: seen.append(kept[-1] == room()), 0, nth=range(1, 100)))
        assert (len(trainer.group), {*seen}) == (3, {True})


# -------------------------------------------------------------------------------------------- too little memory


def test_a_lack_of_memory_in_another_call_than_that_in_which_they_went_on_is_raised() -> None:
    trainer = four()
    assert trainer.walk(20, dies(1, nth=[10]), slowly(trainer, 100.0)) == [20] * 3
    began = trainer.kernel.now
    with pytest.raises(MemoryError):
        trainer.walk(20, befalls(MemoryError("no room"), 0, nth=[4]))
    assert trainer.kernel.now - began < 10


def with_fewer_than(num_workers: int, error: Exception, *, after: int = 0) -> Any:
    """User code raises in groups that are too small, once a rank has taken so many steps."""

    def rule(label: str, process: Process) -> Exception | None:
        is_small = label == "step" and 1 < process.world.size < num_workers
        return error if is_small and process.replica and process.replica.state.steps >= after else None

    return rule


def test_memory_that_runs_out_in_the_first_step_after_going_on_leads_to_waiting() -> None:
    trainer = four()
    trainer.rule = with_fewer_than(4, MemoryError("no room"))
    assert trainer.walk(5, dies(1), slowly(trainer), max_retries=1) == [5] * 4
    assert trainer.kinds == ["continued", "grown"]
    assert trainer.last_event[3] == "with 3 workers ranks 0, 1, 2 raised MemoryError: no room"
    assert trainer.walk(5, dies(1), slowly(trainer)) == [10] * 4, "they know better now"
    assert trainer.kinds == ["continued", "grown", "continued"]


@pytest.mark.parametrize(
    ("options", "error", "after"),
    [
        ({}, ValueError("no room"), 0),
        ({"keeps_global_batch": False, "resize_interval_s": 60.0}, MemoryError("no room"), 0),
        ({}, MemoryError("no room"), 4),  # steps after going on
        ({"nodes": (3, 1)}, MemoryError("no room"), 0),  # again, because nobody can come
    ],
)
def test_other_exceptions_are_the_users(options: dict[str, Any], error: Exception, after: int) -> None:
    trainer = four(**options)
    trainer.rule = with_fewer_than(4, error, after=after)
    act = trainer.lose_node("n1") if "nodes" in options else die
    with pytest.raises(type(error), match="no room"):
        trainer.walk(9, befalls(act, 3), slowly(trainer))
    assert trainer.kinds[0] == "continued"


def test_where_nobody_can_wait_for_memory_all_start_anew() -> None:
    trainer = four()
    trainer.rule = with_fewer_than(4, MemoryError())
    fails = befalls(ZeroDivisionError(), 0, 1, 2, at="leave", nth=[2])
    assert trainer.walk(5, dies(3), fails, slowly(trainer)) == [5] * 4
    assert trainer.pids[0] > 103


# -------------------------------------------------------------------------------------------- between two calls


def shrunk() -> Trainer:
    """A trainer that lost one of three workers, and has room for another one since."""
    trainer = Trainer(nodes=(2, 1)).started()
    trainer.walk(5, befalls(trainer.lose_node("n1"), 2))
    trainer.add_node(1)
    return trainer


def test_between_two_calls_workers_step_in_without_a_new_group() -> None:
    trainer = shrunk()
    assert trainer.walk(1, max_retries=0) == [6] * 3
    assert (trainer.kinds, trainer.pids) == (["continued", "grown"], [100, 101, 103])
    assert trainer.controller.history.num_failures == 1


def test_growing_that_fails_in_place_goes_on_from_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = shrunk()
    monkeypatch.setattr(SimReplica, "regroup", lambda *args: 1 / 0)
    assert trainer.walk(1, max_retries=0) == [6] * 3
    assert trainer.kinds == ["continued", "grown"]
    assert trainer.last_event[3].startswith("there is room for more workers; could not form a new group: ")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loss_that_is_found_while_the_group_changes_is_counted_and_named(leaves: bool) -> None:
    trainer = shrunk()
    if leaves:
        trainer.walk(1)
        trainer.kernel.sleep(60.0)
        trainer.cluster.nodes["n2"].is_leaving = True
    num_before = trainer.controller.history.num_failures
    trainer.walk(3, dies(0, at="leave", nth=[1]), max_retries=0)
    assert trainer.kinds[-1] == "continued"
    assert trainer.controller.history.num_failures == num_before + 1
    why = "a node is going away" if leaves else "there is room for more workers"
    assert trainer.last_event[3] == f"lost rank 0; {why}"


# -------------------------------------------------------------------------------------------- held inside a call


def test_a_call_is_held_to_leave_a_node_and_gone_on_with_by_the_rest() -> None:
    trainer = Trainer(nodes=(2, 1)).started()
    leave = befalls(lambda process: setattr(trainer.cluster.nodes["n1"], "is_leaving", True), 0)
    assert trainer.walk(60, leave, max_retries=0) == [60] * 2
    assert (trainer.kinds, trainer.pids) == (["left"], [100, 101])
    event = trainer.controller.history.events[-1]
    assert event.cause == "a node is going away"
    assert event.detail.startswith("pass 0 at "), "how far it was"


def test_a_held_call_whose_group_cannot_be_formed_anew_goes_on_from_the_snapshot_of_that_very_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(nodes=(2, 1)).started()

    def leave(process: Process) -> None:
        trainer.cluster.nodes["n1"].is_leaving = True
        monkeypatch.setattr(SimReplica, "regroup", lambda *args: 1 / 0)

    assert trainer.walk(60, befalls(leave, 0), max_retries=0) == [60] * 2
    event = trainer.controller.history.events[-1]
    assert (event.kind, event.detail[:28]) == ("left", "from a snapshot inside the c")
    assert event.cause.startswith("a node is going away; could not form a new group")


def test_no_rank_counts_as_lost_if_those_who_keep_their_ranks_cannot_form_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(nodes=(1, 1, 2), num_spares=1, regroups=False, spec={"runs_on": True}).started()
    trainer.controller.start_spares()
    trainer.walk(1)

    def leave(process: Process) -> None:
        trainer.cluster.nodes[trainer.group.infos[1].node_id].is_leaving = True
        monkeypatch.setattr(SimReplica, "regroup", lambda *args: 1 / 0)

    assert trainer.walk(60, befalls(leave, 0), max_retries=0) == [61] * 3
    assert trainer.kinds == ["left"]
    assert trainer.last_event[3].startswith("a node is going away; could not form a new group")


# -------------------------------------------------------------------------------------------- back to the last snapshot


def test_a_completed_call_is_finished_from_a_snapshot_inside_it_before_the_next_one_begins_again() -> None:
    trainer = Trainer(continues=False, snapshot_every=1, snapshot_every_s=3600.0).started()
    trainer.walk(1)
    trainer.walk(30)
    assert trainer.controller.snapshots.is_inside, "none was taken after that call"
    assert trainer.walk(5, dies(1)) == [36] * 3
    assert trainer.controller.history.events[-1].detail.endswith("with 1 completed call since run again")


def test_survivors_keep_their_processes_and_all_go_back_to_the_last_snapshot() -> None:
    trainer = Trainer(**RENEWS).started()
    trainer.walk(2)
    assert trainer.walk(5, dies(1)) == [7] * 3
    assert trainer.pids == [100, 102, 103]
    assert trainer.controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    event = trainer.controller.history.events[-1]
    assert (event.kind, event.old_size, event.new_size, event.num_kept) == ("restored", 3, 3, 2)


@pytest.mark.parametrize(
    "befall",
    [
        (dies(0), dies(1), dies(2)),
        (dies(1), befalls(ZeroDivisionError("`setup` does not run twice"), 0, at="built", nth=[1])),
    ],
    ids=["no one is left", "set-up fails"],
)
def test_where_no_process_can_be_kept_all_are_new(befall: tuple[Befall, ...]) -> None:
    trainer = Trainer(**RENEWS).started()
    trainer.walk(2)
    assert trainer.walk(5, *befall) == [7] * 3
    assert (trainer.pids[0] > 102, trainer.kinds) == (True, ["restored"])
    assert trainer.controller.history.events[-1].num_kept == 0


def test_a_place_on_a_node_that_is_gone_is_no_room_to_grow() -> None:
    trainer = Trainer(nodes=(2, 1), **RENEWS).started()
    assert trainer.walk(5, befalls(trainer.lose_node("n1"), 2)) == [5] * 2
    num_started = trainer.num_started
    assert trainer.walk(1) == [6] * 2
    assert (trainer.kinds, trainer.num_started) == (["restored"], num_started)
    trainer.add_node(1)
    assert trainer.walk(1) == [7] * 3
    assert trainer.kinds == ["restored", "grown"]


def test_a_part_that_no_node_has_any_more_is_told_with_the_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise LostPartError("The last snapshot is lost.")

    trainer = Trainer(**RENEWS).started()
    trainer.walk(2)
    trainer.controller.snapshots.last_file = "`epoch-2`"
    monkeypatch.setattr(SimReplica, "restore", fail)
    with pytest.raises(WorkersLostError, match=r"is lost\. The last file is `epoch-2`: `load` it into") as caught:
        trainer.walk(5, dies(1))
    assert not isinstance(caught.value, WorkerError), "it is no exception of the user's code"


def test_a_state_that_no_snapshot_has_is_never_replaced_by_an_older_one() -> None:
    trainer = Trainer(snapshot_every_s=None, **RENEWS).started()
    trainer.walk(2)
    trainer.controller.snapshot()
    trainer.walk(1)
    with pytest.raises(WorkersLostError, match="snapshot_every_s=None"):
        trainer.walk(5, dies(1))
