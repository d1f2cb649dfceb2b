"""`TorchMLDataset`: shards of data frames as datasets of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from raysgd.arrays.frames import ShardedFrames


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

    def _column(self, name: Any, shape: Any, kind: Any) -> _Column:
        return _Column(name, shape, kind)

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

    def __init__(self, frames: Any, columns: Sequence[_Column]) -> None:
        self._frames = frames
        self._columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for frame in iter(self._frames):
            yield from zip(*(column.of(frame) for column in self._columns), strict=True)


@dataclass(frozen=True)
class _Column:
    """One column: how its values become a tensor."""

    name: Any
    shape: Any
    kind: torch.dtype | None

    def __post_init__(self) -> None:
        assert self.kind is None or isinstance(self.kind, torch.dtype), (
            f"`{self.kind!r}` is the type of column {self.name!r}: need a `torch.dtype`, such as `torch.float`."
        )

    def of(self, frame: Any) -> torch.Tensor:
        """Its values in a frame."""
        values = frame[self.name].to_numpy()
        if values.dtype == object:
            values = np.stack([self._array(value) for value in values])
        tensor = torch.tensor(values, dtype=self.kind or torch.float)
        return tensor.view(-1, *self._shape_of_row())

    def _array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray | list | tuple):
            raise TypeError(
                f"Column {self.name!r} has a `{type(value).__name__}`: need numbers, arrays, lists or tuples."
            )
        return np.asarray(value)

    def _shape_of_row(self) -> tuple[int, ...]:
        if self.shape is None or self.shape == 0:
            return (1,)
        return (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
