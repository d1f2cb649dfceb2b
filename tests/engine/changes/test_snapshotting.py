"""Snapshots that are not taken after each call: what is repeated then, and what forces one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raysgd.engine.controller import ElasticController
from raysgd.engine.policies import ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.replica import Capture
from raysgd.exceptions import WorkersLostError
from tests.helpers.fakes import (
    WORDS,
    CountingReplica,
    FakeClock,
    FakeCluster,
    FakeGroup,
    Lost,
    NullConnection,
    Raised,
    add,
    read,
)

ALL = Lost((0, 1, 2))


class Costly(CountingReplica):
    """Its state takes a tenth of a second to copy, on the slowest rank."""

    num_copies = 0

    def capture(self, landed_token: int | None) -> Capture:
        self.num_copies += 1
        return replace(super().capture(landed_token), seconds=0.1 if self.world.rank == 1 else 0.02)


class Trainer:
    """A controller over a fake cluster, whose calls take a second."""

    def __init__(
        self, every_s: Any = "auto", *, is_large: bool = False, transfer_s: float = 0.0, heartbeat_s: float = 30.0
    ) -> None:
        self.clock, self.call_s = FakeClock(), 1.0
        self.cluster = FakeCluster(while_waiting=lambda on_wait: self._pass())
        spec = GroupSpec(
            NullConnection(),
            partial(Costly, is_large=is_large),
            snapshot_every_s=every_s,
            heartbeat_s=heartbeat_s,
            words=WORDS,
        )
        self.controller = ElasticController(
            spec,
            ScalingPolicy(3, draw=lambda: 0.0),
            make_group=self.cluster.make_group,
            view=self.cluster.view,
            clock=self.clock.as_clock(),
        )
        self.controller.start()
        self.controller.snapshots.poll()
        self.cluster.transfer_s = transfer_s

    def _pass(self) -> None:
        self.clock.now_s += self.call_s

    def add(self, amount: float, **options: Any) -> float:
        call = Call(add, lambda worlds: [(amount,)] * len(worlds), changes_state=True, **options)
        return float(self.controller.run(call)[0])

    def lose(self) -> None:
        """Loses all workers in a call that changes nothing."""
        self.cluster.calls = deque([ALL])
        self.controller.run(Call(read))

    @property
    def group(self) -> FakeGroup:
        return self.cluster.groups[-1]

    @property
    def num_copies(self) -> int:
        return int(self.group.replicas[0].num_copies)


def test_copies_take_two_percent_of_the_time() -> None:
    trainer = Trainer()
    for _ in range(21):
        trainer.add(1)
    # One of the start, one behind the first call, whose length is not known, and then one for every 5 s.
    assert trainer.num_copies == 2 + 20 // 5
    assert trainer.group.functions == ["add"] * 21


def test_a_copy_that_takes_longer_than_silence_is_allowed_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    Trainer(heartbeat_s=0.2).add(1)
    assert "shorter than a copy" not in caplog.text
    Trainer(heartbeat_s=0.05).add(1)
    assert "`heartbeat_s=0.05` is shorter than a copy of the state, which took 0.1 s" in caplog.text


def test_the_calls_that_no_snapshot_covers_are_run_again_and_the_history_says_so() -> None:
    trainer = Trainer()
    for amount in (1, 10, 100):
        trainer.add(amount)
    trainer.lose()
    assert trainer.group.functions == ["restore", "add", "add", "read"]
    assert trainer.group.replicas[1].total == 111
    event = trainer.controller.history.events[-1]
    assert event.detail == "from the last snapshot, with 2 completed calls since run again"
    status = trainer.controller.glance({}, None)
    assert status.losses == (event.detail,)
    assert "2 calls (2.0 s) since; every 5 s, because a copy takes 0.1 s" in str(status)


def test_what_was_run_again_is_run_again_after_the_next_loss_too() -> None:
    trainer = Trainer()
    for amount in (1, 10):
        trainer.add(amount)
    for _ in range(2):
        trainer.lose()
    assert trainer.group.replicas[0].total == 11


def test_a_call_that_cannot_be_repeated_forces_a_snapshot() -> None:
    trainer = Trainer()
    trainer.add(1)
    trainer.add(10)
    trainer.add(100, is_repeatable=False)
    assert trainer.controller.snapshots.calls_since == ()
    trainer.lose()
    assert trainer.group.functions == ["restore", "read"]
    assert trainer.group.replicas[0].total == 111


def test_a_snapshot_that_could_not_be_taken_behind_such_a_call_follows_behind_the_next_one() -> None:
    trainer = Trainer(is_large=True, transfer_s=1e9)
    trainer.add(1)  # its copy is on its way
    trainer.add(10, is_repeatable=False)
    assert trainer.num_copies == 2
    trainer.cluster.transfer_s = 0
    trainer.add(100)
    assert trainer.num_copies == 3
    assert trainer.controller.snapshot().shared_state == 111
    assert trainer.controller.snapshots.calls_since == ()


def test_a_call_that_took_much_longer_than_expected_is_followed_by_a_snapshot() -> None:
    trainer = Trainer()
    trainer.add(1)
    trainer.call_s = 3600.0
    trainer.add(10)
    assert trainer.controller.snapshots.calls_since == ()
    assert trainer.group.functions == ["add", "add", "nothing"]


def test_a_loss_behind_such_a_call_is_recovered() -> None:
    trainer = Trainer()
    trainer.add(1)
    trainer.call_s = 3600.0
    trainer.cluster.restores = deque([ALL])
    assert trainer.add(10) == 11
    assert trainer.group.replicas[0].total == 11
    assert trainer.controller.snapshot().shared_state == 11


def test_a_snapshot_that_is_asked_for_covers_everything() -> None:
    trainer = Trainer()
    for amount in (1, 10):
        trainer.add(amount)
    assert trainer.controller.snapshot().shared_state == 11
    assert trainer.controller.snapshots.calls_since == ()


def test_a_state_on_its_way_is_had_as_soon_as_it_is_copied() -> None:
    trainer = Trainer(is_large=True, transfer_s=2.0)
    trainer.add(1, is_repeatable=False)
    newest = trainer.controller.newest_snapshot()
    assert newest.landed is None
    assert trainer.group.functions == ["add"]
    trainer.add(10)
    with pytest.raises(TimeoutError):
        newest.result(0.1)


def test_workers_are_not_ended_while_a_file_waits_for_their_state() -> None:
    trainer = Trainer(is_large=True, transfer_s=9.0)
    trainer.add(1)
    newest = trainer.controller.newest_snapshot()
    trainer.cluster.calls = deque([Lost((1,))])
    trainer.controller.run(Call(read))
    assert trainer.controller.snapshots.landed is not None
    assert trainer.controller.snapshots.landed.shared_state == 1
    assert newest.landed is None, "it is what it was; its transfer has arrived"


def test_a_state_that_was_lost_on_its_way_is_told() -> None:
    trainer = Trainer(is_large=True, transfer_s=1e9)
    trainer.add(1)
    newest = trainer.controller.newest_snapshot()
    trainer.controller.kill_group()
    with pytest.raises(WorkersLostError, match="lost with its worker"):
        newest.result()


# ------------------------------------------------------------------------------------------------- switched off


def test_without_snapshots_a_loss_raises_and_names_the_last_file() -> None:
    trainer = Trainer(None)
    trainer.add(1)
    assert trainer.num_copies == 0
    with pytest.raises(WorkersLostError, match=r"`snapshot_every_s=None` switches.*No file was saved"):
        trainer.lose()
    trainer.controller.snapshots.last_file = "last.pt"
    with pytest.raises(WorkersLostError, match=r"The last file is last\.pt: `load` it into a new trainer"):
        trainer.controller.run(Call(read))
    assert trainer.cluster.sizes == [3], "no worker that would begin from the start, unnoticed"


def test_without_snapshots_workers_that_have_nothing_to_lose_are_replaced() -> None:
    trainer = Trainer(None)
    trainer.lose()
    assert trainer.cluster.sizes == [3, 3]


def test_without_snapshots_one_that_was_asked_for_counts_until_the_next_call() -> None:
    trainer = Trainer(None)
    trainer.add(1)
    assert trainer.controller.snapshot().shared_state == 1
    trainer.lose()
    assert trainer.group.replicas[0].total == 1
    trainer.add(10)
    with pytest.raises(WorkersLostError, match="switches snapshots off"):
        trainer.lose()


def test_without_snapshots_the_end_of_workers_that_are_apart_is_told() -> None:
    trainer = Trainer(None)
    trainer.add(1)
    trainer.cluster.calls = deque([Raised(1, ValueError("mine"), others_answered=False)])
    with pytest.raises(ValueError, match=r"their state is lost: `snapshot_every_s=None`"):
        trainer.add(10)


def test_without_snapshots_status_says_so() -> None:
    assert "switched off" in str(Trainer(None).controller.glance({}, None))
