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
        shared_state: State that all ranks share, such as model and optimizer. Set only by rank 0, and only if the state
            is small enough to be sent with the answer to the call.
        progress: This rank's progress in the running call, for a mid-call snapshot. Small.
        token: Identifies the copy of the shared state that the worker stores until the driver fetches it. None if the
            worker stores no copy.
        is_part: True if the shared state is sharded. Each rank's token then identifies the rank's shard.
        seconds: How long the copy took.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """The object that holds and trains the model in a worker process. PyTorch and TensorFlow have their own classes.

    Only `fetch` may be called while another method is running.
    """

    def setup(self) -> Any:
        """Build the user's objects, such as the model, after the worker has joined its group.

        Returns:
            Facts about the objects that the front end needs, such as the number of models.
        """

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the training state and return it or a token for it.

        Args:
            landed_token: Token of the newest copy that has arrived in the driver, so that the worker can discard it.
        """

    def fetch(self, token: int) -> Any:
        """Return the copied state that `token` identifies. Called from another thread, possibly during training."""

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state, such as its random generators. None if the snapshot has none for this
                rank.
        """

    def shutdown(self) -> None:
        """Release resources that would outlive the process or disturb the next replica in it."""


class RegroupingReplica(Replica, Protocol):
    """A replica that can survive the loss of other replicas: it keeps its process and continues in a new group.

    `heartbeat`, `propose_hold`, `settle_hold` and `last_hold` are called from a second thread while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return the replica's progress, after it has left the old group."""

    def warm_up(self) -> None:
        """Run operations that are slow the first time, such as compilation, before the worker joins a group.

        They may change the replica's state, because joining the group overwrites it with the group's state.
        """

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue as rank `world.rank` of a new group that all ranks have joined. Return the same facts as `setup`."""

    def heartbeat(self) -> Heartbeat:
        """Return the replica's current progress as a `Heartbeat`."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Propose that this rank stops the running call after `at` steps, or if `at` is None, `margin` steps from now.

        If the rank accepts, it waits at that step until `settle_hold` tells it whether all ranks have agreed.

        Args:
            number: Number of the proposal. Numbers increase, and a proposal that arrives twice or late is ignored.
            margin: Number of steps from now. Used if `at` is None.
            at: Number of completed steps at which another rank has agreed to stop.

        Returns:
            Number of completed steps at which this rank will stop, or None if it cannot stop there.
        """

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """Tell this rank the outcome of proposal `number`: stop at the step if `is_agreed`, otherwise continue."""

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal to stop, and True if this rank was told that all ranks agreed."""

    def restore_inside(self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
        """Restore a snapshot that was taken inside a call, so that the call can resume there.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state. None if the snapshot has none for this rank.
            first: Progress of rank 0.
            parts: Progress of the old ranks whose metrics this rank takes over.
        """

    def capture_here(self) -> Capture:
        """Copy the state after the last completed step, with the progress in an interrupted call if it can resume."""

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of mid-call snapshot `number`, or None if it is no longer stored."""


ReplicaFactory = Callable[[World], Replica]


def nothing(replica: Replica) -> None:
    """Do nothing. Used for calls whose only purpose is that the workers copy their state afterwards."""


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
    """Return a heartbeat with the lines that the worker process has logged since its last heartbeat or answer.

    The answer to the running call repeats these lines, because the call may end before the driver reads the heartbeat.
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
    """Interrupt the driver's running call, so that workers can join a group in which a user's function keeps running.

    The interrupted call only waits for messages from the function, and the function is not interrupted.
    """
    replica.hold()


def propose_hold(replica: RegroupingReplica, number: int, margin: int, at: int | None) -> int | None:
    """Propose that the rank stops at a step. Return the step, or None if the rank cannot stop there."""
    return replica.propose_hold(number, margin, at)


def settle_hold(replica: Any, number: int, is_agreed: bool) -> None:
    """Tell the rank the outcome of proposal `number`. `is_agreed` is True if all ranks stop at the proposed step."""
    replica.settle_hold(number, is_agreed)


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last proposal to stop, and True if the rank was told that all ranks agreed to it."""
    found: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return found


def leave_call(replica: Any, number: int) -> None:
    """Make this standby worker stop the call that it runs on loan between two batches, because the group needs it.

    Args:
        replica: The standby worker's replica.
        number: Number of the loan. Calls of earlier loans are stopped, too.
    """
    replica.leave_call(number)
