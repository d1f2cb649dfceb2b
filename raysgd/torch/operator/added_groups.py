"""Parameter groups that optimizers were given after `setup`: a state names them, so that other processes add them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd.torch.objects.plain_names import plain
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.worker.state.state_checks import require

ADDED = "added_groups"  # key in the state of an optimizer: for each such group, the names of its parameters

Names = list[list[str | None]]


class AddedGroups:
    """The groups behind those of `setup`.

    Args:
        optimizers: As `setup` has left them.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._counts = [len(getattr(optimizer, "param_groups", ())) for optimizer in optimizers]

    def in_states(self, registered: RegisteredObjects) -> list[dict[str, Names]]:
        """Return what the state of each optimizer says of them. A parameter that nothing saves has the name None."""
        groups = [self._of(index, optimizer) for index, optimizer in enumerate(registered.optimizers)]
        if not any(groups):
            return [{} for _ in groups]
        names = {id(parameter): name for name, parameter in _parameters(registered).items()}
        named = [[[names.get(id(parameter)) for parameter in group["params"]] for group in each] for each in groups]
        return [{ADDED: each} if each else {} for each in named]

    def fitted(self, registered: RegisteredObjects, states: Sequence[Any], *, in_place: bool) -> list[Any]:
        """Return the optimizers with the groups of their states; unless `in_place`, copies where these are others.

        Raises:
            ValueError: A group has parameters that are not registered here.
        """
        optimizers, parameters = list(registered.optimizers), _parameters(registered)
        for index, (own, saved) in enumerate(zip(self.in_states(registered), states, strict=True)):
            names = saved.get(ADDED, []) if isinstance(saved, Mapping) else []
            if names == own.get(ADDED, []):
                continue
            _check(names, parameters, optimizers[index])
            optimizers[index] = optimizers[index] if in_place else _copied(optimizers[index])
            self._drop(index, optimizers[index])
            for group in names:
                optimizers[index].add_param_group({"params": [parameters[name] for name in group]})
        return optimizers

    def _of(self, index: int, optimizer: Any) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
        is_of_setup = index < len(self._counts)  # others may be registered later
        return groups[self._counts[index] :] if is_of_setup else []

    def _drop(self, index: int, optimizer: Any) -> None:
        added = self._of(index, optimizer)
        for parameter in [each for group in added for each in group["params"]]:
            optimizer.state.pop(parameter, None)
        del optimizer.param_groups[len(optimizer.param_groups) - len(added) :]


def _parameters(registered: RegisteredObjects) -> dict[Any, torch.Tensor]:
    return {
        f"{index}.{plain(name)}": parameter
        for index, part in enumerate(registered.trained)
        for name, parameter in part.named_parameters()
    }


def _check(names: Any, parameters: Mapping[Any, torch.Tensor], optimizer: Any) -> None:
    are_lists = isinstance(names, list) and all(isinstance(group, list) for group in names)
    require(are_lists, "the groups that were added to an optimizer are not lists of names")
    flat = [str(name or "no name") for group in names for name in group]
    strangers = [name for name in flat if name not in parameters]
    require(not strangers, f"an optimizer has parameters that are not registered here ({', '.join(strangers)[:300]})")
    require(len(set(flat)) == len(flat), "an optimizer has a parameter twice")
    require(hasattr(optimizer, "add_param_group"), f"`{type(optimizer).__name__}` takes no other groups")


def _copied(optimizer: Any) -> Any:
    copied = copy.copy(optimizer)
    copied.param_groups, copied.state = list(optimizer.param_groups), copy.copy(optimizer.state)
    return copied
