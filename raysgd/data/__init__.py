"""Data for the class-based trainers: `Dataset`, arrays and data frames, and datasets of Ray Data as batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.arrays.arrays import Arrays
    from raysgd.arrays.ray_batches import RayBatches
    from raysgd.data.dataset import Dataset

__all__ = ["Arrays", "Dataset", "RayBatches"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Arrays": "raysgd.arrays.arrays",
        "Dataset": "raysgd.data.dataset",
        "RayBatches": "raysgd.arrays.ray_batches",
    },
)
