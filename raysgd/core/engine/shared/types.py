"""The data that the parts of the engine exchange. Everything is frozen; results are new objects."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raysgd.core.engine.shared.time_spent import TimeSpent
from raysgd.core.text.log_lines import WorkerLogLine
from raysgd.exceptions import WorkerFault

FailureKind = Literal["died", "disconnected", "user"]
LOOPBACK = "127.0.0.1"
PORT_BITS = 16
"""Number of bits of an endpoint that are its port. The other bits identify a Unix socket."""


@dataclass(frozen=True)
class WorkerInfo:
    """The node, process and GPUs of a worker. The GPUs are those that Ray assigned."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """The addresses at which the ranks of a group listen for each other. The driver distributes them through Ray.

    Attributes:
        addresses: Host and port of each rank, by rank. The port may have more bits than `PORT_BITS`.
        on_one_node: True if all ranks run on one node.
        secret: Key by which the ranks of this group recognize each other.
    """

    addresses: tuple[tuple[str, int], ...]
    on_one_node: bool
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of each rank."""
        return tuple(host for host, _ in self.addresses)

    @property
    def address(self) -> str:
        """Host of rank 0."""
        return self.addresses[0][0]

    @property
    def port(self) -> int:
        """Port of rank 0."""
        return self.addresses[0][1] & (1 << PORT_BITS) - 1


def hosts_of(infos: Sequence[WorkerInfo]) -> list[str]:
    """Return the address at which each worker should listen for the others.

    On a single node, that is the loopback address: nothing outside needs to connect, and a node may not be able to
    reach its own public address.
    """
    on_one_node = len({info.node_id for info in infos}) == 1
    return [LOOPBACK if on_one_node else info.node_ip for info in infos]


@dataclass(frozen=True)
class World:
    """One worker's place among all workers.

    Attributes:
        gpu_ids: GPUs that Ray assigned to this worker.
        node_gpu_ids: GPUs of all workers on its node, in order.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    gpu_ids: tuple[str, ...] = ()
    node_gpu_ids: tuple[str, ...] = ()

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


@dataclass(frozen=True)
class Resources:
    """The resources that one worker needs.

    Attributes:
        num_cpus: CPUs.
        num_gpus: GPUs.
            custom: Other resources: amount by name.
            runtime_env: The Ray runtime environment of the process; empty for the job's.
            labels: Labels that the node must have; empty for any node.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """Return the resources as a mapping for Ray, without zeros, because Ray refuses them in bundles."""
        amounts = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}


@dataclass(frozen=True)
class NodeView:
    """One live node, with its total and its free resources.

    Attributes:
        is_settling: True if more will be free in a moment, because a removed placement group still holds some.
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
    """The cluster at one moment.

    Attributes:
        nodes: The live nodes.
        holders: The placement groups that hold or want resources.
        can_grow: True if nodes may join.
    """

    nodes: tuple[NodeView, ...]
    holders: tuple[PlacementGroupHolder, ...] = ()
    can_grow: bool = True

    def without(self, node_ids: Collection[str]) -> ClusterView:
        """Return the cluster without these nodes."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.node_id not in node_ids))


@dataclass(frozen=True)
class Failure:
    """The reason why one worker's call did not return a value.

    Attributes:
        kind: What kind of failure it is.
        fault: Description of the exception.
        notes: Lines that the worker logged before.
        joint_work: Record of what the worker did in the call that all ranks have to do in the same way. Filled in if
            the group failed.
    """

    kind: FailureKind
    fault: WorkerFault
    notes: tuple[WorkerLogLine, ...] = ()
    joint_work: Any = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one worker's call: a value, a failure, or no answer before the driver stopped waiting."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    answered: bool = True

    @property
    def ok(self) -> bool:
        return self.answered and self.failure is None

    @property
    def has_died(self) -> bool:
        """True if the worker died during the call."""
        return self.failure is not None and self.failure.kind == "died"


@dataclass(frozen=True)
class ReplicaProgress:
    """The progress of a replica in a call that was interrupted, or that stopped at a step boundary.

    Attributes:
        progress: Number of completed steps of the call. All ranks count them in the same way.
        is_whole: True if its state is that of a completed step, so that others may copy it.
        obstacle: Reason why it cannot continue in another group; None if it can.
        words: The progress in the user's terms, for the log.
        admits: True if others may join it at this point.
    """

    progress: int = 0
    is_whole: bool = True
    obstacle: str | None = None
    words: str = ""
    admits: bool = True


@dataclass(frozen=True)
class StateHandover:
    """Which ranks of a new group take over a state, and from which rank.

    Attributes:
        source: Rank, in the new group, from whose state all continue.
        takers: Ranks that lack this state, in the order in which they pass it on.
        orphans: Progress and metrics of the ranks that left in an orderly way.
        make_replica: Makes replicas that match the current ones, for workers that got ready earlier; None if not
            needed.
    """

    source: int = 0
    takers: tuple[int, ...] = ()
    orphans: tuple[Any, ...] = ()
    make_replica: Any = None

    def by_node(self, worlds: Sequence[World]) -> StateHandover:
        """Order the takers so that the state travels to each node once, starting with the source's node.

        Args:
            worlds: The place of each rank.
        """
        home = worlds[self.source].node_rank

        def place(rank: int) -> tuple[bool, int, int]:
            node = worlds[rank].node_rank
            return node != home, node, rank

        return replace(self, takers=tuple(sorted(self.takers, key=place)))


@dataclass(frozen=True)
class DataLedger:
    """How many samples of the current or last pass over the data were used, and what became of the others.

    Attributes:
        pass_index: Index of the pass, from 0.
        due: Number of samples that this pass uses in steps; None if it is not known before its end.
        used: Number of samples used so far by all workers together, each once.
        in_flight: Number of samples in the step that is running. They are repeated if it is interrupted.
        left_out: Number of rows of a stream that could not be read and were left out.
    """

    pass_index: int
    due: int | None
    used: int
    in_flight: int = 0
    left_out: int = 0

    def used_since(self, before: DataLedger) -> int:
        """Return how many samples of this pass were used since an earlier ledger.

        >>> [DataLedger(1, 100, 60).used_since(DataLedger(index, 100, 20)) for index in (0, 1)]
        [60, 40]
        """
        return self.used - (before.used if before.pass_index == self.pass_index else 0)

    def __str__(self) -> str:
        used = f"{self.used}" if self.due is None else f"{self.used} of {self.due}"
        left_out = f", {self.left_out} left out" if self.left_out else ""
        return f"epoch {self.pass_index + 1}: {used} samples used{left_out}"


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a replica.

    Attributes:
        epoch: The current pass over the data.
        step: Steps completed in the running call; -1 between calls.
        phase: What the replica is doing.
        num_samples: Number of samples that this rank has processed in the running call.
        snapshot: Number of the newest snapshot taken inside the running call; 0 if there is none.
        at: Time of the heartbeat, on the clock of its process.
        own_s: Seconds of the current or last training call that this rank worked rather than waited for others. None if
            not measured.
        data: Counts of the samples; None if the library does not divide the data.
        notes: Lines that the process logged since its last heartbeat or answer.
        time: What the rank's time was spent on; None if not measured.
        joint_work: Record of what the rank did in the current or last training call that all ranks have to do in the
            same way. None if not recorded.
    """

    epoch: int = 0
    step: int = -1
    phase: str = "idle"
    num_samples: int = 0
    snapshot: int = 0
    at: float = 0.0
    own_s: float | None = None
    data: DataLedger | None = None
    notes: tuple[WorkerLogLine, ...] = ()
    time: TimeSpent | None = None
    joint_work: Any = None

    @property
    def is_training(self) -> bool:
        """True during a training call."""
        return self.phase == "training"


@dataclass(frozen=True)
class HeldAtStep:
    """The result, on every rank, of a call that stopped at the step boundary where it was asked to stop.

    Attributes:
        step: Number of completed steps of the call.
        part: This rank's part of a snapshot taken there (a `Capture`).
        is_planned: Whether the call itself was to be left there.
    """

    step: int
    part: Any
    is_planned: bool = False


@dataclass(frozen=True)
class GroupReport:
    """The outcomes of one call, in rank order."""

    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        return [outcome.value for outcome in self.outcomes]

    @property
    def all_answered(self) -> bool:
        """True if every worker answered, is alive and is connected, so that the group can take another call."""
        return all(o.answered and (o.failure is None or o.failure.kind == "user") for o in self.outcomes)
