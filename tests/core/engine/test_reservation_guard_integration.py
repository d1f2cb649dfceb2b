"""Tasks and actors that have a trainer and are killed: its workers end with them, and its reservation is given back."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.placement import Reservation, guard
from raysgd.core.engine.policies import ScalingPolicy
from raysgd.core.engine.shared.interface import Call, GroupSpec
from tests.conftest import NUM_CPUS
from tests.helpers.fakes import CountingReplica, NullConnection
from tests.helpers.hygiene import RaySurroundings
from tests.helpers.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

TOO_MUCH = 100.0
FOR_EVER_S = 3600.0


def work(replica: CountingReplica) -> None:
    time.sleep(FOR_EVER_S)


class Host:
    """An actor with a trainer of one worker."""

    def pid(self) -> int:
        return os.getpid()

    def start(self, num_cpus: float = 0.5) -> None:
        spec = GroupSpec(NullConnection(), CountingReplica, Resources(num_cpus=num_cpus), reservation_timeout_s=600.0)
        self.controller = ElasticController(spec, ScalingPolicy(1))
        self.controller.start()

    def train(self) -> None:
        self.controller.run(Call(work), max_retries=3)

    def stop(self) -> None:
        self.controller.stop(force=True)

    def host_of_its_own(self) -> Any:
        return host()


def host(**options: Any) -> Any:
    return ray.remote(num_cpus=0, max_concurrency=4)(Host).options(**options).remote()


@ray.remote(num_cpus=0, max_retries=0)
def start_and_train(told: Any) -> None:
    trainer = Host()
    trainer.start()
    ray.get(told.tell.remote(os.getpid()))
    trainer.train()


@ray.remote(num_cpus=0)
class Board:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def tell(self, value: int) -> None:
        self.known.append(value)

    def all(self) -> list[int]:
        return self.known


def reserved() -> list[str]:
    """The states of the placement groups that there are."""
    return [entry["state"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_nothing_stays_of_trainers_whose_actors_are_killed() -> None:
    before = RaySurroundings.now()
    by_ray, waiting, working, again = host(), host(), host(), host(max_restarts=1)
    outer = host(name="outer", lifetime="detached", namespace="tests")
    inner = ray.get(outer.host_of_its_own.remote())
    ray.get([each.start.remote() for each in (by_ray, working, again, inner)])
    running = [each.train.remote() for each in (working, inner)]
    waiting.start.remote(TOO_MUCH)
    wait_until(lambda: sorted(reserved()) == [*["CREATED"] * 4, "PENDING"])
    ray.kill(by_ray)
    for each in (waiting, working, again, inner):
        kill(ray.get(each.pid.remote()))
    wait_until(lambda: reserved() == [])
    assert ray.get(again.pid.remote()) > 0
    for each in (again, outer):
        ray.kill(each)
    del running
    assert before.leaks() == []


def test_nothing_stays_of_a_trainer_whose_task_is_killed() -> None:
    before, board = RaySurroundings.now(), Board.remote()
    task = start_and_train.remote(board)
    wait_until(lambda: ray.get(board.all.remote()) != [])
    assert reserved() == ["CREATED"]
    kill(ray.get(board.all.remote())[0])
    ray.kill(board)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(task)
    assert before.leaks() == []


def test_the_guard_ends_with_the_reservation() -> None:
    actor = host()
    ray.get(actor.pid.remote())
    before = RaySurroundings.now()
    ray.get(actor.start.remote())
    guards = [leak for leak in before._leaks() if "ReservationGuard" in leak]
    ray.get(actor.stop.remote())
    assert len(guards) == 1
    assert before.leaks() == []
    ray.kill(actor)


def test_a_driver_needs_none() -> None:
    assert guard("raysgd-of-a-driver") is None
    reservation = Reservation(Resources(num_cpus=NUM_CPUS), 1)
    reservation.wait(60)
    reservation.close(60)
