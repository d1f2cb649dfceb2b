"""What the cluster has, and what a group has reserved or asked for there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.placement import Reservation, Slots

NEED = Resources(num_cpus=2)


class Granted(Reservation):
    """A reservation in a cluster with so much room."""

    def __init__(self, cluster: Cluster, num_workers: int, *rest: Any) -> None:
        self._cluster, self._num_workers, self.rest = cluster, num_workers, rest
        self.has_room = self.is_closed = False
        self.is_own = not cluster.is_inside_another

    def is_granted(self) -> bool:
        if not self.has_room and self._cluster.room >= self._num_workers:
            self._cluster.room -= self._num_workers
            self.has_room = True
        return self.has_room

    def wait(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        assert self.is_granted()

    def nodes(self) -> list[str | None]:
        return [*self._cluster.nodes, *["node"] * self._num_workers][: self._num_workers]

    def close(self, timeout_s: float) -> None:
        if self.has_room:
            self._cluster.room += self._num_workers
        self.has_room, self.is_closed = False, True


@dataclass
class Cluster:
    """Room for workers.

    Attributes:
        nodes: Where the first workers of a reservation are, None on a node that was lost; all others are on one node.
        made: Every reservation.
    """

    room: int
    is_inside_another: bool = False
    nodes: tuple[str | None, ...] = ()
    made: list[Granted] = field(default_factory=list)

    def slots(self) -> Slots:
        return Slots(self._make)

    def _make(self, *args: Any) -> Granted:
        self.made.append(Granted(self, *args))
        return self.made[-1]

    @property
    def num_waiting(self) -> int:
        """For how many workers room is asked for that is not there."""
        return sum(len(each) for each in self.made if not each.is_closed and not each.has_room)


def test_each_worker_that_is_asked_for_is_of_use_without_the_others() -> None:
    cluster = Cluster(room=2)
    slots = cluster.slots()
    slots.reserve(2, 1.0)
    slots.ask_up_to(5, 2)
    slots.take_granted()
    assert (len(slots), cluster.num_waiting) == (2, 3)
    cluster.room += 2
    slots.take_granted()
    assert (len(slots), cluster.num_waiting) == (4, 1)
    assert len(slots.take_usable(4)) == 4, "those of the first reservation were not taken yet"


@pytest.mark.parametrize(("first", "then", "waiting"), [(3, 1, 1), (1, 3, 3), (2, 0, 0), (2, -1, 0)])
def test_asking_again_replaces_what_was_asked_for(first: int, then: int, waiting: int) -> None:
    cluster = Cluster(room=0)
    slots = cluster.slots()
    slots.ask_up_to(first, 0)
    slots.ask_up_to(then, 0)
    assert cluster.num_waiting == waiting


def test_nothing_is_asked_for_where_no_worker_lacks_also_without_a_slot_of_its_own() -> None:
    cluster = Cluster(room=3)
    slots = cluster.slots()
    slots.ask_up_to(1, 1)  # the driver alone
    assert cluster.num_waiting == 0
    slots.reserve(3, 1.0)
    slots.ask_up_to(2, 2)  # and a spare
    assert cluster.num_waiting == 0


def test_a_reservation_has_the_room_that_was_asked_for() -> None:
    cluster = Cluster(room=0)
    slots = cluster.slots()
    slots.ask_up_to(2, 0)
    cluster.room = 2
    assert cluster.made[0].is_granted(), "meanwhile"
    slots.reserve(2, 1.0)
    assert (len(slots), cluster.room, cluster.num_waiting) == (2, 0, 0)


def test_what_was_asked_for_is_given_back_at_the_end() -> None:
    cluster = Cluster(room=1)
    slots = cluster.slots()
    slots.ask_up_to(2, 0)
    slots.take_granted()
    slots.close(1.0)
    assert (cluster.room, cluster.num_waiting, len(slots)) == (1, 0, 0)


def test_all_is_given_back_where_ctrl_c_ends_the_wait_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(room=3)
    slots = cluster.slots()
    slots.reserve(2, 1.0)
    slots.reserve(1, 1.0)
    close = Granted.close

    def interrupted(reservation: Granted, timeout_s: float) -> None:
        close(reservation, timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(Granted, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slots.close(1.0)
    assert cluster.room == 3


def test_inside_another_placement_group_there_is_nothing_to_ask_for() -> None:
    cluster = Cluster(room=5, is_inside_another=True)
    slots = cluster.slots()
    slots.ask_up_to(2, 0)
    slots.take_granted()
    assert len(slots) == 0
    sleeps: list[float] = []
    slots.await_room(2, 1.2, sleeps.append)
    assert sum(sleeps) == pytest.approx(1.2)


def test_a_wait_ends_when_there_is_room_for_all_and_keeps_nothing() -> None:
    cluster, slept = Cluster(room=0), 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        cluster.room += 1  # a node starts
        assert cluster.num_waiting == 3

    slots = cluster.slots()
    slots.await_room(3, 60.0, sleep)
    assert 1 < slept < 2
    assert (cluster.room, cluster.num_waiting, len(slots)) == (3, 0, 0)


def test_a_wait_that_is_broken_off_asks_for_nothing_any_more() -> None:
    cluster = Cluster(room=0)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.slots().await_room(3, 60.0, interrupt)
    assert cluster.num_waiting == 0


def test_slots_on_nodes_that_are_gone_or_to_be_avoided_are_of_no_use() -> None:
    slots = Cluster(room=3, nodes=(None, "leaving")).slots()
    slots.reserve(3, 1.0)
    taken = slots.take_slot()
    assert (slots.num_usable(), slots.num_usable({"leaving"}), len(slots)) == (2, 1, 3)
    slots.give_back(taken)
    assert len(slots.take_usable(3, {"leaving"})) == 1
