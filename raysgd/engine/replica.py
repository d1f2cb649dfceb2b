"""What the engine expects of the object that lives in each worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd.engine.types import World


@dataclass(frozen=True)
class Capture:
    """One rank's part of a snapshot, taken right after a call.

    Attributes:
        rank_state: What only this rank knows (its random state); small.
        shared_state: What all ranks share (model, optimizer, ...), from rank 0 alone and only when it is small enough
            to travel with the answer.
        token: Names the shared state that waits in the worker's memory to be fetched; None when there is nothing to
            fetch.
    """

    rank_state: Any = None
    shared_state: Any = None
    token: int | None = None


class Replica(Protocol):
    """A framework object in a worker process. All methods but `fetch` run one after the other."""

    def setup(self) -> Any:
        """Builds the user's objects; the communication group exists already. Returns facts for the front end."""

    def capture(self, landed_token: int | None) -> Capture:
        """Copies the state, once. `landed_token` names the newest shared state that the driver holds by now."""

    def fetch(self, token: int) -> Any:
        """Returns the shared state that `token` names. Called from a second thread, while the replica may train."""

    def restore(self, shared_state: Any, rank_states: Sequence[Any]) -> None:
        """Takes over a snapshot, whatever the number of ranks that it was taken with."""

    def shutdown(self) -> None:
        """Lets go of everything that a killed process would leak or that another replica here would trip over."""


ReplicaFactory = Callable[[World], Replica]
