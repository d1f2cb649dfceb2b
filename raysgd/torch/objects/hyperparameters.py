"""Sets optimizers' hyperparameters after a state was loaded or the config changed.

Loading a state restores the optimizers' momenta and the position in the learning rate schedule. The hyperparameters,
however, keep the values that the operator's `setup` chose, and saved values are ignored. If `config["lr"]` changes
later, learning rates that `setup` took from this entry are updated. A new learning rate scales the entire schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

Hyperparameters = Sequence[Mapping[str, Any]]
"""Hyperparameters of one optimizer: for each parameter group, values by name."""

_RATE, _FIRST_RATE, _HIGHEST_RATE = "lr", "initial_lr", "max_lr"  # `OneCycleLR` sets `max_lr`
_RATES = frozenset({_RATE, _FIRST_RATE, _HIGHEST_RATE, "min_lr"})
_CYCLED = frozenset({"momentum", "betas"})
_OWN_RATES = ("eta_min", "min_lrs", "max_lrs")  # a scheduler's rates that do not follow the initial rate


def note_first_rates(schedulers: Iterable[Any]) -> None:
    """Store each parameter group's initial learning rate in the group, unless a scheduler has already done this.

    `ReduceLROnPlateau` does not store the initial rate. Without the initial rate, nothing would show later by how much
    this scheduler has reduced the rate.
    """
    for scheduler in schedulers:
        for group in _groups_of(scheduler, ()):
            if _is_plain(group[_RATE]):
                group.setdefault(_FIRST_RATE, group[_RATE])


def read(optimizers: Iterable[Any]) -> list[Hyperparameters]:
    """Return the current hyperparameters of each optimizer. Without parameter groups, they are an empty list."""
    return [[_plain(group) for group in getattr(optimizer, "param_groups", ())] for optimizer in optimizers]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, bool | int | float) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def apply(read_before: Iterable[Hyperparameters], optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
    """Set hyperparameters of optimizers. A new initial learning rate scales the current and all future rates.

    Args:
        read_before: Hyperparameters to set, from `read`, `follow` or `differing`.
        optimizers: Optimizers to change.
        schedulers: Schedulers of the optimizers' learning rates.

    Raises:
        ValueError: A scheduler does more than scale the initial rate, so it cannot adapt to a new initial rate. Or a
            scheduler is not registered, or its initial rate is 0, which cannot be scaled. No hyperparameter was
            changed.
    """
    moves = [
        (group, _moved(before, group))
        for groups, optimizer in zip(read_before, optimizers, strict=True)
        for before, group in zip(groups, getattr(optimizer, "param_groups", ()), strict=False)
    ]
    following = _following(schedulers, [group for group, moved in moves if _differing(group, moved).keys() & _RATES])
    for group, moved in moves:
        group.update(moved)
    for scheduler in following:
        _follow(scheduler)


def follow(chosen: Sequence[Hyperparameters], rate: Any, before: Any) -> list[Hyperparameters]:
    """Return the learning rates that `setup` would have chosen with a new `config["lr"]`, to pass to `apply`.

    `setup` is assumed to have taken a rate from the config if the rate equals the config's previous value. If the rate
    equals the new value, the same is assumed, because the `setup` of a new worker has run with the changed config.

    Args:
        chosen: Hyperparameters that `read` returned after `setup`.
        rate: New value of `config["lr"]`.
        before: Previous value of `config["lr"]`.

    Raises:
        ValueError: The new value is not a valid learning rate.
    """
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < math.inf
    usable = rate if is_number else before
    new: list[Hyperparameters] = [[_followed(group, usable, before) for group in groups] for groups in chosen]
    if any(map(any, new)) and not is_number:
        raise ValueError(f"`lr={rate!r}`: need a finite number, 0 or more.")
    return new


def _followed(group: Mapping[str, Any], rate: Any, before: Any) -> dict[str, Any]:
    first = group.get(_HIGHEST_RATE, group.get(_FIRST_RATE, group.get(_RATE)))
    if first not in (before, rate):
        return {}
    return {name: rate if group[name] == first else group[name] * (rate / first) for name in _RATES if name in group}


def differing(before: Sequence[Hyperparameters], after: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    """Return the hyperparameters in `after` that have another value in `before`, to pass to `apply`.

    If a learning rate of a parameter group differs, all learning rates of the group are included, because `apply` needs
    them.
    """
    found: list[Hyperparameters] = []
    for index, groups in enumerate(after):
        others = before[index] if index < len(before) else ()
        found.append([_differing(others[at] if at < len(others) else {}, group) for at, group in enumerate(groups)])
    return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in after.items() if name in before and before[name] != value}
    if not found.keys().isdisjoint(_RATES):  # `apply` needs all rates to scale a schedule
        found.update({name: after[name] for name in _RATES if name in after})
    return found


def updated(chosen: Sequence[Hyperparameters], new: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    """Return the hyperparameters in `chosen`, updated with the values in `new`."""
    return [
        [{**group, **numbers} for group, numbers in zip(groups, others, strict=True)]
        for groups, others in zip(chosen, new, strict=True)
    ]


def remember(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Callable[[], None]:
    """Record the hyperparameters of optimizers and the states of schedulers. Return a function that restores both."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    numbers = [_plain(group) for group in groups]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]

    def restore() -> None:
        for group, before in zip(groups, numbers, strict=True):
            group.update(before)
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    return restore


def _moved(before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to set in a parameter group.

    If the learning rate follows a schedule, the current rate is scaled by the ratio of the initial rate in `before` to
    the initial rate in the group. The other values are taken from `before`, except that momenta are left out if a
    scheduler cycles them.

    Args:
        before: Hyperparameters to set.
        group: Parameter group of an optimizer.
    """
    moved = {name: value for name, value in before.items() if name in group}
    first, new = group.get(_FIRST_RATE), before.get(_FIRST_RATE)
    if new is not None and _RATE in group:
        if not first and new:
            raise ValueError(
                f"`lr={new!r}`: the initial learning rate of the schedule is {first!r}, so the position in the "
                "schedule is not known. Start the schedule above 0, and load only states of optimizers that had a "
                "scheduler."
            )
        moved[_RATE] = group[_RATE] if new == first else group[_RATE] * (new / first)
    if "max_momentum" in group:
        moved = {name: value for name, value in moved.items() if name not in _CYCLED}
    return moved


def _following(schedulers: Iterable[Any], changed: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the schedulers that must adapt to new initial learning rates.

    Args:
        schedulers: The registered schedulers.
        changed: Parameter groups whose initial learning rates change.

    Raises:
        ValueError: A scheduler does more than scale the initial rate, or is not registered.
    """
    following, scheduled = list[Any](), set[int]()
    for scheduler in schedulers:
        groups = {*map(id, _groups_of(scheduler, changed))}
        scheduled |= groups
        if not groups.isdisjoint(map(id, changed)):
            following += _with_inner(scheduler)
    if any(_FIRST_RATE in group and id(group) not in scheduled for group in changed):
        raise ValueError(
            "The learning rate cannot be changed, because a scheduler is not registered and would overwrite the new "
            "value. Pass the scheduler to `register(schedulers=...)`."
        )
    for each in following:
        _check_multiplies(each)
    return following


def _check_multiplies(scheduler: Any) -> None:
    none = 0, [0] * len(_groups_of(scheduler, ()))
    own = [name for name in _OWN_RATES if getattr(scheduler, name, 0) not in none]
    if own or type(scheduler).__module__ != LRScheduler.__module__:
        raise ValueError(
            f"The learning rate cannot be changed, because `{type(scheduler).__name__}` may have rates of its own"
            f"{f' (`{own[0]}`)' if own else ''} that do not follow. Use a `LambdaLR`, which multiplies the initial "
            "rate. For `update_config`, you can also override `config_changed(self, config, changed)`: set "
            "the rates of optimizer and scheduler there, without `super().config_changed`."
        )


def _groups_of(scheduler: Any, unknown: Sequence[Any]) -> Sequence[Any]:
    groups: Sequence[Any] = getattr(getattr(scheduler, "optimizer", None), "param_groups", unknown)
    return groups


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers that it contains, as a `SequentialLR` does."""
    yield scheduler
    for value in getattr(scheduler, "__dict__", {}).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, LRScheduler):
                yield from _with_inner(each)


def _follow(scheduler: Any) -> None:
    """Copy the learning rates of a scheduler's optimizer into the scheduler, which then continues from these rates."""
    groups = scheduler.optimizer.param_groups
    known = scheduler.state_dict()
    rates = {
        "base_lrs": [group.get(_FIRST_RATE, group[_RATE]) for group in groups],
        "_last_lr": [group[_RATE] for group in groups],
    }
    scheduler.load_state_dict({**known, **{name: value for name, value in rates.items() if name in known}})
