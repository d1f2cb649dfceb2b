"""Two numbers for each parameter that the replicas keep equal; `raysgd.messages.weight_sums` compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.messages.weight_sums import WeightSums, models_to_compare, tolerance_of
from raysgd.torch.parallel.strategy import trainable, unwrap

_CHUNK = 1 << 16  # numbers that a CPU converts at once, within its cache
_CHUNK_ELSEWHERE = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def sums_of(
    models: Sequence[torch.nn.Module],
    compares_ranks: Any,
    left_out_of: Callable[[torch.nn.Module], Collection[str] | None],
    is_exact: bool,
) -> WeightSums | None:
    """Return the numbers of all parameters to compare, frozen ones too; None where there are none.

    Args:
        models: The registered models, without wrappers.
        compares_ranks: That of the operator.
        left_out_of: Returns the names of the parameters of a model that are not kept equal; None for all of them.
        is_exact: Whether the bits are to be equal.
    """
    began = time.perf_counter()
    if isinstance(compares_ranks, tuple | list):
        compares_ranks = tuple(unwrap(each) for each in compares_ranks)
    found: dict[str, torch.Tensor] = {}
    for number, model in models_to_compare(models, compares_ranks):
        left_out = left_out_of(model)
        if left_out is not None and trainable(model):
            place = f"of model {number} (`{type(model).__name__}`)"
            kept = ((name, each) for name, each in model.named_parameters() if name not in left_out)
            found |= {f"`{name}` {place}": each.detach() for name, each in kept if _has_numbers(each)}
    if not found:
        return None
    rows = [_row(parameter, is_exact) for parameter in found.values()]
    numbers = torch.stack([row.to(rows[0].device) for row in rows]).cpu().numpy()  # waits for a GPU once
    tolerances = tuple(tolerance_of(parameter.element_size()) for parameter in found.values())
    return WeightSums(tuple(found), numbers, tolerances, time.perf_counter() - began)


def _has_numbers(parameter: torch.Tensor) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta and parameter.layout == torch.strided


def _row(parameter: torch.Tensor, is_exact: bool) -> torch.Tensor:
    """Return the two numbers. A few of the parameter's are converted at once, so that this takes little memory."""
    flat, rows = (torch.view_as_real(parameter) if parameter.is_complex() else parameter).reshape(-1), []
    for part in flat.split(_CHUNK if flat.device.type == "cpu" else _CHUNK_ELSEWHERE):
        if is_exact:  # sums of integers are the same in any order
            bits = part.view(_BITS[part.element_size()]).long()
            rows.append(torch.stack((bits.sum(), (bits * bits).sum())))
        else:
            numbers = part.double()
            rows.append(torch.stack((numbers.sum(), numbers.dot(numbers))))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
