"""Defines `MLDataset`, a sharded dataset of data frames, and creates it from a `ParallelIterator`.

This module is the former `ray.util.data`. It imports pandas only when it creates the first data frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raysgd.core.imports import require, require_installed
from raysgd.util.iter import ItemShard, LocalIterator, ParallelIterator, shuffled

if TYPE_CHECKING:
    import pandas as pd

    from raysgd.tf.tf_dataset import TFMLDataset
    from raysgd.torch.torch_dataset import TorchMLDataset

__all__ = ["MLDataset", "from_parallel_iter"]


def from_parallel_iter(
    para_it: ParallelIterator, need_convert: bool = True, batch_size: int = 32, repeated: bool = False
) -> MLDataset:
    """Create an `MLDataset`, a sharded dataset of data frames, from a parallel iterator.

    Args:
        para_it: A parallel iterator over data frames, or over records: lists or other iterables, dicts, or dataclasses.
        need_convert: True if the elements of `para_it` are records. False if they are data frames.
        batch_size: Number of records to combine into one data frame. With `need_convert=False`, data frames are not
            changed, and this argument only sets the dataset's attribute `batch_size`.
        repeated: True if the shards of `para_it` repeat indefinitely. This argument only sets the dataset's attribute
            `repeated`.

    Raises:
        ImportError: pandas is not installed.
    """
    require_installed("pandas", extra="data", purpose="`MLDataset`")
    frames = para_it.batch(batch_size).for_each(_frame) if need_convert else para_it
    return MLDataset(frames._shards, f"from_parallel_iter[{para_it}]", batch_size, repeated)


class MLDataset(ParallelIterator):
    """A sharded dataset of pandas data frames. Each worker reads one of the shards.

    Args:
        shards: The shards, whose elements are pandas data frames.
        name: Name to show in `repr`.
        batch_size: Maximum number of rows in a data frame; 0 if unknown. The number is not checked, and methods such as
            `for_each` do not update it.
        repeated: True if the shards repeat indefinitely.
    """

    def __init__(self, shards: Sequence[ItemShard], name: str, batch_size: int = 0, repeated: bool = False) -> None:
        super().__init__(shards, name)
        self.batch_size = batch_size
        self.repeated = repeated

    def __repr__(self) -> str:
        return f"MLDataset[{self.name}]"

    def _with(self, shards: Sequence[ItemShard], name: str) -> MLDataset:
        return MLDataset(shards, name, self.batch_size, self.repeated)

    def batch(self, batch_size: int) -> MLDataset:
        """Return a dataset with the same rows in data frames of `batch_size` rows.

        The last data frame of a shard may have fewer rows.
        """
        cut = self.transform(partial(_cut, batch_size))
        return MLDataset(cut._shards, f"{self.name}.batch({batch_size})", batch_size, self.repeated)

    def get_repeatable_shard(
        self,
        shard_index: int,
        batch_ms: int = 0,
        num_async: int = 1,
        shuffle: bool = False,
        shuffle_buffer_size: int = 1,
        seed: int | None = None,
    ) -> LocalIterator:
        """Return an iterator over the data frames of one shard. Each call to `iter()` starts again at the first frame.

        Args:
            shard_index: Index of the shard.
            batch_ms: Accepted for compatibility with `ray.util.data` and ignored. No data is sent between processes.
            num_async: Accepted for compatibility with `ray.util.data` and ignored.
            shuffle: True to shuffle the order of the data frames, and the rows within each data frame.
            shuffle_buffer_size: Number of data frames in the buffer from which the next one is drawn at random. With 1,
                the data frames keep their order.
            seed: Seed for the order. With None, each iteration has a different order.

        Raises:
            ValueError: The shard does not exist.
        """
        shard = self._shard(shard_index)
        if shuffle:
            shard = shard.then(partial(shuffled, shuffle_buffer_size, seed)).then(partial(_with_shuffled_rows, seed))
        return LocalIterator(shard, f"{self.name}.shard[{shard_index}]")

    def to_torch(
        self,
        feature_columns: Any = None,
        feature_shapes: Any = None,
        feature_types: Any = None,
        label_column: Any = None,
        label_shape: Any = None,
        label_type: Any = None,
    ) -> TorchMLDataset:
        """Return a `TorchMLDataset`, which converts each shard to a PyTorch dataset.

        The arguments are those of `TorchMLDataset`.
        """
        from raysgd.torch.torch_dataset import TorchMLDataset

        return TorchMLDataset(
            self, feature_columns, feature_shapes, feature_types, label_column, label_shape, label_type
        )

    def to_tf(
        self,
        feature_columns: Any = None,
        feature_shapes: Any = None,
        feature_types: Any = None,
        label_column: Any = None,
        label_shape: Any = None,
        label_type: Any = None,
    ) -> TFMLDataset:
        """Return a `TFMLDataset`, which converts each shard to a `tf.data` dataset.

        The arguments are those of `TFMLDataset`.
        """
        from raysgd.tf.tf_dataset import TFMLDataset

        return TFMLDataset(self, feature_columns, feature_shapes, feature_types, label_column, label_shape, label_type)


def _with_shuffled_rows(seed: int | None, frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield each data frame with its rows in random order."""
    import numpy as np

    draw = np.random.RandomState(seed)
    for frame in frames:
        yield frame.sample(frac=1.0, random_state=draw).reset_index(drop=True)


def _cut(num_rows: int, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield the rows of data frames in new data frames of `num_rows` rows, in the same order.

    The last data frame may have fewer rows.
    """
    import pandas as pd

    rest: list[pd.DataFrame] = []
    for frame in frames:
        whole = pd.concat([*rest, frame], ignore_index=True)
        num_full = len(whole) // num_rows * num_rows
        for start in range(0, num_full, num_rows):
            yield whole.iloc[start : start + num_rows].reset_index(drop=True)
        rest = [whole.iloc[num_full:]]
    if rest and len(rest[0]):
        yield rest[0].reset_index(drop=True)


def _frame(records: list[Any]) -> pd.DataFrame:
    pandas: Any = require("pandas", extra="data", purpose="`MLDataset`")
    return pandas.DataFrame([_record(record) for record in records])


def _record(record: Any) -> Any:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    if isinstance(record, dict):
        return record
    if isinstance(record, Iterable) and not isinstance(record, str | bytes):
        return list(record)
    raise ValueError(
        f"`MLDataset` got a record that is a `{type(record).__name__}`: need a list or another iterable, a dict, or a "
        "dataclass."
    )
