"""Faults that wait in the driver, until it makes a call of the trainer or starts workers."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raysgd.testing.targets import controller_of
from raysgd.testing.traps import Trap

if TYPE_CHECKING:
    from raysgd.engine.group import WorkerGroup
    from raysgd.engine.shared.group_spec import GroupSpec
    from raysgd.engine.shared.types import World

_armed: weakref.WeakKeyDictionary[Any, dict[str, Trap]] = weakref.WeakKeyDictionary()
"""For each trainer and moment what was armed last, so that only one thing happens there."""


def disarm_all(trainer: Any) -> None:
    """Takes back all faults of this trainer that wait in the driver."""
    for trap in _armed.get(trainer, {}).values():
        trap.is_armed = False


def _arm(trainer: Any, trap: Trap) -> None:
    before = _armed.setdefault(trainer, {}).get(trap.place)
    if before is not None:
        before.is_armed = False
    _armed[trainer][trap.place] = trap


def arm_call(trainer: Any, name: str, act: Callable[[], None]) -> None:
    """Lets `act` happen when the method `name` of this trainer is called the next time."""
    trap = Trap(act, name)
    _arm(trainer, trap)
    trap.before(trainer, name)


def arm_setup(trainer: Any, ranks: Sequence[int]) -> None:
    """Lets the next group that is started, and has these ranks, lose them over its set-up."""
    lifecycle, trap = controller_of(trainer), Trap(lambda: None, "setup")
    original = lifecycle.make_group

    def make_group(spec: GroupSpec, num_workers: int) -> WorkerGroup:
        if trap.is_armed and num_workers > max(ranks):
            trap.is_armed = False
            spec = replace(spec, make_replica=_DyingMaker(spec.make_replica, tuple(ranks)))
        group: WorkerGroup = original(spec, num_workers)
        return group

    _arm(trainer, trap)
    lifecycle.make_group = make_group


@dataclass(frozen=True)
class _DyingMaker:
    """Makes replicas, but on some ranks ends the process instead."""

    make_replica: Callable[[World], Any]
    ranks: tuple[int, ...]

    def __call__(self, world: World) -> Any:
        if world.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make_replica(world)
