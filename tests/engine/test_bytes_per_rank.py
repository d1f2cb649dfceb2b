"""What the driver sends to each rank when a state is restored: as much to one of many as to one of a few.

The group is the real one, and packs what it sends; its workers are light, and count what comes.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from raysgd.driver.keeping import load_into_all
from raysgd.engine.controller import ElasticController
from raysgd.engine.group import WorkerGroup
from raysgd.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import GroupReport, Outcome, Rendezvous, StateHandover, WorkerInfo, World
from raysgd.engine.snapshots import Snapshot
from raysgd.engine.transfers import SharedValue
from raysgd.engine.worker import WorkerAnswer
from tests.helpers.fakes import WORDS, CountingReplica, FakeClock, FakeCluster, NullConnection

OWN_BYTES = 10_000  # of the random states of a rank
SHARED_BYTES = 10**6
FEW, MANY = 4, 300


class LightWorker:
    """A worker that only counts."""

    is_local = False

    def __init__(self) -> None:
        self.num_bytes = 0

    def submit(self, method: str, *args: Any) -> str:
        self.num_bytes = len(pickle.dumps(args))
        return method


class LightGroup(WorkerGroup):
    """A group of such workers, all of which answer."""

    def start(self, reservation_timeout_s: float | None = None, min_workers: int | None = None) -> GroupReport:
        infos = [WorkerInfo(f"node {rank // 8}", "10.0.0.1", rank) for rank in range(self.num_workers)]
        self.give_ranks([LightWorker() for _ in infos], infos)  # type: ignore[misc]
        return self._gather(dict.fromkeys(range(self.num_workers)))

    def store(self, value: Any) -> SharedValue:
        return SharedValue(value, "a reference")

    def kill(self, timeout_s: float = 5.0) -> None: ...

    def _gather(self, calls: Any, on_wait: Any = None) -> GroupReport:
        return GroupReport(tuple(Outcome(rank, WorkerAnswer(None)) for rank in calls))

    def _connect(self, join: Callable[[Rendezvous], Any], on_wait: Any = None) -> GroupReport:
        addresses = tuple(("10.0.0.1", 40_000) for _ in self.workers)
        return self._gather(join(Rendezvous(addresses, False)))

    @property
    def received(self) -> list[int]:
        """The bytes of what came last, by rank."""
        return [worker.num_bytes for worker in self.workers]  # type: ignore[union-attr]


@contextmanager
def controlled(num_workers: int) -> Iterator[ElasticController]:
    spec = GroupSpec(NullConnection(), CountingReplica, regroups=True, captures=False, words=WORDS)
    cluster = FakeCluster(num_workers)
    controller = ElasticController(
        spec, ScalingPolicy(num_workers), FailurePolicy(), LightGroup, cluster.view, FakeClock().as_clock()
    )
    controller.start()
    yield controller
    controller.stop(force=True)


def own_states(num_workers: int) -> tuple[bytes, ...]:
    return tuple(secrets.token_bytes(OWN_BYTES) for _ in range(num_workers))


def received(controller: ElasticController) -> list[int]:
    group = controller.group
    assert isinstance(group, LightGroup)
    return group.received


def rebuilt(num_workers: int, is_inside: bool) -> list[int]:
    """After a loss that left nobody."""
    with controlled(num_workers) as controller:
        progress = own_states(num_workers) if is_inside else None
        snapshot = Snapshot(secrets.token_bytes(SHARED_BYTES), own_states(num_workers), progress)
        controller.snapshots.adopt(snapshot)
        controller.kill_group()
        controller.ensure_group()
        return received(controller)


def loaded(num_workers: int) -> list[int]:
    """From a file, or from another trainer."""
    with controlled(num_workers) as controller:
        state = secrets.token_bytes(SHARED_BYTES)
        load_into_all(controller, CountingReplica.restore, state, own_states(num_workers), is_complete=True)
        return received(controller)


WAYS = {
    "rebuilt between calls": partial(rebuilt, is_inside=False),
    "rebuilt inside a call": partial(rebuilt, is_inside=True),
    "loaded": loaded,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_gets_the_random_states_of_no_other(way: str) -> None:
    few, many = WAYS[way](FEW), WAYS[way](MANY)
    assert len(many) == MANY
    assert OWN_BYTES < min(few) <= max(few) < 4 * OWN_BYTES, "its own, and progress"
    assert max(many) - max(few) < 100


def test_all_ranks_are_sent_the_progress_of_those_that_left_and_no_more() -> None:
    """Whichever is lost next, the others know what those had measured. And addresses, which are as many as ranks."""
    with controlled(MANY) as controller:
        group = controller.group
        assert isinstance(group, LightGroup)
        left = MANY // 2
        group.regroup(range(left), [], StateHandover(0, tuple(range(1, left)), own_states(MANY - left)))
        sent = (MANY - left) * OWN_BYTES
        assert sent < min(group.received) <= max(group.received) < sent + 100 * MANY
        assert World(rank=left - 1, size=left, local_rank=5, local_size=6, node_rank=18, num_nodes=19) in group.worlds
