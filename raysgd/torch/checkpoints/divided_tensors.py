"""Divided tensors: which rank has which part, and parts that are copied to where others are divided otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard


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
