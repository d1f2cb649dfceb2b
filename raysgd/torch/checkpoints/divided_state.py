"""`DividedState`: the state of models that are sharded over the ranks, in one part for each rank.

Besides the parts, a sharded state has an index, which describes all tensors. The rows of a sharded tensor are split
over the ranks as `torch.chunk` would split them. A rank's part contains its rows of each sharded tensor. The part of
rank 0 also contains the tensors that are not sharded. The parts of a snapshot (the state that the driver keeps for
recovery) are in Ray's object store, where they outlive the workers. The parts of a checkpoint are files. When the state
is restored into a worker group of any size, each rank reads only the rows that it needs. The full state is assembled
only in a process that requests it.

ADR 92 explains why no rank gathers the full state.
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
"""Path of a tensor in a state: the keys and list indices that lead to it."""

Tensors = Mapping[Path_, torch.Tensor]

Index = Mapping[Path_, tuple[torch.dtype, tuple[int, ...], bool]]
"""For each tensor in a state, by its path: dtype, full shape, and True if the tensor is sharded."""

MakeRoom = Callable[[Mapping[str, Any], Sequence[Path_]], dict[Path_, torch.Tensor]]
"""Function that allocates the tensors into which a rank reads its shard of a state.

It gets the state with placeholder tensors (see `DividedState.outline`), and the paths of these tensors in the state.
"""

_PARTS = ("models", "criterion", "optimizers")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path_, torch.Tensor]]:
    """Separate the tensors of a state's models, criterion and optimizers from the remaining state.

    Tensors without dimensions, such as an optimizer's step count, stay in the remaining state.

    Returns:
        The remaining state, and the tensors by path. The state passed to this function does not change.

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
    """Insert tensors into a state from which `split` has removed them. Return the complete state.

    Args:
        rest: State without the tensors.
        paths: Paths of the tensors in the state.
        tensor_of: Function that returns the tensor for a path.

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
    """Copy nested dicts and lists, but not other values. A dict or list that occurs several times is copied once.

    Args:
        value: Value to copy.
        made: The copies so far, by the ID of the original.
    """
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
    """Return the part of a sharded state that a rank stores. Tensors are not copied.

    The part is a dict with the keys `tensors` (this rank's tensors by path), `rest` (the state without tensors) and
    `index` (a description of all tensors). The values of `rest` and `index` are None except on rank 0.
    """
    rest, tensors = split(state)
    is_divided = {path: _is_divided(tensor) for path, tensor in tensors.items()}
    kept = {path: _local(tensor) for path, tensor in tensors.items() if not rank or is_divided[path]}
    if rank:
        return {"rest": None, "index": None, "tensors": kept}
    index = {path: (each.dtype, tuple(each.shape), is_divided[path]) for path, each in tensors.items()}
    return {"rest": rest, "index": index, "tensors": kept}


class DividedState:
    """A sharded state, with one part for each rank that wrote the state. A part is read when it is first needed.

    Args:
        rest: State without the tensors of its models, criterion and optimizers. See `split`.
        index: Dtype and shape of each of these tensors, and whether it is sharded.
        num_parts: Number of ranks that wrote the state.
        read_part: Function that gets a rank and returns the tensors in its part, by path.

    Attributes:
        rest: State without the tensors of its models, criterion and optimizers.
        index: Dtype and shape of each of these tensors, and whether it is sharded.
    """

    def __init__(self, rest: dict[str, Any], index: Index, num_parts: int, read_part: Callable[[int], Tensors]) -> None:
        self.rest, self.index, self._num_parts = rest, index, num_parts
        self._part = cache(read_part)

    def outline(self) -> dict[str, Any]:
        """Return the state with placeholder tensors, which have a shape but take no memory."""

        def shape_of(path: Path_) -> torch.Tensor:
            dtype, size, _ = self.index[path]
            return torch.zeros((), dtype=dtype).expand(size)

        return joined(self.rest, self.index, shape_of)

    def whole(self) -> dict[str, Any]:
        """Read all parts, and return the full state. Its tensors are copies in new memory."""

        def tensor_of(path: Path_) -> torch.Tensor:
            if not self.index[path][2]:
                return self._part(0)[path].clone()
            return torch.cat([self._part(rank)[path] for rank in range(self._num_parts)])

        return joined(copy.deepcopy(self.rest), self.index, tensor_of)

    def make_room(self, make: MakeRoom) -> dict[Path_, torch.Tensor]:
        """Allocate the tensors into which `fill` reads this rank's shard. They are not the tensors of the models.

        Args:
            make: Function that gets the outline and the paths of the tensors, and allocates them.

        Raises:
            ValueError: The state does not fit the models.
        """
        return make(self.outline(), list(self.index))

    @torch.no_grad()
    def fill(self, room: Tensors) -> None:
        """Read this rank's rows of each tensor from the parts, and copy them into the tensors in `room`."""
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
        """Return the complete state with the given tensors, one for each path in the index."""
        return joined(self.rest, self.index, tensors.__getitem__)


def of_snapshot(parts: DividedValue) -> DividedState:
    """Return the sharded state in a snapshot. Each part is decoded when it is first needed.

    Args:
        parts: Encoded parts of the snapshot, one for each rank.
    """

    @cache
    def content(rank: int) -> dict[str, Any]:
        return decode(parts[rank], copy=False)

    first = content(0)
    return DividedState(first["rest"], first["index"], len(parts), lambda rank: content(rank)["tensors"])


def whole(shared_state: Any, copy: bool) -> Any:
    """Return the full state in a snapshot that the driver has.

    Args:
        shared_state: Encoded state of the snapshot, or its parts if it is sharded.
        copy: True to copy the tensors into new memory. Tensors of a sharded state are always copied.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).whole() if is_divided else decode(shared_state, copy=copy)


def outline(shared_state: Any) -> Any:
    """Return the state in a snapshot, to inspect its structure. The tensors of a sharded state contain only zeros.

    Args:
        shared_state: Encoded state of the snapshot, or its parts if it is sharded.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).outline() if is_divided else decode(shared_state, copy=False)


# ------------------------------------------------------------------------------------ the rows of a rank


def _placement(tensor: Any) -> Any:
    """Return how a `DTensor` is sharded (its placement). Return None for a plain tensor, which each rank has in full.

    A `DTensor` is recognized by an attribute, because importing the class `DTensor` is slow.
    """
    placements = getattr(tensor, "placements", None)
    return None if placements is None else placements[0]


def _is_divided(tensor: Any) -> bool:
    placement = _placement(tensor)
    is_divided = placement is not None and placement.is_shard()
    assert not is_divided or placement.dim == 0, "`fully_shard` divides rows"
    return is_divided


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a `DTensor`. Return a plain tensor unchanged."""
    return tensor if _placement(tensor) is None else tensor.to_local()


def _begin_here(tensor: Any) -> int:
    """Return the index of this rank's first row in a sharded tensor."""
    mesh = tensor.device_mesh
    return begin_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())


def begin_of(total: int, num_ranks: int, rank: int) -> int:
    """Return the index of a rank's first row if `total` rows are split like `torch.chunk` splits them."""
    return min(total, rank * -(-total // num_ranks))


def overlaps(total: int, num_ranks: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return which ranks hold the rows from `begin` to `end` (exclusive) of a tensor.

    Args:
        total: Number of rows of the tensor.
        num_ranks: Number of ranks over which the rows are split, like `torch.chunk` splits them.
        begin: Index of the first row.
        end: Index after the last row.

    Returns:
        For each rank that holds some of these rows: the rank, the index of its first such row, and the index after its
        last such row.

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
