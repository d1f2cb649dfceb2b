"""The whole engine on a real cluster: real processes die, and the state and the numbers must be right afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from raysgd.connections.torch import TorchConnection
from raysgd.engine.controller import ElasticController
from raysgd.engine.placement import cluster_view
from raysgd.engine.policies import ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import ClusterView, Resources, World
from raysgd.exceptions import TrainerShutdownError, WorkerError, WorkersLostError
from tests.conftest import NUM_CPUS
from tests.helpers.failure_plan import FailurePlan, InjectedError
from tests.helpers.fakes import CountingReplica, NullConnection
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.integration
FOR_EVER_S = 120.0


class PlannedReplica(CountingReplica):
    """Follows a plan while it is set up (step "set-up") and while it is restored."""

    def __init__(self, plan: FailurePlan, is_large: bool, world: World) -> None:
        super().__init__(world, is_large)
        self.plan = plan

    def setup(self) -> str:
        self.plan.check(self.world.rank, SET_UP)
        return super().setup()

    def restore(self, shared_state: float, own_state: int | None) -> None:
        self.plan.check(self.world.rank, RESTORE)
        super().restore(shared_state, own_state)


SET_UP, RESTORE = -1, -2


def train(replica: PlannedReplica, step: int) -> tuple[float, int]:
    """Adds the step to the sum, unless the plan has something else in mind first."""
    replica.plan.check(replica.world.rank, step)
    replica.total += step
    replica.num_own_calls += 1
    return replica.total, replica.num_own_calls


def train_together(replica: PlannedReplica, step: int) -> tuple[float, int]:
    """The same with a collective that waits for all ranks."""
    import torch

    replica.plan.check(replica.world.rank, step)
    torch.distributed.all_reduce(torch.zeros(1))
    return train(replica, step)


def where(replica: PlannedReplica) -> int:
    return os.getpid()


class Trainer:
    """A controller, and what a test does with it."""

    def __init__(
        self,
        plan: FailurePlan,
        num_workers: int = 2,
        is_large: bool = False,
        scaling: ScalingPolicy | None = None,
        view: Callable[[], ClusterView] = cluster_view,
        **spec: Any,
    ) -> None:
        values: dict[str, Any] = {
            "connection": NullConnection(),
            "make_replica": partial(PlannedReplica, plan, is_large),
            "reservation_timeout_s": 60.0,
            **spec,
        }
        scaling = scaling or ScalingPolicy(num_workers)
        self.controller = ElasticController(GroupSpec(**values), scaling, view=view)
        self.controller.start()

    def train(self, step: int, max_retries: int = 3, function: Any = train, on_wait: Any = None) -> list[Any]:
        call = Call(function, lambda worlds: [(step,)] * len(worlds), changes_state=True, on_wait=on_wait)
        return self.controller.run(call, max_retries=max_retries)

    def pids(self) -> list[int]:
        return self.controller.run(Call(where), max_retries=3)


Make = Callable[..., Trainer]


@pytest.fixture
def make(ray_cluster: None) -> Iterator[Make]:
    """Makes trainers that are stopped after the test."""
    trainers: list[Trainer] = []

    def make(*args: Any, **options: Any) -> Trainer:
        trainers.append(Trainer(*args, **options))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.controller.stop(force=True)


@pytest.fixture
def plan(tmp_path: Path) -> FailurePlan:
    return FailurePlan(tmp_path)


# -------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("is_large", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_each_rank_may_die_in_the_middle_of_a_call_and_all_at_once(
    make: Make, plan: FailurePlan, is_large: bool
) -> None:
    plan = plan.die(rank=0, step=2).die(rank=1, step=3).die_together(num_ranks=2, step=4)
    trainer = make(plan, is_large=is_large)
    results = [trainer.train(step) for step in (1, 2, 3, 4, 5)]
    assert results == [[(total, calls)] * 2 for calls, total in enumerate((1, 3, 6, 10, 15), start=1)]
    assert trainer.controller.history.num_failures == 3
    assert plan.num_fired == 4


def test_a_worker_may_die_while_it_starts_while_it_is_restored_and_when_it_starts_again(
    make: Make, plan: FailurePlan
) -> None:
    plan = plan.die(rank=1, step=SET_UP).die(rank=0, step=2).die(rank=1, step=RESTORE)
    trainer = make(plan)
    assert trainer.train(1) == [(1, 1)] * 2
    assert trainer.train(2, max_retries=1) == [(3, 2)] * 2
    assert plan.num_fired == 3


def test_a_large_state_that_was_on_its_way_when_its_worker_died_is_made_again(make: Make, plan: FailurePlan) -> None:
    trainer = make(plan, is_large=True)
    trainer.train(1)
    trainer.train(2)
    os.kill(trainer.pids()[0], signal.SIGKILL)
    assert trainer.controller.snapshot().shared_state == 3
    assert trainer.train(3) == [(6, 3)] * 2


@pytest.mark.parametrize(("use_local", "lost"), [(False, 0), (True, 1)])
def test_in_a_real_process_group_a_death_is_told_from_the_errors_that_follow(
    make: Make, plan: FailurePlan, use_local: bool, lost: int
) -> None:
    trainer = make(plan.die(rank=lost, step=2), use_local=use_local, connection=TorchConnection(timeout_s=60))
    for step, total in ((1, 1), (2, 3), (3, 6)):
        assert trainer.train(step, max_retries=1, function=train_together) == [(total, step)] * 2
    assert trainer.controller.history.num_failures == 1
    if use_local:
        assert trainer.controller.ensure_group().local_replica.total == 6


# -------------------------------------------------------------------------------------------- exceptions


def test_an_exception_ends_the_wait_of_a_rank_in_a_collective_and_comes_as_its_own_class(
    make: Make, plan: FailurePlan
) -> None:
    trainer = make(plan.fail(rank=1, step=2), connection=TorchConnection(timeout_s=FOR_EVER_S))
    trainer.train(1, function=train_together)
    pids = trainer.pids()
    with pytest.raises(InjectedError) as caught:
        trainer.train(2, function=train_together)
    assert isinstance(caught.value, WorkerError)
    [fault] = caught.value.faults
    assert (fault.rank, fault.node) == (1, ray.util.get_node_ip_address())
    assert str(caught.value).startswith("InjectedError: injected at step 2\n  raised at ")
    assert "failure_plan.py" in fault.location
    assert trainer.controller.history.num_failures == 0
    assert trainer.train(3, max_retries=0, function=train_together) == [(4, 2)] * 2
    assert not set(trainer.pids()) & set(pids)


@pytest.mark.usefixtures("patient")
def test_an_exception_on_every_rank_comes_once_and_the_workers_go_on(make: Make, plan: FailurePlan) -> None:
    trainer = make(plan.raise_(rank=None, error=KeyError("loss"), step=2, times=2))
    pids = trainer.pids()
    with pytest.raises(KeyError) as caught:
        trainer.train(2)
    assert str(caught.value).count("KeyError: 'loss'\n  raised at") == 1
    assert "on ranks 0, 1, node" in str(caught.value)
    assert trainer.train(3) == [(3, 1)] * 2
    assert trainer.pids() == pids


def test_ctrl_c_ends_the_workers_and_the_next_call_starts_from_the_last_state(make: Make, plan: FailurePlan) -> None:
    trainer = make(plan.hang(rank=0, seconds=FOR_EVER_S, step=2))
    trainer.train(1)
    pids = trainer.pids()

    def press_ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.train(2, on_wait=press_ctrl_c)
    assert trainer.train(3) == [(4, 2)] * 2
    assert not set(trainer.pids()) & set(pids)


# -------------------------------------------------------------------------------------------- sizes


class Rival:
    """Somebody who takes a CPU as soon as the workers of a trainer are gone."""

    def __init__(self) -> None:
        self.group: Any = None
        self.is_waiting = False

    def view(self) -> ClusterView:
        """The cluster, as a trainer looks at it that has just given its resources back."""
        if self.is_waiting:
            self.is_waiting = False
            self.group = placement_group([{"CPU": 1}], name="somebody-else")
            assert self.group.wait(120)
            wait_until(lambda: cluster_view().nodes[0].available.get("CPU") == NUM_CPUS - 1)
        return cluster_view()

    def leave(self) -> None:
        """Gives the CPU back, for which a trainer may have waited."""
        if self.group is not None:
            remove_placement_group(self.group)
        self.group = None


@pytest.fixture
def rival() -> Iterator[Rival]:
    rival = Rival()
    yield rival
    if rival.group is not None:
        remove_placement_group(rival.group)


def test_the_group_shrinks_with_the_room_and_grows_back_without_a_retry(
    make: Make, plan: FailurePlan, rival: Rival
) -> None:
    trainer = make(plan.die(rank=1, step=2), resources=Resources(num_cpus=2), view=rival.view)
    trainer.train(1)
    rival.is_waiting = True
    assert trainer.train(2) == [(3, 2)]
    assert trainer.controller.num_workers == 1
    assert trainer.train(3, max_retries=0) == [(6, 3)]
    rival.leave()
    wait_until(lambda: [holder.state for holder in cluster_view().holders] == ["CREATED"] * 2)  # one was asked for
    assert trainer.train(4, max_retries=0) == [(10, 4), (10, 1)]  # nobody had kept what was the second rank's own
    assert trainer.controller.num_workers == 2
    assert trainer.controller.history.num_failures == 1


def test_when_no_room_is_left_the_message_says_who_has_it(make: Make, plan: FailurePlan, rival: Rival) -> None:
    scaling = ScalingPolicy(1, num_attempts=2, first_delay_s=0.1)
    need = Resources(num_cpus=NUM_CPUS)
    trainer = make(plan.die(rank=0, step=2), resources=need, scaling=scaling, view=rival.view)
    trainer.train(1)
    rival.is_waiting = True
    with pytest.raises(WorkersLostError) as caught:
        trainer.train(2)
    assert "held by placement group somebody-else (CREATED):  1 x {'CPU': 1.0}" in str(caught.value)
    assert f"requested:  1 x {{'CPU': {NUM_CPUS}.0}}" in str(caught.value)
    assert trainer.controller.snapshot().shared_state == 1
    rival.leave()
    wait_until(lambda: cluster_view().nodes[0].available.get("CPU") == NUM_CPUS)
    assert trainer.train(3) == [(4, 2)]


# -------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("force", [False, True])
def test_after_stopping_there_is_nothing_left_to_use(make: Make, plan: FailurePlan, force: bool) -> None:
    trainer = make(plan, num_workers=1)
    trainer.train(1)
    trainer.controller.stop(force)
    trainer.controller.stop(not force)
    with pytest.raises(TrainerShutdownError):
        trainer.train(2)
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == NUM_CPUS)


def hang_once_all_have_been_here(folder: Path, num_times: int) -> None:
    (folder / str(os.getpid())).touch()
    if len(list(folder.iterdir())) > num_times:
        time.sleep(FOR_EVER_S)


@pytest.mark.parametrize("moment", ["in the call", "while new workers start"])
def test_a_call_that_another_thread_shuts_down_ends_and_leaves_nothing(
    make: Make, plan: FailurePlan, tmp_path: Path, moment: str
) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    is_starting = moment == "while new workers start"
    hook = partial(hang_once_all_have_been_here, folder, 2)
    plan = plan.die(rank=1, step=1) if is_starting else plan.hang(rank=0, seconds=FOR_EVER_S, step=1)
    trainer = make(plan, initialization_hook=hook)
    num_seen = 3 if is_starting else 2
    stopping = threading.Timer(0.3, trainer.controller.stop)

    def stop_once_it_hangs() -> None:
        wait_until(lambda: len(list(folder.iterdir())) >= num_seen)
        stopping.start()

    watching = threading.Thread(target=stop_once_it_hangs)
    watching.start()
    with pytest.raises(TrainerShutdownError):
        trainer.train(1)
    watching.join()
    stopping.join()
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == NUM_CPUS)
