"""Gathers of user code: sizes are compared in steps in which the ranks' shares of a joint batch differ.

Gloo ends the process of a rank that receives more than it has room for, and NCCL waits for ever. Neither tells why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist

_NAMES = ("allgather", "_allgather_base", "all_gather_single")


@contextmanager
def comparing_sizes(differ: Callable[[], bool]) -> Iterator[None]:
    """Compare what the ranks gather with each other.

    Args:
        differ: Whether shares differ in this step; all ranks have to answer alike.
    """
    kept = {name: value for name, value in vars(dist.ProcessGroup).items() if name in _NAMES}
    for name in kept:
        setattr(dist.ProcessGroup, name, partialmethod(_gather, getattr(dist.ProcessGroup, name), differ))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(dist.ProcessGroup, name, value)


def _gather(
    group: Any, method: Any, differ: Callable[[], bool], output: Any, given: Any, *more: Any, **options: Any
) -> Any:
    if differ():
        _compare(group, given[0] if isinstance(given, list) else given)
    return method(group, output, given, *more, **options)


def _compare(group: Any, own: torch.Tensor) -> None:
    sizes = torch.tensor([own.numel(), -own.numel()], device=own.device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    most, least = sizes.tolist()
    if most != -least:
        raise ValueError(
            f"The workers gather tensors of different sizes, of {-least} to {most} numbers, because "
            "their shares of this joint batch differ. PyTorch gathers equal sizes only. Pass `drop_last=True` to the "
            "train loader and a batch size that the number of workers divides, or fill the tensors up to one size."
        )
