"""Checksums of parameters, by which ranks notice that their parameters are no longer in sync.

Each rank sends two checksums for each parameter after some of the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from raysgd.trainer.messages.weight_sums import WeightSums, models_to_compare, tolerance_of

_CHUNK = 1 << 16  # elements that a CPU converts at once, to stay in its cache
_CHUNK_ELSEWHERE = 1 << 24  # elements that a GPU converts at once
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


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
        compares_ranks = tuple(
            each.module if isinstance(each, DistributedDataParallel) else each for each in compares_ranks
        )
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
            bits = part.view(_BITS[part.element_size()]).long()
            rows.append(torch.stack((bits.sum(), (bits * bits).sum())))
        else:
            numbers = part.double()
            rows.append(torch.stack((numbers.sum(), numbers.dot(numbers))))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
