"""The ranks of workers, by where they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from raysgd.engine.shared.types import WorkerInfo, World

ItemT = TypeVar("ItemT")


def in_order(infos: Sequence[WorkerInfo], *, first_stays: bool = False) -> list[int]:
    """Order new workers for their ranks, as indices of `infos`: node by node, and by the GPU on each.

    The nodes come in the order in which they appear, and so do workers that share a GPU or have none. So neighbours in
    the world are neighbours in fact, wherever the cluster put them.

    Args:
        infos: Where the workers live.
        first_stays: Whether the first one is rank 0 in any case, as the driver is.
    """
    nodes = _numbered_nodes(infos)

    def place(index: int) -> tuple[Any, ...]:
        gpu_ids = _sorted_ids(infos[index].gpu_ids)
        return not (first_stays and index == 0), nodes[infos[index].node_id], [_by_number(g) for g in gpu_ids[:1]]

    return sorted(range(len(infos)), key=place)


def assign(infos: Sequence[WorkerInfo]) -> list[World]:
    """Give each worker its place; world ranks follow the order of `infos`, local ranks count up node by node."""
    seen: Counter[str] = Counter()
    sizes = Counter(info.node_id for info in infos)
    node_ranks = _numbered_nodes(infos)
    on_node: dict[str, list[str]] = {node: [] for node in sizes}
    for info in infos:
        on_node[info.node_id] += info.gpu_ids
    gpu_ids = {node: _sorted_ids(found) for node, found in on_node.items()}
    worlds = []
    for rank, info in enumerate(infos):
        worlds.append(
            World(
                rank=rank,
                size=len(infos),
                local_rank=seen[info.node_id],
                local_size=sizes[info.node_id],
                node_rank=node_ranks[info.node_id],
                num_nodes=len(node_ranks),
                gpu_ids=info.gpu_ids,
                node_gpu_ids=gpu_ids[info.node_id],
            )
        )
        seen[info.node_id] += 1
    return worlds


def places(ranks: Sequence[int], num_workers: int) -> list[int]:
    """Return the next rank of each worker: first those with a rank, who keep it as far as there is such, then others.

    >>> places([0, 2], 3), places([1, 2], 2), places([2, 3], 3)
    ([0, 2, 1], [1, 0], [2, 0, 1])

    Args:
        ranks: The present ranks of those who stay.
        num_workers: How many there will be.
    """
    free = [rank for rank in range(num_workers) if rank not in ranks]
    kept = [rank if rank < num_workers else free.pop(0) for rank in ranks]
    return kept + free


def in_places(items: Sequence[ItemT], places: Sequence[int]) -> list[ItemT]:
    """Return items in the order of their places; as they are without any.

    >>> in_places(["a", "b", "c"], [0, 2, 1])
    ['a', 'c', 'b']
    """
    return [items[index] for index in sorted(range(len(items)), key=(places or range(len(items))).__getitem__)]


def keepers(infos: Sequence[WorkerInfo], home: str) -> dict[int, int]:
    """Return which rank keeps a copy of what another one has: its partner on another node, by the rank that has it.

    The copies of each node go to the next one, in a circle, so that no node keeps much more than it gives.

    Args:
        infos: Where the workers live.
        home: The node of the driver, who keeps the copies for this node. Ranks on it need none: if they are lost with
            their node, so is the driver.
    """
    on_node: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        on_node.setdefault(info.node_id, []).append(rank)
    nodes, found = list(on_node), {}
    for node, following in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True):
        if node != following and home not in (node, following):
            others = on_node[following]
            found.update({rank: others[index % len(others)] for index, rank in enumerate(on_node[node])})
    return found


def _numbered_nodes(infos: Sequence[WorkerInfo]) -> dict[str, int]:
    """The nodes with their numbers, in the order in which they appear."""
    return {node: index for index, node in enumerate(dict.fromkeys(info.node_id for info in infos))}


def _sorted_ids(gpu_ids: Iterable[str]) -> tuple[str, ...]:
    """Each once; numbers by their value."""
    return tuple(sorted(set(gpu_ids), key=_by_number))


def _by_number(gpu_id: str) -> tuple[bool, int, str]:
    return not gpu_id.isdigit(), int(gpu_id) if gpu_id.isdigit() else 0, gpu_id
