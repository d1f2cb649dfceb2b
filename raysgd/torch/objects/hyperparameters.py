"""The hyperparameters of optimizers across configs: a state brings those it was trained with, a new config has others.

A state that was loaded keeps its momenta and its place in the schedule; the numbers are those that `setup` chose. Where
`config["lr"]` changes later, the rates that came from it follow. A new learning rate multiplies the whole schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

Hyperparameters = Sequence[Mapping[str, Any]]
"""Of one optimizer: for each group of parameters its numbers by name."""

_RATE, _FIRST_RATE, _HIGHEST_RATE = "lr", "initial_lr", "max_lr"  # the last one is of `OneCycleLR`
_RATES = frozenset({_RATE, _FIRST_RATE, _HIGHEST_RATE, "min_lr"})
_CYCLED = frozenset({"momentum", "betas"})
_OWN_RATES = ("eta_min", "min_lrs", "max_lrs")  # of PyTorch's schedulers that do more than multiply the first rate


def note_first_rates(schedulers: Iterable[Any]) -> None:
    """Note the rates that schedules begin at. A `ReduceLROnPlateau` does not, and its cuts could not be told later."""
    for scheduler in schedulers:
        for group in _groups_of(scheduler, ()):
            if _is_plain(group[_RATE]):
                group.setdefault(_FIRST_RATE, group[_RATE])


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
    """Set optimizers to what was read of them. A new first rate multiplies the rates of the schedule, now and later.

    Args:
        read_before: What `read` returned for these optimizers.
        optimizers: The optimizers.
        schedulers: The schedulers of their learning rates.

    Raises:
        ValueError: What a new rate would make of a schedule is not known. Nothing is changed.
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
    """Return the learning rates that `setup` would have chosen with another `config["lr"]`, for `apply`.

    A rate comes from the config if it had the value there. A worker that is new has chosen it with the new value.

    Args:
        chosen: What `read` returned after `setup`.
        rate: The new value.
        before: The value before.

    Raises:
        ValueError: The new value is no learning rate.
    """
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < math.inf
    usable = rate if is_number else before
    new: list[Hyperparameters] = [[_followed(group, usable, before) for group in groups] for groups in chosen]
    if any(map(any, new)) and not is_number:
        raise ValueError(f"`lr={rate!r}`: need a finite number from 0 on.")
    return new


def _followed(group: Mapping[str, Any], rate: Any, before: Any) -> dict[str, Any]:
    first = group.get(_HIGHEST_RATE, group.get(_FIRST_RATE, group.get(_RATE)))
    if first not in (before, rate):
        return {}
    return {name: rate if group[name] == first else group[name] * (rate / first) for name in _RATES if name in group}


def differing(before: Sequence[Hyperparameters], after: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    """Only the numbers of `after` that are other ones than before, for `apply`."""
    found: list[Hyperparameters] = []
    for index, groups in enumerate(after):
        others = before[index] if index < len(before) else ()
        found.append([_differing(others[at] if at < len(others) else {}, group) for at, group in enumerate(groups)])
    return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in after.items() if name in before and before[name] != value}
    if not found.keys().isdisjoint(_RATES):  # a scheduled rate needs all
        found.update({name: after[name] for name in _RATES if name in after})
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
    """The numbers from before, with those that a schedule moves as far along it as those of the group are."""
    moved = {name: value for name, value in before.items() if name in group}
    first, new = group.get(_FIRST_RATE), before.get(_FIRST_RATE)
    if new is not None and _RATE in group:
        if not first and new:
            raise ValueError(
                f"`lr={new!r}`: the schedule began at {first!r}, so the place in it is not known. Begin above 0, and "
                "load states of optimizers that had a scheduler."
            )
        moved[_RATE] = group[_RATE] if new == first else group[_RATE] * (new / first)
    if "max_momentum" in group:
        moved = {name: value for name, value in moved.items() if name not in _CYCLED}
    return moved


def _following(schedulers: Iterable[Any], changed: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the schedulers of groups whose rates change, if all do no more than multiply the first rate."""
    following, scheduled = list[Any](), set[int]()
    for scheduler in schedulers:
        groups = {*map(id, _groups_of(scheduler, changed))}
        scheduled |= groups
        if not groups.isdisjoint(map(id, changed)):
            following += _with_inner(scheduler)
    if any(_FIRST_RATE in group and id(group) not in scheduled for group in changed):
        raise ValueError(
            "A new learning rate, and a scheduler that is not registered: it would set its own ones again. Pass it to "
            "`register(schedulers=...)`."
        )
    for each in following:
        _check_multiplies(each)
    return following


def _check_multiplies(scheduler: Any) -> None:
    none = 0, [0] * len(_groups_of(scheduler, ()))
    own = [name for name in _OWN_RATES if getattr(scheduler, name, 0) not in none]
    if own or type(scheduler).__module__ != LRScheduler.__module__:
        raise ValueError(
            f"A new learning rate, and `{type(scheduler).__name__}`, which has rates of its own"
            f"{f' (`{own[0]}`)' if own else ''}: whether these follow is not known. Use a `LambdaLR`, which multiplies "
            "the first rate. For `update_config`, you can also override `config_changed(self, config, changed)`: set "
            "the rates of optimizer and scheduler there, without `super().config_changed`."
        )


def _groups_of(scheduler: Any, unknown: Sequence[Any]) -> Sequence[Any]:
    groups: Sequence[Any] = getattr(getattr(scheduler, "optimizer", None), "param_groups", unknown)
    return groups


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it steps, as `SequentialLR` does."""
    yield scheduler
    for value in getattr(scheduler, "__dict__", {}).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, LRScheduler):
                yield from _with_inner(each)


def _follow(scheduler: Any) -> None:
    """Let a scheduler go on from the rates that its optimizer has now."""
    groups = scheduler.optimizer.param_groups
    known = scheduler.state_dict()
    rates = {
        "base_lrs": [group.get(_FIRST_RATE, group[_RATE]) for group in groups],
        "_last_lr": [group[_RATE] for group in groups],
    }
    scheduler.load_state_dict({**known, **{name: value for name, value in rates.items() if name in known}})
