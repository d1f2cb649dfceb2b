"""What holds for every group whose workers survive the loss of others, whether the driver is one of them or not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.cluster.resources import Resources
from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine import standby
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.policies import choose_source, takers
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import GroupReport, StateHandover, World
from raysgd.core.engine.worker import WorkerProcess
from raysgd.exceptions import ReservationTimeoutError
from tests.helpers.failure_plan import FailurePlan
from tests.helpers.fakes import NullConnection, SteppingReplica
from tests.helpers.processes import is_alive, is_stopped, wait_until

pytestmark = pytest.mark.integration
PATIENCE_S = 120.0
NUM_STEPS = 6


class JoinedReplica(SteppingReplica):
    """A replica whose state is handed over through its process group."""

    def regroup(self, world: World, handover: StateHandover) -> str:
        import torch

        state = torch.tensor([self.total, float(self.num_done or 0)])
        torch.distributed.broadcast(state, handover.source)
        if world.rank in handover.takers:
            self.total, self.num_done = state[0].item(), int(state[1])
        return super().regroup(world, handover)


def step_together(replica: JoinedReplica, plan: FailurePlan) -> float:
    """Steps that wait for all ranks, from wherever the replica is."""
    import torch

    replica.num_done = replica.num_done or 0
    while replica.num_done < NUM_STEPS:
        plan.check(replica.world.rank, replica.num_done)
        one = torch.ones(1)
        torch.distributed.all_reduce(one)
        replica.total += one.item() / replica.world.size
        replica.num_done += 1
    return replica.total


def where(replica: SteppingReplica) -> tuple[int, int, int]:
    return replica.world.rank, replica.world.size, os.getpid()


def warmed_up(replica: SteppingReplica) -> bool:
    return replica.is_primed


@dataclass
class Rig:
    """A group of three, and how to mend it by hand."""

    group: WorkerGroup
    plan: FailurePlan

    def step(self) -> GroupReport:
        return self.on_all(step_together, self.plan)

    def on_all(self, function: Callable[..., Any], *args: Any) -> GroupReport:
        return self.group.on_replica(function, {rank: args for rank in range(len(self.group))})

    def values(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.on_all(function, *args).values

    def pids(self) -> list[int]:
        return [info.pid for info in self.group.infos]

    def mend(self, survivors: list[int], num_new: int) -> GroupReport:
        """Lets the survivors go on with so many new ones."""
        report = self.group.tear_down(survivors)
        assert report.ok, report
        progress_reports = report.values
        source = choose_source(progress_reports)
        assert source is not None
        self.group.remove_workers([rank for rank in range(len(self.group)) if rank not in survivors])
        assert self.group.standby.start_more(num_new, 3) == num_new
        joining = self.group.standby.take_ready(num_new, PATIENCE_S)
        assert len(joining) == num_new
        new_ranks = range(len(survivors), len(survivors) + num_new)
        handover = StateHandover(source, (*takers(progress_reports, source), *new_ranks))
        return self.group.regroup(survivors, joining, handover)


Make = Callable[..., Rig]


@pytest.fixture
def make(ray_cluster: None, tmp_path: Path) -> Iterator[Make]:
    """Makes groups, of three as a rule, that are ended after the test, whatever became of them."""
    groups: list[WorkerGroup] = []

    def make(
        plan: Callable[[FailurePlan], FailurePlan] = lambda plan: plan, num_workers: int = 3, **options: Any
    ) -> Rig:
        values: dict[str, Any] = {
            "connection": TorchConnection(timeout_s=60),
            "make_replica": JoinedReplica,
            "resources": Resources(num_cpus=0.5),
            "regroups": True,
            **options,
        }
        group = WorkerGroup(GroupSpec(**values), num_workers)
        groups.append(group)
        assert group.start().ok
        return Rig(group, plan(FailurePlan(tmp_path)))

    yield make
    for group in groups:
        group.kill(10)


# -------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize(("use_local", "lost", "num_new"), [(False, 0, 1), (True, 2, 0)])
def test_survivors_of_a_killed_rank_go_on_where_they_were(make: Make, use_local: bool, lost: int, num_new: int) -> None:
    rig = make(lambda plan: plan.die(rank=lost, step=3), use_local=use_local)
    before = rig.pids()
    report = rig.step()
    assert not report.ok
    survivors = rig.group.settle(report)
    assert survivors == [rank for rank in range(3) if rank != lost]
    assert rig.mend(survivors, num_new).ok
    size = 2 + num_new
    assert (len(rig.group), len(rig.group.worlds), len(rig.group.infos)) == (size, size, size)
    assert rig.pids()[:2] == [before[rank] for rank in survivors], "the same processes"
    assert rig.values(where) == [(rank, size, pid) for rank, pid in enumerate(rig.pids())]
    assert rig.values(warmed_up) == [False, False, *[True] * num_new]
    assert rig.values(step_together, rig.plan) == [NUM_STEPS] * size, "no step is lost and none is done twice"
    wait_until(lambda: not is_alive(before[lost]))


def check(replica: SteppingReplica, plan: FailurePlan) -> None:
    plan.check(replica.world.rank)


def set_done(num_done: int, replica: SteppingReplica) -> None:
    replica.num_done = num_done


def test_ranks_answer_beside_their_work_without_those_that_are_late_and_say_how_far_they_are(make: Make) -> None:
    rig = make(connection=NullConnection(), make_replica=SteppingReplica, use_local=True)
    rig.on_all(partial(set_done, 4))
    os.kill(rig.pids()[2], signal.SIGSTOP)
    wait_until(lambda: is_stopped(rig.pids()[2]))
    try:
        in_time = {rank: (rank, 3, rig.pids()[rank]) for rank in (0, 1)}
        assert rig.group.ask_beside(where, ranks=[0, 1], timeout_s=PATIENCE_S) == in_time
        answers = rig.group.ask_beside(where, timeout_s=1.0)
        assert {0} <= set(answers) <= {0, 1}, "on a busy machine rank 1 may be late, too"
        assert set(rig.group.ask_workers(WorkerProcess.stack, ranks=[1], timeout_s=PATIENCE_S)) == {1}
        call = rig.group.submit_beside(2, where)
        platform = Platform()
        assert not platform.outcome(2, call).answered
    finally:
        os.kill(rig.pids()[2], signal.SIGCONT)
    wait_until(lambda: platform.outcome(2, call).answered)
    assert platform.outcome(2, call).value[0] == 2
    progress_reports = rig.group.tear_down([0, 2]).values
    assert [(one.position, one.words) for one in progress_reports] == [(4, "4 steps done")] * 2
    os.kill(rig.pids()[2], signal.SIGSTOP)
    rig.group.kill_rank(2)
    wait_until(lambda: not is_alive(rig.pids()[2]))


# -------------------------------------------------------------------------------------------- those who step in


def ready(rig: Rig, count: int) -> bool:
    return rig.group.standby.num_ready == count


def test_spares_are_primed_take_a_seat_and_give_it_back(make: Make) -> None:
    rig = make(connection=NullConnection(), make_replica=SteppingReplica, num_workers=1, num_spares=1)
    assert rig.group.standby.start_more(5, 2) == 1, "room for one is reserved"
    assert rig.group.standby.start_more(1, 2) == 0
    wait_until(lambda: rig.group.standby.num_coming == 0)  # being asked is enough to see who is ready
    assert rig.group.standby.num_ready == 1
    [spare] = rig.group.standby.take_ready(3)
    assert is_alive(spare.info.pid)
    assert spare.info.pid not in rig.pids()
    rig.group.standby.kill(spare)
    wait_until(lambda: not is_alive(spare.info.pid))
    assert rig.group.standby.start_more(1, 2) == 1


class FreezesLater(SteppingReplica):
    """Stops its process while it is warmed_up, where a file says so."""

    def __init__(self, order: Path, world: World) -> None:
        super().__init__(world)
        self.order = order

    def warm_up(self) -> None:
        if self.order.exists():
            self.order.unlink()
            time.sleep(0.5)  # until it has been polled
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(PATIENCE_S)  # another thread may take the signal, on a busy machine somewhat later
        super().warm_up()


def test_whoever_freezes_while_being_made_ready_is_ended_and_leaves_the_seat(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_LOADING_S", 0.0)
    order = tmp_path / "freeze"
    order.touch()
    freezes = partial(FreezesLater, order)
    rig = make(connection=NullConnection(), make_replica=freezes, num_workers=1, num_spares=1, heartbeat_s=3.0)
    rig.group.standby.start_more(1, 2)
    wait_until(lambda: rig.group.standby.num_coming == 0)
    assert rig.group.standby.num_ready == 0
    assert "did not respond" in caplog.text
    assert rig.group.standby.start_more(1, 2) == 1
    wait_until(lambda: ready(rig, 1))


def test_room_for_more_is_reserved_or_refused_and_then_nothing_is_held(make: Make) -> None:
    rig = make(connection=NullConnection(), make_replica=SteppingReplica, num_workers=1)
    assert rig.group.standby.start_more(1, 2) == 0
    with pytest.raises(ReservationTimeoutError):
        rig.group.slots.reserve(100, 0.2)
    rig.group.slots.reserve(1, PATIENCE_S)
    assert rig.group.standby.start_more(2, 2) == 1
    wait_until(lambda: ready(rig, 1))
    [spare] = rig.group.standby.take_ready(1)
    rig.group.tear_down([0])
    report = rig.group.regroup([0], [spare], StateHandover(0, (1,)))
    assert report.values == [f"rank {rank} of 2" for rank in range(2)]
    rig.group.kill(10)
    wait_until(lambda: not is_alive(spare.info.pid))
