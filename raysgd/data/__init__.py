"""Data for the class-based trainers: `Dataset`, arrays and data frames, and datasets of Ray Data as batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.data.dataset import Dataset
    from raysgd.replicas.arrays import Arrays
    from raysgd.replicas.ray_batches import RayBatches

__all__ = ["Arrays", "Dataset", "RayBatches"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Arrays": "raysgd.replicas.arrays",
        "Dataset": "raysgd.data.dataset",
        "RayBatches": "raysgd.replicas.ray_batches",
    },
)
