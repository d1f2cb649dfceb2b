"""Sums, copies and checksums of tensors over the ranks, over the mesh where this is quicker than over gloo."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from raysgd.core.connections.group import Group
from raysgd.core.connections.torch import mesh_group
from raysgd.trainer.messages.comparison import WeightSums, models_to_compare, tolerance_of

_CHUNK = 1 << 16  # elements that a CPU converts at once, to stay in its cache
_CHUNK_ELSEWHERE = 1 << 24  # elements that a GPU converts at once
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


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
    shapes = [tuple(each.shape) for each in present]
    digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=present[0].device if present else reachable())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes.sum():
        raise ValueError(
            f"The workers created different models. On this worker, a model has {len(shapes)} parameters and buffers "
            f"with {sum(each.numel() for each in present):,} elements. Create the same model on every worker."
        )
    repeat_first(present)


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


def sums_of(
    models: Sequence[torch.nn.Module],
    compares_ranks: Any,
    left_out_of: Callable[[torch.nn.Module], Collection[str] | None],
    is_exact: bool,
) -> WeightSums | None:
    """Return checksums of all parameters that must be in sync, even frozen ones. Return None if there are none.

    Models without trainable parameters are left out.

    Args:
        models: Registered models, without wrappers.
        compares_ranks: The operator's attribute `compares_ranks`, which selects the models to compare.
        left_out_of: Function that returns the names of a model's parameters that may differ between ranks; None if all
            may differ.
        is_exact: True for checksums that change with any bit. False for sums, which are compared with a tolerance.

    Raises:
        ValueError: `compares_ranks` is neither a bool nor a sequence of registered models.
    """
    began = time.perf_counter()
    if isinstance(compares_ranks, tuple | list):
        compares_ranks = tuple(map(unwrap, compares_ranks))
    found: dict[str, torch.Tensor] = {}
    for number, model in models_to_compare(models, compares_ranks):
        left_out = left_out_of(model)
        if left_out is not None and any(each.requires_grad for each in model.parameters()):
            of_model = f"of model {number} (`{type(model).__name__}`)"
            kept = ((name, each) for name, each in model.named_parameters() if name not in left_out)
            found |= {f"`{name}` {of_model}": each.detach() for name, each in kept if _has_numbers(each)}
    if not found:
        return None
    rows = [_row(parameter, is_exact) for parameter in found.values()]
    numbers = torch.stack([row.to(rows[0].device) for row in rows]).cpu().numpy()  # wait for the GPU only once
    tolerances = tuple(tolerance_of(parameter.element_size()) for parameter in found.values())
    shapes = tuple(tuple(parameter.shape) for parameter in found.values())
    return WeightSums(tuple(found), shapes, numbers, tolerances, time.perf_counter() - began)


def _has_numbers(parameter: torch.Tensor) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta and parameter.layout == torch.strided


def _row(parameter: torch.Tensor, is_exact: bool) -> torch.Tensor:
    """Return two checksums of a parameter: the sum of its values and the sum of their squares.

    With `is_exact`, the values are the bits of the elements as integers. The parameter is converted in chunks to save
    memory.
    """
    flat, rows = (torch.view_as_real(parameter) if parameter.is_complex() else parameter).reshape(-1), []
    for part in flat.split(_CHUNK if flat.device.type == "cpu" else _CHUNK_ELSEWHERE):
        if is_exact:  # a sum of integers is the same in any order, unlike a sum of floats
            bits = part.view(BITS[part.element_size()]).long()
            rows.append(torch.stack((bits.sum(), (bits * bits).sum())))
        else:
            numbers = part.double()
            rows.append(torch.stack((numbers.sum(), numbers.dot(numbers))))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
