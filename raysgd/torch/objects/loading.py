"""Loads saved states into the memory that is there already, and keeps nothing of what it is given.

A saved state may be a view of a file or of another process's memory. And fresh memory for a large state costs
several times as much as the copy itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

_EXTRA_STATE = "_extra_state"
"""The end of the keys under which modules keep what `get_extra_state` returned: their owners may hold on to it."""


def load_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a model's state dict. `load_state_dict` copies the tensors; the rest is copied here."""
    copies = {
        id(value): value
        for name, value in saved.items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    model.load_state_dict(copy.deepcopy(saved, copies))


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state dict, into the tensors that it has now where these are of the same kind.

    An optimizer keeps the tensors that `load_state_dict` is given. So it is given its own ones, filled with the
    new values, and copies of the others.
    """
    groups = getattr(optimizer, "param_groups", ())
    taken = {_address(parameter) for group in groups for parameter in group["params"]}
    copies: dict[int, Any] = {}
    with torch.no_grad():
        _fill(optimizer.state_dict().get("state"), saved.get("state"), copies, taken)
    optimizer.load_state_dict(copy.deepcopy(saved, copies))


def _fill(own: Any, saved: Any, copies: dict[int, Any], taken: set[int]) -> None:
    """Copy the tensors in `saved` over those at the same places in `own`; note which now stands for which."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in own.keys() & saved.keys():
            _fill(own[key], saved[key], copies, taken)
    elif id(saved) not in copies and _is_alike(own, saved) and _address(own) not in taken:
        taken.add(_address(own))
        copies[id(saved)] = own.copy_(saved)


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether both are ordinary tensors of one kind, and `own` has its memory to itself."""
    if type(own) is not torch.Tensor or type(saved) is not torch.Tensor:
        return False
    kinds = [(tensor.layout, tensor.dtype, tensor.shape) for tensor in (own, saved)]
    if kinds[0] != kinds[1] or own.layout is not torch.strided or own.is_meta:
        return False
    return own.is_leaf and own.numel() > 0 and own.untyped_storage().nbytes() == own.nbytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
