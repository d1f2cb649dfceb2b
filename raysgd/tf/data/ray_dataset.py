"""Converts Ray Data batches to `tf.data` datasets, and columns to the dtypes that models expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.core.arrays import trees
from raysgd.core.arrays.user_data import BatchForm, RayBatches, RayLoader, formed, stacked
from raysgd.core.engine.shared.types import World
from raysgd.streams.loaders import ArrayCollate
from raysgd.tf.objects.datasets import prepare_dataset_shard


def loader_of(batches: RayBatches, config: Mapping[str, Any], world: World) -> RayLoader:
    """Return a loader for a Ray Data dataset. In each call, the loader receives this worker's shard from the driver.

    Raises:
        ValueError: Neither `batches` nor the config has a batch size.
    """
    return RayLoader(batches.sized(config), world, as_batch)


def dataset_over(loader: RayLoader) -> Any:
    """Return a `tf.data.Dataset` over a loader's batches. The loader may receive the batches later.

    The dataset is marked as already sharded. To determine the element spec, this function reads the first row of the
    Ray Data dataset.
    """
    import tensorflow as tf

    first = as_batch(loader.batches.dataset.take_batch(1, batch_format="numpy"), loader.batches.form)
    signature = tf.nest.map_structure(spec_of, first)
    return prepare_dataset_shard(tf.data.Dataset.from_generator(lambda: iter(loader), output_signature=signature))


def as_batch(arrays: Any, form: BatchForm) -> Any:
    """Convert columns to a batch of arrays, in the dtypes that models expect and in the structure of `form`."""
    return formed(trees.mapped(arrays, as_array), form, _joined)


def as_array(values: Any) -> Any:
    """Return a column's values as an array. Convert float64 to Keras's default dtype `floatx`, usually float32."""
    import tensorflow as tf

    values = stacked(values)
    return values.astype(tf.keras.backend.floatx()) if values.dtype == np.float64 else values


def array_collate() -> ArrayCollate:
    """Return a function that collates rows into a batch of arrays, in the dtypes that models expect."""
    return ArrayCollate(lambda values: as_array(np.asarray(values)))


def _joined(columns: list[Any]) -> Any:
    """Concatenate columns into one matrix with a row per sample. A column of scalars becomes one matrix column."""
    return np.concatenate([column[:, None] if column.ndim == 1 else column for column in columns], axis=1)


def spec_of(values: Any) -> Any:
    """Return the `TensorSpec` of an array in a batch, with a variable number of rows."""
    import tensorflow as tf

    tensor = tf.convert_to_tensor(values)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
