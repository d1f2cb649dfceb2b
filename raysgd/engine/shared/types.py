"""The data that passes between the parts of the engine. Everything is frozen; results are new objects."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raysgd._text.log_lines import WorkerLogLine
from raysgd.engine.shared.time_spent import TimeSpent
from raysgd.exceptions import WorkerFault

FailureKind = Literal["died", "disconnected", "user"]
LOOPBACK = "127.0.0.1"
PORT_BITS = 16
"""The bits of an endpoint that are a port; more bits name a Unix socket."""


@dataclass(frozen=True)
class WorkerInfo:
    """The place of a worker process, and the GPUs that Ray gave it."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """The addresses at which the ranks of a group listen for each other. The driver hands them round through Ray.

    Attributes:
        addresses: Host and port of each rank, by rank; the port may have more bits than `PORT_BITS`.
        on_one_node: Whether all ranks are.
        secret: By which the ranks of this group know each other.
    """

    addresses: tuple[tuple[str, int], ...]
    on_one_node: bool
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(host for host, _ in self.addresses)

    @property
    def address(self) -> str:
        """The host of rank 0."""
        return self.addresses[0][0]

    @property
    def port(self) -> int:
        """The port of rank 0."""
        return self.addresses[0][1] & (1 << PORT_BITS) - 1


def hosts_of(infos: Sequence[WorkerInfo]) -> list[str]:
    """Under which address each of these workers is to listen for the others.

    On a single node that is the loopback address: no one from outside needs to connect, and the node's public address
    may be unreachable from itself.
    """
    on_one_node = len({info.node_id for info in infos}) == 1
    return [LOOPBACK if on_one_node else info.node_ip for info in infos]


@dataclass(frozen=True)
class World:
    """One worker's place among all workers.

    Attributes:
        gpu_ids: The GPUs that Ray gave this worker.
        node_gpu_ids: Those of all workers on its node, in order.
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
        custom: Other amounts by name.
        runtime_env: The environment that Ray makes for its process; empty for that of the job.
        labels: What the labels of its node have to be; empty for any node.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The same as a mapping for Ray, without the zeros (Ray refuses bundles of zeros)."""
        amounts = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}


@dataclass(frozen=True)
class NodeView:
    """One live node: what it has in all and what of it is free.

    Attributes:
        is_settling: Whether more of it will be free in a moment: a placement group that was removed still holds some.
    """

    node_id: str
    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    is_settling: bool = False


@dataclass(frozen=True)
class PlacementGroupHolder:
    """A placement group that holds or waits for resources."""

    name: str
    state: str
    bundles: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class ClusterView:
    """The cluster as it looked at one moment.

    Attributes:
        nodes: Its nodes.
        holders: The placement groups that hold or want some of it.
        can_grow: Whether nodes may join.
    """

    nodes: tuple[NodeView, ...]
    holders: tuple[PlacementGroupHolder, ...] = ()
    can_grow: bool = True

    def without(self, node_ids: Collection[str]) -> ClusterView:
        """The same as if these nodes were not there."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.node_id not in node_ids))


@dataclass(frozen=True)
class Failure:
    """The reason for which one worker's call did not return a value.

    Attributes:
        kind: The kind of it.
        fault: The exception.
        notes: What the worker logged before.
        joint_work: What it did in the call that all ranks have to do alike, if the group failed.
    """

    kind: FailureKind
    fault: WorkerFault
    notes: tuple[WorkerLogLine, ...] = ()
    joint_work: Any = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one worker's call: a value, a failure, or no answer before we stopped listening."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    answered: bool = True

    @property
    def ok(self) -> bool:
        return self.answered and self.failure is None

    @property
    def has_died(self) -> bool:
        """True if the worker died in it."""
        return self.failure is not None and self.failure.kind == "died"


@dataclass(frozen=True)
class ReplicaProgress:
    """The progress of a replica in a call that broke off, or that was held at a step boundary.

    Attributes:
        progress: Steps of the call that it has completed, counted alike on all ranks.
        is_whole: Whether its state is that of a completed step, so that others may take it over.
        obstacle: Why it cannot go on in another group; None when it can.
        words: How far that is in the user's terms, for the log.
        admits: Whether others may join it where it is.
    """

    progress: int = 0
    is_whole: bool = True
    obstacle: str | None = None
    words: str = ""
    admits: bool = True


@dataclass(frozen=True)
class StateHandover:
    """The ranks that take over a state when a new group is formed, and those that give it.

    Attributes:
        source: Rank, in the new group, whose state is the one to go on from.
        takers: The ranks whose state is another one, or none yet, in the order in which they pass it on.
        orphans: How far the ranks were that left in an orderly way, and what they had measured.
        make_replica: Makes replicas as they are by now, for those who were made ready earlier; else None.
    """

    source: int = 0
    takers: tuple[int, ...] = ()
    orphans: tuple[Any, ...] = ()
    make_replica: Any = None

    def by_node(self, worlds: Sequence[World]) -> StateHandover:
        """The same with takers in an order in which the state travels to each node once, beginning with the source's.

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
    """The samples of the pass over the data that is running or was run last, by what became of them.

    Attributes:
        pass_index: Which pass, from 0.
        due: How many samples steps will use, or have used, in this pass; None where only its end will tell.
        used: How many have been used, each once, by all workers together.
        in_flight: How many are in a step that is not done; if it breaks off, they are repeated.
        left_out: Rows of a stream that could not be read, and were left out.
    """

    pass_index: int
    due: int | None
    used: int
    in_flight: int = 0
    left_out: int = 0

    def used_since(self, before: DataLedger) -> int:
        """Return how many samples of this pass were used since then.

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
        epoch: The pass over the data that it is in.
        step: Steps completed in the running call; -1 between calls.
        phase: What it is doing.
        num_samples: Samples that this rank has worked on in the running call.
        snapshot: Number of the newest snapshot taken inside the running call; 0 when there is none.
        at: When it was given, on the clock of its process.
        own_s: Seconds of the training call, running or last, that this rank spent on its own work rather than on
            waiting for others. None where that was not measured.
        data: What became of the samples; None where the library does not divide the data.
        notes: What its process logged since the last sign of life or answer.
        time: What its time was spent on; None where that was not measured.
        joint_work: What it did in the training call, running or last, that all ranks have to do alike. None where that
            was not recorded.
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
        """True if it comes from inside a training call."""
        return self.phase == "training"


@dataclass(frozen=True)
class HeldAtStep:
    """The result of a call on every rank that stopped at the step boundary at which it was asked to stop.

    Attributes:
        step: Steps of the call completed.
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
        """True if every worker answered, lives and is connected, so that the group can take another call."""
        return all(o.answered and (o.failure is None or o.failure.kind == "user") for o in self.outcomes)
