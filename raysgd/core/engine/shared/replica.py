"""The interface that the engine expects of a replica, and the functions that it calls replicas with.

The functions stand here because a worker imports the module of each function that it is sent.
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
        rank_state: State that only this rank has (its random state); small.
        shared_state: State that all ranks share (model, optimizer, ...). From rank 0 only, and only if it is small
            enough to travel with the answer.
        progress: Progress of this rank in the running call, for a mid-call snapshot; small.
        token: Identifies the shared state that waits in the worker's memory to be fetched; None if none does.
        is_part: True if the shared state is divided: each rank's token stands for a part of it.
        seconds: Duration of the copy.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """The framework's object in a worker process. Only `fetch` may run while another method runs."""

    def setup(self) -> Any:
        """Build the user's objects. The worker has joined its group. Return facts for the front end."""

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the state, once. `landed_token` is the token of the newest shared state that the driver has."""

    def fetch(self, token: int) -> Any:
        """Return the shared state for `token`. Called from a second thread, possibly during training."""

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot. `own_state` is None if the snapshot has no state of this rank."""

    def shutdown(self) -> None:
        """Release what a killed process would leak or what would disturb the next replica in this process."""


class RegroupingReplica(Replica, Protocol):
    """A replica that survives the loss of others: it keeps its process and memory and continues in a new group.

    `heartbeat`, `propose_hold`, `settle_hold` and `last_hold` are called from a second thread while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return the progress of the replica. It has left the old group by then."""

    def warm_up(self) -> None:
        """Do in advance everything that is slow the first time. The state is replaced by another replica's later."""

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue in a new group, which has formed, as rank `world.rank`. Return facts, like `setup`."""

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Ask to stop before step `at` of the running call; if None, `margin` steps from now.

        Args:
            number: Number of the proposal, larger than that of each one before. A proposal that arrives twice or late
                is ignored.
            margin: How many steps ahead.
            at: The step that another rank chose.

        Returns:
            The step, or None if this rank cannot stop there. At that step it waits until the proposal is settled.
        """

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """Settle a proposal: all ranks stop at the proposed step if `is_agreed`, otherwise none does."""

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal, and True if this rank was told that all agreed to it."""

    def restore_inside(self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
        """Restore a snapshot that was taken inside a call. The call continues from there.

        Args:
            shared_state: As for `restore`.
            own_state: As for `restore`.
            first: Progress of rank 0.
            parts: Progress of the ranks whose metrics this one counts.
        """

    def capture_here(self) -> Capture:
        """Copy the state of the last completed step. Include the progress of an interrupted call if it can continue."""

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of mid-call snapshot `number`; None if it was dropped."""


ReplicaFactory = Callable[[World], Replica]


def nothing(replica: Replica) -> None:
    """Do nothing. For a call whose purpose is the copy of the state after it."""


def fetch(replica: Replica, token: int) -> Any:
    """Return the part of the state that waits under a token."""
    return replica.fetch(token)


def restore(replica: Replica, shared_state: Any, own_state: Any) -> None:
    """Restore a snapshot that was taken between two calls."""
    replica.restore(shared_state, own_state)


def restore_inside(replica: Any, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
    """Restore a snapshot that was taken inside a call."""
    replica.restore_inside(shared_state, own_state, first, parts)


def replica_progress(replica: RegroupingReplica) -> ReplicaProgress:
    """Return the progress of a survivor."""
    return replica.replica_progress()


def heartbeat(replica: Any) -> Heartbeat | None:
    """Return a heartbeat with the log lines of the process.

    The call may end before the driver reads this, so its answer contains the log lines again.
    """
    found = sign_of_life(replica)
    return None if found is None else replace(found, notes=log_lines.glance())


def sign_of_life(replica: Any) -> Heartbeat | None:
    """Return a heartbeat without log lines; None if the replica gives no heartbeats."""
    found: Heartbeat | None = replica.heartbeat() if hasattr(replica, "heartbeat") else None
    return found


def part_of_snapshot(replica: RegroupingReplica, number: int) -> Capture | None:
    """Return this rank's part of a mid-call snapshot."""
    return replica.part_of_snapshot(number)


def capture_here(replica: RegroupingReplica) -> Capture:
    """Copy the state, also in the middle of an interrupted call."""
    return replica.capture_here()


def hold(replica: Any) -> None:
    """Let a replica that keeps running between calls return from its call, so that workers can step in."""
    replica.hold()


def propose_hold(replica: RegroupingReplica, number: int, margin: int, at: int | None) -> int | None:
    """Propose a step to stop at. Return it, or None if this rank cannot stop there."""
    return replica.propose_hold(number, margin, at)


def settle_hold(replica: Any, number: int, is_agreed: bool) -> None:
    """Settle the proposal of a step: say whether all ranks stop there."""
    replica.settle_hold(number, is_agreed)


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last proposed stop, and True if the replica was told that all agreed."""
    found: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return found


def leave_call(replica: Any, number: int) -> None:
    """Let the call of this loan, and those of all earlier ones, give up between two batches."""
    replica.leave_call(number)
