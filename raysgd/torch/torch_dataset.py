"""`TorchMLDataset`: makes a PyTorch dataset of each shard of an `MLDataset`, a sharded set of data frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from raysgd.core.arrays.frames import Column, ShardedFrames


class TorchMLDataset(ShardedFrames):
    """Sharded data frames, for training with PyTorch. Each shard is a dataset of tuples `(*features, label)`.

    In the operator's `setup`, create a `DataLoader` over `get_shard(self.world_rank)`. The shards may have different
    lengths. In training, a worker that runs out of batches repeats its last batch with weight 0 until all workers have
    run out.

    Args:
        ds: A `raysgd.util.data.MLDataset`.
        feature_columns: Names of the feature columns.
        feature_shapes: Shape of each feature in a row. Default: `(1,)`.
        feature_types: `torch.dtype` of each feature. Default: `torch.float`.
        label_column: Name of the label column.
        label_shape: Shape of the label in a row. Default: `(1,)`.
        label_type: `torch.dtype` of the label. Default: `torch.float`.

    Raises:
        AssertionError: `feature_columns` or `label_column` is missing, a list differs in length from `feature_columns`,
            or a type is not a `torch.dtype`.
    """

    def _check(self, name: Any, shape: Any, kind: Any) -> None:
        assert kind is None or isinstance(kind, torch.dtype), (
            f"`{kind!r}` is the type of column {name!r}: need a `torch.dtype`, such as `torch.float`."
        )

    def get_shard(
        self,
        shard_index: int,
        batch_ms: int = 0,
        num_async: int = 1,
        shuffle: bool = False,
        shuffle_buffer_size: int = 1,
        seed: int | None = None,
    ) -> IterableDataset[tuple[torch.Tensor, ...]]:
        """Return a dataset of the rows of one shard.

        All arguments are passed to `MLDataset.get_repeatable_shard`.
        """
        frames = self._ds.get_repeatable_shard(shard_index, batch_ms, num_async, shuffle, shuffle_buffer_size, seed)
        return _Rows(frames, self._columns)


class _Rows(IterableDataset[tuple[torch.Tensor, ...]]):
    """Dataset of one shard. It iterates over the rows of the shard's data frames, as tuples of tensors."""

    def __init__(self, frames: Any, columns: Sequence[Column]) -> None:
        self._frames = frames
        self._columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for frame in iter(self._frames):
            yield from zip(*(_values(frame, *column) for column in self._columns), strict=True)


def _values(frame: Any, name: Any, shape: Any, kind: Any) -> torch.Tensor:
    """Return a column of a data frame as a tensor with one row per row of the frame."""
    values = frame[name].to_numpy()
    if values.dtype == object:
        values = np.stack([_array(name, value) for value in values])
    of_row = (1,) if shape in (None, 0) else (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.tensor(values, dtype=kind or torch.float).view(-1, *of_row)


def _array(name: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray | list | tuple):
        raise TypeError(f"Column {name!r} has a `{type(value).__name__}`: need numbers, arrays, lists or tuples.")
    return np.asarray(value)
