"""`TrainedParts`: which parameters are frozen, and which parameter groups optimizers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.trainer.worker.replica_state import require

Flags = tuple[list[list[bool]], list[int]]
Noted = dict[str, Any]
"""Names of parameters, in a dict with two keys.

`frozen`: for each module, the names of its frozen parameters. `groups`: for each optimizer, a list of names for each
parameter group. Names in `groups` are prefixed with the index of the module.
"""


class TrainedParts:
    """Records which parameters are frozen and which parameter groups optimizers have, and detects changes.

    Args:
        registered: Objects that the operator's `setup` registered.
    """

    def __init__(self, registered: RegisteredObjects) -> None:
        self._registered = registered
        self._of_setup = _read(registered)
        self.note()

    def note(self) -> None:
        """Record the current frozen parameters and parameter groups."""
        self._now, self._flags = _read(self._registered), self.flags

    @property
    def since_setup(self) -> Noted | None:
        """Frozen parameters and parameter groups at the last call to `note`, to store in a snapshot.

        None if they have not changed since the end of `setup`.
        """
        return None if self._now == self._of_setup else self._now

    @property
    def flags(self) -> Flags:
        """Current `requires_grad` of each parameter, and current number of parameter groups of each optimizer."""
        registered = self._registered
        flags = [[parameter.requires_grad for parameter in part.parameters()] for part in registered.trained]
        return flags, [len(getattr(optimizer, "param_groups", ())) for optimizer in registered.optimizers]

    def has_changed(self, freezes_in_batches: bool = False) -> bool:
        """Return True if parameters were frozen or unfrozen, or parameter groups were added, since the last `note`.

        If all parameters of a model are now frozen, the model counts as unchanged. The reason is that user code, such
        as a GAN, may freeze a whole model during a part of each batch.

        Args:
            freezes_in_batches: True to ignore newly frozen parameters. Unfrozen parameters and added parameter groups
                are still detected.
        """
        present = self.flags
        if present == self._flags:
            return False
        (flags, counts), (noted, noted_counts) = present, self._flags
        if freezes_in_batches:
            noted = [
                [now and before for now, before in zip(*both, strict=True)] for both in zip(flags, noted, strict=True)
            ]
        return counts != noted_counts or any(
            any(now) and now != before for now, before in zip(flags, noted, strict=True)
        )

    def check(self, freezes_in_batches: bool = False) -> None:
        """Check that user code has called `rewrap` after each change of the frozen parameters or parameter groups.

        Args:
            freezes_in_batches: True to ignore newly frozen parameters. Unfrozen parameters and added parameter groups
                are still detected.

        Raises:
            ValueError: Parameters were frozen or unfrozen, or parameter groups were added, without a call to `rewrap`.
        """
        if self.has_changed(freezes_in_batches):
            raise ValueError(
                "Parameters were frozen or unfrozen (`requires_grad`), or parameter groups were added, since `setup` "
                "or the last `self.rewrap()`. Call `self.rewrap()` on all workers after such a change."
            )

    def take(self, noted: Noted | None) -> bool:
        """Freeze and unfreeze parameters and replace parameter groups, as recorded in a snapshot.

        Args:
            noted: Frozen parameters and parameter groups from the snapshot; None for those at the end of `setup`.

        Returns:
            True if anything has changed.

        Raises:
            ValueError: A parameter group in the snapshot has parameters that the operator has not registered.
        """
        noted = noted or self._of_setup
        if noted == self._now and not self.has_changed():
            return False
        groups = self.groups_after(noted)
        for part, frozen in zip(self._registered.trained, map(set, noted["frozen"]), strict=True):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(name not in frozen)
        for optimizer, own in zip(self._registered.optimizers, groups, strict=True):
            _give_groups(optimizer, own)
        self.note()
        return True

    def groups_after(self, noted: Noted | None) -> list[list[list[torch.Tensor]]]:
        """Return the parameters in each group of each optimizer, as they are after `take(noted)`.

        Raises:
            ValueError: A parameter group in the snapshot has parameters that the operator has not registered.
        """
        parameters = _names(self._registered)
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = (noted or self._of_setup)["groups"]
        pairs = zip(self._registered.optimizers, groups, strict=True)
        return [_groups_after(_groups_of(each), _named(each, names), some, parameters) for each, some in pairs]


def _read(registered: RegisteredObjects) -> Noted:
    names = {id(parameter): name for name, parameter in _names(registered).items()}
    frozen = [[name for name, each in part.named_parameters() if not each.requires_grad] for part in registered.trained]
    return {"frozen": frozen, "groups": [_named(optimizer, names) for optimizer in registered.optimizers]}


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _named(optimizer: Any, names: Mapping[int, str]) -> list[list[str | None]]:
    """Return the parameters' names in each parameter group of an optimizer.

    Args:
        optimizer: The optimizer.
        names: Names of the parameters of registered modules, by parameter ID. Other parameters get None.
    """
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in _groups_of(optimizer)]


def _names(registered: RegisteredObjects) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter
        for index, part in enumerate(registered.trained)
        for name, parameter in part.named_parameters()
    }


def _groups_after(
    own: Sequence[Mapping[str, Any]],
    own_names: Sequence[Sequence[str | None]],
    names: Sequence[Sequence[str | None]],
    parameters: Mapping[Any, torch.Tensor],
) -> list[list[torch.Tensor]]:
    """Return the parameters in each group of an optimizer, once its groups have the parameters with these names.

    Args:
        own: The optimizer's groups.
        own_names: Names of the parameters in each of these groups.
        names: Names of the parameters in each group afterwards. From the first group with other names on, all of its
            parameters must be registered.
        parameters: Registered parameters by name.
    """
    alike = [*takewhile(lambda pair: pair[0] == pair[1], zip(own_names, names, strict=False))]
    added = names[len(alike) :]
    strangers = [name for group in added for name in group if name not in parameters]
    require(not strangers, f"an optimizer has parameters that are not registered here ({strangers})")
    kept = [list(group["params"]) for group in own[: len(alike)]]
    return [*kept, *([parameters[name] for name in group] for group in added)]


def _give_groups(optimizer: Any, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Replace an optimizer's parameter groups, starting with the first group that differs from its entry in `groups`.

    The optimizer's state of the parameters in replaced groups is discarded.

    Args:
        optimizer: Optimizer to change.
        groups: The parameters in each group.
    """
    own = [[*map(id, group["params"])] for group in _groups_of(optimizer)]
    wanted = [[*map(id, group)] for group in groups]
    num_alike = len([*takewhile(lambda pair: pair[0] == pair[1], zip(own, wanted, strict=False))])
    for group in _groups_of(optimizer)[num_alike:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    if len(own) > num_alike:
        del optimizer.param_groups[num_alike:]
    for added in groups[num_alike:]:
        optimizer.add_param_group({"params": list(added)})
