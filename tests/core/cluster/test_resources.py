"""What nodes have, how many workers fit there, and what is said if they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysgd.core.cluster.ray_cluster import _plain
from raysgd.core.cluster.resources import (
    ClusterView,
    NodeView,
    PlacementGroupHolder,
    Resources,
    capacity,
    cpus_that_fit,
    explain,
    impossibility,
    num_fitting,
)
from raysgd.train import _workers

NEED = Resources(num_cpus=2)


def node(free: float, total: float = 8, name: str = "1") -> NodeView:
    return NodeView(name, f"10.0.0.{name}", {"CPU": total}, {"CPU": free})


def view(*free_cpus: float, total: float = 8, **more: float) -> ClusterView:
    """A cluster with so many free CPUs on each node, of `total`, and `more` of other things."""
    return ClusterView(
        tuple(
            NodeView(f"node{index}", f"10.0.0.{index}", {"CPU": total, **more}, {"CPU": cpus, **more})
            for index, cpus in enumerate(free_cpus)
        )
    )


@pytest.mark.parametrize(
    ("free", "need", "expected"),
    [
        ({"CPU": 4}, Resources(), 4),
        ({"CPU": 4}, Resources(num_cpus=3), 1),
        ({"CPU": 2.5}, Resources(), 2),
        ({"CPU": 0.5}, Resources(), 0),
        ({"CPU": 0.5}, Resources(num_cpus=0.25), 2),
        ({"CPU": 0.3}, Resources(num_cpus=0.1), 3),  # 0.3 / 0.1 is a little less than 3
        ({"CPU": 8, "GPU": 1}, Resources(num_gpus=1), 1),
        ({"CPU": 8}, Resources(num_gpus=1), 0),
        ({"CPU": 8, "tpu": 3}, Resources(custom={"tpu": 2}), 1),
        ({"CPU": 1, "GPU": 8}, Resources(num_gpus=1), 1),
        ({}, Resources(), 0),
    ],
)
def test_the_scarcest_resource_decides_how_many_fit(free: dict[str, float], need: Resources, expected: int) -> None:
    assert num_fitting(free, need) == expected


def test_workers_that_need_nothing_fit_in_any_number() -> None:
    assert num_fitting({}, Resources(num_cpus=0)) >= 1000


@pytest.mark.parametrize(
    ("free_cpus", "num_cpus", "expected"),
    [((2, 2), 1, 4), ((1, 1), 2, 0), ((3, 3), 2, 2), ((0.5, 0.5), 1, 0), ((), 1, 0)],
)
def test_what_is_left_over_on_two_nodes_does_not_make_a_worker(
    free_cpus: tuple[float, ...], num_cpus: float, expected: int
) -> None:
    assert capacity(view(*free_cpus), Resources(num_cpus)) == expected


def test_capacity_counts_all_there_is_when_asked_to() -> None:
    assert capacity(view(1, 0, total=4), Resources(2), free_only=False) == 4


@pytest.mark.parametrize(
    ("cpus_of_nodes", "need", "num_workers", "expected"),
    [
        ((2,), Resources(), 4, 0.5),
        ((2,), Resources(), 3, 0.66),
        ((2, 8), Resources(num_cpus=4), 3, 2.66),
        ((4, 4), Resources(num_cpus=3), 4, 2),
        ((2,), Resources(num_gpus=1), 4, 0),
        ((2,), Resources(custom={"license": 1}), 4, 0),
        ((), Resources(), 1, 0),
        ((0,), Resources(), 1, 0),
    ],
)
def test_with_how_many_cpus_each_all_would_fit(
    cpus_of_nodes: tuple[float, ...], need: Resources, num_workers: int, expected: float
) -> None:
    nodes = tuple(NodeView(str(cpus), "10.0.0.1", {"CPU": cpus}, {"CPU": 0}) for cpus in cpus_of_nodes)
    found = cpus_that_fit(ClusterView(nodes), need, num_workers)
    assert found == expected
    if found:
        assert capacity(ClusterView(nodes), replace(need, num_cpus=found), free_only=False) >= num_workers


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
    found = impossibility(Resources(), 4, ClusterView((node(0, total=2),)), _workers.WORDS.with_cpus)
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
