"""The resources of workers and nodes: what a worker needs, what nodes have, how many workers fit, and who gets GPUs.

Nothing in this module queries Ray. ADR 173 explains the decision for `use_gpu="auto"`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any

logger = logging.getLogger(__name__)

MOST_ON_A_GPU = 4
"""Number of workers that may share a GPU with `use_gpu="auto"`."""

_SHARES = tuple(10_000 // count / 10_000 for count in range(1, MOST_ON_A_GPU + 1))  # Ray counts in ten-thousandths
_TOLERANCE = 1e-6  # allowance for rounding errors in sums of resources; Ray's smallest unit of resources is 1/10000

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable with which users let NCCL run several ranks on one GPU."""

_MULTI_RANK_SINCE = 23000  # NCCL 2.30.0, in the form that `ncclGetVersion` returns


@dataclass(frozen=True)
class DriverView:
    """The GPUs and the NCCL that the driver sees.

    Attributes:
        num_gpus: Number of GPUs that PyTorch sees in this process. None if this PyTorch was built without GPU support.
            0 if unknown, as with TensorFlow, which the driver does not load.
        multi_rank: Value of the environment variable `MULTI_RANK` for the workers; None if it is not set.
        nccl: Version of the NCCL library in this process, such as 23007; 0 if it has none.
    """

    num_gpus: int | None = 0
    multi_rank: str | None = None
    nccl: int = 0


@dataclass(frozen=True)
class GpuChoice:
    """The GPUs of each worker.

    Attributes:
        num_gpus: GPUs of each worker: a fraction if workers share GPUs, 0 if they train on CPUs.
        backend: Backend of PyTorch workers: "gloo", "nccl" or "horovod".
    """

    num_gpus: float
    backend: str

    @property
    def is_shared(self) -> bool:
        """True if several workers may use the same GPU."""
        return 0 < self.num_gpus < 1


def choose_gpus(
    use_gpu: bool | str,
    num_workers: int,
    driver: DriverView,
    ask_nodes: Callable[[], Sequence[float]] | None,
    *,
    num_gpus_per_worker: float = 1,
    backend: str = "auto",
    has_driver: bool = False,
) -> GpuChoice:
    """Decide how many GPUs each worker gets, and over which backend PyTorch workers communicate.

    Log if workers share GPUs because of "auto".

    Args:
        use_gpu: True for `num_gpus_per_worker` GPUs each, False for CPUs, "auto" to go by the cluster.
        num_workers: The largest number of workers, spare workers included.
        driver: What this process sees.
        ask_nodes: Returns the number of GPUs of each node, whether free or not. Within a placement group, as in a trial
            of Ray Tune, of each of its bundles. Called only if this matters. None without Ray.
        num_gpus_per_worker: The user's number of GPUs for each worker.
        backend: The user's backend: "auto", or a name.
        has_driver: True if a worker runs in this process.

    Raises:
        ValueError: With "auto", more than `MOST_ON_A_GPU` workers would share a GPU. Or the backend does not support
            workers that share a GPU.
    """
    num_gpus = float(num_gpus_per_worker) if use_gpu else 0.0
    if use_gpu == "auto":
        of_nodes = None if ask_nodes is None or driver.num_gpus is None else ask_nodes()
        if driver.num_gpus is None or (not driver.num_gpus and (has_driver or of_nodes is None)):
            num_gpus = 0.0
        elif of_nodes is not None:
            num_gpus = _that_fit(num_workers, num_gpus, of_nodes)
            if 0 < num_gpus < num_gpus_per_worker:
                logger.warning(
                    '%s workers share %g GPU(s), with %g of a GPU each, because of `use_gpu="auto"`: workers on one '
                    "GPU take turns. For a GPU each pass at most `num_workers=%d` (spares count too), for CPUs "
                    "`use_gpu=False`",
                    num_workers,
                    sum(of_nodes),
                    num_gpus,
                    max(1, sum(map(int, of_nodes))),
                )
    choice = GpuChoice(num_gpus, backend)
    if backend == "auto":
        is_possible = num_gpus >= 1 or (choice.is_shared and not why_ranks_cannot_share(driver.multi_rank, driver.nccl))
        return GpuChoice(num_gpus, "nccl" if is_possible else "gloo")
    share = num_gpus or num_gpus_per_worker  # NCCL is refused for a part of a GPU also where there are no GPUs
    if share < 1 and num_workers > 1:
        if backend == "nccl" and not _is_set(driver.multi_rank):  # each worker checks the version that it has loaded
            obstacle = why_ranks_cannot_share(driver.multi_rank, driver.nccl)
            raise ValueError(
                f'`backend="nccl"` for workers that share a GPU (`num_gpus_per_worker={share:g}`): {obstacle} '
                'Or pass `backend="gloo"`, or omit it.'
            )
        if backend == "horovod" and use_gpu == "auto" and num_gpus:
            raise ValueError(
                f'`use_gpu="auto"` with `backend="horovod"` and {num_workers} workers: there are fewer GPUs, which '
                "Horovod's workers cannot share. Pass `use_gpu=False` to train on CPUs, fewer `num_workers`, or "
                '`backend="gloo"`.'
            )
    return choice


def _that_fit(num_workers: int, num_gpus_per_worker: float, of_nodes: Sequence[float]) -> float:
    if not any(of_nodes):
        return 0.0
    if num_gpus_per_worker != 1:  # the user's own number: if it does not fit, the reservation says what would
        return num_gpus_per_worker
    share = largest_share(num_workers, of_nodes)
    if not share:
        fitting = _num_fitting(_SHARES[-1], of_nodes)
        raise ValueError(
            f'`use_gpu="auto"` with {num_workers} workers (spares count too), but the cluster has {sum(of_nodes):g} '
            f"GPU(s), and at most {MOST_ON_A_GPU} workers share one: ask for at most {fitting} workers, pass "
            "`use_gpu=False` to train on CPUs, or choose the share yourself: `use_gpu=True, num_gpus_per_worker="
            f"{int(100 * sum(of_nodes) / num_workers) / 100:g}` (functions: `resources_per_worker`)."
        )
    return share


def largest_share(num_workers: int, of_nodes: Sequence[float]) -> float:
    """Return the largest part of a GPU that each worker can have, at most 1.

    Return 0 if more than `MOST_ON_A_GPU` workers would share a GPU.

    >>> [largest_share(num_workers, (1, 1)) for num_workers in (2, 3, 6, 9)]
    [1.0, 0.5, 0.3333, 0]
    """
    return next((share for share in _SHARES if _num_fitting(share, of_nodes) >= num_workers), 0)


def _num_fitting(share: float, of_nodes: Sequence[float]) -> int:
    return sum(int((num_gpus + _TOLERANCE) / share) for num_gpus in of_nodes)


def why_ranks_cannot_share(multi_rank: str | None, nccl: int) -> str:
    """Return why NCCL cannot run several ranks on one GPU, and what to do. Return "" if it can.

    Args:
        multi_rank: Value of the environment variable `MULTI_RANK`; None if it is not set.
        nccl: Version of the loaded library, such as 23007; 0 if there is none.

    >>> why_ranks_cannot_share("1", 23007)
    ''
    """
    if _is_set(multi_rank) and nccl >= _MULTI_RANK_SINCE:
        return ""
    variable = "not set" if multi_rank is None else f'"{multi_rank}"'
    version = f"NCCL {nccl // 10_000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "no NCCL"
    return (
        f"NCCL runs several ranks on one GPU only from version 2.30 on and with `{MULTI_RANK}=1`. Here, the variable "
        f"is {variable}, and {version} is loaded. Set it before the program starts, with `NCCL_NVLS_ENABLE=0` and "
        "`NCCL_MAX_CTAS=2`."
    )


def _is_set(multi_rank: str | None) -> bool:
    return multi_rank not in (None, "", "0")


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
