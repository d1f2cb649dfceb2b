"""The protocol of the object that lives in each worker, as the engine expects it, and the calls of it.

The calls stand here because a worker imports the module of each function that it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raysgd._text import log_lines
from raysgd.engine.shared.types import Heartbeat, ReplicaProgress, StateHandover, World


@dataclass(frozen=True)
class Capture:
    """One rank's part of a snapshot, taken right after a call.

    Attributes:
        rank_state: What only this rank knows (its random state); small.
        shared_state: What all ranks share (model, optimizer, ...), from rank 0 alone and only when it is small enough
            to travel with the answer.
        progress: How far this rank is in the running call, for a snapshot taken inside one; small.
        token: Names the shared state that waits in the worker's memory to be fetched; None when there is nothing to
            fetch.
        is_part: Whether the shared state is divided: under each rank's token is a part of it.
        seconds: How long the copy took.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """A framework object in a worker process. All methods but `fetch` run one after the other."""

    def setup(self) -> Any:
        """Build the user's objects; the communication group exists already. Return facts for the front end."""

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the state, once. `landed_token` names the newest shared state that the driver holds by now."""

    def fetch(self, token: int) -> Any:
        """Return the shared state that `token` names. Called from a second thread, while the replica may train."""

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Take over a snapshot; `own_state` is None where it was taken with fewer ranks."""

    def shutdown(self) -> None:
        """Let go of everything that a killed process would leak or that another replica here would trip over."""


class RegroupingReplica(Replica, Protocol):
    """A replica that survives the loss of others: it keeps its process and its memory and continues in a new group.

    `heartbeat`, `propose_hold`, `settle_hold` and `last_hold` are called from a second thread, while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return how far it is. The old group has been left when this is called."""

    def warm_up(self) -> None:
        """Pay in advance for everything that happens for the first time. Its state is taken over from another one."""

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Go on in the new group, which exists already, at `world`. Return facts, like `setup`."""

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Ask to stop ahead of step `at` of the running call; with None, of the step `margin` steps from now.

        Args:
            number: Larger than that of each proposal before. One that arrives twice, or late, is ignored.
            margin: How many steps ahead.
            at: The step that another rank has chosen.

        Returns:
            The step; None when it cannot stop there. A rank that gets there waits until the proposal is settled.
        """

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """All ranks will stop at the step that was proposed under this number, or none will."""

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal, and whether all agreed, as far as it was told."""

    def restore_inside(self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
        """Do what `restore` does with a snapshot that was taken inside a call, which will continue.

        Args:
            shared_state: As for `restore`.
            own_state: As for `restore`.
            first: How far rank 0 was.
            parts: How far those ranks were whose metrics this one counts.
        """

    def capture_here(self) -> Capture:
        """Copy the state of the last completed step; with how far the call is that broke off, where it can continue."""

    def part_of_snapshot(self, number: int) -> Capture | None:
        """This rank's part of the snapshot `number` taken inside the running call; None if it is not kept any more."""


ReplicaFactory = Callable[[World], Replica]


def nothing(replica: Replica) -> None:
    """Do nothing: a call only lets the state be copied after it."""


def fetch(replica: Replica, token: int) -> Any:
    """Return the part of the state that waits under a token."""
    return replica.fetch(token)


def restore(replica: Replica, shared_state: Any, own_state: Any) -> None:
    """Take over a state from between two calls."""
    replica.restore(shared_state, own_state)


def restore_inside(replica: Any, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any]) -> None:
    """Take over a state from inside a call."""
    replica.restore_inside(shared_state, own_state, first, parts)


def replica_progress(replica: RegroupingReplica) -> ReplicaProgress:
    """Return how far a survivor is."""
    return replica.replica_progress()


def heartbeat(replica: Any) -> Heartbeat | None:
    """Return a sign of life with what the process logged.

    The answer of its call repeats that, which may end before this is read.
    """
    found = sign_of_life(replica)
    return None if found is None else replace(found, notes=log_lines.glance())


def sign_of_life(replica: Any) -> Heartbeat | None:
    """Return what the replica is doing; None from one that does not tell."""
    found: Heartbeat | None = replica.heartbeat() if hasattr(replica, "heartbeat") else None
    return found


def part_of_snapshot(replica: RegroupingReplica, number: int) -> Capture | None:
    """Return this rank's part of a snapshot from inside the running call."""
    return replica.part_of_snapshot(number)


def capture_here(replica: RegroupingReplica) -> Capture:
    """Copy the state, also in the middle of a call that broke off."""
    return replica.capture_here()


def hold(replica: Any) -> None:
    """Let a replica that runs on by itself return from its call, so that others can step in."""
    replica.hold()


def propose_hold(replica: RegroupingReplica, number: int, margin: int, at: int | None) -> int | None:
    """Propose a step to stop at; return the one that this rank can still stop at."""
    return replica.propose_hold(number, margin, at)


def settle_hold(replica: Any, number: int, is_agreed: bool) -> None:
    """Say whether all ranks stop at the proposed step."""
    replica.settle_hold(number, is_agreed)


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last stop that was proposed, and whether the replica was told that all agree."""
    found: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return found


def leave_call(replica: Any, number: int) -> None:
    """Let the call of this loan, and of all before it, give up between two batches."""
    replica.leave_call(number)
