"""Replicas made anew in the processes that they have, in a scripted group."""

from __future__ import annotations

from collections import deque

import pytest

from raysgd.engine.controller import ElasticController
from raysgd.engine.policies import ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.exceptions import WorkerError
from tests.helpers.fakes import CountingReplica, FakeClock, FakeCluster, Lost, NullConnection, Raised, add, read


def begin_at(replica: CountingReplica, total: float) -> str:
    """Stands for a set-up with other settings."""
    replica.total, replica.num_own_calls = total, 0
    return f"new rank {replica.world.rank}"


class Trainer:
    """A trainer whose workers begin with a number, which it can change."""

    def __init__(self, *, is_large: bool = False) -> None:
        self.begins_at = 0.0
        self.is_large = is_large
        self.cluster = FakeCluster()
        self.controller = ElasticController(
            GroupSpec(NullConnection(), self._make_replica),
            ScalingPolicy(max_workers=3),
            make_group=self.cluster.make_group,
            view=self.cluster.view,
            clock=FakeClock().as_clock(),
        )
        self.controller.start()

    def _make_replica(self, world: object) -> CountingReplica:
        replica = CountingReplica(world, self.is_large)  # type: ignore[arg-type]
        replica.total = self.begins_at
        return replica

    def add(self, amount: float) -> list[float]:
        return self.controller.run(Call(add, lambda worlds: [(amount,)] * len(worlds), changes_state=True))

    def totals(self) -> list[float]:
        return [total for total, _ in self.controller.run(Call(read))]

    def renew(self, begins_at: float) -> None:
        self.begins_at = begins_at
        self.controller.renew(begin_at, begins_at)


def test_all_begin_again_in_the_same_processes() -> None:
    trainer = Trainer()
    trainer.add(5)
    trainer.renew(100)
    assert trainer.totals() == [100] * 3
    assert trainer.cluster.sizes == [3]
    assert trainer.controller.facts == ["new rank 0", "new rank 1", "new rank 2"]
    assert trainer.add(1) == [101] * 3


@pytest.mark.parametrize("is_large", [False, True])
def test_what_was_trained_before_never_comes_back(is_large: bool) -> None:
    trainer = Trainer(is_large=is_large)
    trainer.add(5)
    trainer.renew(100)
    trainer.cluster.calls = deque([Lost((1,))])
    assert trainer.add(1) == [101] * 3
    assert trainer.cluster.sizes == [3, 3]


def test_a_worker_that_is_lost_meanwhile_is_replaced_by_one_that_is_as_new() -> None:
    trainer = Trainer()
    trainer.add(5)
    trainer.cluster.calls = deque([Lost((2,))])
    trainer.renew(100)
    assert trainer.totals() == [100] * 3
    assert trainer.cluster.sizes == [3, 3]


def test_no_copy_is_taken_until_there_is_something_to_keep() -> None:
    trainer = Trainer()
    trainer.renew(100)
    assert not trainer.controller.snapshots.has_any
    assert trainer.controller.landed_snapshot() is None
    assert trainer.controller.snapshot().shared_state == 100
    trainer.add(1)
    landed = trainer.controller.landed_snapshot()
    assert landed.shared_state == 101


def test_where_it_fails_nothing_half_new_is_left() -> None:
    trainer = Trainer()
    trainer.add(5)
    trainer.cluster.calls = deque([Raised(1, ValueError("no such layer"))])
    with pytest.raises(WorkerError, match="no such layer"):
        trainer.renew(100)
    assert trainer.controller.group is None
    assert trainer.totals() == [100] * 3, "by the settings of the last attempt"
    trainer.controller.kill_group()
    trainer.renew(200)
    assert trainer.totals() == [200] * 3


def test_other_replicas_need_other_processes() -> None:
    trainer = Trainer()
    trainer.add(5)
    trainer.begins_at = 100
    trainer.controller.restart()
    assert trainer.totals() == [100] * 3
    assert trainer.cluster.sizes == [3, 3]
