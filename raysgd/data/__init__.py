"""Data for the class-based trainers: `Dataset`, arrays and data frames, Ray Data datasets, and streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.core.arrays.arrays import Arrays
    from raysgd.core.arrays.ray_batches import RayBatches
    from raysgd.data.dataset import Dataset
    from raysgd.streams.formats import (
        ArrowStream,
        HuggingFaceStream,
        IterableStream,
        JSONLinesStream,
        ParquetStream,
        TarStream,
    )
    from raysgd.streams.stream import Shard, Stream

__all__ = [
    "Arrays",
    "ArrowStream",
    "Dataset",
    "HuggingFaceStream",
    "IterableStream",
    "JSONLinesStream",
    "ParquetStream",
    "RayBatches",
    "Shard",
    "Stream",
    "TarStream",
]

lazy_names(
    __name__,
    {
        "Arrays": "raysgd.core.arrays.arrays",
        "ArrowStream": "raysgd.streams.formats",
        "Dataset": "raysgd.data.dataset",
        "HuggingFaceStream": "raysgd.streams.formats",
        "IterableStream": "raysgd.streams.formats",
        "JSONLinesStream": "raysgd.streams.formats",
        "ParquetStream": "raysgd.streams.formats",
        "RayBatches": "raysgd.core.arrays.ray_batches",
        "Shard": "raysgd.streams.stream",
        "Stream": "raysgd.streams.stream",
        "TarStream": "raysgd.streams.formats",
    },
)
