"""The hyperparameters of optimizers across configs: a state brings those it was trained with, a new config has others.

A state that was loaded keeps its momenta and its place in the schedule; the numbers are those that `setup` chose. Where
`config["lr"]` changes later, the rates that came from it follow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Hyperparameters = Sequence[Mapping[str, Any]]
"""Of one optimizer: for each group of parameters its numbers by name."""

_RATE, _FIRST_RATE = "lr", "initial_lr"


def read(optimizers: Iterable[Any]) -> list[Hyperparameters]:
    """Return what optimizers are set to; of one that has no groups of parameters, nothing."""
    return [[_plain(group) for group in getattr(optimizer, "param_groups", ())] for optimizer in optimizers]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, bool | int | float) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def apply(read_before: Iterable[Hyperparameters], optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
    """Set optimizers to what was read of them. A scheduled learning rate stays at its place in the schedule.

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


def follow(chosen: Sequence[Hyperparameters], rate: Any, before: Any) -> list[Hyperparameters]:
    """Return the learning rates that `setup` would have chosen with another `config["lr"]`, for `apply`.

    A rate comes from the config if it had the value there. A worker that is new has chosen it with the new value.

    Args:
        chosen: What `read` returned after `setup`.
        rate: The new value.
        before: The value before.

    Raises:
        ValueError: The new value is no learning rate.
    """
    new: list[Hyperparameters] = [[_followed(group, rate, before) for group in groups] for groups in chosen]
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < math.inf
    if any(map(any, new)) and not is_number:
        raise ValueError(f"`lr={rate!r}`: need a finite number from 0 on.")
    return new


def _followed(group: Mapping[str, Any], rate: Any, before: Any) -> dict[str, Any]:
    if group.get(_FIRST_RATE, group.get(_RATE)) not in (before, rate):
        return {}
    return {name: rate for name in (_RATE, _FIRST_RATE) if name in group}


def differing(before: Sequence[Hyperparameters], after: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    """Only the numbers of `after` that are other ones than before, for `apply`."""
    found: list[Hyperparameters] = []
    for index, groups in enumerate(after):
        others = before[index] if index < len(before) else ()
        found.append([_differing(others[at] if at < len(others) else {}, group) for at, group in enumerate(groups)])
    return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in after.items() if name in before and before[name] != value}
    if _FIRST_RATE in found or _RATE in found:  # a scheduled rate needs both
        found.update({name: after[name] for name in (_RATE, _FIRST_RATE) if name in after})
    return found


def updated(chosen: Sequence[Hyperparameters], new: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    """Return what `setup` has chosen, with other numbers in it."""
    return [
        [{**group, **numbers} for group, numbers in zip(groups, others, strict=True)]
        for groups, others in zip(chosen, new, strict=True)
    ]


def remember(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Callable[[], None]:
    """Return what puts all numbers back."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    numbers = [_plain(group) for group in groups]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]

    def put_back() -> None:
        for group, before in zip(groups, numbers, strict=True):
            group.update(before)
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    return put_back


def _moved(before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers from before, with the learning rate as far along its schedule as that of the group is."""
    moved = {name: value for name, value in before.items() if name in group}
    first = group.get(_FIRST_RATE)
    if first and _RATE in group and before.get(_FIRST_RATE) is not None:
        moved[_RATE] = before[_FIRST_RATE] * (group[_RATE] / first)
    return moved


def _follow(scheduler: Any) -> None:
    """Let a scheduler go on from the rates that its optimizer has now."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    if not hasattr(scheduler, "base_lrs") or not all(_FIRST_RATE in group for group in groups):
        return
    known = scheduler.state_dict()
    rates = {
        "base_lrs": [group[_FIRST_RATE] for group in groups],
        "_last_lr": [group[_RATE] for group in groups],
    }
    scheduler.load_state_dict({**known, **{name: value for name, value in rates.items() if name in known}})
