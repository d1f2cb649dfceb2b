from __future__ import annotations

import pytest

from raysgd.engine import ranks
from raysgd.engine.types import WorkerInfo, World


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
    worlds = ranks.assign(infos(nodes))
    assert [world.rank for world in worlds] == list(range(len(nodes)))
    assert [world.local_rank for world in worlds] == local_ranks
    assert [world.local_size for world in worlds] == local_sizes
    assert [world.node_rank for world in worlds] == node_ranks
    assert all(world.size == len(nodes) and world.num_nodes == len(set(nodes)) for world in worlds)


def test_nodes_are_told_apart_by_id_not_by_address() -> None:
    worlds = ranks.assign([WorkerInfo("a", "127.0.0.1", 1), WorkerInfo("b", "127.0.0.1", 2)])
    assert worlds[1] == World(rank=1, size=2, local_rank=0, local_size=1, node_rank=1, num_nodes=2)


def test_a_worker_knows_its_gpus_and_those_of_its_node_in_the_order_of_their_numbers() -> None:
    gpus = [("a", ("10",)), ("b", ("0", "1")), ("a", ("2",)), ("a", ("MIG-x", "2"))]
    found = ranks.assign([WorkerInfo(node, node, pid, ids) for pid, (node, ids) in enumerate(gpus)])
    assert [world.gpu_ids for world in found] == [ids for _, ids in gpus]
    assert found[0].node_gpu_ids == found[2].node_gpu_ids == ("2", "10", "MIG-x")
    assert found[1].node_gpu_ids == ("0", "1")
