"""Pure functions that decide how many workers run, their ranks, what caused a failure, and whose state to copy.

Nothing in this module sleeps, queries Ray or contacts a worker. The decisions can therefore be tested without a
cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

from raysgd.core.cluster.resources import ClusterView, Resources, capacity
from raysgd.core.engine.shared.types import Failure, FailureKind, GroupReport, ReplicaProgress, WorkerInfo, World
from raysgd.core.memory import ran_out
from raysgd.core.text.log_lines import named
from raysgd.exceptions import WorkerFault

_REASON_LENGTH = 160
_LONGEST_DELAY_S = 60.0
# Short descriptions of how a worker was lost, by the class of the error with which Ray reports the loss.
_PROCESS_DIED, _NODE_DIED = "its process died", "its node died"
_DEATHS = {
    "ActorDiedError": _PROCESS_DIED,
    "WorkerCrashedError": _PROCESS_DIED,
    "OutOfMemoryError": "killed, its node was out of memory",
    "NodeDiedError": _NODE_DIED,
    "ActorUnavailableError": "out of reach",
}
_OF_SEVERAL = {_PROCESS_DIED: "their processes died", _NODE_DIED: "their nodes died"}
LOOK_AT_RAYS_LOG = "Ray's log of the worker (`worker-*.err`) may name the cause"
_OF_A_NODE = ("its node has died", "node it was running on is dead", "preemption")
_BY_WEIGHT: tuple[FailureKind, ...] = ("died", "user", "memory", "disconnected")


@dataclass(frozen=True)
class WaitForWorkers:
    """A decision not to start workers yet, because too few workers fit into the free resources.

    Attributes:
        delay_s: Seconds to wait before the next attempt. None to give up.
        reason: States how many workers fit, for a log or error message.
    """

    delay_s: float | None
    reason: str


@dataclass(frozen=True)
class ScalingPolicy:
    """Decides how many workers to run.

    Attributes:
        max_workers: Largest number of workers.
        min_workers: Smallest number of workers.
        num_attempts: Number of attempts to find enough resources.
        first_delay_s: The first wait between attempts. Each wait is twice as long as the previous one, up to a minute.
        num_local: Number of workers that run in the driver. A group of only these workers needs no free resources.
    """

    max_workers: int
    min_workers: int = 1
    num_attempts: int = 10
    first_delay_s: float = 1.0
    num_local: int = 0

    def decide(self, view: ClusterView, need: Resources, attempt: int) -> int | WaitForWorkers:
        """Return how many workers to start with the free resources, or how long to wait for more resources.

        Args:
            view: The cluster's nodes and their free resources.
            need: Resources of one worker.
            attempt: Index of this attempt to start workers, from 0.
        """
        fitting = max(self.num_local, min(self.max_workers, capacity(view, need)))
        if fitting >= self.min_workers:
            return fitting
        reason = f"{fitting} of at least {self.min_workers} workers fit"
        if not view.can_grow and capacity(view, need, free_only=False) < self.min_workers:
            return WaitForWorkers(None, f"{reason}, even when nothing else runs")
        if attempt + 1 >= self.num_attempts:
            return WaitForWorkers(None, f"{reason} after {attempt + 1} attempts")
        return WaitForWorkers(self.delay_s(attempt), reason)

    def grow(self, view: ClusterView, need: Resources, num_workers: int, num_reserved: int) -> int:
        """Return by how many workers the current group could grow.

        Args:
            view: The cluster's nodes and their free resources.
            need: Resources of one worker.
            num_workers: Size of the current group.
            num_reserved: Number of slots that the current group has already reserved, whether free or in use.
        """
        return max(0, min(self.max_workers, num_reserved + capacity(view, need)) - num_workers)

    def delay_s(self, attempt: int) -> float:
        """Return how many seconds to wait after attempt number `attempt`, counted from 0.

        The wait doubles with each attempt, up to a minute.
        """
        return min(_LONGEST_DELAY_S, self.first_delay_s * 2.0**attempt)


Wait = bool | Literal["auto"]
"""The user's choice of whether survivors wait for new workers.

With "auto", they wait only if they cannot keep the global batch.
"""

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True)
class Resizing:
    """The rules for when the number of workers changes.

    Attributes:
        check_s: Seconds between checks for free resources during a call. None to grow only between calls.
        num_awaited: Survivors of a failure wait for workers that are starting until the group has this many workers.
        num_awaited_by_call: Before a call that workers can join while it runs, the driver waits for workers that are
            starting until the group has this many workers.
        minds_memory: True if survivors that ran out of memory in their first step wait for new workers. With fewer
            workers, each worker needs more memory.
    """

    check_s: float | None
    num_awaited: int
    num_awaited_by_call: int
    minds_memory: bool = False


@dataclass(frozen=True)
class ElasticRules:
    """The rules for how a worker group responds to changes of the cluster.

    Attributes:
        wait: The user's choice of whether survivors of a failure wait for new workers.
        resize_interval_s: Seconds between checks for free resources during a call. With None, the group never grows
            during a call.
        leaving_nodes: Returns the IDs of nodes that will be removed soon.
        keeps_global_batch: Returns True if the result of a training step does not depend on the number of workers.
            Survivors can then continue calls without replacements.
    """

    wait: Wait = True
    resize_interval_s: float | None = None
    leaving_nodes: Callable[[], frozenset[str]] = frozenset
    keeps_global_batch: Callable[[], bool] = lambda: False

    def resizing(self, max_workers: int, num_short: int = 0, *, regroups: bool = True) -> Resizing:
        """Return the rules for when the number of workers changes.

        Args:
            max_workers: Number of workers that the trainer should have.
            num_short: Largest group size with which memory ran out. 0 if memory never ran out.
            regroups: True if replicas can continue in another group.
        """
        if self.wait == AUTO and regroups and self.keeps_global_batch():
            enough = min(max_workers, num_short + 1)
            return Resizing(self.resize_interval_s, enough, enough, minds_memory=True)
        if self.wait:
            return Resizing(None if self.wait == AUTO else self.resize_interval_s, max_workers, max_workers)
        return Resizing(self.resize_interval_s, 1, max_workers)


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failed call.

    Attributes:
        kind: "died" (a process or node died), "disconnected" (a connection was lost although no rank is known to be
            dead), "user" (user code raised an exception) or "memory" (memory ran out in a step that can be repeated).
        faults: The errors of that kind, in rank order.
        beside: If `kind` is "died", exceptions that user code raised in the same call. The death may have caused them,
            so they only appear in messages.
    """

    kind: FailureKind
    faults: tuple[WorkerFault, ...]
    beside: tuple[WorkerFault, ...] = ()

    @property
    def ranks(self) -> list[int]:
        return [fault.rank for fault in self.faults]


def classify(report: GroupReport) -> Diagnosis:
    """Return the cause of a failed call.

    A death takes precedence, because it causes the survivors' errors. A user exception, or a lack of memory, takes
    precedence over lost connections: the rank that raised it stops, so the other ranks lose their connections to it.
    """
    failures = [outcome.failure for outcome in report.outcomes if outcome.failure is not None]
    assert failures, "classify() needs a report with at least one failure"
    for kind in _BY_WEIGHT:
        faults = _of_kind(failures, kind)
        if faults:
            return Diagnosis(kind, faults, _of_kind(failures, "user") if kind == "died" else ())
    raise AssertionError("unreachable: every failure has a known kind")


def failed_alike(report: GroupReport) -> bool:
    """Return True if every rank failed at the same line of user code with the same class of exception."""
    failures = [outcome.failure for outcome in report.outcomes]
    places = {(failure.fault.type_name, failure.fault.location) for failure in failures if failure is not None}
    return None not in failures and len(places) == 1


def is_lack_of_memory(diagnosis: Diagnosis) -> bool:
    """Return True if no process died and user code raised only out-of-memory errors, of a GPU or a node."""
    faults = diagnosis.faults
    return diagnosis.kind == "user" and all(ran_out(each.error, each.type_name, each.message) for each in faults)


@dataclass(frozen=True)
class LostNodes:
    """Nodes that lost all their workers.

    Attributes:
        addresses: Addresses of the nodes.
        are_dead: True if Ray reports the nodes as dead.
    """

    addresses: tuple[str, ...] = ()
    are_dead: bool = False

    def __str__(self) -> str:
        names = f"node{'s' if len(self.addresses) > 1 else ''} {', '.join(self.addresses)}"
        return f"{names} died" if self.are_dead else f"all workers of {names}"


def emptied_nodes(lost: Collection[int], infos: Sequence[WorkerInfo]) -> dict[str, str]:
    """Return the addresses of the lost ranks' nodes, by node ID.

    Return an empty dict if any of these nodes has a live worker.

    Args:
        lost: Ranks whose workers were lost.
        infos: Node of each rank's worker, by rank, before the loss.
    """
    emptied = {infos[rank].node_id: infos[rank].node_ip for rank in sorted(lost)}
    in_use = {info.node_id for rank, info in enumerate(infos) if rank not in lost}
    return {} if in_use & emptied.keys() else emptied


def words(diagnosis: Diagnosis, gone: Collection[int] = (), nodes: LostNodes | None = None) -> str:
    """Return a short description of why a call failed, for logs and error messages.

    Args:
        diagnosis: The cause of the failed call.
        gone: Ranks that are known to be lost. Need not include the ranks in `diagnosis`.
        nodes: Nodes that lost all their workers.
    """
    reason = _said(diagnosis.faults[0], diagnosis.kind == "died")
    if diagnosis.kind in ("user", "memory"):
        return f"{named(diagnosis.ranks)} raised {reason}"
    lost = {*gone, *diagnosis.ranks} if diagnosis.kind == "died" else {*gone}
    facts = [str(nodes)] if nodes is not None else []
    if diagnosis.kind == "died" and not (nodes is not None and nodes.are_dead):
        facts.insert(0, reason if len(lost) == 1 else _OF_SEVERAL.get(reason, reason))
    known = f" ({'; '.join(facts)})" if facts else ""
    parts = [f"lost {named(lost)}{known}"] if lost else []
    if diagnosis.kind == "disconnected":
        reporters = [rank for rank in diagnosis.ranks if rank not in lost] or diagnosis.ranks
        verb = "reports" if len(reporters) == 1 else "report"
        parts.append(f"{named(reporters)} {verb}: connection to another rank lost ({reason})")
    parts += [f"rank {fault.rank} raised {_said(fault, False)}" for fault in diagnosis.beside[:1]]
    return "; ".join(parts)


def why_not_started(failure: Failure) -> str:
    """Return a description of why a worker did not start. If user code raised an exception, name the line of code."""
    reason = _said(failure.fault)
    if failure.kind == "user":
        return f"{reason}, raised at {failure.fault.location}"
    return f"{reason}. {LOOK_AT_RAYS_LOG}" if reason == _PROCESS_DIED else reason


def _said(fault: WorkerFault, is_death: bool = True) -> str:
    if is_death and fault.type_name in _DEATHS:
        is_of_node = any(phrase in str(fault.error) for phrase in _OF_A_NODE)
        return _DEATHS["NodeDiedError" if is_of_node else fault.type_name]
    return f"{fault.type_name}: {shorten(fault.message.partition(chr(10))[0], _REASON_LENGTH, placeholder=' ...')}"


def _of_kind(failures: list[Failure], kind: str) -> tuple[WorkerFault, ...]:
    return tuple(failure.fault for failure in failures if failure.kind == kind)


class RetryBudget:
    """Counts the retries of one call, or of several calls that share one number of retries.

    A restart always costs a retry. Continuing in place with the survivors of a failure is free after enough progress:
    at least one step of the call, and a position at least 2 beyond the one at which the survivors last continued. That
    takes two steps, but only one with `accumulate_grad_batches=2`, because the position counts global batches.
    Otherwise, continuing costs a retry, too. After a hang, continuing always costs a retry, because the code may hang
    again. Survivors that completed no step since they last continued cannot continue again, because continuing may
    have broken them.

    Args:
        num_retries: Number of retries, possibly infinite. If it is 0, the first failure ends the call, even if
            continuing would be free.

    Attributes:
        num_spent: Number of retries used.
        num_refused: Number of failures for which no retry was left.
        continued_at: Position in the call at which the survivors last continued. None after a restart.
    """

    def __init__(self, num_retries: float) -> None:
        self.num_retries = num_retries
        self.renew()

    def renew(self) -> None:
        """Reset the budget for the next call or series of calls."""
        self.num_spent = 0
        self.num_refused = 0
        self.continued_at: int | None = None
        self._has_hung = False

    @property
    def is_spent(self) -> bool:
        return self.num_spent >= self.num_retries

    def note_hang(self) -> None:
        """Record that the next recovery was caused by a hung worker. Continuing then costs a retry."""
        self._has_hung = True

    @property
    def free_from(self) -> float:
        """Position in the call from which continuing with the survivors costs no retry.

        One step since the survivors last continued is not enough: code that fails after every step also completes one
        step between two failures. A step that accumulates the gradients of several global batches counts as several.
        """
        if self._has_hung:
            return float("inf")
        return 1 if self.continued_at is None else self.continued_at + 2

    def pay_for_continuing(self, position: int) -> None:
        self.num_spent += position < self.free_from
        self.continued_at, self._has_hung = position, False

    def pay_for_restart(self) -> None:
        self.num_spent += 1
        self.continued_at, self._has_hung = None, False

    def refuse(self) -> None:
        """Count a failure for which no retry was left."""
        self.num_refused += 1


@dataclass(frozen=True)
class FailurePolicy:
    """Says which failed calls are retried, and how. The table of `recovery.machine` decides.

    By default, a call is retried if workers were lost, but not if user code raised an exception.

    Attributes:
        continues: True to continue with the survivors if possible.
        retries_user_errors: True to use a retry and restart all workers even if user code raised an exception.
    """

    continues: bool = False
    retries_user_errors: bool = False

    def renew_if_due(self, budget: RetryBudget, *, can_continue: bool) -> None:
        """Reset the budget if there was enough progress before a failure. By default, it is never reset.

        Args:
            budget: The retries of the failed call.
            can_continue: True if survivors of the failure can continue the call.
        """


def choose_source(reports: Sequence[ReplicaProgress]) -> int | None:
    """Return the index of the replica whose state the other survivors copy.

    Return None if the survivors cannot continue.

    The source is the most advanced replica that is not in the middle of a step. Replicas that have not completed the
    source's last step may copy its state, too: that step already includes the gradients of all ranks, even of lost
    ranks.

    Args:
        reports: The progress of each survivor's replica.
    """
    if any(report.obstacle for report in reports):
        return None
    sources = [(-report.position, index) for index, report in enumerate(reports) if report.can_be_source]
    return min(sources)[1] if sources else None


def are_alike(reports: Sequence[ReplicaProgress]) -> bool:
    """Return True if all replicas are in sync: each has the state after the same number of completed steps."""
    return all(each.can_be_source for each in reports) and len({each.position for each in reports}) == 1


def takers(reports: Sequence[ReplicaProgress], source: int) -> tuple[int, ...]:
    """Return the indices of the replicas that must copy the state of the replica with the index `source`."""
    position = reports[source].position
    return tuple(i for i, each in enumerate(reports) if not each.can_be_source or each.position != position)


# ---------------------------------------------------------------------------------------------------------------- ranks


def rank_order(infos: Sequence[WorkerInfo], *, first_stays: bool = False) -> list[int]:
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


def assign_ranks(infos: Sequence[WorkerInfo]) -> list[World]:
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


def next_ranks(ranks: Sequence[int], num_workers: int) -> list[int]:
    """Return each worker's rank in the next group. A worker keeps its rank if that rank exists in the next group.

    Other workers get free ranks.

    >>> next_ranks([0, 2], 3), next_ranks([1, 2], 2), next_ranks([2, 3], 3)
    ([0, 2, 1], [1, 0], [2, 0, 1])

    Args:
        ranks: The current ranks of the workers that stay in the group.
        num_workers: Size of the next group. The ranks of new workers come last in the result.
    """
    free = [rank for rank in range(num_workers) if rank not in ranks]
    kept = [rank if rank < num_workers else free.pop(0) for rank in ranks]
    return kept + free


def shard_keepers(infos: Sequence[WorkerInfo], home: str) -> dict[int, int]:
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
