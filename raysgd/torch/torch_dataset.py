"""`TorchMLDataset`: shards of data frames as datasets of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from raysgd.arrays.frames import Column, ShardedFrames


class TorchMLDataset(ShardedFrames):
    """Rows of data frames that lie in shards, as a dataset of tuples `(*features, label)` for each shard.

    Make a `DataLoader` of the shard `self.world_rank` in `setup`. The shards may have different lengths, so give
    `num_steps` to `train`, or let the library see to it with `add_dist_sampler=False`.

    Args:
        ds: A `raysgd.util.data.MLDataset`.
        feature_columns: Names of the columns of features.
        feature_shapes: The shape of each of them in a row, `(1,)` by default.
        feature_types: Their `torch.dtype`s, `torch.float` by default.
        label_column: Name of the column of labels.
        label_shape: Its shape in a row.
        label_type: Its `torch.dtype`.

    Raises:
        AssertionError: A list has another length than `feature_columns`, or a type is not one of PyTorch.
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
        """The rows of one shard; arguments as in `MLDataset.get_repeatable_shard`."""
        frames = self._ds.get_repeatable_shard(shard_index, batch_ms, num_async, shuffle, shuffle_buffer_size, seed)
        return _Rows(frames, self._columns)


class _Rows(IterableDataset[tuple[torch.Tensor, ...]]):
    """The rows of data frames."""

    def __init__(self, frames: Any, columns: Sequence[Column]) -> None:
        self._frames = frames
        self._columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for frame in iter(self._frames):
            yield from zip(*(_values(frame, *column) for column in self._columns), strict=True)


def _values(frame: Any, name: Any, shape: Any, kind: Any) -> torch.Tensor:
    """Return what a column has in a frame."""
    values = frame[name].to_numpy()
    if values.dtype == object:
        values = np.stack([_array(name, value) for value in values])
    of_row = (1,) if shape in (None, 0) else (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.tensor(values, dtype=kind or torch.float).view(-1, *of_row)


def _array(name: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray | list | tuple):
        raise TypeError(f"Column {name!r} has a `{type(value).__name__}`: need numbers, arrays, lists or tuples.")
    return np.asarray(value)
