"""Who is to form the next group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysgd.engine.changes.group_former import CannotForm, GroupFormer, NextGroup
from raysgd.engine.policies import RetryBudget, ScalingPolicy
from raysgd.engine.shared.types import GroupReport
from tests.engine.stepping_trainer import Trainer
from tests.helpers.fakes import Interrupted, Lost


class Scene:
    """A group of three, of which rank 1 is lost; `former` gathers who goes on."""

    def __init__(self, min_workers: int = 1, num_slots: int = 3) -> None:
        self.trainer = Trainer(num_slots=num_slots)
        self.trainer.cluster.num_slots = num_slots
        self.scaling = ScalingPolicy(3, min_workers)
        self.suspected: list[Sequence[int]] = []

    def former(self, *, num_awaited: int = 3, budget: RetryBudget | None = None) -> NextGroup:
        former = GroupFormer(
            self.trainer.group,
            self.scaling,
            budget,
            num_awaited=num_awaited,
            nodes_to_avoid=frozenset,
            suspect=self.suspected.append,
            now=self.trainer.clock.monotonic,
            on_wait=lambda: None,
        )
        return former.form([0, 2])

    @property
    def standby(self) -> Any:
        return self.trainer.group.standby


def test_a_new_worker_joins_the_survivors_where_there_is_room() -> None:
    next_group = Scene().former()
    assert (next_group.staying, len(next_group.joining), len(next_group.progress_reports)) == ([0, 2], 1, 2)


def test_survivors_that_do_not_wait_go_on_without_whoever_is_not_ready() -> None:
    scene = Scene()
    scene.trainer.cluster.standby_is_slow = True
    assert scene.former(num_awaited=0).joining == []
    assert scene.standby.num_coming == 1, "it is made ready meanwhile"


def test_who_is_lost_while_the_others_wait_is_left_out_and_who_came_stays() -> None:
    scene = Scene()
    scene.trainer.cluster.standby_is_slow = True
    scene.trainer.cluster.waits = deque([Lost((0,))])
    next_group = scene.former()
    assert next_group.staying == [2]
    assert len(next_group.joining) == 2, "the one that was waited for, and one for rank 0"
    assert scene.suspected == [[2]]


def test_too_few_form_no_group_and_the_standby_workers_are_killed() -> None:
    scene = Scene(min_workers=3)
    scene.trainer.cluster.stands = deque([Lost((0,))])
    scene.trainer.cluster.num_slots = 2
    with pytest.raises(CannotForm, match="2 of at least 3 workers are left") as raised:
        scene.former()
    assert raised.value.staying == [2]
    assert len(scene.standby.killed_standby) == 1


def test_an_interrupt_while_they_wait_kills_the_standby_workers() -> None:
    scene = Scene()
    scene.trainer.cluster.standby_is_slow = True
    scene.trainer.cluster.waits = deque([Lost((0,))])
    scene.trainer.cluster.stands = deque([None, Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        scene.former()
    assert len(scene.standby.killed_standby) == 1


def test_a_survivor_that_answers_later_than_another_ones_death_is_heard_of_stays() -> None:
    scene = Scene()
    scene.trainer.cluster.stands = deque([Lost((0,))])
    leave = scene.trainer.group.leave_group

    def leave_late(survivors: Sequence[int], on_wait: Any = None) -> GroupReport:
        report = leave(survivors)
        late = (replace(found, answered=report.ok or found.failure is not None) for found in report.outcomes)
        return GroupReport(tuple(late))

    scene.trainer.group.leave_group = leave_late  # type: ignore[method-assign]
    assert scene.former().staying == [2]


def test_nobody_left_needs_no_words() -> None:
    scene = Scene()
    scene.trainer.cluster.stands = deque([Lost((0, 2))])
    with pytest.raises(CannotForm, match=r"^$") as raised:
        scene.former()
    assert list(raised.value.staying) == []


def test_going_on_has_to_be_paid_for() -> None:
    scene = Scene()
    with pytest.raises(CannotForm, match="no retry is left") as raised:
        scene.former(budget=RetryBudget(0))
    assert raised.value.staying == [0, 2]
