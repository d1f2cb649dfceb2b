"""What the cluster has, and what a group has reserved or asked for there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.engine import placement
from raysgd.core.engine.placement import Reservation, Slots, _plain, explain, impossibility, init_ray
from raysgd.core.engine.shared.types import ClusterView, NodeView, PlacementGroupHolder, Resources
from raysgd.train import executor
from tests.helpers.run_if import RunIf

NEED = Resources(num_cpus=2)


def node(free: float, total: float = 8, name: str = "1") -> NodeView:
    return NodeView(name, f"10.0.0.{name}", {"CPU": total}, {"CPU": free})


def test_the_table_says_what_was_asked_what_there_is_and_what_holds_it() -> None:
    bundles = ({"CPU": 3.0}, *[{"CPU": 0.001}] * 1000)
    view = ClusterView((node(1), node(8, name="2")), (PlacementGroupHolder("tune", "CREATED", bundles),))
    assert explain(NEED, 5, view).splitlines() == [
        "  requested:  5 x {'CPU': 2.0}",
        "  node 10.0.0.1:  free {'CPU': 1} of {'CPU': 8}",
        "  node 10.0.0.2:  free {'CPU': 8} of {'CPU': 8}",
        "  held by placement group tune (CREATED):  1 x {'CPU': 3.0}, 1000 x {'CPU': 0.001}",
        "  held by other tasks and actors:  3 CPU",
    ]


@pytest.mark.parametrize("state", ["PENDING", "RESCHEDULING"])
def test_a_group_that_waits_for_resources_does_not_hold_them(state: str) -> None:
    view = ClusterView((node(6),), (PlacementGroupHolder("other", state, ({"CPU": 99.0},)),))
    lines = explain(NEED, 1, view).splitlines()
    assert lines[2:] == [
        f"  waited for by placement group other ({state}):  1 x {{'CPU': 99.0}}",
        "  held by other tasks and actors:  2 CPU",
    ]


def test_nothing_is_said_of_others_when_everything_is_accounted_for() -> None:
    view = ClusterView((node(4),), (PlacementGroupHolder("own", "CREATED", ({"CPU": 4.0},)),))
    assert "other tasks" not in explain(NEED, 1, view)


def test_an_empty_cluster_is_told_as_such() -> None:
    assert explain(NEED, 1, ClusterView(())) == "  requested:  1 x {'CPU': 2.0}"


def test_who_asks_for_gpus_that_no_node_has_is_told_how_to_do_without() -> None:
    need, gpu_node = Resources(num_cpus=1, num_gpus=1), NodeView("2", "10.0.0.2", {"CPU": 8, "GPU": 1}, {"CPU": 8})
    advice = "No node has a GPU. To train on CPUs pass `use_gpu=False`."
    assert explain(need, 2, ClusterView((node(8),))).endswith(advice)
    assert advice in str(impossibility(need, 2, ClusterView((node(8),))))
    assert advice not in explain(need, 2, ClusterView((node(8), gpu_node)))
    assert advice not in explain(NEED, 2, ClusterView((node(8),)))


@pytest.mark.parametrize("has_variable", [True, False])
def test_an_address_where_nothing_answers_is_an_error_at_once(
    has_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    if has_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=rf"No Ray cluster answers at `{address}`.*RAY_ADDRESS"):
        init_ray(**({} if has_variable else {"address": address}))


@RunIf(modules=["ray._private.authentication"])
@pytest.mark.parametrize(
    ("token", "mode", "taken"), [(True, None, "token"), (True, "disabled", "disabled"), (False, None, "")]
)
def test_a_token_is_used_where_there_is_one_and_no_mode_is_set(
    token: bool, mode: str | None, taken: str, tmp_path: Path
) -> None:
    """As `ray start --head` uses it, so that what runs beside it is let in."""
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("c0ffee" * 6)
    names = [name for name in os.environ if name.startswith("RAY_AUTH")]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    program = "import os; from raysgd.core.engine import placement; placement._use_token()\n"
    program += "print(os.environ.get('RAY_AUTH_MODE', ''))"
    given = {**environment, "HOME": str(tmp_path), **({} if mode is None else {"RAY_AUTH_MODE": mode})}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == taken


@pytest.mark.parametrize(
    ("nodes", "num_workers", "reason"),
    [
        ((node(0), node(0, name="2")), 8, None),
        ((node(8), node(8, total=9, name="2")), 9, "The nodes have room for 8 workers at most, even when nothing else"),
        ((node(1, total=1), node(1, total=1, name="2")), 1, "No node is large enough for a worker, even when nothing"),
        ((), 1, "No node is large enough"),
    ],
)
def test_what_no_node_can_ever_hold_is_known_from_its_total(
    nodes: tuple[NodeView, ...], num_workers: int, reason: str | None
) -> None:
    found = impossibility(NEED, num_workers, ClusterView(nodes))
    if reason is None or found is None:
        assert found == reason
    else:
        assert found.startswith(reason)
        assert explain(NEED, num_workers, ClusterView(nodes)) in found


@pytest.mark.parametrize(
    ("need", "num_workers", "advice"),
    [
        (
            Resources(),
            4,
            "Ask for 2 workers at most (spares count too), or for less per worker: `num_cpus_per_worker=0.5`.",
        ),
        (Resources(num_cpus=8), 1, "Ask for less per worker: `num_cpus_per_worker=2`."),
        (
            Resources(num_cpus=2),
            2,
            "1 worker at most (spares count too), or for less per worker: `num_cpus_per_worker=1`.",
        ),
        (Resources(num_gpus=1), 4, "No node has a GPU. To train on CPUs pass `use_gpu=False`."),
        (Resources(custom={"license": 1}), 1, "held by other tasks and actors:  2 CPU"),
    ],
)
def test_what_never_fits_comes_with_what_would(need: Resources, num_workers: int, advice: str) -> None:
    found = impossibility(need, num_workers, ClusterView((node(0, total=2),)))
    assert found is not None
    assert found.endswith(advice)


@pytest.mark.parametrize(
    ("num_gpus", "need", "num_workers", "advice"),
    [
        (
            1,
            Resources(num_gpus=1),
            2,
            'Ask for 1 worker at most (spares count too), or for shared GPUs: `use_gpu="auto"`, or '
            "`num_gpus_per_worker=0.5` of `TorchTrainer`, or for CPUs only: `use_gpu=False`.",
        ),
        (
            2,
            Resources(num_gpus=1),
            3,
            'Ask for 2 workers at most (spares count too), or for shared GPUs: `use_gpu="auto"`, or '
            "`num_gpus_per_worker=0.5` of `TorchTrainer`, or for CPUs only: `use_gpu=False`.",
        ),
        (1, Resources(num_gpus=2), 2, "Ask for CPUs only: `use_gpu=False`."),
        (
            1,
            Resources(num_gpus=1),
            5,
            "Ask for 1 worker at most (spares count too), or for CPUs only: `use_gpu=False`.",
        ),
        (1, Resources(num_cpus=8, num_gpus=1), 2, "Ask for 1 worker at most (spares count too)."),
    ],
)
def test_who_asks_for_more_gpus_than_there_are_is_told_the_ways_out(
    num_gpus: int, need: Resources, num_workers: int, advice: str
) -> None:
    amounts = {"CPU": 8.0, "GPU": num_gpus}
    found = impossibility(need, num_workers, ClusterView((NodeView("1", "10.0.0.1", amounts, amounts),)))
    assert found is not None
    assert found.endswith(advice), found


def test_what_to_ask_for_is_written_as_the_front_end_calls_it() -> None:
    found = impossibility(Resources(), 4, ClusterView((node(0, total=2),)), executor.WORDS)
    assert found is not None
    assert found.endswith("""`resources_per_worker={"CPU": 0.5}`.""")


def test_memory_counts_and_is_shown_to_who_asks_for_it() -> None:
    amounts = _plain(
        {"CPU": 2.0, "memory": 8.0, "object_store_memory": 4.0, "node:10.0.0.1": 1.0, "CPU_group_0_1": 1.0}
    )
    assert amounts == {"CPU": 2.0, "memory": 8.0}
    view = ClusterView((NodeView("1", "10.0.0.1", amounts, amounts),))
    asking = Resources(num_cpus=1, custom={"memory": 8.0})
    assert impossibility(asking, 1, view) is None
    assert impossibility(asking, 2, view) is not None
    assert "'memory': 8.0" in explain(asking, 1, view)
    assert "memory" not in explain(NEED, 1, view)


class Granted(Reservation):
    """A reservation in a cluster with so much room."""

    def __init__(self, cluster: Cluster, num_workers: int, *rest: Any) -> None:
        self._cluster, self._num_workers, self.rest = cluster, num_workers, rest
        self.has_room = self.is_closed = False

    @property
    def is_own(self) -> bool:
        return not self._cluster.is_inside_another

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


def test_the_head_of_a_cluster_is_gone_if_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not placement._is_gone(address)
    assert placement._is_gone(address)
    assert not placement._is_gone("")


def test_a_question_to_a_head_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(placement, "_head_address", lambda: address)
    assert placement.ask_head(never.wait, None) is None
    assert placement.ask_head(lambda: "answer", "none") == "answer"
    with pytest.raises(KeyError):
        placement.ask_head(lambda: {}["unknown"], "none")
