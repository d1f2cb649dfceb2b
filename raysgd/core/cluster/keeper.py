"""Lets a detached trainer's workers outlive the trainer's process, so that the next process can find and use them.

A detached trainer runs in a Ray actor. Its `Keeper` saves a description of the worker group outside the actor's
process, and counts the calls that change the training state. Each worker stores the number of its last state-changing
call and its reply to that call. From these, the trainer's next process can determine if a call has already run.
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
    """The number of a call. A worker that receives the same number twice runs the call once and repeats its reply.

    Attributes:
        call: Sequence number among the trainer's calls that change the training state, from 1.
        attempt: Number of earlier attempts to run this call.
        is_resumed: True if the attempt resumes an interrupted call.
        function: Name of the call's function.
    """

    call: int
    attempt: int
    is_resumed: bool
    function: str


@dataclass(frozen=True)
class KeptGroup:
    """Describes a worker group, so that the trainer's next process can adopt it.

    Attributes:
        workers: The driver's handles to the workers, by rank.
        slots: The group's `Slots`.
        facts: What the replicas' `setup` returned, by rank.
    """

    workers: Sequence[Any]
    slots: Any
    facts: Sequence[Any]


class Keeper:
    """Saves a description of a detached trainer's workers, so that the trainer's next process finds them.

    Args:
        trainer: Name of the trainer.
        write: Saves the pickled description of the group, replacing the previous one.

    Attributes:
        num_calls: Number of state-changing calls that were started.
        found: The newest call number that was stored on the workers when this process took them over from the previous
            process. None if no number was stored, and once this process has started a state-changing call.
    """

    def __init__(self, trainer: str, write: Callable[[bytes], object]) -> None:
        self._trainer, self._write = trainer, write
        self._group: bytes | None = None
        self.num_calls = 0
        self.found: CallNumber | None = None

    def actor_options(self) -> dict[str, Any]:
        """Return the Ray options for a worker's actor that outlives this process."""
        return {"lifetime": "detached", "namespace": NAMESPACE, "name": f"{_prefix(self._trainer)}{uuid.uuid4().hex}"}

    def keep_group(self, group: KeptGroup) -> None:
        """Save the description of a worker group for the trainer's next process."""
        from ray import cloudpickle

        self._write(cloudpickle.dumps(group))

    def take_up(self, group: bytes | None) -> None:
        """Set the description of a worker group that the trainer's previous process saved. `find` then unpickles it.

        Args:
            group: The pickled description. None if none was saved.
        """
        self._group = group

    def find(self) -> KeptGroup | None:
        """Return the worker group saved by the trainer's previous process, and kill all other workers of the trainer.

        Return None if no group was saved, or if this method was called before.
        """
        kept, self._group = self._group, None
        if kept is None:
            return None
        group: KeptGroup = pickle.loads(kept)
        end_workers(self._trainer, {worker.name for worker in group.workers})
        return group

    def number(self, call: Any) -> CallNumber | None:
        """Return the number for a call that is about to start, or None if the call does not change the training state.

        If the trainer's previous process died during the same call, return the number that the workers stored for the
        call. The workers then do not run the call twice.
        """
        if not call.changes_state:
            return None
        self.num_calls += 1
        fresh = CallNumber(self.num_calls, 0, False, getattr(call.function, "__qualname__", ""))
        stored, self.found = self.found, None
        return (
            stored if stored is not None and (stored.call, stored.function) == (fresh.call, fresh.function) else fresh
        )


def end_workers(trainer: str, but: Collection[str] = ()) -> None:
    """Kill the remaining workers of a detached trainer, except the workers whose names are in `but`."""
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
    """Make `keeper` the keeper of this process. Workers started from now on outlive the process."""
    global _KEEPER
    _KEEPER = keeper


def keeper() -> Keeper | None:
    """Return this process's `Keeper`, or None if the workers end together with the process."""
    return _KEEPER
