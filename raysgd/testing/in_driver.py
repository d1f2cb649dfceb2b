"""Arms faults that happen when the driver calls a certain method of the trainer, or starts workers."""

from __future__ import annotations

import functools
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raysgd.testing.targets import controller_of

if TYPE_CHECKING:
    from raysgd.core.engine.group import WorkerGroup
    from raysgd.core.engine.shared.group_spec import GroupSpec
    from raysgd.core.engine.shared.types import GroupReport, World

_undo: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], None]]] = weakref.WeakKeyDictionary()
"""For each trainer, the functions that disarm its faults, by trigger point: the name of a method, or "setup"."""


def disarm_all(trainer: Any) -> None:
    """Disarm all of this trainer's faults that `arm_call` and `arm_setup` have armed and that have not happened yet."""
    for undo in list(_undo.get(trainer, {}).values()):
        undo()


def _disarm(trainer: Any, name: str) -> None:
    """Disarm a trainer's fault at a trigger point, if one is armed, before another fault is armed there."""
    undo = _undo.get(trainer, {}).get(name)
    if undo is not None:
        undo()


def arm_call(trainer: Any, name: str, act: Callable[[], None]) -> None:
    """Arm a fault: call `act` immediately before the next call to the trainer's method `name`."""
    _disarm(trainer, name)
    original = getattr(trainer, name)

    @functools.wraps(original)
    def trapped(*args: Any, **keywords: Any) -> Any:
        undo()
        act()
        return original(*args, **keywords)

    def undo() -> None:
        trainer.__dict__.pop(name, None)
        _undo[trainer].pop(name, None)

    setattr(trainer, name, trapped)
    _undo.setdefault(trainer, {})[name] = undo


def arm_setup(trainer: Any, ranks: Sequence[int]) -> None:
    """Arm a fault that kills the workers with these ranks while the trainer sets up its next worker group.

    A worker group that is too small to have all of these ranks does not trigger the fault.
    """
    _disarm(trainer, "setup")
    lifecycle = controller_of(trainer)
    original = lifecycle.make_group

    def make_group(spec: GroupSpec, num_workers: int) -> WorkerGroup:
        if num_workers <= max(ranks):
            group: WorkerGroup = original(spec, num_workers)
            return group
        undo()
        doomed_spec = replace(spec, make_replica=_DyingMaker(spec.make_replica, tuple(ranks)))
        doomed: WorkerGroup = original(doomed_spec, num_workers)
        doomed.standby._spec = spec  # replacement workers get the original spec, so they are not killed
        start = doomed.start

        def start_once(*args: Any) -> GroupReport:
            try:
                return start(*args)
            finally:
                doomed._spec = spec

        doomed.start = start_once  # type: ignore[assignment]
        return doomed

    def undo() -> None:
        lifecycle.make_group = original
        _undo[trainer].pop("setup", None)

    lifecycle.make_group = make_group
    _undo.setdefault(trainer, {})["setup"] = undo


@dataclass(frozen=True)
class _DyingMaker:
    """Creates a worker's replica (the object that runs the user's code), or kills the worker's process instead.

    Attributes:
        make_replica: Function that creates the replica.
        ranks: The ranks whose processes are killed.
    """

    make_replica: Callable[[World], Any]
    ranks: tuple[int, ...]

    def __call__(self, world: World) -> Any:
        if world.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make_replica(world)
