"""Variables of all ranks brought together: sums, means, and rank 0's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysgd.connections.group import Array, Group


@contextmanager
def summed(group: Group, variables: Sequence[Any]) -> Iterator[None]:
    """Inside, variables have the sums of all ranks' values, and this rank's own again afterwards."""
    if group.size == 1 or not variables:
        yield
        return
    own = _values(variables)
    _assign_sums(group, variables, own)
    try:
        yield
    finally:
        for variable, array in zip(variables, own, strict=True):
            variable.assign(array)


def merge_statistics(group: Group, models: Sequence[Any]) -> None:
    """Averages what is not trained but changes in training, such as the moving averages of BatchNorm."""
    variables = [v for model in models for v in model.non_trainable_weights if _is_float(v)]
    if group.size > 1 and variables:
        _assign_sums(group, variables, _values(variables), divisor=group.size)


def share_first(group: Group, variables: Sequence[Any]) -> None:
    """Gives every rank rank 0's values."""
    if group.size == 1:
        return
    for variable in variables:
        array = np.array(variable.numpy())
        if array.dtype.hasobject:  # strings
            continue
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        group.from_first(flat)
        variable.assign(flat.view(array.dtype).reshape(array.shape))


def _values(variables: Sequence[Any]) -> list[Array]:
    return [np.asarray(variable.numpy()) for variable in variables]


def _assign_sums(group: Group, variables: Sequence[Any], own: Sequence[Array], divisor: int = 1) -> None:
    flat = np.concatenate([array.reshape(-1).astype(np.float64) for array in own]) / divisor
    group.add_up(flat)
    start = 0
    for variable, array in zip(variables, own, strict=True):
        part = flat[start : start + array.size].reshape(array.shape)
        variable.assign(part.astype(array.dtype))
        start += array.size


def _is_float(variable: Any) -> bool:
    return np.asarray(variable.numpy()).dtype.kind in "fV"  # V: bfloat16, whose kind NumPy does not know
