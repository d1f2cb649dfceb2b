"""The hyperparameters of optimizers across configs: a state brings those it was trained with, a new config has others.

A state that was loaded keeps its momenta and its place in the schedule; the numbers are those that `setup` chose. Where
entries of the config change later, the numbers that came from these entries follow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

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


def follow(
    chosen: Sequence[Hyperparameters], config: Mapping[str, Any], changed: Mapping[str, Any]
) -> tuple[list[Hyperparameters], set[str]]:
    """Return what `setup` would have chosen with changed entries of the config, as far as names and values tell.

    A number comes from an entry if it has its name, and had its value when `setup` chose it. A worker that is new has
    chosen it with the new value already.

    Args:
        chosen: What `read` returned after `setup`.
        config: The config with the new values.
        changed: The values before, by name.

    Returns:
        Only the numbers that follow, for `apply`; and their names.

    Raises:
        ValueError: A value is of another kind than the number that it is to replace.
    """
    new: list[Hyperparameters] = []
    for groups in chosen:
        new.append([_followed(group, config, changed) for group in groups])
    return new, {name for groups in new for group in groups for name in group if name in changed}


def _followed(group: Mapping[str, Any], config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    followed: dict[str, Any] = {}
    for name in changed.keys() & group.keys():
        value = group.get(_FIRST_RATE, group[name]) if name == _RATE else group[name]
        if any(_is_plain(each) and each == value for each in (changed[name], config[name])):
            _check_kind(name, config[name], value)
            followed[name] = config[name]
    if _RATE in followed and _FIRST_RATE in group:
        followed[_FIRST_RATE] = followed[_RATE]
    return followed


def _check_kind(name: str, new: Any, before: Any) -> None:
    if before is not None and not (_is_plain(new) and _kind_of(new) is _kind_of(before)):
        raise ValueError(f"`{name}={new!r}`: the optimizer has {before!r} there, so it needs a value of that kind.")
    if isinstance(new, float) and not math.isfinite(new):
        raise ValueError(f"`{name}={new!r}`: need a number that is finite.")


def _kind_of(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def check_taken(optimizers: Iterable[Any], new: Iterable[Hyperparameters]) -> None:
    """Check numbers against what optimizers of these classes can be made with.

    Args:
        optimizers: The optimizers.
        new: The new numbers of each, as `follow` returns them.

    Raises:
        ValueError, TypeError: The class of an optimizer refuses its numbers.
    """
    for optimizer, groups in zip(optimizers, new, strict=True):
        defaults = getattr(optimizer, "defaults", {})
        if any(groups) and _can_be_made(optimizer, defaults):
            for numbers in groups:
                _make(optimizer, {**defaults, **{name: numbers[name] for name in numbers if name in defaults}})


def _can_be_made(optimizer: Any, defaults: Mapping[str, Any]) -> bool:
    """Return whether its class takes the numbers that it has: some need more, or other ones."""
    try:
        _make(optimizer, defaults)
    except Exception:  # code of the class, for which there is no rule
        return False
    return True


def _make(optimizer: Any, numbers: Mapping[str, Any]) -> None:
    type(optimizer)([torch.nn.Parameter(torch.empty(0))], **numbers)


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


def rate_setter(optimizers: Iterable[Any], chosen: Iterable[Hyperparameters]) -> Callable[[float], None]:
    """Return what sets the learning rate of the first group; the others keep the ratios that `setup` chose.

    Args:
        optimizers: The optimizers.
        chosen: What `read` returned after `setup`.
    """
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    rates = [each.get(_FIRST_RATE, each.get(_RATE)) for groups_of_one in chosen for each in groups_of_one]
    first = next((rate for rate in rates if rate), 1.0)
    shares = [rate / first if rate else 1.0 for rate in rates]

    def set_rate(rate: float) -> None:
        for group, share in zip(groups, shares, strict=True):
            if _RATE in group:
                group[_RATE] = rate * share

    return set_rate


@contextmanager
def put_back_on_errors(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Iterator[None]:
    """Puts all numbers back if the body fails."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    numbers = [_plain(group) for group in groups]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        yield
    except BaseException:
        for group, before in zip(groups, numbers, strict=True):
            group.update(before)
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        raise


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
