"""Room for a divided state: tensors with what one rank has of each, still without their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raysgd.torch.checkpoints.divided_index import Path_
from raysgd.torch.objects.plain_names import plain, with_plain_names
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.torch.parallel.strategy import NoParallel


def _at(state: Any, path: Path_) -> Any:
    for step in path:
        state = state[step]
    return state


@dataclass(frozen=True)
class DividedRoom:
    """Room for a state that is divided like what is registered.

    Attributes:
        registered: The models and the optimizers.
        criterion: The criterion, if it is trained.
        outline: The state, with tensors that have a shape and no memory.
    """

    registered: RegisteredObjects
    criterion: Any
    outline: Mapping[str, Any]

    def tensor(self, path: Path_, parallel: NoParallel) -> torch.Tensor:
        """Return one of its tensors, divided by `parallel`."""
        return parallel.empty_like(self._like(path), _at(self.outline, path).dtype)

    def _like(self, path: Path_) -> torch.Tensor:
        """Return a tensor with the shape, divided as that one is to be."""
        size = _at(self.outline, path).shape
        own = self._owner(path)
        return own if isinstance(own, DTensor) and own.shape == size else torch.empty(size)

    def _owner(self, path: Path_) -> Any:
        part, *rest = path
        if part == "models":
            return self._in(self.registered.original_models[int(rest[0])], rest[1])
        if part == "criterion":
            return self._in(self.criterion, rest[0])
        return self._parameter(rest) if rest[1] == "state" else None

    def _in(self, model: torch.nn.Module, name: Any) -> Any:
        return with_plain_names(model.state_dict()).get(plain(str(name)))

    def _parameter(self, rest: list[Any]) -> Any:
        """Returns the parameter of an entry of an optimizer's state: entries are by its index."""
        number, _, index, *_ = rest
        saved = self.outline["optimizers"][number]["param_groups"]
        own = self.registered.optimizers[number].param_groups
        indices = [each for group in saved for each in group["params"]]
        parameters = [each for group in own for each in group["params"]]
        return dict(zip(indices, parameters, strict=True)).get(index)
