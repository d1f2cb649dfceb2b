"""Converts arrays, such as the columns of a Ray Data batch, to PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from raysgd.core.arrays import trees
from raysgd.core.arrays.ray_batches import BatchForm, formed, stacked


def as_batch(arrays: Any, form: BatchForm, models: Iterable[torch.nn.Module] = ()) -> Any:
    """Convert arrays to a batch of tensors for an operator.

    Args:
        arrays: An array, or a tuple or dict of arrays, such as the columns of a Ray Data batch.
        form: Names of the columns to use as inputs and target, and the user's function to transform the batch. Without
            names, the batch has the structure of `arrays`.
        models: Models that get the batch. Floating-point values are converted to the dtype of the models' first
            floating-point parameter.
    """
    dtypes = (each.dtype for model in models for each in model.parameters() if each.is_floating_point())
    return formed(trees.mapped(arrays, partial(as_tensor, dtype=next(dtypes, None))), form, _joined)


def as_tensor(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Convert an array to a tensor. Return an array without numbers, such as an array of strings, unchanged.

    Args:
        values: The array, or a tensor.
        dtype: Dtype to which floating-point values are converted. Default: float64 becomes PyTorch's default dtype, and
            other dtypes stay the same.
    """
    if isinstance(values, torch.Tensor):  # not through NumPy, which has no bfloat16
        values = values.detach().clone()
    else:
        values = stacked(values)
        if values.dtype.kind not in "biuf":
            return values
        values = torch.tensor(values)
    if not values.is_floating_point():
        return values
    default = torch.get_default_dtype() if values.dtype == torch.float64 else None
    return values.to(dtype or default or values.dtype)


def _joined(columns: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate columns along the second dimension. A 1-D column becomes a matrix with one column."""
    return torch.cat([column.unsqueeze(1) if column.ndim == 1 else column for column in columns], dim=1)
