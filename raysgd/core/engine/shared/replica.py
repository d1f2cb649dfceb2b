"""The interface that the engine expects of a replica, and what it sends to workers to call a replica.

A worker imports the module of each function that it receives. This module therefore imports no module of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from raysgd.core.engine.shared.types import Heartbeat, ReplicaProgress, StateHandover, World
from raysgd.core.text import log_lines

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Capture:
    """One rank's part of a snapshot.

    Attributes:
        rank_state: This rank's own state, such as the state of its random generators. It is small.
        shared_state: State that all ranks share, such as model and optimizer. Set only by rank 0, and only if the state
            is small enough to be sent with the answer to the call.
        progress: This rank's progress in the running call, for a mid-call snapshot. It is small.
        token: Identifies the copy of the shared state that the worker stores until the driver fetches the copy. None if
            the worker stores no copy.
        is_part: True if the shared state is sharded. Each rank's token then identifies the rank's shard.
        seconds: How long the worker took to copy the state.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """The object that holds and trains the model in a worker process.

    PyTorch and TensorFlow have separate replica classes.

    Of these methods, only `fetch` may be called while another method is running.
    """

    def setup(self) -> Any:
        """Build the user's objects, such as the model. Called after the worker has joined its group.

        Returns:
            Facts about these objects, such as the number of models. The front end needs these facts.
        """

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the training state. Return the copy, or a token with which the driver can fetch the copy.

        Args:
            landed_token: Token of the newest copy that has arrived in the driver. The worker can discard that copy.
        """

    def fetch(self, token: int) -> Any:
        """Return the copied state that `token` identifies.

        May be called from another thread, possibly during training.
        """

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore the training state from a snapshot.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state, such as its random generators. None if the snapshot has none for this
                rank.
        """

    def shutdown(self) -> None:
        """Release resources that would outlive the process or disturb the next replica in the same process."""


class RegroupingReplica(Replica, Protocol):
    """A replica that can survive the loss of other replicas: it keeps its process and continues in a new group.

    `heartbeat`, `propose_hold`, `resolve_hold`, `last_hold` and `part_of_snapshot` are called from a second thread
    while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return how far this replica is in its last call, and whether it can continue in a new group.

        Called between two calls, after a failed call, or after the worker has left its old group.
        """

    def warm_up(self) -> None:
        """Run operations that are slow the first time, such as compilation. Called before the worker joins a group.

        It does not matter if these operations change the replica's state, because joining the group overwrites that
        state with the group's state.
        """

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue as a rank of a new group that all ranks have joined. Return the same facts as `setup`.

        Args:
            world: This worker's rank in the new group, group size and so on.
            handover: Which rank sends the training state, and which ranks receive it.
        """

    def heartbeat(self) -> Heartbeat:
        """Return the replica's current progress as a `Heartbeat`."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Propose that this rank stops the running call at a step.

        If the rank accepts, it waits at that step until `resolve_hold` delivers the decision.

        Args:
            number: Number of the proposal. Numbers increase, and a proposal that arrives twice or late is ignored.
            margin: Number of steps from now after which to stop. Used if `at` is None.
            at: Number of completed steps at which another rank has agreed to stop.

        Returns:
            Number of completed steps at which this rank will stop, or None if it cannot stop there.
        """

    def resolve_hold(self, number: int, is_agreed: bool) -> None:
        """Deliver the decision on the proposal with this number to this rank.

        If all ranks have agreed, this rank stops the call at the proposed step. Otherwise, it continues the call.
        """

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal to stop, and True if `resolve_hold` confirmed that proposal."""

    def restore_inside(
        self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any], everyones: Sequence[Any]
    ) -> None:
        """Restore a snapshot that was taken inside a call, so that the call can resume there.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state. None if the snapshot has none for this rank.
            first: Progress of rank 0 in the call.
            parts: Progress of the old ranks whose metrics this rank takes over. See `taken_over`.
            everyones: Progress of every old rank, as `for_others` returns it.
        """

    def capture_here(self) -> Capture:
        """Copy the training state after the last completed step.

        If a call was interrupted and can resume, also copy the progress in that call.
        """

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the mid-call snapshot with this number, or None if it is no longer stored."""


class HostingReplica(Replica, Protocol):
    """A replica in which a user's function keeps running between calls (`runs_on` of the group spec)."""

    def hold(self) -> None:
        """Interrupt the running call, so that workers can join a group in which a user's function keeps running.

        The call only waits for messages from the user's function. The function itself is not interrupted.
        """


class SpareReplica(Replica, Protocol):
    """A replica that can run a call on a spare worker, outside the group."""

    def leave_call(self, number: int) -> None:
        """Stop the call that the spare worker runs outside the group. The call stops between two batches.

        Args:
            number: Number of the loan for which the spare worker runs that call. Calls of earlier loans are stopped,
                too.
        """


ReplicaFactory = Callable[[World], Replica]


def method_of(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a function that can be sent to a worker, and calls the method of the replica that it receives there.

    Args:
        method: The method as a protocol declares it, for example `Replica.fetch`.
    """
    return partial(_call_method, method.__name__)


def _call_method(name: str, replica: Any, *args: Any) -> Any:
    return getattr(replica, name)(*args)


def nothing(replica: Replica) -> None:
    """Do nothing. Workers run this function if the only purpose of a call is that they copy their state afterwards."""


def taken_over(parts: Sequence[T], rank: int, num_ranks: int) -> Sequence[T]:
    """Return the parts of the old ranks, such as their metrics, that one rank of a new group takes over.

    In a group of n ranks, these are the parts of every n-th old rank, starting with the old rank of its own number.
    """
    return parts[rank::num_ranks]


def heartbeat(replica: Any) -> Heartbeat | None:
    """Return the replica's heartbeat, with the log lines of the worker process. Return None if it has no heartbeats.

    The lines are those since the process's last heartbeat or answer. The answer to the running call repeats them,
    because the call may end before the driver reads the heartbeat.
    """
    heartbeat = sign_of_life(replica)
    return None if heartbeat is None else replace(heartbeat, notes=log_lines.glance())


def sign_of_life(replica: Any) -> Heartbeat | None:
    """Return a heartbeat without log lines. Return None if the replica has no heartbeats."""
    heartbeat: Heartbeat | None = replica.heartbeat() if hasattr(replica, "heartbeat") else None
    return heartbeat


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last proposal to stop, and True if `resolve_hold` confirmed that proposal."""
    last_hold: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return last_hold
