"""Batches of Ray Data as `tf.data`, and columns in the dtypes of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.core.arrays import trees
from raysgd.core.arrays.ray_batches import BatchForm, RayBatches, RayLoader, formed, stacked
from raysgd.core.engine.shared.types import World
from raysgd.streams.loaders import ArrayCollate
from raysgd.tf.objects.datasets import prepare_dataset_shard


def loader_of(batches: RayBatches, config: Mapping[str, Any], world: World) -> RayLoader:
    """Return a loader that waits for this worker's share.

    Raises:
        ValueError: There is no batch size.
    """
    return RayLoader(batches.sized(config), world, as_batch)


def dataset_over(loader: RayLoader) -> Any:
    """Return a `tf.data.Dataset` over the batches that a loader gets later. It is not divided again.

    Reads the first row of the dataset for the shape of batches.
    """
    import tensorflow as tf

    first = as_batch(loader.batches.dataset.take_batch(1, batch_format="numpy"), loader.batches.form)
    signature = tf.nest.map_structure(spec_of, first)
    return prepare_dataset_shard(tf.data.Dataset.from_generator(lambda: iter(loader), output_signature=signature))


def as_batch(arrays: Any, form: BatchForm) -> Any:
    """Return a batch for a step: arrays in the dtypes of models, or the columns that the form names."""
    return formed(trees.mapped(arrays, as_array), form, _joined)


def as_array(values: Any) -> Any:
    """Return a column with Keras's `floatx`, float32 by default, instead of float64."""
    import tensorflow as tf

    values = stacked(values)
    return values.astype(tf.keras.backend.floatx()) if values.dtype == np.float64 else values


def array_collate() -> ArrayCollate:
    """Return a collate function that makes arrays in the dtypes of models."""
    return ArrayCollate(lambda values: as_array(np.asarray(values)))


def _joined(columns: list[Any]) -> Any:
    """Concatenate columns; a column of single numbers has width one."""
    return np.concatenate([column[:, None] if column.ndim == 1 else column for column in columns], axis=1)


def spec_of(values: Any) -> Any:
    """Return the `TensorSpec` of an array in a batch with any number of rows."""
    import tensorflow as tf

    tensor = tf.convert_to_tensor(values)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
