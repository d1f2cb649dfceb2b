"""Data for the class-based trainers: `Dataset`, arrays and data frames, datasets of Ray Data, and streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.arrays.arrays import Arrays
    from raysgd.arrays.ray_batches import RayBatches
    from raysgd.data.dataset import Dataset
    from raysgd.streams.formats.arrow import ArrowStream, ParquetStream
    from raysgd.streams.formats.hugging_face import HuggingFaceStream
    from raysgd.streams.formats.iterables import IterableStream
    from raysgd.streams.formats.json_lines import JSONLinesStream
    from raysgd.streams.formats.tar_samples import TarStream
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
        "Arrays": "raysgd.arrays.arrays",
        "ArrowStream": "raysgd.streams.formats.arrow",
        "Dataset": "raysgd.data.dataset",
        "HuggingFaceStream": "raysgd.streams.formats.hugging_face",
        "IterableStream": "raysgd.streams.formats.iterables",
        "JSONLinesStream": "raysgd.streams.formats.json_lines",
        "ParquetStream": "raysgd.streams.formats.arrow",
        "RayBatches": "raysgd.arrays.ray_batches",
        "Shard": "raysgd.streams.stream",
        "Stream": "raysgd.streams.stream",
        "TarStream": "raysgd.streams.formats.tar_samples",
    },
)
