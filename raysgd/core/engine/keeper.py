"""Workers that outlive the process of their controller, and what a later process needs to use them again.

Only a detached trainer has a `Keeper`. It keeps the group and the number of calls that changed the state. The workers
keep the rest: each knows the number of its last such call, and its reply to it.
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
    """The number of a call. A worker that receives a call twice runs it once and repeats its reply.

    Attributes:
        call: Number of calls that change the state, up to and including this one.
        attempt: How often it was tried before.
        is_resumed: True if it continues an interrupted call.
        function: Name of the function that it runs.
    """

    call: int
    attempt: int
    is_resumed: bool
    function: str


@dataclass(frozen=True)
class KeptGroup:
    """A group as a later process finds it: workers by rank, their places, their slots and their facts."""

    workers: Sequence[Any]
    infos: Sequence[Any]
    slots: Any
    facts: Sequence[Any]


class Keeper:
    """Keeps what is needed to find the workers of a detached trainer again.

    Args:
        trainer: Name of the trainer.
        write: Saves the bytes of a group in place of the previous ones.

    Attributes:
        num_calls: Number of calls that change the state that were started.
        found: The newest call number found on a worker.
    """

    def __init__(self, trainer: str, write: Callable[[bytes], object]) -> None:
        self._trainer, self._write = trainer, write
        self._group: bytes | None = None
        self.num_calls = 0
        self.found: CallNumber | None = None

    def actor_options(self) -> dict[str, Any]:
        """Return the options of an actor that outlives this process."""
        return {"lifetime": "detached", "namespace": NAMESPACE, "name": f"{_prefix(self._trainer)}{uuid.uuid4().hex}"}

    def keep_group(self, group: KeptGroup) -> None:
        """Save a group."""
        from ray import cloudpickle

        self._write(cloudpickle.dumps(group))

    def take_up(self, group: bytes | None) -> None:
        """Continue with the group that the previous process saved."""
        self._group = group

    def find(self) -> KeptGroup | None:
        """Return that group, the first time only. Kill all other workers of the trainer."""
        kept, self._group = self._group, None
        if kept is None:
            return None
        group: KeptGroup = pickle.loads(kept)
        end_workers(self._trainer, {worker.name for worker in group.workers})
        return group

    def number(self, call: Any) -> CallNumber | None:
        """Return the number of a call that starts. If the previous process died during it, return that number."""
        if not call.changes_state:
            return None
        self.num_calls += 1
        fresh = CallNumber(self.num_calls, 0, False, getattr(call.function, "__qualname__", ""))
        found, self.found = self.found, None
        return found if found is not None and (found.call, found.function) == (fresh.call, fresh.function) else fresh


def end_workers(trainer: str, but: Collection[str] = ()) -> None:
    """Kill the remaining workers of a trainer, except those with the names in `but`."""
    import ray

    for each in ray.util.list_named_actors(all_namespaces=True):
        name = each["name"]
        if each["namespace"] == NAMESPACE and name.startswith(_prefix(trainer)) and name not in but:
            try:
                ray.kill(ray.get_actor(name, NAMESPACE))
            except ValueError:  # the actor has just ended
                continue


def _prefix(trainer: str) -> str:
    return f"{_PREFIX}{trainer}:"


_KEEPER: Keeper | None = None


def keep(keeper: Keeper) -> None:
    """Let the workers that this process starts outlive it."""
    global _KEEPER
    _KEEPER = keeper


def keeper() -> Keeper | None:
    """Return the keeper of this process; None if its workers end with it."""
    return _KEEPER
