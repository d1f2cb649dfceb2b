"""What a controller does after a loss with replicas that cannot go on: it keeps processes, with new replicas."""

from __future__ import annotations

from collections import deque

import pytest

from raysgd.engine.transfers import LostPartError
from raysgd.exceptions import WorkerError, WorkersLostError
from tests.engine.stepping_trainer import Trainer
from tests.helpers.fakes import Event, Interrupted, Lost, Raised


def test_survivors_keep_their_processes_and_all_go_back_to_the_last_snapshot() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    before, kept = trainer.group.replicas, [trainer.group.infos[rank] for rank in (0, 2)]
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 3})) == [7, 7, 7]
    assert (len(trainer.cluster.groups), trainer.group.infos[:2]) == (1, kept)
    assert not any(replica in before for replica in trainer.group.replicas), "what they were is of no use"
    assert trainer.group.functions == ["walk", "walk", "restore", "walk"]
    assert trainer.controller.facts == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    event = trainer.controller.history.events[-1]
    assert (event.kind, event.old_size, event.new_size, event.num_kept) == ("rebuilt", 3, 3, 2)
    assert trainer.walk(1) == [8, 8, 8]


def test_without_room_fewer_go_on() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.cluster.num_slots = 2
    assert trainer.walk(5, Lost((1,), after={0: 2, 2: 2})) == [7, 7]
    event = trainer.controller.history.events[-1]
    assert str(event).startswith(
        "lost rank 1 (RuntimeError: the process is gone); kept 2 processes and resumed with 2 instead of 3 workers"
    )


def test_a_place_on_a_node_that_is_gone_is_no_room_to_grow() -> None:
    trainer = Trainer(renews=True)
    trainer.cluster.num_slots = 2
    trainer.walk(5, Lost((1,)))
    assert len(trainer.group.slots) == 3
    assert trainer.walk(1) == [6, 6]
    assert trainer.kinds == ["rebuilt"]
    trainer.cluster.num_slots = 3
    assert trainer.walk(1) == [7, 7, 7]
    assert trainer.kinds == ["rebuilt", "grown"]


def test_a_lost_connection_of_all_keeps_all() -> None:
    trainer = Trainer(renews=True)
    assert trainer.walk(5, Lost((0, 1, 2), "disconnected")) == [5, 5, 5]
    assert (len(trainer.cluster.groups), trainer.controller.history.events[-1].num_kept) == (1, 3)


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        ((0, 1, 2), []),
        ((1,), [Lost((0, 1, 2))] * 4),
        ((1,), [Raised(0, ValueError("`setup` does not run twice in a process"))]),
    ],
    ids=["no one is left", "all die, and so do those in their place", "set-up fails"],
)
def test_where_no_process_can_be_kept_all_are_new(lost: tuple[int, ...], then: list[Event]) -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.cluster.regroups = deque(then)
    assert trainer.walk(5, Lost(lost)) == [7, 7, 7]
    first, second = trainer.cluster.groups
    assert (first.ended_by, second.is_alive, trainer.kinds) == ("kill", True, ["rebuilt"])
    assert trainer.controller.history.events[-1].num_kept == 0


@pytest.mark.parametrize("moment", ["regroups", "restores"])
def test_the_others_go_on_without_a_worker_that_dies_while_replicas_are_made_or_given_the_state(moment: str) -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    setattr(trainer.cluster, moment, deque([Lost((0,))]))
    trainer.cluster.standby_is_slow = True
    assert trainer.walk(5, Lost((1,))) == [7, 7]
    assert (len(trainer.cluster.groups), trainer.kinds) == (1, ["rebuilt"])
    assert trainer.walk(1) == [8, 8, 8], "the next call grows"


@pytest.mark.parametrize(("num_times", "num_groups"), [(1, 1), (3, 1), (4, 2)])
def test_where_all_die_while_they_are_given_the_state_others_start_in_their_place(
    num_times: int, num_groups: int
) -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.cluster.restores = deque([Lost((0, 1, 2))] * num_times)
    assert trainer.walk(5, Lost((1,))) == [7, 7, 7]
    assert (len(trainer.cluster.groups), trainer.kinds) == (num_groups, ["rebuilt"])
    assert trainer.controller.history.events[-1].num_kept == 0
    assert trainer.group.standby.replacements.num_left == 0, "those who start later are replaced before the next call"


def test_replicas_made_while_calls_are_run_again_are_not_asked_for_copies_of_those_before_them() -> None:
    trainer = Trainer(is_large=True)
    trainer.cluster.transfer_s = 1000.0
    trainer.cluster.standby_is_slow = True
    trainer.walk(2)
    assert trainer.walk(5, Lost((0, 1, 2)), Lost((1,))) == [7, 7]
    assert trainer.group.replicas[0].landed_tokens == [None], "a copy was taken as if there were none on its way"


def test_a_part_that_no_node_has_any_more_is_told_with_the_last_file() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.controller.snapshots.last_file = "`epoch-2`"
    trainer.cluster.restores = deque([Raised(1, LostPartError("The last snapshot is lost."))])
    with pytest.raises(WorkersLostError, match=r"is lost\. The last file is `epoch-2`: `load` it into") as caught:
        trainer.walk(5, Lost((1,)))
    assert not isinstance(caught.value, WorkerError), "it is no exception of the user's code"


def test_too_few_survivors_wait_for_room_as_new_workers_do() -> None:
    trainer = Trainer(renews=True, min_workers=3)
    trainer.walk(2)
    trainer.cluster.num_slots = 2

    def make_room(seconds: float) -> None:
        trainer.cluster.num_slots = 3

    trainer.clock.at_sleep = make_room
    assert trainer.walk(5, Lost((1,))) == [7, 7, 7]
    assert trainer.kinds == ["rebuilt"]
    assert not trainer.cluster.groups[0].is_alive


def test_going_back_costs_a_retry() -> None:
    trainer = Trainer(renews=True)
    assert trainer.walk(5, Lost((1,)), max_retries=1) == [5, 5, 5]
    with pytest.raises(WorkersLostError, match="1 allowed retries"):
        trainer.walk(5, Lost((1,)), Lost((1,)), max_retries=1)


def test_a_state_that_no_snapshot_has_is_never_replaced_by_an_older_one() -> None:
    trainer = Trainer(renews=True, snapshot_every_s=None)
    trainer.walk(2)
    trainer.controller.snapshot()
    trainer.walk(1)
    with pytest.raises(WorkersLostError, match="snapshot_every_s=None"):
        trainer.walk(5, Lost((1,)))


def test_a_rank_that_froze_is_ended_for_sure_where_only_standby_workers_are_kept() -> None:
    """Its place is given to another worker at once, so nothing else would end it."""
    trainer = Trainer(rejoins=False, num_slots=4, num_spares=1)
    trainer.walk(2)
    trainer.cluster.silent = {0}
    assert trainer.walk(5, Lost((1,))) == [7, 7, 7]
    assert (len(trainer.cluster.groups), trainer.group.killed_ranks) == (1, [0])


def test_a_group_that_is_formed_half_way_is_never_used() -> None:
    trainer = Trainer(renews=True)
    trainer.walk(2)
    trainer.cluster.regroups = deque([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        trainer.walk(5, Lost((1,)))
    assert not trainer.group.is_alive
    assert trainer.walk(1) == [3, 3, 3]
