"""The resources of workers and nodes: what a worker needs, what nodes have, and how many workers fit.

Nothing in this module queries Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any

from raysgd.core.cluster.gpus import largest_share

_TOLERANCE = 1e-6  # allowance for rounding errors in sums of resources; Ray's smallest unit of resources is 1/10000


@dataclass(frozen=True)
class Resources:
    """The resources that one worker needs.

    Attributes:
        num_cpus: Number of CPUs.
        num_gpus: Number of GPUs.
        custom: Amounts of other resources, by name.
        runtime_env: The Ray runtime environment for the worker's process. If empty, the job's environment is used.
        labels: Labels that the worker's node must have. If empty, any node is allowed.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """Return the resources as a Ray bundle. Zero amounts are omitted, because Ray rejects them."""
        amounts = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}


@dataclass(frozen=True)
class NodeView:
    """One live node, with its total and free resources.

    Attributes:
        node_id: Ray's ID of the node.
        address: Address of the node.
        total: All resources of the node.
        available: Free resources of the node.
        is_settling: True if more resources will be free soon, because Ray has not finished removing a placement group.
    """

    node_id: str
    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    is_settling: bool = False


@dataclass(frozen=True)
class PlacementGroupHolder:
    """A placement group that holds resources or waits for them."""

    name: str
    state: str
    bundles: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class ClusterView:
    """The cluster's nodes and resources at one moment.

    Attributes:
        nodes: The live nodes, without nodes that Ray will remove soon. In a placement group, each bundle of the group
            counts as a node.
        holders: The placement groups that hold resources or wait for them.
        can_grow: True if more nodes may join.
        is_head_gone: True if the cluster's head node is gone. The view is then empty, because the cluster cannot be
            queried.
    """

    nodes: tuple[NodeView, ...]
    holders: tuple[PlacementGroupHolder, ...] = ()
    can_grow: bool = True
    is_head_gone: bool = False

    def without(self, node_ids: Collection[str]) -> ClusterView:
        """Return the view without the nodes that have these IDs."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.node_id not in node_ids))


def num_fitting(amounts: Mapping[str, float], need: Resources) -> int:
    """Return how many workers fit on a node that has these amounts of resources.

    Args:
        amounts: The node's free or total resources.
        need: Resources of one worker. If the worker needs none, the result is a very large number.
    """
    bundle = need.bundle()
    if not bundle:
        return 10**6
    return min(int((amounts.get(name, 0.0) + _TOLERANCE) / amount) for name, amount in bundle.items())


def capacity(view: ClusterView, need: Resources, *, free_only: bool = True) -> int:
    """Return how many workers fit into the cluster's free resources. Node labels are ignored.

    Args:
        view: The cluster's nodes and their resources.
        need: Resources of one worker.
        free_only: False to count the cluster's total resources instead.
    """
    return sum(num_fitting(node.available if free_only else node.total, need) for node in view.nodes)


def cpus_that_fit(view: ClusterView, need: Resources, num_workers: int) -> float:
    """Return the largest number of CPUs per worker with which all workers would fit into an empty cluster.

    Only numbers below `need.num_cpus` are tried. Return 0 if the workers do not fit with any of them.
    """
    of_nodes = {node.total.get("CPU", 0.0) for node in view.nodes}
    shares = {floor(100 * cpus / count) / 100 for cpus in of_nodes for count in range(1, num_workers + 1)}
    smaller = sorted((share for share in shares if 0 < share < need.num_cpus), reverse=True)
    needs = ((share, replace(need, num_cpus=share)) for share in smaller)
    return next((share for share, less in needs if capacity(view, less, free_only=False) >= num_workers), 0.0)


def explain(need: Resources, num_workers: int, view: ClusterView) -> str:
    """Return a table of resources for error messages.

    The table lists the requested resources, each node's resources, the placement groups that hold resources or wait
    for them, and the CPUs that other tasks and actors use.
    """
    where = f" on nodes with the labels {dict(need.labels)}" if need.labels else ""
    lines = [f"  requested:  {num_workers} x {need.bundle()}{where}"]
    hidden = {"memory"} - need.bundle().keys()  # Ray lists every node's memory, but few programs request memory
    for node in view.nodes:
        free, total = ({name: of[name] for name in of if name not in hidden} for of in (node.available, node.total))
        lines.append(f"  node {node.address}:  free {free} of {total}")
    for holder in view.holders:
        how = "held" if holder.state == "CREATED" else "waited for"
        counts = Counter(str(dict(bundle)) for bundle in holder.bundles)
        bundles = ", ".join(f"{count} x {bundle}" for bundle, count in counts.items())
        lines.append(f"  {how} by placement group {holder.name} ({holder.state}):  {bundles}")
    held = sum(bundle.get("CPU", 0.0) for h in view.holders if h.state == "CREATED" for bundle in h.bundles)
    used = sum(n.total.get("CPU", 0.0) - n.available.get("CPU", 0.0) for n in view.nodes)
    if used - held > 1e-6:
        lines.append(f"  held by other tasks and actors:  {used - held:g} CPU")
    if need.num_gpus and not any(node.total.get("GPU") for node in view.nodes):
        lines.append("No node has a GPU. To train on CPUs pass `use_gpu=False`.")
    return "\n".join(lines)


def impossibility(
    need: Resources, num_workers: int, view: ClusterView, with_cpus: str = "num_cpus_per_worker={:g}"
) -> str | None:
    """Return an error message if the workers cannot fit into the cluster, even if all nodes were idle.

    If a smaller request could fit, the message suggests it. If the workers can fit, return None.
    """
    most = capacity(view, need, free_only=False)
    if most >= num_workers:
        return None
    limit = f"{most} worker{'s' if most > 1 else ''} at most"
    fits = f"The nodes have room for {limit}" if most else "No node is large enough for a worker"
    num_cpus = cpus_that_fit(view, need, num_workers)
    ways = [f"for {limit} (spares count too)"] if most else []
    ways += [f"for less per worker: `{with_cpus.format(num_cpus)}`"] if num_cpus else []
    ways += _ways_with_fewer_gpus(need, num_workers, view)
    remedy = f"\nAsk {', or '.join(ways)}." if ways else ""
    return f"{fits}, even when nothing else runs:\n{explain(need, num_workers, view)}{remedy}"


def _ways_with_fewer_gpus(need: Resources, num_workers: int, view: ClusterView) -> list[str]:
    """Return what to ask for if the workers would fit with less of a GPU, or without. Empty if no node has a GPU."""
    of_nodes = [node.total.get("GPU", 0.0) for node in view.nodes]
    fits_without = capacity(view, replace(need, num_gpus=0), free_only=False) >= num_workers
    if not (need.num_gpus and any(of_nodes) and fits_without):
        return []
    ways, share = ["for CPUs only: `use_gpu=False`"], largest_share(num_workers, of_nodes)
    if 0 < share < need.num_gpus <= 1:
        ways.insert(0, f'for shared GPUs: `use_gpu="auto"`, or `num_gpus_per_worker={share:g}` of `TorchTrainer`')
    return ways
