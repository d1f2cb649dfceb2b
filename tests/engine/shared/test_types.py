from __future__ import annotations

import dataclasses

import pytest

from raysgd.engine.shared import types
from raysgd.engine.shared.types import (
    GroupReport,
    Outcome,
    Rendezvous,
    Resources,
    StateHandover,
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


@pytest.mark.parametrize(("size", "expected"), [(1, False), (2, True), (8, True), (0, False)])
def test_only_two_or_more_workers_are_distributed(size: int, expected: bool) -> None:
    assert World(rank=0, size=size).is_distributed is expected


FINE = Outcome(0, value=7)
SILENT = Outcome(0, answered=False)
DIED = Outcome(0, failure=failure("died"))
RAISED = Outcome(0, failure=failure("user"))
DISCONNECTED = Outcome(0, failure=failure("disconnected"))
RAISED_THEN_KILLED = Outcome(0, failure=failure("user"), answered=False)


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


def test_the_values_come_in_the_order_of_the_outcomes() -> None:
    assert GroupReport((Outcome(0, "a"), Outcome(1, None), Outcome(2, "c"))).values == ["a", None, "c"]


def test_an_empty_value_is_an_answer_too() -> None:
    assert Outcome(0, value=None).ok


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


def test_everything_that_passes_between_the_parts_is_frozen() -> None:
    found = [value for value in vars(types).values() if dataclasses.is_dataclass(value)]
    assert len(found) >= 10
    for dataclass in found:
        assert getattr(dataclass, "__dataclass_params__").frozen, dataclass  # noqa: B009 - mypy does not know it


def test_a_state_enters_each_node_once_beginning_with_that_of_its_source() -> None:
    nodes = [0, 1, 1, 2, 0, 2, 1]
    worlds = [World(rank, len(nodes), node_rank=node) for rank, node in enumerate(nodes)]
    handover = StateHandover(source=2, takers=(0, 3, 1, 4, 5, 6)).by_node(worlds)
    assert handover == StateHandover(2, (1, 6, 0, 4, 3, 5))
