"""Removes nodes from a local Ray cluster, to test what happens when machines fail."""

from __future__ import annotations

from typing import Any

from raysgd.testing.targets import check_ranks, group_of


def remove_node(cluster: Any, node: Any = None, *, trainer: Any = None, rank: int | None = None) -> Any:
    """Kill all processes of one node of a local test cluster, without a graceful shutdown.

    Name the node with `node`, or with both `trainer` and `rank`.

    Args:
        cluster: The `ray.cluster_utils.Cluster` that contains the node.
        node: The node to remove, as `cluster.add_node` returned it.
        trainer: A running trainer that has a worker on the node to remove.
        rank: The rank of the worker on the node to remove.

    Returns:
        The removed node.

    Raises:
        ValueError: The node is not in the cluster, or is the driver's node or the head node. Or there is no such rank,
            the rank is the driver itself, or the arguments name the node in neither or both of the two ways.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced.
    """
    node = _find_node(cluster, node, trainer, rank)
    cluster.remove_node(node, allow_graceful=False)
    return node


def _node_of_rank(cluster: Any, trainer: Any, rank: int) -> Any:
    [rank] = check_ranks(trainer, rank, may_be_driver=False)
    node_id = group_of(trainer).infos[rank].node_id
    nodes = [cluster.head_node, *cluster.worker_nodes]
    node = next((found for found in nodes if found is not None and found.node_id == node_id), None)
    if node is None:
        raise ValueError(f"`rank={rank}`: its worker is on node {node_id}, which is not in this cluster.")
    return node


def _find_node(cluster: Any, node: Any, trainer: Any, rank: int | None) -> Any:
    if (node is None) == (trainer is None) or (trainer is None) != (rank is None):
        raise ValueError(
            "`remove_node` needs either `node`, or both `trainer` and `rank`, to know which node to remove."
        )
    if node is None:
        node = _node_of_rank(cluster, trainer, rank if rank is not None else 0)
    if node is cluster.head_node:
        raise ValueError(
            "This is the head node, and removing it would end the cluster: put workers on nodes that you added."
        )
    if node not in cluster.worker_nodes:
        raise ValueError(f"`node={node!r}` is not a node of this cluster, or was removed before.")
    import ray

    if ray.is_initialized() and node.node_id == ray.get_runtime_context().get_node_id():
        raise ValueError(
            "The driver is connected through this node, so removing it would end the driver: choose another one."
        )
    return node
