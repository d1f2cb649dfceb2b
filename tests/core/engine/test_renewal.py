"""Replicas made anew in the processes that they have."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.exceptions import WorkerError
from tests.core.engine.trainer import RESTARTS, Befall, Trainer, befalls, die, in_note
from tests.simulator.replica import SimReplica, State


def begin_at(replica: SimReplica, number: int) -> str:
    """Stands for a set-up with other settings."""
    replica.restore(State(noted=(number,)), None)
    return f"new rank {replica.world.rank}"


class Renewed(Trainer):
    """A trainer whose workers begin with a number, which it can change."""

    begins_at: tuple[int, ...] = ()

    def make_replica(self, *args: Any) -> SimReplica:
        replica = super().make_replica(*args)
        replica.state = State(noted=self.begins_at)
        return replica

    def renew(self, number: int, befall: Befall | None = None) -> None:
        self.begins_at = (number,)
        self.expect(befall or {})
        self.controller.renew(begin_at, number)


@pytest.mark.parametrize("is_large", [False, True])
def test_all_begin_again_in_the_same_processes_and_nothing_of_before_comes_back(is_large: bool) -> None:
    trainer = Renewed(is_large=is_large, **RESTARTS).started()
    trainer.note(5)
    trainer.renew(100)
    assert trainer.look() == [(100,)] * 3
    assert trainer.num_started == 3
    assert trainer.controller.facts == ["new rank 0", "new rank 1", "new rank 2"]
    assert trainer.note(1, in_note(die, 1)) == [(100, 1)] * 3
    assert trainer.num_started == 6


def test_a_worker_that_is_lost_meanwhile_is_replaced_by_one_that_is_as_new() -> None:
    trainer = Renewed(**RESTARTS).started()
    trainer.note(5)
    trainer.renew(100, befalls(die, 2, at="called", nth=[1]))
    assert trainer.look() == [(100,)] * 3
    assert trainer.num_started == 6


def test_no_copy_is_taken_until_there_is_something_to_keep() -> None:
    trainer = Renewed(**RESTARTS).started()
    trainer.renew(100)
    assert not trainer.controller.snapshots.has_any
    assert trainer.controller.landed_snapshot() is None
    assert trainer.controller.snapshot().shared_state.noted == (100,)
    trainer.note(1)
    assert trainer.controller.landed_snapshot().shared_state.noted == (100, 1)


def test_where_it_fails_nothing_half_new_is_left() -> None:
    trainer = Renewed(**RESTARTS).started()
    trainer.note(5)
    with pytest.raises(WorkerError, match="no such layer"):
        trainer.renew(100, befalls(ValueError("no such layer"), 1, at="called", nth=[1]))
    assert trainer.controller.group is None
    assert trainer.look() == [(100,)] * 3, "by the settings of the last attempt"
    trainer.controller.kill_group()
    trainer.renew(200)
    assert trainer.look() == [(200,)] * 3


def test_other_replicas_need_other_processes() -> None:
    trainer = Renewed(**RESTARTS).started()
    trainer.note(5)
    trainer.begins_at = (100,)
    trainer.controller.restart()
    assert (trainer.look(), trainer.num_started) == ([(100,)] * 3, 6)
