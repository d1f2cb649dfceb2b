from __future__ import annotations

import pytest

from raysgd.core.engine.policies import assign_ranks, rank_order, shard_keepers
from raysgd.core.engine.shared.types import WorkerInfo, World


def infos(nodes: str) -> list[WorkerInfo]:
    return [WorkerInfo(node, f"10.0.0.{node}", pid) for pid, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "local_sizes", "node_ranks"),
    [
        ("", [], [], []),
        ("a", [0], [1], [0]),
        ("aaa", [0, 1, 2], [3, 3, 3], [0, 0, 0]),
        ("ab", [0, 0], [1, 1], [0, 1]),
        ("abab", [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1]),
        ("aab", [0, 1, 0], [2, 2, 1], [0, 0, 1]),
        ("bac", [0, 0, 0], [1, 1, 1], [0, 1, 2]),
    ],
)
def test_ranks_count_up_in_the_world_and_on_each_node(
    nodes: str, local_ranks: list[int], local_sizes: list[int], node_ranks: list[int]
) -> None:
    worlds = assign_ranks(infos(nodes))
    assert [world.rank for world in worlds] == list(range(len(nodes)))
    assert [world.local_rank for world in worlds] == local_ranks
    assert [world.local_size for world in worlds] == local_sizes
    assert [world.node_rank for world in worlds] == node_ranks
    assert all(world.size == len(nodes) and world.num_nodes == len(set(nodes)) for world in worlds)


def test_nodes_are_told_apart_by_id_not_by_address() -> None:
    worlds = assign_ranks([WorkerInfo("a", "127.0.0.1", 1), WorkerInfo("b", "127.0.0.1", 2)])
    assert worlds[1] == World(rank=1, size=2, local_rank=0, local_size=1, node_rank=1, num_nodes=2)


def test_a_worker_knows_its_gpus_and_those_of_its_node_in_the_order_of_their_numbers() -> None:
    gpus = [("a", ("10",)), ("b", ("0", "1")), ("a", ("2",)), ("a", ("MIG-x", "2"))]
    found = assign_ranks([WorkerInfo(node, node, pid, ids) for pid, (node, ids) in enumerate(gpus)])
    assert [world.gpu_ids for world in found] == [ids for _, ids in gpus]
    assert found[0].node_gpu_ids == found[2].node_gpu_ids == ("2", "10", "MIG-x")
    assert found[1].node_gpu_ids == ("0", "1")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("", []),
        ("a", [0]),
        ("abab", [0, 2, 1, 3]),
        ("abaa", [0, 2, 3, 1]),
        ("bacab", [0, 4, 1, 3, 2]),
        ("aabb", [0, 1, 2, 3]),
    ],
)
def test_new_workers_get_their_ranks_node_by_node(nodes: str, expected: list[int]) -> None:
    found = infos(nodes)
    assert rank_order(found) == expected
    worlds = assign_ranks([found[index] for index in expected])
    assert [world.node_rank for world in worlds] == sorted(world.node_rank for world in worlds)


def test_on_a_node_the_lowest_gpu_comes_first_and_equals_stay_as_they_came() -> None:
    gpus = [("a", ("10", "3")), ("b", ("1",)), ("a", ("2",)), ("a", ("GPU-7",)), ("b", ("0",)), ("a", ("2",))]
    found = [WorkerInfo(node, node, pid, ids) for pid, (node, ids) in enumerate(gpus)]
    assert rank_order(found) == [2, 5, 0, 3, 4, 1]


def test_the_driver_stays_the_first_and_brings_its_node_along() -> None:
    gpus = [("b", ("1",)), ("a", ("0",)), ("b", ("0",)), ("a", ("1",)), ("b", ())]
    found = [WorkerInfo(node, node, pid, ids) for pid, (node, ids) in enumerate(gpus)]
    assert rank_order(found, first_stays=True) == [0, 4, 2, 1, 3]
    assert rank_order(found) == [4, 2, 0, 1, 3]


@pytest.mark.parametrize(
    ("nodes", "home", "expected"),
    [
        ("", "h", {}),
        ("aaaa", "h", {}),  # there is no other node: the driver has a copy
        ("aaaa", "a", {}),
        ("ab", "h", {0: 1, 1: 0}),
        ("aabb", "h", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abab", "h", {0: 1, 1: 0, 2: 3, 3: 2}),
        ("aaab", "h", {0: 3, 1: 3, 2: 3, 3: 0}),
        ("abc", "h", {0: 1, 1: 2, 2: 0}),
        ("ab", "a", {}),  # rank 0 is lost with the driver, who has a copy of what rank 1 has
        ("abc", "a", {1: 2}),
        ("aabbcc", "b", {4: 0, 5: 1}),
    ],
)
def test_partners_are_on_the_next_node(nodes: str, home: str, expected: dict[int, int]) -> None:
    assert shard_keepers(infos(nodes), home) == expected


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
@pytest.mark.parametrize("num_each", [1, 2, 8])
def test_equal_nodes_keep_as_much_as_they_give(num_nodes: int, num_each: int) -> None:
    group = infos("".join(chr(ord("a") + node) * num_each for node in range(num_nodes)))
    keepers = shard_keepers(group, "h")
    assert sorted(keepers) == sorted(keepers.values()) == list(range(len(group)))
    assert all(group[rank].node_id != group[keeper].node_id for rank, keeper in keepers.items())
