"""The recovery protocol under thousands of schedules of failures, on a virtual clock. What it simulates: ADR 64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.cluster import keeper as outliving
from raysgd.core.engine.policies import RetryBudget
from raysgd.core.engine.shared.interface import Call
from tests.helpers.stories import ROOT
from tests.simulator.many import report
from tests.simulator.network import COLLECTIVE_TIMEOUT_S
from tests.simulator.platform import SimWorker
from tests.simulator.replica import walk, walk_on
from tests.simulator.running import Simulation, quiet, run
from tests.simulator.schedule import Fault, Op, Schedule, drawn
from tests.simulator.shrinking import shrunk, told

QUICK = 2000
BLOCK = 100
LOGS = """
import json, sys
from tests.simulator.running import run
from tests.simulator.schedule import drawn
print(json.dumps([run(drawn(seed)).log for seed in json.loads(sys.argv[1])]))
"""


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, QUICK, BLOCK))
def test_all_invariants_hold_in_every_schedule(first: int) -> None:
    with quiet():
        broken = [seed for seed in range(first, first + BLOCK) if run(drawn(seed)).broken is not None]
    assert not broken, report(broken[0])


def test_a_schedule_that_is_run_again_goes_the_same_way() -> None:
    for seed in (3, 107, 403, 917):
        assert run(drawn(seed)).log == run(drawn(seed)).log


@pytest.mark.long
def test_a_schedule_goes_the_same_way_in_another_process() -> None:
    """Where sets have another order."""
    seeds = range(0, 60, 2)
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-c", LOGS, json.dumps(list(seeds))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [list(run(drawn(seed)).log) for seed in seeds]


def test_a_broken_schedule_is_made_small() -> None:
    schedule = replace(drawn(5), faults=(*drawn(5).faults, Fault("die", "step", 2), Fault("die", "leave", 1)))
    smallest = shrunk(schedule, lambda each: any(fault.point == "leave" for fault in each.faults))
    assert [fault.point for fault in smallest.faults] == ["leave"]
    assert smallest.ops == ()


def test_the_faults_of_a_schedule_come_about() -> None:
    ops = (Op("train"), Op("train"))
    faults = (Fault("die", "step", 3), Fault("die", "stepped", 9), Fault("drain", "step", 30))
    verdict = run(Schedule(1, num_workers=3, nodes=(3, 2), ops=ops, faults=faults))
    assert verdict.broken is None
    assert verdict.num_happened == 3
    assert any("resumed with" in line for line in verdict.log)


LEFT: dict[str, tuple[dict[str, Any], int, tuple[Fault, ...]]] = {
    "a rank freezes": ({"num_workers": 1}, 2, (Fault("freeze", "stepped", 1),)),
    "the copy of the state is lost on its way": ({"num_workers": 2}, 1, (Fault("die", "send", 2),)),
    "the survivors die, too": ({"num_workers": 2}, 2, (Fault("die", "step", 4, 1), Fault("die", "join", 3))),
    "too few survive": ({"min_workers": 3, "nodes": (2, 1)}, 4, (Fault("lose node", "step", 4),)),
    "a rank dies where it was planned": ({"is_large": False}, 1, (Fault("die", "stepped", 4, 1),)),
    "a rank dies before it has gone on": ({"nodes": (6,)}, 3, (Fault("die", "step", 13, 1),)),
}


@pytest.mark.parametrize("story", LEFT)
def test_a_call_that_is_left_is_left_and_gone_on_with_whatever_befalls_it(story: str) -> None:
    more, argument, faults = LEFT[story]
    options = {"num_workers": 3, "nodes": (4,), "num_samples": 40, "batch_size": 6, "is_large": True, **more}
    with quiet():
        verdict = run(Schedule(1, ops=(Op("leave", argument), Op("train", None, 6)), faults=faults, **options))
    assert (verdict.broken, verdict.num_happened) == (None, len(faults))


def test_a_call_that_a_survivor_had_finished_when_it_was_to_be_left_is_not_repeated_by_a_restart() -> None:
    ops = Op("look"), Op("look"), Op("leave", 66), Op("kill"), Op("leave", 72, 6)
    schedule = Schedule(5468, nodes=(5,), num_samples=8, batch_size=2, is_large=True, ops=ops)
    with quiet():
        verdict = run(replace(schedule, faults=(Fault("die", "last", 1, 3),)))
    assert (verdict.broken, verdict.num_happened) == (None, 1)


@pytest.mark.parametrize("joins_late", [True, False])
@pytest.mark.parametrize("kind", ["leave", "train"])
def test_a_connection_that_is_lost_whenever_a_call_begins_uses_its_retries_up(kind: str, joins_late: bool) -> None:
    faults = tuple(Fault("lose connection", "called", nth) for nth in range(1, 161))
    ops = (Op(kind, 20 if kind == "leave" else None, 3),)
    schedule = Schedule(1, nodes=(4,), num_samples=40, batch_size=2, joins_late=joins_late, ops=ops, faults=faults)
    with quiet():
        verdict = run(replace(schedule, num_workers=2))
    assert verdict.broken is None
    assert verdict.num_happened < 40
    [raised] = [line for line in verdict.log if "RAISED" in line]
    assert "the 3 allowed retries of this call are used up" in raised


def test_a_rank_that_is_stuck_in_a_step_is_not_waited_for_when_a_call_is_left() -> None:
    schedule = Schedule(1841, nodes=(4,), num_samples=8, batch_size=2, continues=False, heartbeat_s=10.0)
    faults = (Fault("slow", "step", 4),)
    with quiet():
        verdict = run(replace(schedule, ops=(Op("leave", 32, 6),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 1)


def test_workers_that_break_whatever_group_they_join_are_replaced() -> None:
    faults = (Fault("poison", "step", 2), Fault("die", "step", 4))
    verdict = run(Schedule(1, num_workers=3, nodes=(4,), ops=(Op("train", None, 2),), faults=faults))
    assert verdict.broken is None
    assert any("restarted all workers" in line for line in verdict.log)
    assert not any("RAISED" in line for line in verdict.log)


@pytest.mark.parametrize("nth", range(101, 201, 4))
def test_ctrl_c_while_frozen_ranks_are_looked_at_ends_the_look_first(nth: int) -> None:
    """The rank in the driver has finished, and a thread listens to the others."""
    schedule = Schedule(
        1,
        num_workers=3,
        nodes=(3,),
        num_samples=8,
        batch_size=2,
        heartbeat_s=3.0,
        use_local=True,
        ops=(Op("train"),),
        faults=(Fault("die", "step", 3, 1), Fault("freeze", "taken", 1), Fault("interrupt", "wait", nth)),
    )
    with quiet():
        assert run(schedule).broken is None


def test_a_new_worker_that_has_only_listened_when_the_last_survivor_dies_is_no_source() -> None:
    ops = Op("load", 16), Op("apply", 14), Op("train", None, 6)
    faults = Fault("die", "open", 3, 6), Fault("die but one", "step", 6, 3)
    schedule = Schedule(7783, nodes=(2, 2), num_samples=23, heartbeat_s=3.0, ops=ops, faults=faults)
    verdict = run(schedule)
    assert (verdict.broken, verdict.num_happened) == (None, 2)


def test_a_worker_that_freezes_while_replicas_are_made_for_a_restore_is_not_waited_for() -> None:
    losses = Fault("lose node", "step", 23, 2), Fault("die", "answer", 3, 3), Fault("freeze", "joined", 8, 2)
    schedule = Schedule(
        6001992,
        num_workers=4,
        nodes=(2, 2),
        num_samples=40,
        batch_size=6,
        continues=False,
        regroups=False,
        renews=True,
        snapshot_every=2,
        tells=False,
        heartbeat_s=3.0,
        use_local=True,
        ops=(Op("train"),),
        faults=(Fault("room comes", "merge", 4), *losses),
    )
    verdict = run(schedule)
    assert (verdict.broken, verdict.num_happened) == (None, 4)


@pytest.mark.parametrize("seed", [201475, 203851])
def test_a_detached_trainer_loses_the_only_worker_with_its_state_while_another_joins(seed: int) -> None:
    """In the first, Ctrl-C comes while the state is looked for. The state is lost, and the call says so."""
    with quiet():
        verdict = run(drawn(seed))
    assert verdict.broken is None
    assert any("WorkersLostError" in line and "the state was lost" in line for line in verdict.log)


def test_ctrl_c_again_and_again_leaves_no_thread_that_looks_after_workers_of_a_group_that_has_ended() -> None:
    """The third time, the driver does not wait any more until the thread has told which rank froze."""
    interrupts = [Fault("interrupt", "wait", nth) for nth in (117, 123, 232)]
    losses = Fault("drain", "noted", 3, 5), Fault("stall", "step", 13, 5), Fault("die", "prepare", 2, 2)
    schedule = Schedule(2519147, num_workers=3, nodes=(2, 4), num_samples=23, use_local=True)
    schedule = replace(schedule, continues=False, regroups=False, renews=True, heartbeat_s=3.0)
    verdict = run(replace(schedule, ops=(Op("note", 1), Op("train", None, 6)), faults=(*interrupts, *losses)))
    assert (verdict.broken, verdict.num_happened) == (None, 6)


@pytest.mark.parametrize("nth", range(90, 111, 4))
def test_ctrl_c_while_the_driver_asks_who_is_stuck_leaves_no_ranks_in_different_states(nth: int) -> None:
    losses = Fault("lose connection", "last", 1, 5), Fault("die", "joined", 1, 6), Fault("stall", "last", 1)
    schedule = Schedule(
        1006706,
        num_workers=3,
        nodes=(4,),
        num_samples=8,
        batch_size=2,
        continues=False,
        regroups=False,
        ops=(Op("train", 27), Op("save", 53, 0), Op("steps", 4)),
        faults=(losses[0], Fault("interrupt", "wait", nth), *losses[1:]),
    )
    verdict = run(schedule)
    assert (verdict.broken, verdict.num_happened) == (None, 4)


@pytest.mark.parametrize(("seed", "point"), [(4, "taking"), (13, "taken")])
def test_what_those_measured_who_left_is_counted_once_where_the_next_group_is_formed_twice(
    seed: int, point: str
) -> None:
    """Rank 0 takes its place in the first group too late for the driver, which does not hear that it counted it."""
    faults = Fault("drain", "step", 5), Fault("slow", "sent", 1, 1), Fault("die", point, 1)
    schedule = Schedule(seed, nodes=(2, 2), num_spares=1, num_samples=40, batch_size=2, ops=(Op("train"),))
    verdict = run(replace(schedule, faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 3)


def test_a_worker_that_froze_is_ended_where_a_spare_takes_its_place() -> None:
    losses = Fault("die", "built", 4, 6), Fault("freeze", "loaded", 3, 6)
    schedule = Schedule(5000390, num_workers=4, nodes=(7,), num_spares=2, num_samples=8, heartbeat_s=3.0)
    verdict = run(replace(schedule, ops=(Op("load", 95),), faults=losses))
    assert (verdict.broken, verdict.num_happened) == (None, 2)


def test_a_rank_that_hangs_in_user_code_is_replaced_and_that_costs_a_retry() -> None:
    schedule = Schedule(1, num_workers=3, nodes=(4,), num_samples=40, ops=(Op("train", None, 1),))
    once = replace(schedule, faults=(Fault("slow", "step", 10),))
    twice = replace(schedule, faults=(*once.faults, Fault("slow", "step", 25)))
    verdicts = run(once), run(twice)
    assert [(verdict.broken, verdict.num_happened) for verdict in verdicts] == [(None, 1), (None, 2)]
    assert ["RAISED WorkersLostError" in "\n".join(verdict.log) for verdict in verdicts] == [False, True]


def test_a_shutdown_from_another_thread_does_not_wait_for_a_rank_that_hangs() -> None:
    faults = Fault("slow", "step", 10), Fault("stop", "wait", 200)
    verdict = run(Schedule(1, num_workers=3, nodes=(4,), num_samples=40, ops=(Op("train"),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 2)
    assert any("RAISED TrainerShutdownError" in line for line in verdict.log)


def test_a_shutdown_from_another_thread_does_not_ask_the_workers_that_it_ends_for_their_state() -> None:
    ops = Op("take_over"), Op("steps", 4), Op("take_over"), Op("look", 93)
    faults = Fault("die but one", "join", 2, 1), Fault("stop", "wait", 129, 3)
    sizes: Any = {"num_workers": 4, "nodes": (4,), "num_samples": 8, "batch_size": 2}
    schedule = Schedule(9015799, **sizes, heartbeat_s=3.0, late_s=2.5, ops=ops, faults=faults)
    verdict = run(schedule)
    assert (verdict.broken, verdict.num_happened) == (None, 2)
    assert any("TABLE Running Interrupted -> Finished" in line for line in verdict.log)


def test_a_shutdown_from_another_thread_does_not_wait_for_a_worker_that_is_still_starting() -> None:
    """Survivors of a loss wait for it, as long as it loads."""
    losses = Fault("lose node", "answer", 1), Fault("drain", "merge", 1, 3)
    faults = Fault("load long", "warm up", 1, 3), *losses, Fault("stop", "wait", 45, 1)
    train = Op("train", 89)
    verdict = run(Schedule(237, nodes=(2, 2), num_samples=8, batch_size=6, late_s=0.4, ops=(train,), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 3), "ended before it could load"
    assert any("RAISED TrainerShutdownError" in line for line in verdict.log)


def test_a_worker_that_dies_while_it_starts_is_replaced_beside_those_that_are_ready() -> None:
    faults = tuple(Fault("die", "prepare", nth) for nth in (1, 2, 5))
    with quiet():
        simulation = Simulation(Schedule(1, 3, min_workers=3, nodes=(3,), ops=(Op("train"),), faults=faults))
        verdict = simulation.run()
    assert (verdict.broken, verdict.num_happened, len(simulation.cluster.processes)) == (None, 3, 3 + 3)


@pytest.mark.parametrize(("num_deaths", "is_started"), [(4 + 3 - 1, True), (4 + 3, False)])
def test_workers_that_always_die_while_they_start_are_not_started_without_end(
    num_deaths: int, is_started: bool
) -> None:
    """There are four attempts, and three replacements for a worker."""
    faults = tuple(Fault("die", "prepare", nth) for nth in range(1, num_deaths + 1))
    verdict = run(Schedule(1, num_workers=1, nodes=(1,), ops=(Op("train"),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, num_deaths)
    assert any("allowed retries are used up" in line for line in verdict.log) != is_started


@pytest.mark.parametrize("point", ["open", "built", "called"])
def test_where_all_die_while_they_start_those_in_their_place_go_on(point: str) -> None:
    """The replicas of the first start are made, and after a loss of all restored, in workers that replace dead ones."""
    deaths = Fault("die with another", point, 1), Fault("die with another", "step", 3), Fault("die", point, 4)
    verdict = run(Schedule(1, num_workers=2, nodes=(2,), ops=(Op("train"), Op("train")), faults=deaths))
    assert verdict.broken is None
    assert not any("RAISED" in line for line in verdict.log)


def test_a_spare_that_is_still_starting_on_a_node_that_goes_away_does_not_step_in() -> None:
    faults = Fault("drain", "prepare", 2, 5), Fault("load long", "prepare", 1, 3)
    schedule = Schedule(
        1024175, num_workers=3, nodes=(1, 3), num_spares=1, num_samples=8, batch_size=6, heartbeat_s=10.0
    )
    verdict = run(replace(schedule, ops=(Op("train", 20),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 2)
    assert any("left: 3 -> 1 workers" in line for line in verdict.log)


@pytest.mark.parametrize(
    ("fault", "num_processes"), [(Fault("die", "step", 14), 4), (Fault("die", "validate", 3), 4)], ids=["rank", "spare"]
)
def test_a_validation_is_run_again_where_its_spare_steps_in_or_dies(fault: Fault, num_processes: int) -> None:
    ops = Op("steps", 4), Op("validate", 40), Op("train")
    with quiet():
        simulation = Simulation(Schedule(1, num_spares=1, nodes=(3,), num_samples=40, ops=ops, faults=(fault,)))
        verdict = simulation.run()
    assert (verdict.broken, verdict.num_happened, len(simulation.cluster.processes)) == (None, 1, num_processes)
    assert any("VALIDATED  pass 0 at 16 after 4 steps" in line for line in verdict.log)
    num_continued = sum("EVENT lost rank" in line and "with 2 workers" in line for line in verdict.log)
    assert num_continued == (fault.point == "step")


@pytest.mark.parametrize("regroups", [True, False])
def test_an_exception_on_another_rank_is_raised_before_the_driver_loses_patience(regroups: bool) -> None:
    """The rank in the driver waits for the other one, and no one tells it that this one is gone."""
    schedule = Schedule(
        1,
        nodes=(4,),
        num_samples=40,
        regroups=regroups,
        continues=regroups,
        tells=False,
        use_local=True,
        ops=(Op("train"),),
        faults=(Fault("raise", "step", 6),),
    )
    [raised] = [line for line in run(schedule).log if "RAISED WorkerError" in line]
    assert "on rank 1" in raised
    assert float(raised.split()[0]) < COLLECTIVE_TIMEOUT_S / 2


@pytest.mark.parametrize("nth", range(1, 20))
def test_ctrl_c_while_a_snapshot_is_awaited_leaves_nothing_behind(nth: int) -> None:
    ops, faults = (Op("landed"), Op("kill")), (Fault("interrupt", "wait", nth),)
    with quiet():
        assert run(Schedule(42436, nodes=(4,), is_large=True, ops=ops, faults=faults)).broken is None


def test_a_replica_that_breaks_its_group_calls_later_is_a_reason_for_the_loss() -> None:
    faults = Fault("drain", "stepped", 40, 5), Fault("poison", "merge", 4, 3)
    train = Op("train", None, 6), Op("train"), Op("train", None, 1), Op("steps", 6)
    schedule = Schedule(1006031, num_workers=3, nodes=(2, 1, 1), num_samples=16, snapshot_every=1, heartbeat_s=10.0)
    verdict = run(replace(schedule, late_s=1.2, ops=train, faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 2)
    assert any("no step was completed since" in line for line in verdict.log)


def test_a_worker_that_died_with_its_node_while_it_loaded_does_not_load_any_more() -> None:
    faults = Fault("load long", "prepare", 5, 1), Fault("drain", "warm up", 1), Fault("die", "joined", 2, 1)
    schedule = Schedule(2522029, num_workers=3, nodes=(4,), num_spares=1, num_samples=8, batch_size=6)
    verdict = run(replace(schedule, ops=(Op("steps", 5),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 3)


def test_a_rank_that_answered_counts_as_a_survivor_however_long_another_one_is_waited_for() -> None:
    faults = Fault("slow", "half", 6, 2), Fault("stall", "wait", 30, 2)
    schedule = Schedule(4001590, num_workers=3, nodes=(2, 2), num_samples=8, batch_size=6, has_halves=True, tells=False)
    verdict = run(replace(schedule, heartbeat_s=3.0, late_s=0.4, ops=(Op("train", None, 1),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 2)


@pytest.mark.parametrize("seed", [40, 54])
def test_what_a_rank_measured_that_was_ended_and_is_still_frozen_is_lost_with_it(seed: int) -> None:
    faults = Fault("stall", "step", 7, 2), Fault("lose connection", "merge", 3, 1)
    verdict = run(Schedule(seed, num_workers=2, nodes=(3,), num_samples=40, ops=(Op("train"),), faults=faults))
    assert (verdict.broken, verdict.num_happened) == (None, 2)


def test_the_report_of_a_broken_schedule_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(
        1, num_spares=1, ops=(Op("look"), Op("note", 1), Op("train")), faults=(Fault("die", "note", 1),)
    )
    monkeypatch.setattr(RetryBudget, "pay_for_restart", lambda budget: None)
    verdict = run(schedule)
    assert verdict.broken is not None
    report = told(None, schedule, verdict)
    replay = report.partition("The smallest schedule found: python -m tests.simulator '")[2].partition("'\n")[0]
    assert run(Schedule.from_json(replay)).broken is not None
    assert json.loads(replay)["faults"]


class KeptInMemory(outliving.Keeper):
    """Keeps the group as it is: the next process of a simulated host is another thread."""

    def __init__(self, group: outliving.KeptGroup | None = None) -> None:
        super().__init__("a host", lambda _: None)
        self.newest = group

    def keep_group(self, group: outliving.KeptGroup) -> None:
        self.newest = group

    def find(self) -> outliving.KeptGroup | None:
        return self.newest


@pytest.mark.parametrize("still_leaves", [True, False])
@pytest.mark.parametrize("num_sent", range(1, 6))
def test_a_detached_trainer_that_is_killed_while_it_stops_its_ranks_leaves_none_waiting(
    num_sent: int, still_leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proposes the stop to three ranks, and tells each that all agree: so many of these messages it sends."""
    simulation = Simulation(Schedule(num_sent, num_workers=3, nodes=(3, 3), num_samples=400, batch_size=2))
    node = simulation.cluster.nodes["n0"]
    kernel, sent, submit = simulation.kernel, list[Any](), SimWorker.submit

    def send(worker: SimWorker, method: Any, *args: Any, **kwargs: Any) -> Any:
        if args and getattr(args[0], "args", ()) in (("propose_hold",), ("resolve_hold",)):
            sent.append(args)
            if len(sent) == num_sent + 1:
                kernel.block(lambda: False)
        return submit(worker, method, *args, **kwargs)

    def train() -> Any:
        call = Call(walk, lambda worlds: [(1, 50)] * len(worlds), changes_state=True, keeps_alike=True, resume=walk_on)
        simulation.controller.start()
        return simulation.controller.run(call, budget=RetryBudget(0))

    monkeypatch.setattr(SimWorker, "submit", send)
    monkeypatch.setattr(outliving, "_KEEPER", kept := KeptInMemory())
    with quiet():
        kernel.after(1.0, lambda: setattr(node, "is_leaving", True))
        kernel.run_thread(train)
        assert kernel.block(lambda: len(sent) > num_sent, 60.0)
        monkeypatch.setattr(outliving, "_KEEPER", KeptInMemory(kept.newest))
        node.is_leaving = still_leaves
        simulation.controller = simulation._controller()
        answers = train()
        kernel.end_threads()
    assert {answer.state.steps for answer in answers} == {50}
    assert {event.kind for event in simulation.controller.history.events} == ({"left"} if still_leaves else set())


def test_a_call_pays_for_workers_that_die_in_the_snapshot_before_its_group_grows() -> None:
    send = Fault("die", "send", 1, 1), Fault("die", "send", 2, 5)
    late = Fault("lose node", "on its way", 1, 7), Fault("freeze", "called", 9, 1)
    settings: Any = {"continues": False, "regroups": False, "renews": True, "is_large": True, "heartbeat_s": 5.0}
    schedule = Schedule(3693, num_workers=4, min_workers=3, nodes=(5,), num_samples=8, late_s=2.5, **settings)
    start = Fault("die but one", "join", 2, 4)
    verdict = run(replace(schedule, batch_size=4, ops=(Op("train", 52, 3),), faults=(start, *send, *late)))
    assert verdict.broken is None
    assert any("4 instead of 3 workers" in line for line in verdict.log)


def test_ctrl_c_in_a_group_that_is_half_formed_leaves_no_driver_that_takes_a_share_of_the_samples() -> None:
    kinds = ("lose", 3), ("note", 53), ("lose", 4), ("look", 53), ("lose", 5), ("look", 85), ("steps", 3)
    ops = tuple(Op(kind, argument) for kind, argument in kinds)
    settings: Any = {
        "num_spares": 1,
        "joins_late": True,
        "resize_interval_s": "auto",
        "tells": False,
        "use_local": True,
    }
    schedule = Schedule(100677, nodes=(3,), num_samples=40, batch_size=4, heartbeat_s=5.0, copy_s=0.0005, **settings)
    verdict = run(replace(schedule, ops=ops, faults=(Fault("interrupt", "wait", 23, 2),), snapshot_every_s="auto"))
    assert verdict.broken is None
    assert any("TABLE Regrouping Interrupted -> Finished" in line for line in verdict.log)
