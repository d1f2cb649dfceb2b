"""The engine's data types: what driver and workers exchange, and what the driver knows about the cluster and calls.

All classes are frozen dataclasses.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from raysgd.core.numbers.timing import TimeSpent
from raysgd.core.text.log_lines import WorkerLogLine
from raysgd.exceptions import WorkerFault

FailureKind = Literal["died", "disconnected", "user", "memory"]
LOOPBACK = "127.0.0.1"
PORT_BITS = 16
"""An endpoint's number holds its port in this many low bits. The higher bits identify a Unix socket."""


@dataclass(frozen=True)
class WorkerInfo:
    """The node and process of a worker, and the GPUs that Ray assigned to it."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


UNKNOWN = WorkerInfo("", "", 0)
"""Stands for the node and process of a worker that has not answered yet."""


@dataclass(frozen=True)
class Rendezvous:
    """The addresses at which the ranks of a group listen for each other. The driver sends them through Ray.

    Attributes:
        addresses: Host and endpoint number of each rank, by rank. The number holds the port: see `PORT_BITS`.
        on_one_node: True if all ranks run on one node.
        secret: Key with which the ranks of this group authenticate each other.
    """

    addresses: tuple[tuple[str, int], ...]
    on_one_node: bool
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host address of each rank, by rank."""
        return tuple(host for host, _ in self.addresses)

    @property
    def address(self) -> str:
        """Host address of rank 0."""
        return self.addresses[0][0]

    @property
    def ports(self) -> tuple[int, ...]:
        """Port of each rank, by rank. A rank that listens at a Unix socket only reserves its port."""
        return tuple(number & (1 << PORT_BITS) - 1 for _, number in self.addresses)

    @property
    def port(self) -> int:
        """Port of rank 0."""
        return self.ports[0]


def hosts_of(infos: Sequence[WorkerInfo]) -> list[str]:
    """Return the addresses at which the workers should listen for each other.

    If all workers are on one node, each address is the loopback address. No other node needs to connect, and a node may
    not be able to reach its own public address.
    """
    on_one_node = len({info.node_id for info in infos}) == 1
    return [LOOPBACK if on_one_node else info.node_ip for info in infos]


@dataclass(frozen=True)
class World:
    """One worker's position in its group.

    Attributes:
        rank: The worker's rank.
        size: Number of workers in the group.
        local_rank: The worker's rank among the workers on its node.
        local_size: Number of workers on its node.
        node_rank: Index of its node.
        num_nodes: Number of nodes that have workers of the group.
        gpu_ids: GPUs that Ray assigned to this worker.
        node_gpu_ids: GPUs that Ray assigned to any worker on its node, sorted by ID and without duplicates.
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
class Failure:
    """The reason why one worker's call did not return a value.

    Attributes:
        kind: "died" (the process or node died), "disconnected" (the connection to another rank was lost), "user" (user
            code raised an exception) or "memory" (memory ran out in a step that the ranks can repeat).
        fault: Description of the exception.
        notes: Lines that the worker logged before the failure.
        joint_work: Record of what every rank must do in the same way in this call, such as its steps. Comparing the
            records shows where ranks diverged. None if nothing was recorded.
        largest_batch: Number of samples that the rank can process at once, if memory ran out. None if unknown.
    """

    kind: FailureKind
    fault: WorkerFault
    notes: tuple[WorkerLogLine, ...] = ()
    joint_work: Any = None
    largest_batch: int | None = None


class StepLacksMemory(Exception):
    """Memory ran out in a step that the ranks can undo and repeat. A replica raises this from the original error.

    Attributes:
        largest_batch: Number of samples to process at once from now on. None to repeat the step unchanged.
    """

    def __init__(self, largest_batch: int | None = None) -> None:
        super().__init__()
        self.largest_batch = largest_batch


@dataclass(frozen=True)
class Answered:
    """The outcome of a call that returned a value.

    Attributes:
        rank: The worker's rank.
        value: What the call returned.
        capture: This rank's part of a snapshot (a `Capture`), if one was requested.
        notes: Lines that the worker logged since its last answer.
    """

    rank: int
    value: Any = None
    capture: Any = None
    notes: tuple[WorkerLogLine, ...] = ()
    ok: ClassVar[bool] = True
    answered: ClassVar[bool] = True
    has_died: ClassVar[bool] = False
    failure: ClassVar[None] = None


@dataclass(frozen=True)
class Failed:
    """The outcome of a call that failed.

    Attributes:
        rank: The worker's rank.
        failure: Why the call failed.
        answered: False if the driver has killed the worker since.
    """

    rank: int
    failure: Failure
    answered: bool = True
    ok: ClassVar[bool] = False

    @property
    def has_died(self) -> bool:
        """True if the worker's process or node died during the call."""
        return self.failure.kind == "died"

    @property
    def notes(self) -> tuple[WorkerLogLine, ...]:
        """Lines that the worker logged before the failure."""
        return self.failure.notes


@dataclass(frozen=True)
class Unanswered:
    """The outcome so far of a call that has not ended."""

    rank: int
    notes: ClassVar[tuple[WorkerLogLine, ...]] = ()
    ok: ClassVar[bool] = False
    answered: ClassVar[bool] = False
    has_died: ClassVar[bool] = False
    failure: ClassVar[None] = None


Outcome: TypeAlias = Answered | Failed | Unanswered
"""The outcome of one worker's call."""


@dataclass(frozen=True)
class ReplicaProgress:
    """The progress of a replica in its current or last call, and whether it can continue in a new group.

    Attributes:
        position: How far the replica is in the call: the number of completed steps, plus one once the call has ended.
            A step on n global batches (`accumulate_grad_batches=n`) counts n times. All ranks count in the same way.
        can_be_source: True if the replica has the state after a completed step, which other replicas may then copy.
        obstacle: Reason why the replica cannot continue in a new group, or None if it can.
        words: Description of the progress, for the users' log.
        admits: True if other workers may join the group at this point of the call.
    """

    position: int = 0
    can_be_source: bool = True
    obstacle: str | None = None
    words: str = ""
    admits: bool = True


@dataclass(frozen=True)
class StateHandover:
    """Says which rank of a new group sends the training state, and which ranks receive it.

    Attributes:
        source: Rank in the new group from whose state all ranks continue.
        takers: Ranks in the new group that lack this state. The state is passed along a chain: from `source` to the
            first taker, from there to the second taker, and so on.
        orphans: Progress and metrics of the ranks that left the group without having failed.
        make_replica: The current replica factory, for joining workers. These workers may have been started with an
            older factory. None for survivors.
    """

    source: int = 0
    takers: tuple[int, ...] = ()
    orphans: tuple[Any, ...] = ()
    make_replica: Any = None

    def by_node(self, worlds: Sequence[World]) -> StateHandover:
        """Return a copy with `takers` sorted by node, starting with the source's node.

        The state is then sent to each node only once.

        Args:
            worlds: The `World` of each rank.
        """
        home = worlds[self.source].node_rank

        def place(rank: int) -> tuple[bool, int, int]:
            node = worlds[rank].node_rank
            return node != home, node, rank

        return replace(self, takers=tuple(sorted(self.takers, key=place)))


@dataclass(frozen=True)
class SamplesUsed:
    """Counts the samples of the current or last pass over the data: samples used, in use and skipped.

    Attributes:
        pass_index: Index of the pass, from 0.
        due: Number of samples that this pass will use in total. None if the number is unknown until the pass ends.
        used: Number of samples used so far by all workers together. A sample that is used again after a failure counts
            once.
        in_flight: Number of samples in the running step. They are used again if the step is interrupted.
        left_out: Number of rows of a stream that could not be read and were skipped.
    """

    pass_index: int
    due: int | None
    used: int
    in_flight: int = 0
    left_out: int = 0

    def used_since(self, before: SamplesUsed) -> int:
        """Return how many samples of this pass were used since an earlier record.

        >>> [SamplesUsed(1, 100, 60).used_since(SamplesUsed(index, 100, 20)) for index in (0, 1)]
        [60, 40]

        Args:
            before: The earlier record. If it is for another pass, all samples of this pass count.
        """
        return self.used - (before.used if before.pass_index == self.pass_index else 0)

    def __str__(self) -> str:
        used = f"{self.used}" if self.due is None else f"{self.used} of {self.due}"
        left_out = f", {self.left_out} left out" if self.left_out else ""
        return f"epoch {self.pass_index + 1}: {used} samples used{left_out}"


@dataclass(frozen=True)
class Heartbeat:
    """A replica's answer to a poll. It shows that the worker is alive, and how far the replica is.

    Attributes:
        epoch: The current epoch.
        step: Number of steps completed in the running call. -1 between calls.
        phase: What the replica is doing, such as "training" or "idle".
        num_samples: Number of samples that this rank has processed in the running call.
        snapshot: The newest snapshot taken inside the running call, as the number of steps completed before it. 0 if
            there is none.
        at: Time of the heartbeat, on the worker process's clock.
        own_s: Seconds of the current or last training call in which this rank worked, rather than waited for other
            ranks. None if not measured.
        data: How many samples were used. None if raysgd does not shard the data.
        notes: Lines that the process logged since its last heartbeat or answer.
        time: How the rank spent its time, such as on steps or waiting for data. None if not measured.
        joint_work: Record of what every rank must do in the same way in the current or last training call, such as its
            steps. None if nothing was recorded.
    """

    epoch: int = 0
    step: int = -1
    phase: str = "idle"
    num_samples: int = 0
    snapshot: int = 0
    at: float = 0.0
    own_s: float | None = None
    data: SamplesUsed | None = None
    notes: tuple[WorkerLogLine, ...] = ()
    time: TimeSpent | None = None
    joint_work: Any = None

    @property
    def is_training(self) -> bool:
        """True during a training call."""
        return self.phase == "training"


@dataclass(frozen=True)
class HeldAtStep:
    """The value that each rank returns if a call stopped between two steps, for example to let workers join.

    Attributes:
        step: Number of completed steps of the call.
        part: This rank's part of a snapshot taken at that step (a `Capture`).
        is_planned: True if the call ended early at this step because of its arguments. False if the driver stopped it.
    """

    step: int
    part: Any
    is_planned: bool = False


@dataclass(frozen=True)
class GroupReport:
    """The outcomes of one call on a worker group, in rank order."""

    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        """The values of the ranks that returned one, in rank order."""
        return [outcome.value for outcome in self.outcomes if isinstance(outcome, Answered)]

    @property
    def captures(self) -> list[Any]:
        """The ranks' parts of a snapshot (`Capture`s), in rank order, of the ranks that sent one."""
        return [each.capture for each in self.outcomes if isinstance(each, Answered) and each.capture is not None]

    @property
    def all_answered(self) -> bool:
        """True if every worker has answered, is alive and is connected. The group can then run another call."""
        return all(o.answered and (o.failure is None or o.failure.kind == "user") for o in self.outcomes)
