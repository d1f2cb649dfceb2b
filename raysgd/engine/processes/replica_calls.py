"""Replica calls: the functions that the driver's half of the engine runs on replicas.

They have a module of their own, because a worker imports the module of each function that it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysgd._text import log_lines
from raysgd.engine.shared.replica import Capture, Replica
from raysgd.engine.shared.types import Heartbeat, ReplicaProgress


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


def replica_progress(replica: Any) -> ReplicaProgress:
    """Return how far a survivor is."""
    found: ReplicaProgress = replica.replica_progress()
    return found


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


def part_of_snapshot(replica: Any, number: int) -> Capture | None:
    """Return this rank's part of a snapshot from inside the running call."""
    found: Capture | None = replica.part_of_snapshot(number)
    return found


def hold(replica: Any) -> None:
    """Let a replica that runs on by itself return from its call, so that others can step in."""
    replica.hold()


def propose_hold(replica: Any, number: int, margin: int, at: int | None) -> int | None:
    """Propose a step to stop at; return the one that this rank can still stop at."""
    found: int | None = replica.propose_hold(number, margin, at)
    return found


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
