"""Copies of tensors that are taken again and again, in memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


class TensorCopies:
    """Copies of some tensors, on their device.

    Args:
        changing: What is copied each time.
        still: What is copied from the first change on that PyTorch counts.
    """

    def __init__(self, changing: Iterable[torch.Tensor], still: Iterable[torch.Tensor]) -> None:
        self._new = list({id(each): each for each in changing}.values())
        known = set(map(id, self._new))
        self._still = [(each, each._version) for each in still if id(each) not in known]
        self._groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._without_grad = torch.no_grad()  # to make one takes as long as a few copies

    def __bool__(self) -> bool:
        return bool(self._new or self._still or self._groups)

    @property
    def num_bytes_new(self) -> int:
        """The memory that the next copy takes in addition."""
        return sum(each.nbytes for each in self._new)

    @property
    def are_complete(self) -> bool:
        """True if everything that has changed since the last time was copied then."""
        return not self._new and all(each._version == before for each, before in self._still)

    def take(self) -> None:
        """Copy what changes."""
        if not self.are_complete:
            self._make_room()
        with self._without_grad:
            for tensors, copies in self._groups.values():
                torch._foreach_copy_(copies, tensors)

    def _make_room(self) -> None:
        """Get memory for copies of what has none and changes."""
        self._new += [each for each, before in self._still if each._version != before]
        self._still = [(each, before) for each, before in self._still if each._version == before]
        while self._new:
            each = self._new[-1]
            # PyTorch copies those of one kind together; on the CPU it copies each by itself in any case.
            kind = each.device, None if each.is_cpu else each.dtype
            tensors, copies = self._groups.setdefault(kind, ([], []))
            copies.append(torch.empty_like(each))  # first: there may be no memory for it
            tensors.append(self._new.pop())

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors the numbers that they had at the last copy."""
        for tensors, copies in self._groups.values():
            torch._foreach_copy_(tensors, copies)


class PooledCopies:
    """Copies of tensors that are known only when they are copied. Memory of the others is let go."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._former: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        """Begin another batch, with the memory of the copies that there are."""
        self._former, self._copies = self._copies, {}

    def undo_of(self, value: Any) -> Callable[[], object] | None:
        """Copy a tensor; return what puts it back. None for what is no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        tensor, copy = self._former.get(id(value), (None, None))
        if tensor is not value or copy is None or copy.shape != value.shape:
            copy = torch.empty_like(value)
        # Not in `no_grad`, which would take longer than the copy of a small tensor.
        self._copies[id(value)] = value, copy.copy_(value.detach() if value.requires_grad else value)
        return partial(_put_back, value, copy)


@torch.no_grad()
def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    tensor.copy_(copy)
