"""Batches of Ray Data as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raysgd.arrays import trees
from raysgd.arrays.ray_batches import BatchForm, formed, stacked


def as_batch(arrays: Any, form: BatchForm) -> Any:
    """Return a batch for an operator: tensors in the structure of the arrays, or the columns that the form names."""
    return formed(trees.mapped(arrays, as_tensor), form, _joined)


def as_tensor(values: Any) -> Any:
    """An array as a tensor. float64 becomes PyTorch's default float, as models have it; text stays an array."""
    values = stacked(values)
    if values.dtype.kind not in "biuf":
        return values
    kind = torch.get_default_dtype() if values.dtype == np.float64 else None
    return torch.tensor(values, dtype=kind)


def _joined(columns: list[torch.Tensor]) -> torch.Tensor:
    """Columns side by side; one of single numbers is one wide."""
    return torch.cat([column.unsqueeze(1) if column.ndim == 1 else column for column in columns], dim=1)
