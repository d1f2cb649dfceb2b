"""A snapshot of divided models: each rank copies what it holds, and a rank of any later group takes what it needs.

The parts lie in the object store, where they outlive the workers. A process that has to have the whole state, because
somebody asked for it, puts it together from them.

Why no rank gathers a snapshot: ADR 92.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from raysgd._state.state_codec import decode
from raysgd.engine.transfers import DividedValue
from raysgd.torch.checkpoints.divided_folder import MakeRoom, Path_, joined, split

Content = Mapping[str, Any]
"""The share of a rank: `rest` (the state without tensors), `shapes`, `dims` (None: not divided) and `tensors`."""


def content_of(state: Mapping[str, Any], rank: int) -> Content:
    """Return what a rank keeps of its state; not copied yet. What is not divided is kept by rank 0."""
    rest, tensors = split(state)
    dims = {path: dim_of(tensor) for path, tensor in tensors.items()}
    kept = {path: tensor for path, tensor in tensors.items() if not rank or dims[path] is not None}
    own = {path: tensor.to_local() if isinstance(tensor, DTensor) else tensor for path, tensor in kept.items()}
    shapes = {path: tuple(tensor.shape) for path, tensor in tensors.items()}
    return {"rest": None if rank else rest, "shapes": shapes, "dims": dims, "tensors": own}


class DividedSnapshot:
    """Reads the parts of all ranks, each when it is needed."""

    def __init__(self, parts: DividedValue) -> None:
        self._parts = parts
        self.part = cache(self._read)
        self.first = self.part(0)

    def _read(self, rank: int) -> Content:
        content: Content = decode(self._parts[rank], copy=False)
        return content

    def outline(self) -> dict[str, Any]:
        """The state with tensors that have a shape and no memory."""

        def shape_of(path: Path_) -> torch.Tensor:
            return torch.zeros((), dtype=self.first["tensors"][path].dtype).expand(self.first["shapes"][path])

        return joined(self.first["rest"], list(self.first["shapes"]), shape_of)

    def whole(self) -> dict[str, Any]:
        """The whole state, in separate memory."""
        return joined(copy.deepcopy(self.first["rest"]), list(self.first["shapes"]), self._whole_tensor)

    def _whole_tensor(self, path: Path_) -> torch.Tensor:
        dim = self.first["dims"][path]
        if dim is None:
            return self.first["tensors"][path].clone()
        return torch.cat([self.part(rank)["tensors"][path] for rank in range(len(self._parts))], dim)

    def taken(self, make_room: MakeRoom) -> dict[str, Any]:
        """The state, divided as it is here; nothing is changed.

        Args:
            make_room: Makes the tensors that this rank has of a state.

        Raises:
            ValueError, KeyError: It does not fit.
        """
        paths = list(self.first["shapes"])
        tensors = make_room(self.outline(), paths)
        for path, tensor in tensors.items():
            self._fill(path, tensor)
        return joined(self.first["rest"], paths, tensors.__getitem__)

    def _fill(self, path: Path_, room: torch.Tensor) -> None:
        dim, total = self.first["dims"][path], self.first["shapes"][path]
        place = TensorToFill.of(room)
        if dim is None:
            place.take(self.first["tensors"][path], 0, 0)
            return
        for rank, *_ in overlaps(total[dim], len(self._parts), *place.span(dim)):
            own = self.part(rank)["tensors"][path]
            place.take(own, dim, begin_of(total[dim], len(self._parts), rank))


# ------------------------------------------------------------------------------------ parts of divided tensors


def dim_of(tensor: torch.Tensor) -> int | None:
    """Return by which dimension a tensor is divided over the ranks; None if it is not."""
    if not isinstance(tensor, DTensor):
        return None
    [placement] = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


@dataclass(frozen=True)
class TensorToFill:
    """A tensor to fill, or this rank's part of one.

    Attributes:
        local: What is in this process.
        dim: By which dimension the tensor is divided; 0 if it is not.
        begin: Where in it `local` begins, along this dimension.
    """

    local: torch.Tensor
    dim: int
    begin: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorToFill:
        """Returns this rank's part of a tensor, to fill."""
        dim = dim_of(tensor)
        if not isinstance(tensor, DTensor) or dim is None:
            return cls(tensor.to_local() if isinstance(tensor, DTensor) else tensor, 0, 0)
        mesh = tensor.device_mesh
        return cls(tensor.to_local(), dim, begin_of(tensor.shape[dim], mesh.size(), mesh.get_local_rank()))

    def span(self, dim: int) -> tuple[int, int]:
        """Between which positions along a dimension it lies."""
        begin = self.begin if dim == self.dim else 0
        return begin, begin + self.local.shape[dim]

    def take(self, part: torch.Tensor, dim: int, at: int) -> None:
        """Copies what it has room for of a part of the tensor, one that begins `at` a position along a dimension."""
        begin, end = self.span(dim)
        first, last = max(begin, at), min(end, at + part.shape[dim])
        source = part.narrow(dim, first - at, last - first)
        if dim != self.dim:
            source = source.narrow(self.dim, self.begin, self.local.shape[self.dim])
        self.local.narrow(dim, first - begin, last - first).copy_(source)


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
