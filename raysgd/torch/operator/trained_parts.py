"""What is trained: frozen parameters, and groups of optimizers, as `setup` or the last `rewrap` has left them.

Snapshots carry what `rewrap` has changed, so that other processes, whose `setup` did not, freeze and add the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.worker.state.state_checks import require

Noted = dict[str, Any]
"""`frozen`: for each module the names of its frozen parameters; `groups`: for each optimizer those of its groups."""


class TrainedParts:
    """The record of what is trained.

    Args:
        registered: As `setup` has left it.
    """

    def __init__(self, registered: RegisteredObjects) -> None:
        self._registered = registered
        self._of_setup = _read(registered)
        self.note()

    def note(self) -> None:
        """Notes what is trained now."""
        self._now, self._flags = _read(self._registered), _flags_of(self._registered)

    @property
    def since_setup(self) -> Noted | None:
        """What is trained, for a state; None where it is what `setup` chose."""
        return None if self._now == self._of_setup else self._now

    @property
    def has_changed(self) -> bool:
        """True if parameters were frozen or unfrozen, or groups added, since it was noted.

        A model that is all frozen counts as unchanged: models are frozen for a part of each batch, too.
        """
        (flags, counts), (noted, noted_counts) = _flags_of(self._registered), self._flags
        return counts != noted_counts or any(
            now != before and any(now) for now, before in zip(flags, noted, strict=True)
        )

    def check(self) -> None:
        """Refuses to train anything else than what was noted.

        Raises:
            ValueError: Something was changed since.
        """
        if self.has_changed:
            raise ValueError(
                "Parameters were frozen or unfrozen (`requires_grad`), or parameter groups were added, since `setup` "
                "or the last `self.rewrap()`. Call `self.rewrap()` on all workers after such a change."
            )

    def take(self, noted: Noted | None) -> bool:
        """Freezes, unfreezes and adds groups as in a state; tells whether anything was changed.

        Raises:
            ValueError: A group has parameters that are not registered.
        """
        noted = noted or self._of_setup
        if noted == self._now and not self.has_changed:
            return False
        for part, frozen in zip(self._registered.trained, map(set, noted["frozen"]), strict=True):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(name not in frozen)
        for optimizer, groups in zip(self._registered.optimizers, noted["groups"], strict=True):
            _give_groups(optimizer, groups, _names(self._registered))
        self.note()
        return True


def _flags_of(registered: RegisteredObjects) -> tuple[list[list[bool]], list[int]]:
    flags = [[parameter.requires_grad for parameter in part.parameters()] for part in registered.trained]
    return flags, [len(_groups_of(optimizer)) for optimizer in registered.optimizers]


def _read(registered: RegisteredObjects) -> Noted:
    names = {id(parameter): name for name, parameter in _names(registered).items()}
    frozen = [[name for name, each in part.named_parameters() if not each.requires_grad] for part in registered.trained]
    return {"frozen": frozen, "groups": [_named(optimizer, names) for optimizer in registered.optimizers]}


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _named(optimizer: Any, names: Mapping[int, str]) -> list[list[str | None]]:
    """Return the names of the parameters in each group; None for those that nothing saves."""
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in _groups_of(optimizer)]


def _names(registered: RegisteredObjects) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter
        for index, part in enumerate(registered.trained)
        for name, parameter in part.named_parameters()
    }


def _give_groups(
    optimizer: Any, groups: Sequence[Sequence[str | None]], parameters: Mapping[Any, torch.Tensor]
) -> None:
    """Drops the groups of an optimizer from the first one that differs on, and adds those of a state."""
    own = _named(optimizer, {id(parameter): name for name, parameter in parameters.items()})
    num_alike = 0
    for ours, theirs in zip(own, groups, strict=False):
        if ours != theirs:
            break
        num_alike += 1
    added = groups[num_alike:]
    strangers = [name for group in added for name in group if name not in parameters]
    require(not strangers, f"an optimizer has parameters that are not registered here ({strangers})")
    for group in _groups_of(optimizer)[num_alike:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    if len(own) > num_alike:
        del optimizer.param_groups[num_alike:]
    for group in added:
        optimizer.add_param_group({"params": [parameters[name] for name in group]})
