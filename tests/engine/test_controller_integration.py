"""The whole engine on a real cluster: real processes die, and the state and the numbers must be right afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from raysgd.engine.controller import ElasticController
from raysgd.engine.placement import cluster_view
from raysgd.engine.policies import ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import ClusterView, Resources
from raysgd.exceptions import TrainerShutdownError, WorkersLostError
from tests.conftest import NUM_CPUS
from tests.helpers.failure_plan import FailurePlan
from tests.helpers.fakes import CountingReplica, NullConnection
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.integration
FOR_EVER_S = 120.0


def train(replica: CountingReplica, plan: FailurePlan, step: int) -> tuple[float, int]:
    """Adds the step to the sum, unless the plan has something else in mind first."""
    plan.check(replica.world.rank, step)
    replica.total += step
    replica.num_own_calls += 1
    return replica.total, replica.num_own_calls


def where(replica: CountingReplica) -> int:
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
            "make_replica": partial(CountingReplica, is_large=is_large),
            "reservation_timeout_s": 60.0,
            **spec,
        }
        scaling = scaling or ScalingPolicy(num_workers)
        self.plan = plan
        self.controller = ElasticController(GroupSpec(**values), scaling, view=view)
        self.controller.start()

    def train(self, step: int) -> list[Any]:
        call = Call(train, lambda worlds: [(self.plan, step)] * len(worlds), changes_state=True)
        return self.controller.run(call, max_retries=3)

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


def test_a_large_state_that_was_on_its_way_when_its_worker_died_is_made_again(make: Make, plan: FailurePlan) -> None:
    trainer = make(plan, is_large=True)
    trainer.train(1)
    trainer.train(2)
    os.kill(trainer.pids()[0], signal.SIGKILL)
    assert trainer.controller.snapshot().shared_state == 3
    assert trainer.train(3) == [(6, 3)] * 2


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


def test_after_stopping_there_is_nothing_left_to_use(make: Make, plan: FailurePlan) -> None:
    trainer = make(plan, num_workers=1)
    trainer.train(1)
    trainer.controller.stop()
    trainer.controller.stop(force=True)
    with pytest.raises(TrainerShutdownError):
        trainer.train(2)
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == NUM_CPUS)


def test_a_call_that_another_thread_shuts_down_ends_and_leaves_nothing(
    make: Make, plan: FailurePlan, tmp_path: Path
) -> None:
    trainer = make(plan.hang(rank=0, seconds=FOR_EVER_S, step=1))
    stopping = threading.Timer(0.3, trainer.controller.stop)

    def stop_once_it_hangs() -> None:
        wait_until(lambda: plan.num_fired == 1)
        stopping.start()

    watching = threading.Thread(target=stop_once_it_hangs)
    watching.start()
    with pytest.raises(TrainerShutdownError):
        trainer.train(1)
    watching.join()
    stopping.join()
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == NUM_CPUS)
