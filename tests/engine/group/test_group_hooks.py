from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from raysgd.engine.controller import ElasticController
from raysgd.engine.decisions.policies import ScalingPolicy
from raysgd.engine.group.group_hooks import GroupHooks
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import Failure, GroupReport, Outcome
from raysgd.exceptions import TrainerShutdownError, WorkerFault
from tests.helpers.fakes import CountingReplica, FakeClock, FakeCluster, Lost, NullConnection, ShutDown, Stopper, read

FAULT = WorkerFault(0, "node", RuntimeError(), "ActorDiedError", "gone", "", "")
LOST = GroupReport((Outcome(0, failure=Failure("died", FAULT)),))


class NotingHooks(GroupHooks):
    """Notes what it is told of which group, and answers the next start as it is to."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.told: list[tuple[str, int, str | None]] = []
        self.killed_before: list[bool] = []
        self.answers: deque[GroupReport | Exception | None] = deque()

    def note(self, what: str, group: Any) -> None:
        self.told.append((what, self.cluster.groups.index(group), group.ended_by))

    def on_start(self, group: Any) -> GroupReport | None:
        self.note("start", group)
        answer = self.answers.popleft() if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_stop(self, group: Any) -> None:
        self.note("stop", group)

    def on_end(self, group: Any) -> None:
        self.killed_before.append(group.is_killed_beside)
        self.note("end", group)


class Trainer:
    """A controller over a fake cluster, with hooks."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.hooks = NotingHooks(self.cluster)
        self.controller = ElasticController(
            GroupSpec(NullConnection(), CountingReplica),
            ScalingPolicy(2, draw=lambda: 0.0),
            make_group=self.cluster.make_group,
            view=self.cluster.view,
            clock=FakeClock().as_clock(),
            hooks=self.hooks,
        )


def test_hooks_come_after_the_start_and_before_the_end() -> None:
    trainer = Trainer()
    trainer.controller.start()
    trainer.controller.stop()
    assert trainer.hooks.told == [("start", 0, None), ("end", 0, None), ("stop", 0, None)]
    assert trainer.cluster.groups[0].ended_by == "stop"


def test_a_forced_end_has_no_goodbye() -> None:
    trainer = Trainer()
    trainer.controller.start()
    trainer.controller.stop(force=True)
    assert trainer.hooks.told == [("start", 0, None), ("end", 0, None)]


def test_every_group_is_seen() -> None:
    trainer = Trainer()
    trainer.controller.start()
    trainer.cluster.calls = deque([Lost((1,))])
    trainer.controller.run(Call(read))
    assert trainer.hooks.told == [("start", 0, None), ("end", 0, None), ("start", 1, None)]


def test_a_group_that_failed_to_start_is_not_seen() -> None:
    trainer = Trainer()
    trainer.cluster.starts = deque([Lost((0,))])
    trainer.controller.start()
    assert trainer.hooks.told == [("start", 1, None)]


def test_a_loss_in_the_hook_is_a_failed_start_and_tried_again() -> None:
    trainer = Trainer()
    trainer.hooks.answers.append(LOST)
    trainer.controller.start()
    assert trainer.hooks.told == [("start", 0, None), ("end", 0, None), ("start", 1, None)]
    assert trainer.cluster.groups[0].ended_by == "kill"


def test_an_exception_in_the_hook_is_raised_and_leaves_nothing() -> None:
    trainer = Trainer()
    trainer.hooks.answers.append(KeyError("a mistake"))
    with pytest.raises(KeyError):
        trainer.controller.start()
    assert trainer.cluster.groups[0].ended_by == "kill"


def test_a_group_that_is_killed_from_another_thread_is_told_of_too() -> None:
    trainer = Trainer()
    trainer.controller.start()
    stopper = Stopper(trainer.controller, trainer.cluster)
    trainer.cluster.calls = deque([ShutDown(stopper.stop)])
    with pytest.raises(TrainerShutdownError):
        trainer.controller.run(Call(read))
    stopper.join()
    assert trainer.hooks.told[1] == ("end", 0, None)
    assert not trainer.hooks.killed_before[0], "what it was to see off was gone already"
    assert trainer.cluster.groups[0].is_killed_beside
