"""The interface that the engine expects of a replica, and the functions through which it calls replicas.

The functions are in this module because a worker imports the module of each function that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raysgd.core.engine.shared.types import Heartbeat, ReplicaProgress, StateHandover, World
from raysgd.core.text import log_lines


@dataclass(frozen=True)
class Capture:
    """One rank's part of a snapshot.

    Attributes:
        rank_state: This rank's own state, such as the state of its random generators. Small.
        shared_state: State that all ranks share, such as model and optimizer. Set only by rank 0, and only if it is
            small enough to be sent with the answer.
        progress: This rank's progress in the running call, for a mid-call snapshot. Small.
        token: Identifies shared state that is stored in the worker until it is fetched. None if none is stored.
        is_part: True if the shared state is sharded. Each rank's token then identifies the rank's shard.
        seconds: Duration of the copy.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """The object that holds the model and trains it in a worker process. Each framework has its implementation.

    Only `fetch` may be called while another method is running.
    """

    def setup(self) -> Any:
        """Build the user's objects, after the worker has joined its group. Return facts that the front end needs."""

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the state. `landed_token` is the token of the newest shared state that has arrived in the driver."""

    def fetch(self, token: int) -> Any:
        """Return the stored shared state for `token`. Called from another thread, possibly during training."""

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot. `own_state` is None if the snapshot has no own state for this rank."""

    def shutdown(self) -> None:
        """Release resources that would outlive the process or disturb the next replica in it."""


class RegroupingReplica(Replica, Protocol):
    """A replica that can survive the loss of other replicas: it keeps its process and continues in a new group.

    `heartbeat`, `propose_hold`, `settle_hold` and `last_hold` are called from a second thread while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return the replica's progress, after it has left the old group."""

    def warm_up(self) -> None:
        """Run operations that are slow the first time, such as compilation.

        Their effect on the state does not matter, because the worker receives the state of the group that it joins.
        """

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue as rank `world.rank` of a new group, after all ranks have joined it. Return facts, like `setup`."""

    def heartbeat(self) -> Heartbeat:
        """Return the replica's current progress as a `Heartbeat`."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Propose to stop the running call after `at` steps, or if `at` is None, `margin` steps from now.

        A rank that accepts waits at that step until the proposal is settled.

        Args:
            number: Number of the proposal. Numbers increase, and a proposal that arrives twice or late is ignored.
            margin: Number of steps from now. Used if `at` is None.
            at: Number of steps that another rank has accepted.

        Returns:
            The number of steps, or None if this rank cannot stop there.
        """

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """Settle a proposal: stop at the proposed step if `is_agreed`, otherwise cancel the proposal."""

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal, and True if this rank was notified that all ranks agreed to it."""

    def restore_inside(self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
        """Restore a snapshot that was taken inside a call, so that the call can resume there.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state. None if the snapshot has none for this rank.
            first: Progress of rank 0.
            parts: Progress of the old ranks whose metrics this rank takes over.
        """

    def capture_here(self) -> Capture:
        """Copy the state of the last completed step, with the progress of an interrupted call if it can resume."""

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of mid-call snapshot `number`, or None if it is no longer stored."""


ReplicaFactory = Callable[[World], Replica]


def nothing(replica: Replica) -> None:
    """Do nothing. Used for a call that only copies the state."""


def fetch(replica: Replica, token: int) -> Any:
    """Return the state that the replica stores for `token`."""
    return replica.fetch(token)


def restore(replica: Replica, shared_state: Any, own_state: Any) -> None:
    """Restore a snapshot that was taken between two calls."""
    replica.restore(shared_state, own_state)


def restore_inside(replica: Any, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
    """Restore a snapshot that was taken inside a call."""
    replica.restore_inside(shared_state, own_state, first, parts)


def replica_progress(replica: RegroupingReplica) -> ReplicaProgress:
    """Return the progress of the replica."""
    return replica.replica_progress()


def heartbeat(replica: Any) -> Heartbeat | None:
    """Return a heartbeat with the process's new log lines.

    The call's answer repeats these lines, because the driver may not read the heartbeat before the call ends.
    """
    found = sign_of_life(replica)
    return None if found is None else replace(found, notes=log_lines.glance())


def sign_of_life(replica: Any) -> Heartbeat | None:
    """Return a heartbeat without log lines, or None if the replica has no heartbeats."""
    found: Heartbeat | None = replica.heartbeat() if hasattr(replica, "heartbeat") else None
    return found


def part_of_snapshot(replica: RegroupingReplica, number: int) -> Capture | None:
    """Return this rank's part of a mid-call snapshot."""
    return replica.part_of_snapshot(number)


def capture_here(replica: RegroupingReplica) -> Capture:
    """Copy the state of the last completed step, even in an interrupted call."""
    return replica.capture_here()


def hold(replica: Any) -> None:
    """Interrupt a call that waits for a message from the user's function, so that workers can join.

    The function itself keeps running.
    """
    replica.hold()


def propose_hold(replica: RegroupingReplica, number: int, margin: int, at: int | None) -> int | None:
    """Propose a step to stop at. Return the step, or None if this rank cannot stop there."""
    return replica.propose_hold(number, margin, at)


def settle_hold(replica: Any, number: int, is_agreed: bool) -> None:
    """Settle a proposed stop. `is_agreed` is True if all ranks stop at the step."""
    replica.settle_hold(number, is_agreed)


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last proposed stop, and True if the rank was notified that all ranks agreed."""
    found: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return found


def leave_call(replica: Any, number: int) -> None:
    """Make calls that run on this standby worker for loan `number` or an earlier loan stop between two batches.

    During a loan, a standby worker runs a separate call until the group needs the worker.
    """
    replica.leave_call(number)
