"""Names in the states of models, without what `torch.compile(model)` adds to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

_COMPILED = "_orig_mod"


def plain(name: Any) -> Any:
    """Return the name that a parameter or a module has where nothing is compiled.

    Examples:
        >>> plain("encoder._orig_mod.0.weight")
        'encoder.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED) if isinstance(name, str) else name


def with_plain_names(state: Any) -> Any:
    """Return the state of a model with plain names."""
    return _renamed(state, plain, plain)


def with_names_of(model: torch.nn.Module, saved: Any) -> Any:
    """Return a saved state with the names that it has in this model, compiled or not."""
    own = model.state_dict()
    names, modules = ({plain(name): name for name in known} for known in (own, getattr(own, "_metadata", ())))
    return _renamed(
        saved, lambda name: names.get(plain(name), plain(name)), lambda name: modules.get(plain(name), plain(name))
    )


def _renamed(state: Any, name_of: Callable[[Any], Any], module_of: Callable[[Any], Any]) -> Any:
    """The same state where no name changes. PyTorch keeps versions of modules beside the tensors."""
    if not isinstance(state, Mapping) or all(name_of(name) == name for name in state):
        return state
    renamed: Any = OrderedDict((name_of(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if isinstance(versions, Mapping):
        renamed._metadata = OrderedDict((module_of(name), value) for name, value in versions.items())
    return renamed
