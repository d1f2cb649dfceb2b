"""The hyperparameters of optimizers across configs: a state brings those it was trained with, a new config has others.

A state that was loaded keeps its momenta and its place in the schedule; the numbers are those that `setup` chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Hyperparameters = Sequence[Mapping[str, Any]]
"""Of one optimizer: for each group of parameters its numbers by name."""

_RATE, _FIRST_RATE = "lr", "initial_lr"


def read(optimizers: Iterable[Any]) -> list[Hyperparameters]:
    """What optimizers are set to; of one that has no groups of parameters, nothing."""
    return [[_plain(group) for group in getattr(optimizer, "param_groups", ())] for optimizer in optimizers]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, bool | int | float) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def apply(read_before: Iterable[Hyperparameters], optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
    """Sets optimizers to what was read of them. A scheduled learning rate stays at its place in the schedule.

    Args:
        read_before: What `read` returned for these optimizers.
        optimizers: The optimizers.
        schedulers: The schedulers of their learning rates.
    """
    for groups, optimizer in zip(read_before, optimizers, strict=True):
        for before, group in zip(groups, getattr(optimizer, "param_groups", ()), strict=False):
            group.update(_moved(before, group))
    for scheduler in schedulers:
        _follow(scheduler)


def _moved(before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers from before, with the learning rate as far along its schedule as that of the group is."""
    moved = {name: value for name, value in before.items() if name in group}
    first = group.get(_FIRST_RATE)
    if first and _RATE in group and before.get(_FIRST_RATE) is not None:
        moved[_RATE] = before[_FIRST_RATE] * (group[_RATE] / first)
    return moved


def _follow(scheduler: Any) -> None:
    """Lets a scheduler go on from the rates that its optimizer has now."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    if not hasattr(scheduler, "base_lrs") or not all(_FIRST_RATE in group for group in groups):
        return
    scheduler.load_state_dict(
        {
            **scheduler.state_dict(),
            "base_lrs": [group[_FIRST_RATE] for group in groups],
            "_last_lr": [group[_RATE] for group in groups],
        }
    )
