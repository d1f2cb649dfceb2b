"""`TFMLDataset`: sharded data frames, with a `tf.data.Dataset` for each shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raysgd.core.arrays.frames import ShardedFrames
from raysgd.core.imports import require_installed


class TFMLDataset(ShardedFrames):
    """Rows of sharded data frames, as a `tf.data.Dataset` of `(feature, label)` for each shard.

    Args:
        ds: An object with the methods `num_shards()`, `repartition(n)`, `get_repeatable_shard(index, batch_ms,
            num_async, shuffle, shuffle_buffer_size, seed)`, and `gather_async(batch_ms, num_async)` for all shards at
            once. The last two yield pandas data frames.
        feature_columns: Names of the feature columns. A single column is used as is. Several columns form a tuple.
        feature_shapes: Shape of each feature column per row. Default: `()`. Required for columns of lists or arrays.
        feature_types: Dtype of each feature column. Default: float32.
        label_column: Name of the label column.
        label_shape: Shape of the label per row. Default: `()`.
        label_type: Dtype of the label. Default: float32.

    Raises:
        AssertionError: `feature_columns` or `label_column` is missing, or a list differs in length from
            `feature_columns`.
        ImportError: TensorFlow is not installed.
    """

    def _check(self, name: Any, shape: Any, kind: Any) -> None:
        require_installed("tensorflow", extra="tf", purpose="`TFMLDataset`")

    def get_shard(
        self,
        shard_index: int,
        batch_ms: int = 0,
        num_async: int = 1,
        shuffle: bool = False,
        shuffle_buffer_size: int = 1,
        seed: int | None = None,
    ) -> Any:
        """Return a `tf.data.Dataset` of the rows of one shard, or of all shards if the index is negative.

        If the index is negative, the rows are not shuffled: `shuffle`, `shuffle_buffer_size` and `seed` have no effect.

        Args:
            shard_index: Index of the shard.
            batch_ms: Milliseconds for which frames are collected before they are sent. `MLDataset` ignores it.
            num_async: Number of concurrent requests. `MLDataset` ignores it.
            shuffle: Whether to shuffle frames and rows.
            shuffle_buffer_size: Size of the shuffle buffer.
            seed: Seed of the shuffle.
        """
        import tensorflow as tf

        def batches() -> Iterator[Any]:
            frames = (
                self._ds.gather_async(batch_ms=batch_ms, num_async=num_async)
                if shard_index < 0
                else self._ds.get_repeatable_shard(shard_index, batch_ms, num_async, shuffle, shuffle_buffer_size, seed)
            )
            for frame in frames:
                yield _structured([_values(frame, name, spec) for (name, *_), spec in pairs])

        pairs = [(column, _spec(*column)) for column in self._columns]
        signature = _structured([spec for _, spec in pairs])
        return tf.data.Dataset.from_generator(batches, output_signature=signature).unbatch()


def _structured(parts: Sequence[Any]) -> Any:
    *features, label = parts
    return (features[0] if len(features) == 1 else tuple(features)), label


def _spec(name: Any, shape: Any, kind: Any) -> Any:
    """Return the `TensorSpec` of a data frame's column, with an unknown number of rows."""
    import tensorflow as tf

    of_row = () if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    return tf.TensorSpec([None, *of_row], tf.as_dtype(np.float32 if kind is None else kind))


def _values(frame: Any, name: Any, spec: Any) -> Any:
    """Return a data frame's column as an array with the spec's shape and dtype."""
    values = frame[name].to_numpy()
    if values.dtype == object and spec.dtype.name != "string":
        values = np.stack([np.asarray(value) for value in values]) if len(values) else np.zeros(0)
    return values.reshape(-1, *spec.shape[1:]).astype(spec.dtype.as_numpy_dtype)
