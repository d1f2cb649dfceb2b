from __future__ import annotations

import pytest

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.shared.types import (
    Answered,
    Failed,
    GroupReport,
    Outcome,
    Rendezvous,
    StateHandover,
    Unanswered,
    WorkerInfo,
    World,
    hosts_of,
)
from tests.helpers.fakes import failure


@pytest.mark.parametrize(
    ("resources", "bundle"),
    [
        (Resources(), {"CPU": 1.0}),
        (Resources(num_cpus=0), {}),
        (Resources(num_cpus=0.5, num_gpus=1), {"CPU": 0.5, "GPU": 1.0}),
        (Resources(num_cpus=0, num_gpus=0.25), {"GPU": 0.25}),
        (Resources(custom={"tpu": 2, "disk": 0}), {"CPU": 1.0, "tpu": 2}),
    ],
)
def test_a_bundle_has_every_amount_but_the_zeros(resources: Resources, bundle: dict[str, float]) -> None:
    assert resources.bundle() == bundle


FINE = Answered(0, value=7)
SILENT = Unanswered(0)
DIED = Failed(0, failure("died"))
RAISED = Failed(0, failure("user"))
DISCONNECTED = Failed(0, failure("disconnected"))
RAISED_THEN_KILLED = Failed(0, failure("user"), answered=False)


@pytest.mark.parametrize(
    ("outcomes", "is_ok", "can_go_on"),
    [
        ([FINE, FINE], True, True),
        ([FINE, SILENT], False, False),
        ([FINE, DIED], False, False),
        ([FINE, RAISED], False, True),
        ([RAISED, RAISED], False, True),
        ([FINE, DISCONNECTED], False, False),
        ([RAISED, DISCONNECTED], False, False),
        ([RAISED, SILENT], False, False),
        ([FINE, RAISED_THEN_KILLED], False, False),
    ],
)
def test_a_group_can_go_on_only_when_every_rank_lives_is_connected_and_has_answered(
    outcomes: list[Outcome], is_ok: bool, can_go_on: bool
) -> None:
    report = GroupReport(tuple(outcomes))
    assert (report.ok, report.all_answered) == (is_ok, can_go_on)


def test_workers_on_one_node_listen_at_the_loopback_address() -> None:
    infos = [WorkerInfo("a", "10.0.0.1", 1), WorkerInfo("a", "10.0.0.1", 2)]
    assert hosts_of(infos) == ["127.0.0.1", "127.0.0.1"]


def test_workers_on_several_nodes_listen_at_the_address_of_their_own_node_only() -> None:
    infos = [WorkerInfo("b", "10.0.0.2", 1), WorkerInfo("a", "10.0.0.1", 2)]
    assert hosts_of(infos) == ["10.0.0.2", "10.0.0.1"]


def test_the_secret_of_a_meeting_is_another_one_each_time_and_shown_nowhere() -> None:
    one, other = (Rendezvous((("10.0.0.2", 1),), on_one_node=False) for _ in range(2))
    assert one == other
    assert one.secret != other.secret
    assert "secret" not in repr(one)
    assert (one.address, one.port) == ("10.0.0.2", 1)


def test_a_state_enters_each_node_once_beginning_with_that_of_its_source() -> None:
    nodes = [0, 1, 1, 2, 0, 2, 1]
    worlds = [World(rank, len(nodes), node_rank=node) for rank, node in enumerate(nodes)]
    handover = StateHandover(source=2, takers=(0, 3, 1, 4, 5, 6)).by_node(worlds)
    assert handover == StateHandover(2, (1, 6, 0, 4, 3, 5))
