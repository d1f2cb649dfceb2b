"""States of models that are divided over the ranks: an index, and the tensors that each rank has.

A rank has its rows of each tensor that is divided, as `torch.chunk` cuts them, and rank 0 what is not divided, too. The
parts of a snapshot lie in the object store, where they outlive the workers; those of a checkpoint are files. A rank of
any later group takes the rows that it needs of them. A process that has to have the whole state, because somebody asked
for it, puts it together.

Why no rank gathers a state: ADR 92.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from raysgd._state.state_codec import decode
from raysgd.engine.transfers import DividedValue

Path_ = tuple[str | int, ...]
"""The place of a tensor in a state."""

Tensors = Mapping[Path_, torch.Tensor]

Index = Mapping[Path_, tuple[torch.dtype, tuple[int, ...], bool]]
"""What each tensor is: its kind, its shape, and whether it is divided."""

MakeRoom = Callable[[Mapping[str, Any], Sequence[Path_]], dict[Path_, torch.Tensor]]
"""Makes the tensors that a rank has of a state: of its outline, and the paths in it where they belong."""

_PARTS = ("models", "criterion", "optimizers")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path_, torch.Tensor]]:
    """Return a state without the tensors of its models and optimizers, and these.

    Examples:
        >>> rest, tensors = split({"epoch": 1, "models": [{"weight": torch.ones(2)}]})
        >>> rest, list(tensors)
        ({'epoch': 1, 'models': [{}]}, [('models', 0, 'weight')])
    """
    tensors: dict[Path_, torch.Tensor] = {}
    parts = {name: _without(state[name], (name,), tensors) for name in _PARTS if name in state}
    return {**state, **parts}, tensors


def _without(value: Any, path: Path_, tensors: dict[Path_, torch.Tensor]) -> Any:
    if isinstance(value, Mapping):
        found = {key: each for key, each in value.items() if isinstance(each, torch.Tensor) and each.ndim}
        tensors.update({(*path, key): each for key, each in found.items()})
        return {key: _without(each, (*path, key), tensors) for key, each in value.items() if key not in found}
    if isinstance(value, list):
        return [_without(each, (*path, index), tensors) for index, each in enumerate(value)]
    return value


def joined(rest: Mapping[str, Any], paths: Iterable[Path_], tensor_of: Callable[[Path_], Any]) -> dict[str, Any]:
    """Return the state with its tensors.

    Examples:
        >>> joined({"models": [{}]}, [("models", 0, "weight")], str)
        {'models': [{'weight': "('models', 0, 'weight')"}]}
    """
    made: dict[int, Any] = {}
    state = {name: _copied(value, made) if name in _PARTS else value for name, value in rest.items()}
    for path in paths:
        owner: Any = state
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = tensor_of(path)
    return state


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """Return a copy of the containers alone, one of each."""
    if not isinstance(value, Mapping | list):
        return value
    if id(value) in made:
        return made[id(value)]
    copied: Any = [] if isinstance(value, list) else {}
    made[id(value)] = copied
    if isinstance(value, list):
        copied.extend(_copied(each, made) for each in value)
    else:
        copied.update({key: _copied(each, made) for key, each in value.items()})
    return copied


def content_of(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return what a rank keeps of its state, not copied yet: `rest` and `index`, of rank 0 alone, and `tensors`."""
    rest, tensors = split(state)
    is_divided = {path: _is_divided(tensor) for path, tensor in tensors.items()}
    kept = {path: _local(tensor) for path, tensor in tensors.items() if not rank or is_divided[path]}
    if rank:
        return {"rest": None, "index": None, "tensors": kept}
    index = {path: (each.dtype, tuple(each.shape), is_divided[path]) for path, each in tensors.items()}
    return {"rest": rest, "index": index, "tensors": kept}


class DividedState:
    """A state in parts, each of which is read when it is needed.

    Args:
        rest: Everything but tensors.
        index: What the tensors are.
        num_parts: How many ranks it was divided by.
        read_part: Returns what the rank with this number had.

    Attributes:
        rest, index: The same.
    """

    def __init__(self, rest: dict[str, Any], index: Index, num_parts: int, read_part: Callable[[int], Tensors]) -> None:
        self.rest, self.index, self._num_parts = rest, index, num_parts
        self._part = cache(read_part)

    def outline(self) -> dict[str, Any]:
        """Return the state with tensors that have a shape and no memory."""

        def shape_of(path: Path_) -> torch.Tensor:
            dtype, size, _ = self.index[path]
            return torch.zeros((), dtype=dtype).expand(size)

        return joined(self.rest, self.index, shape_of)

    def whole(self) -> dict[str, Any]:
        """Return the whole state, in separate memory."""

        def tensor_of(path: Path_) -> torch.Tensor:
            if not self.index[path][2]:
                return self._part(0)[path].clone()
            return torch.cat([self._part(rank)[path] for rank in range(self._num_parts)])

        return joined(copy.deepcopy(self.rest), self.index, tensor_of)

    def make_room(self, make: MakeRoom) -> dict[Path_, torch.Tensor]:
        """Return tensors to fill, divided as they are here; nothing is changed.

        Raises:
            ValueError, KeyError: The state does not fit.
        """
        return make(self.outline(), list(self.index))

    @torch.no_grad()
    def fill(self, room: Tensors) -> None:
        """Read into tensors what this rank has of them."""
        for path, tensor in room.items():
            local, (_, size, is_divided) = _local(tensor), self.index[path]
            if not is_divided and not _is_divided(tensor):
                local.copy_(self._part(0)[path])
                continue
            begin = _begin_here(tensor) if _is_divided(tensor) else 0
            sources = overlaps(size[0], self._num_parts if is_divided else 1, begin, begin + len(local))
            for rank, first, last in sources:
                at = begin_of(size[0], self._num_parts, rank) if is_divided else 0
                local[first - begin : last - begin].copy_(self._part(rank)[path][first - at : last - at])

    def joined(self, tensors: Tensors) -> dict[str, Any]:
        """Return the state with these tensors in it."""
        return joined(self.rest, self.index, tensors.__getitem__)


def of_snapshot(parts: DividedValue) -> DividedState:
    """Return the state in the parts of a snapshot."""

    @cache
    def content(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = decode(parts[rank], copy=False)
        return found

    first = content(0)
    return DividedState(first["rest"], first["index"], len(parts), lambda rank: content(rank)["tensors"])


def whole(shared_state: Any, copy: bool) -> Any:
    """Return the whole state that a snapshot has in the driver.

    Args:
        shared_state: That of a snapshot.
        copy: Whether its tensors have memory of their own. Those of ranks that divide it always have.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).whole() if is_divided else decode(shared_state, copy=copy)


def outline(shared_state: Any) -> Any:
    """Return the same for a look at what it is made of."""
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).outline() if is_divided else decode(shared_state, copy=False)


# ------------------------------------------------------------------------------------ the rows of a rank


def _placement(tensor: Any) -> Any:
    """Return how a tensor lies on the ranks; None if each has all of it. No import: it loads parts of PyTorch."""
    placements = getattr(tensor, "placements", None)
    return None if placements is None else placements[0]


def _is_divided(tensor: Any) -> bool:
    placement = _placement(tensor)
    is_divided = placement is not None and placement.is_shard()
    assert not is_divided or placement.dim == 0, "`fully_shard` divides rows"
    return is_divided


def _local(tensor: Any) -> torch.Tensor:
    """Return what this process has of a tensor."""
    local: torch.Tensor = tensor if _placement(tensor) is None else tensor.to_local()
    return local


def _begin_here(tensor: Any) -> int:
    """Return where the rows of this rank begin in a divided tensor."""
    mesh = tensor.device_mesh
    return begin_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())


def begin_of(total: int, num_ranks: int, rank: int) -> int:
    """Return where the part of a rank begins: parts are as those of `torch.chunk`."""
    return min(total, rank * -(-total // num_ranks))


def overlaps(total: int, num_ranks: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return which ranks have something between two positions: rank, first position, and the one behind the last.

    Examples:
        >>> overlaps(10, 3, 2, 9)  # they have 4, 4 and 2
        [(0, 2, 4), (1, 4, 8), (2, 8, 9)]
    """
    found = []
    for rank in range(num_ranks):
        first, last = max(begin, begin_of(total, num_ranks, rank)), min(end, begin_of(total, num_ranks, rank + 1))
        if first < last:
            found.append((rank, first, last))
    return found
