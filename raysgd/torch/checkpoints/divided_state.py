"""States of models that are sharded over the ranks: an index, and the tensors that each rank holds.

A rank holds its rows of each sharded tensor, split as by `torch.chunk`. Rank 0 also holds the tensors that are not
sharded. The parts of a snapshot are in the object store, where they outlive the workers; the parts of a checkpoint are
files. A rank of any later group reads the rows that it needs from these parts. The full state is assembled only in a
process that was asked for it.

ADR 92 explains why no rank gathers a state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from raysgd.core.engine.transfers import DividedValue
from raysgd.core.state.state_codec import decode

Path_ = tuple[str | int, ...]
"""Path of a tensor in a state."""

Tensors = Mapping[Path_, torch.Tensor]

Index = Mapping[Path_, tuple[torch.dtype, tuple[int, ...], bool]]
"""Dtype and shape of each tensor, and True if the tensor is sharded."""

MakeRoom = Callable[[Mapping[str, Any], Sequence[Path_]], dict[Path_, torch.Tensor]]
"""Creates a rank's tensors of a state, given the state's outline and the tensors' paths in it."""

_PARTS = ("models", "criterion", "optimizers")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path_, torch.Tensor]]:
    """Split a state into the state without the tensors of its models and optimizers, and these tensors by path.

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
    """Return the state with its tensors inserted. Inverse of `split`.

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
    """Copy only the containers, each container once."""
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
    """Return a rank's part of the state, uncopied: `tensors` and, from rank 0 only, `rest` and `index`."""
    rest, tensors = split(state)
    is_divided = {path: _is_divided(tensor) for path, tensor in tensors.items()}
    kept = {path: _local(tensor) for path, tensor in tensors.items() if not rank or is_divided[path]}
    if rank:
        return {"rest": None, "index": None, "tensors": kept}
    index = {path: (each.dtype, tuple(each.shape), is_divided[path]) for path, each in tensors.items()}
    return {"rest": rest, "index": index, "tensors": kept}


class DividedState:
    """A state in parts. Each part is read when it is needed.

    Args:
        rest: Everything except the tensors.
        index: Index of the tensors.
        num_parts: Number of ranks over which the state was sharded.
        read_part: Returns the tensors of the rank with this number.

    Attributes:
        rest: Everything except the tensors.
        index: Index of the tensors.
    """

    def __init__(self, rest: dict[str, Any], index: Index, num_parts: int, read_part: Callable[[int], Tensors]) -> None:
        self.rest, self.index, self._num_parts = rest, index, num_parts
        self._part = cache(read_part)

    def outline(self) -> dict[str, Any]:
        """Return the state with tensors that have a shape but take no memory."""

        def shape_of(path: Path_) -> torch.Tensor:
            dtype, size, _ = self.index[path]
            return torch.zeros((), dtype=dtype).expand(size)

        return joined(self.rest, self.index, shape_of)

    def whole(self) -> dict[str, Any]:
        """Return the full state, copied into new memory."""

        def tensor_of(path: Path_) -> torch.Tensor:
            if not self.index[path][2]:
                return self._part(0)[path].clone()
            return torch.cat([self._part(rank)[path] for rank in range(self._num_parts)])

        return joined(copy.deepcopy(self.rest), self.index, tensor_of)

    def make_room(self, make: MakeRoom) -> dict[Path_, torch.Tensor]:
        """Return tensors to fill, sharded like this rank's models. The models are not changed.

        Raises:
            ValueError, KeyError: The state does not fit.
        """
        return make(self.outline(), list(self.index))

    @torch.no_grad()
    def fill(self, room: Tensors) -> None:
        """Read this rank's rows of the tensors into `room`."""
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
        """Return the state with these tensors inserted."""
        return joined(self.rest, self.index, tensors.__getitem__)


def of_snapshot(parts: DividedValue) -> DividedState:
    """Return the sharded state that the parts of a snapshot contain."""

    @cache
    def content(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = decode(parts[rank], copy=False)
        return found

    first = content(0)
    return DividedState(first["rest"], first["index"], len(parts), lambda rank: content(rank)["tensors"])


def whole(shared_state: Any, copy: bool) -> Any:
    """Return the full state in a snapshot that the driver holds.

    Args:
        shared_state: State of the snapshot.
        copy: True to copy the tensors into new memory. Tensors of a sharded state are always copied.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).whole() if is_divided else decode(shared_state, copy=copy)


def outline(shared_state: Any) -> Any:
    """Return the state in a snapshot to inspect its structure. Tensors of a sharded state have only a shape."""
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).outline() if is_divided else decode(shared_state, copy=False)


# ------------------------------------------------------------------------------------ the rows of a rank


def _placement(tensor: Any) -> Any:
    """Return a tensor's placement; None if each rank has the full tensor. Avoids importing DTensor, which is slow."""
    placements = getattr(tensor, "placements", None)
    return None if placements is None else placements[0]


def _is_divided(tensor: Any) -> bool:
    placement = _placement(tensor)
    is_divided = placement is not None and placement.is_shard()
    assert not is_divided or placement.dim == 0, "`fully_shard` divides rows"
    return is_divided


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's shard of a tensor."""
    local: torch.Tensor = tensor if _placement(tensor) is None else tensor.to_local()
    return local


def _begin_here(tensor: Any) -> int:
    """Return the index of this rank's first row in a sharded tensor."""
    mesh = tensor.device_mesh
    return begin_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())


def begin_of(total: int, num_ranks: int, rank: int) -> int:
    """Return the index at which a rank's rows start, with the split of `torch.chunk`."""
    return min(total, rank * -(-total // num_ranks))


def overlaps(total: int, num_ranks: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return the ranks that hold rows between two positions, as tuples (rank, first position, end position).

    Examples:
        >>> overlaps(10, 3, 2, 9)  # the ranks have 4, 4 and 2 rows
        [(0, 2, 4), (1, 4, 8), (2, 8, 9)]
    """
    found = []
    for rank in range(num_ranks):
        first, last = max(begin, begin_of(total, num_ranks, rank)), min(end, begin_of(total, num_ranks, rank + 1))
        if first < last:
            found.append((rank, first, last))
    return found
