"""Data that a user passes to one call, such as `trainer.predict(data)`, and batches of Ray Data, for Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.arrays import trees, user_data
from raysgd.core.arrays.user_data import (
    Arrays,
    BatchForm,
    CallData,
    Kind,
    RayBatches,
    RayLoader,
    RepeatedBatches,
    as_arrays,
    formed,
    goes_to_all,
    size_of,
    stacked,
)
from raysgd.core.engine.shared.types import World
from raysgd.streams.loaders import ArrayCollate
from raysgd.streams.source import BatchesInOrder
from raysgd.streams.stream import Stream
from raysgd.tf.objects import datasets
from raysgd.tf.objects.datasets import prepare_dataset_shard
from raysgd.trainer.messages import prediction
from raysgd.trainer.messages.prediction import (
    ArrayContainer,
    BatchRequest,
    Found,
    PredictionSource,
    Work,
    num_rows_of,
    refuse,
)


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


_ADVICE = "Pass a function `(config, batch_size)` that makes the dataset in each worker"


def check(dataset: Any, name: str = "dataset", *, with_fit: bool = False, training: bool = False) -> None:
    """Check that a call such as `trainer.validate` can use the data that the user passed to it.

    Args:
        dataset: The data that the user passed to the call.
        name: Name of the call's argument, for error messages.
        with_fit: True if Keras's own loops draw the batches.
        training: True if the call trains.

    Raises:
        TypeError: The type of `dataset` is not supported.
        ValueError: The call trains with Keras's own `fit`, which uses only the dataset from `data_creator`.
    """
    if dataset is None:
        return
    if with_fit and training:
        raise ValueError(
            "`train(dataset=...)` with creators cannot work: `fit` trains on what `data_creator` returns. Pass "
            "`training_operator_cls`, or return the dataset from `data_creator`."
        )
    kind = kind_of(dataset)
    if kind is not None and (not with_fit or (goes_to_all(kind) and not isinstance(dataset, Stream))):
        return
    raise TypeError(
        f"`{name}=` got `{type(dataset).__name__}`: need a `tf.data.Dataset` of batches, arrays or a data frame, a "
        "dataset of Ray Data, a stream, or a function `(config, batch_size)` that returns a `tf.data.Dataset`."
    )


def kind_of(dataset: Any) -> Kind | None:
    """Return what kind of data a user passed to a call, such as "rows". Return None if the type is not supported."""
    if is_dataset(dataset) or isinstance(dataset, Stream):
        return "batches"
    kind = user_data.kind_of(dataset)
    # Datasets of the kind "shards" yield PyTorch tensors, which TensorFlow cannot use.
    return None if kind == "shards" else kind


def is_dataset(dataset: Any) -> bool:
    """Return True for a `tf.data.Dataset`, without importing TensorFlow."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def call_data_of(dataset: Any, config: Mapping[str, Any], seed: int, *, travels: bool) -> CallData | None:
    """Wrap the data that a user passed to a call, for use in the workers. Return None if its type is not supported.

    Args:
        dataset: The data that the user passed to the call.
        config: The config of a worker's operator, which may hold the batch size.
        seed: Seed that determines the order of shuffled arrays.
        travels: Whether the data must be serialized, to be sent to other processes.

    Raises:
        ValueError: A dataset does not consist of batches or cannot be sent to the workers, an `Arrays` has a transform,
            or there is no batch size.
    """
    kind = kind_of(dataset)
    if kind == "rows":
        data = dataset if isinstance(dataset, Arrays) else Arrays(dataset)
        return CallData(kind, _dataset_maker(data, config, seed))
    if kind != "batches":
        return user_data.call_data_of(dataset, config)
    if isinstance(dataset, Stream):
        return CallData(kind, dataset)
    datasets.check_dataset("dataset", dataset)
    return CallData(kind, datasets.packed("dataset", dataset, _ADVICE) if travels else dataset)


def _dataset_maker(data: Arrays, config: Mapping[str, Any], seed: int) -> Callable[[], Any]:
    if data.transform is not None:
        raise ValueError(
            "`Arrays(transform=...)` with a `TFTrainer` cannot work: `tf.data` transforms in graphs. Pass a "
            "`tf.data.Dataset` with `map`."
        )
    size = size_of(f"a `{type(data.data).__name__}`", data.batch_size, config)
    rows = as_arrays(plain(data.data), in_columns=data.feature_columns is not None)
    num_rows = num_rows_of(rows)
    return partial(_dataset_over, rows, data.form, size, num_rows if data.shuffle else 0, data.drop_last, seed)


def _dataset_over(arrays: Any, form: BatchForm, size: int, num_shuffled: int, drop_last: bool, seed: int) -> Any:
    """Return arrays as a `tf.data.Dataset` of batches. Called in the workers.

    If `num_shuffled` is not 0, it is the size of the shuffle buffer, and the rows are reshuffled in each pass.
    """
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(as_batch(arrays, form))
    rows = rows.shuffle(num_shuffled, seed=seed) if num_shuffled else rows
    return rows.batch(size, drop_remainder=drop_last)


def batches_of(share: CallData, is_distributed: bool) -> Any:
    """Return the batches of the data that the user passed to a call. Called in a worker.

    If every worker has received the whole data, the returned batches are not sharded yet. If the data is a `Stream`, it
    is returned unchanged.

    Raises:
        TypeError, ValueError: A creator did not return a dataset of batches.
        ValueError: A shuffled dataset would have a different order on each worker.
    """
    if share.kind == "ray":
        return RepeatedBatches(lambda: (as_batch(arrays, share.data.form) for arrays in share.data.arrays()))
    if share.kind == "rows":
        return share.data()
    dataset = share.data() if share.kind == "creator" else datasets.unpacked(share.data)
    if isinstance(dataset, Stream):
        return dataset
    datasets.check_dataset("what the creator in `dataset=` returned", dataset)
    if is_distributed and datasets.is_shuffled(dataset) and datasets.is_divided(dataset):
        raise ValueError(
            "`dataset=` got a shuffled `tf.data.Dataset`, which each worker would shuffle differently. Pass "
            "`raysgd.data.Arrays(data, shuffle=True)`, or register the dataset in `setup`."
        )
    return dataset


KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a `tf.data.Dataset` of batches, a dataset of Ray Data, "
    "a stream, or an iterator over batches"
)


def source_to_predict(data: Any, asked: BatchRequest) -> Found:
    """Return the source of the batches for a `predict` call, and the container that collects the predictions.

    Raises:
        TypeError: The type of `data` is not supported.
        ValueError: The data is a shuffled dataset, so predictions could not be matched to rows.
    """
    if isinstance(data, Arrays):
        data = replace(data, data=plain(data.data))
    source = prediction.source_of(plain(data), asked)
    if source is not None:
        return source
    if isinstance(data, Stream):
        batches = BatchesInOrder(data, asked.size, ArrayCollate())  # plain arrays, without TensorFlow in the driver
        return PredictionSource(iter(batches), batches.num_batches), ArrayContainer()
    if is_dataset(data):
        return _of_dataset(data), ArrayContainer()
    if not isinstance(data, Iterable) or isinstance(data, Sequence | Mapping | set | frozenset):
        raise refuse(data, KINDS)
    given = (plain(tuple(each) if isinstance(each, list) else each) for each in data)
    return PredictionSource(given, None), ArrayContainer()


def _of_dataset(dataset: Any) -> PredictionSource:
    datasets.check_dataset("data", dataset)
    if datasets.is_shuffled(dataset):
        raise ValueError(
            "`predict` got a shuffled `tf.data.Dataset`, so you could not tell which row a result belongs to. Pass the "
            "dataset without `shuffle`."
        )
    number = int(dataset.cardinality())
    return PredictionSource(dataset.as_numpy_iterator(), number if number >= 0 else None)


def batches_to_predict(work: Work) -> Iterator[tuple[Any, int]]:
    """Yield `(batch, number of rows)` for each batch that this worker predicts in one round of a `predict` call."""
    assert not work.are_rows, "datasets of PyTorch only"
    return work.made(as_batch, lambda batch: trees.rows_of(next(iter(trees.leaves(batch)))[1]) or 0)


def plain(data: Any) -> Any:
    """Convert all tensors in nested tuples and dicts to NumPy arrays. Other objects, such as lists, stay unchanged."""
    is_tree = isinstance(data, tuple | Mapping) or hasattr(data, "numpy")
    return trees.mapped(data, lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf) if is_tree else data


def inputs(batch: Any, has_target: bool) -> Any:
    """Return only the model's inputs from a batch that may also contain targets and sample weights.

    Args:
        batch: The batch. If it is not a tuple, it contains only inputs.
        has_target: True if the tuple's first item holds the inputs. If False, all items are inputs.
    """
    if not isinstance(batch, tuple):
        return batch
    return batch[0] if has_target or len(batch) == 1 else batch
