"""Assigns ranks to workers by their nodes and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from raysgd.core.engine.shared.types import WorkerInfo, World

ItemT = TypeVar("ItemT")


def in_order(infos: Sequence[WorkerInfo], *, first_stays: bool = False) -> list[int]:
    """Sort new workers by node, then by GPU. The ranks on each node are then consecutive.

    Nodes keep the order in which they first appear, and so do workers that share a GPU or have no GPU.

    Args:
        infos: Node and GPUs of each worker.
        first_stays: True if the first worker must be rank 0, because it is the driver.

    Returns:
        Indices of `infos`, in rank order.
    """

    def place(index: int) -> tuple[Any, ...]:
        return not (first_stays and index == 0), [_by_number(g) for g in _sorted_ids(infos[index].gpu_ids)[:1]]

    return [index for ranks in _by_node(infos).values() for index in sorted(ranks, key=place)]


def assign(infos: Sequence[WorkerInfo]) -> list[World]:
    """Return the `World` (rank, group size, local rank and so on) of each worker. Ranks follow the order of `infos`."""
    nodes, worlds = _by_node(infos).values(), dict[int, World]()
    for node_rank, ranks in enumerate(nodes):
        gpu_ids = _sorted_ids(gpu_id for rank in ranks for gpu_id in infos[rank].gpu_ids)
        for local_rank, rank in enumerate(ranks):
            worlds[rank] = World(
                rank=rank,
                size=len(infos),
                local_rank=local_rank,
                local_size=len(ranks),
                node_rank=node_rank,
                num_nodes=len(nodes),
                gpu_ids=infos[rank].gpu_ids,
                node_gpu_ids=gpu_ids,
            )
    return [worlds[rank] for rank in range(len(infos))]


def places(ranks: Sequence[int], num_workers: int) -> list[int]:
    """Return each worker's rank in the next group. A worker keeps its rank if that rank exists in the next group.

    Other workers get free ranks.

    >>> places([0, 2], 3), places([1, 2], 2), places([2, 3], 3)
    ([0, 2, 1], [1, 0], [2, 0, 1])

    Args:
        ranks: The current ranks of the workers that stay in the group.
        num_workers: Size of the next group. The ranks of new workers come last in the result.
    """
    free = [rank for rank in range(num_workers) if rank not in ranks]
    kept = [rank if rank < num_workers else free.pop(0) for rank in ranks]
    return kept + free


def in_places(items: Sequence[ItemT], places: Sequence[int]) -> list[ItemT]:
    """Return items sorted by rank. If `places` is empty, return the items in the given order.

    >>> in_places(["a", "b", "c"], [0, 2, 1])
    ['a', 'c', 'b']

    Args:
        items: One item for each worker.
        places: The rank of each worker.
    """
    return [items[index] for index in sorted(range(len(items)), key=(places or range(len(items))).__getitem__)]


def keepers(infos: Sequence[WorkerInfo], home: str) -> dict[int, int]:
    """Choose a partner rank on another node for each rank. The partner stores a copy of the rank's shard of the state.

    Each node sends its copies to the next node in a ring of all nodes. If all nodes have the same number of ranks,
    each rank then stores at most one copy.

    Args:
        infos: Node of each worker, by rank.
        home: The driver's node. Ranks on this node and on the node before it in the ring have no partner, because the
            driver stores copies of their shards.

    Returns:
        The partner of each rank, by rank, without the ranks that have no partner.
    """
    on_node = _by_node(infos)
    nodes, holders = list(on_node), dict[int, int]()
    for node, following in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True):
        if node != following and home not in (node, following):
            others = on_node[following]
            holders.update({rank: others[index % len(others)] for index, rank in enumerate(on_node[node])})
    return holders


def _by_node(infos: Sequence[WorkerInfo]) -> dict[str, list[int]]:
    """Return the indices of `infos` by node ID, in the order in which the nodes first appear."""
    on_node: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        on_node.setdefault(info.node_id, []).append(index)
    return on_node


def _sorted_ids(gpu_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the GPU IDs sorted and without duplicates. Numeric IDs are sorted by value."""
    return tuple(sorted(set(gpu_ids), key=_by_number))


def _by_number(gpu_id: str) -> tuple[bool, int, str]:
    return not gpu_id.isdigit(), int(gpu_id) if gpu_id.isdigit() else 0, gpu_id
