"""Sums and copies of tensors over the ranks, over the mesh where this is quicker than over gloo."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from raysgd.core.connections.group import Group
from raysgd.core.connections.torch import mesh_group


def quick_group(tensor: torch.Tensor) -> Group | None:
    """Return the mesh if it sums the tensor faster than PyTorch; otherwise None.

    The mesh consists of direct connections between the ranks.
    """
    group = mesh_group() if tensor.device.type == "cpu" else None
    return group if group is not None and group.is_quick_for(tensor.nbytes) else None


def reachable() -> torch.device | None:
    """Return the device of tensors that PyTorch's default process group can sum: the GPU, or None for the CPU."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else None


def trainable(model: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """Return the parameters of a model that are not frozen."""
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Check that the ranks' tensors have the same shapes, then copy rank 0's tensors to every rank.

    Raises:
        ValueError: The ranks' tensors differ in number or shape. Raised on all ranks.
    """
    present = list(_with_numbers(tensors))
    _check_shapes(present)
    repeat_first(present)


def _check_shapes(tensors: Sequence[torch.Tensor]) -> None:
    shapes = [tuple(each.shape) for each in tensors]
    digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=tensors[0].device if tensors else reachable())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes.sum():
        raise ValueError(
            f"The workers created different models. On this worker, a model has {len(shapes)} parameters and buffers "
            f"with {sum(each.numel() for each in tensors):,} elements. Create the same model on every worker."
        )


def repeat_first(tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's tensors to every rank. The shapes must be the same on all ranks."""
    # Prefer the mesh, because a broadcast of gloo may hang when connections are closed.
    for tensor in _with_numbers(tensors):
        flat = tensor.contiguous().reshape(-1)
        at_once = quick_group(flat)
        if at_once is not None:
            at_once.from_first(flat.view(torch.uint8).numpy())
        else:
            dist.broadcast(flat.view(torch.uint8), 0)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.reshape(tensor.shape))


def _with_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (each.detach() for each in tensors if each.numel() and not each.is_meta and not is_lazy(each))


def multiply(gradients: torch.Tensor, factor: Any) -> None:
    """Multiply gradients by a factor, in place. With the factor 0, also set NaNs to 0."""
    if isinstance(factor, torch.Tensor) or factor not in (0.0, 1.0):
        gradients.mul_(factor)
    elif not factor:
        gradients.zero_()  # the gradients of a batch that does not count may be NaN, which times 0 is NaN


def all_sum(tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place. All ranks must call this function together."""
    group = quick_group(tensor)
    if group is not None:
        group.add_up(tensor.numpy())
    else:
        dist.all_reduce(tensor)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in a `DistributedDataParallel` or `DataParallel` wrapper, or the model itself.

    Other classes with an attribute `module` are not unwrapped, because they may do more than call the module.
    """
    return model.module if isinstance(model, DistributedDataParallel | torch.nn.DataParallel) else model
