"""Workers that outlive the process of their controller, and what a later process needs to go on with them.

Only a detached trainer has a `Keeper`. What it keeps: the group, and how many calls were made that change the state.
The rest is with the workers: each knows the number of its last such call, and its reply.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

NAMESPACE = "raysgd"
_PREFIX = "worker:"


@dataclass(frozen=True)
class CallNumber:
    """The number of a call: a worker that is sent it twice runs it once, and gives its reply again.

    Attributes:
        call: How many calls that change the state there were up to this one.
        attempt: How often it was tried before.
        is_resumed: Whether it continues inside the call.
        function: The function that it runs, by name.
    """

    call: int
    attempt: int
    is_resumed: bool
    function: str


@dataclass(frozen=True)
class KeptGroup:
    """A group as a later process finds it again: its workers by rank, their places, their slots and their facts."""

    workers: Sequence[Any]
    infos: Sequence[Any]
    slots: Any
    facts: Sequence[Any]


class Keeper:
    """Keeps what is needed to find the workers of a detached trainer again.

    Args:
        trainer: The name of the trainer.
        write: Keeps the bytes of a group instead of those before.

    Attributes:
        num_calls: How many calls that change the state were begun.
        found: The newest number that a worker was found with.
    """

    def __init__(self, trainer: str, write: Callable[[bytes], object]) -> None:
        self._trainer, self._write = trainer, write
        self._group: bytes | None = None
        self.num_calls = 0
        self.found: CallNumber | None = None

    def actor_options(self) -> dict[str, Any]:
        """Options of an actor that outlives this process."""
        return {"lifetime": "detached", "namespace": NAMESPACE, "name": f"{_prefix(self._trainer)}{uuid.uuid4().hex}"}

    def keep_group(self, group: KeptGroup) -> None:
        """Keep a group."""
        from ray import cloudpickle

        self._write(cloudpickle.dumps(group))

    def take_up(self, group: bytes | None) -> None:
        """Go on with the group that the process before this one has kept."""
        self._group = group

    def find(self) -> KeptGroup | None:
        """Return that group, once; other workers of the trainer are ended."""
        kept, self._group = self._group, None
        if kept is None:
            return None
        group: KeptGroup = pickle.loads(kept)
        end_workers(self._trainer, {worker.name for worker in group.workers})
        return group

    def number(self, call: Any) -> CallNumber | None:
        """Return the number of a call that begins; that of the process before this one if it is in that call."""
        if not call.changes_state:
            return None
        self.num_calls += 1
        fresh = CallNumber(self.num_calls, 0, False, getattr(call.function, "__qualname__", ""))
        found, self.found = self.found, None
        return found if found is not None and (found.call, found.function) == (fresh.call, fresh.function) else fresh


def end_workers(trainer: str, but: Collection[str] = ()) -> None:
    """End the workers of a trainer that are left, but for those of these names."""
    import ray

    for each in ray.util.list_named_actors(all_namespaces=True):
        name = each["name"]
        if each["namespace"] == NAMESPACE and name.startswith(_prefix(trainer)) and name not in but:
            try:
                ray.kill(ray.get_actor(name, NAMESPACE))
            except ValueError:  # it has just ended
                continue


def _prefix(trainer: str) -> str:
    return f"{_PREFIX}{trainer}:"


_KEEPER: Keeper | None = None


def keep(keeper: Keeper) -> None:
    """Let the workers that this process starts outlive it."""
    global _KEEPER
    _KEEPER = keeper


def keeper() -> Keeper | None:
    """Return what keeps the workers of this process; None where they end with it."""
    return _KEEPER
