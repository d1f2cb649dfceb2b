"""Data of one call as TensorFlow takes it: to train and validate on, made in each worker, and to predict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raysgd.arrays import trees
from raysgd.arrays.arrays import Arrays, as_arrays, is_frame, is_of_arrays
from raysgd.arrays.containers import ArrayContainer
from raysgd.arrays.ray_batches import RayShare, ray_batches
from raysgd.arrays.whole_data import Creator, OwnData, creator_of, is_creator, size_of
from raysgd.messages import prediction_data
from raysgd.messages.prediction import Rows, RowSlice, Work
from raysgd.messages.prediction_data import BatchRequest, BatchSource, Found, num_rows_of, refuse
from raysgd.streams.source import BatchesInOrder
from raysgd.streams.stream import Stream
from raysgd.tf.data.ray_dataset import array_collate, as_batch
from raysgd.tf.objects import datasets

_ADVICE = "Pass a function `(config, batch_size)` that makes the dataset in each worker"


@dataclass(frozen=True)
class ArrayDataset:
    """A dataset that is made of arrays.

    Attributes:
        batches: In the form of batches already, but for all rows.
        batch_size: Of one worker.
        shuffle: Whether each pass has a different order.
        drop_last: Whether to leave out a last batch that is not full.
        seed: What the order comes from.
    """

    batches: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def make(self) -> Any:
        """Return the dataset."""
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices(self.batches)
        if self.shuffle:
            rows = rows.shuffle(num_rows_of(self.batches), seed=self.seed)
        return rows.batch(self.batch_size, drop_remainder=self.drop_last)


def check(dataset: Any, name: str = "dataset", *, with_fit: bool = False, training: bool = False) -> None:
    """Refuse what cannot be used for one call.

    Args:
        dataset: What the call was given.
        name: What the argument is called.
        with_fit: Whether Keras's own loops draw the batches.
        training: Whether it is to train on.

    Raises:
        TypeError: It is of an unknown kind.
        ValueError: Keras's own loops cannot use it.
    """
    if dataset is None:
        return
    if with_fit and training:
        raise ValueError(
            "`train(dataset=...)` with creators cannot work: `fit` trains on what `data_creator` returns. Pass "
            "`training_operator_cls`, or return the dataset from `data_creator`."
        )
    if isinstance(dataset, Arrays) or is_frame(dataset) or is_of_arrays(dataset):
        return
    if _is_dataset(dataset) or is_creator(dataset) or (isinstance(dataset, Stream) and not with_fit):
        return
    has_shards = hasattr(dataset, "set_num_shards") and hasattr(dataset, "get_shard")
    if not with_fit and (ray_batches(dataset) is not None or has_shards):
        return
    raise TypeError(
        f"`{name}=` got `{type(dataset).__name__}`: need a `tf.data.Dataset` of batches, arrays or a data frame, a "
        "dataset of Ray Data, a stream, a function `(config, batch_size)` that returns a `tf.data.Dataset`, or an "
        "object with `set_num_shards(n)` and `get_shard(i)`."
    )


def _is_dataset(dataset: Any) -> bool:
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def whole(
    dataset: Any, config: Mapping[str, Any], seed: int, *, travels: bool
) -> ArrayDataset | OwnData | datasets.PackedDataset | Creator | None:
    """Return what every worker makes its dataset of; None for data of another kind.

    Args:
        dataset: What the call was given.
        config: That of one worker.
        seed: What the order of shuffled arrays comes from.
        travels: Whether it goes to other processes.

    Raises:
        ValueError: It cannot be divided over the workers, or there is no batch size.
    """
    if isinstance(dataset, Stream):
        return OwnData(dataset)
    if _is_dataset(dataset):
        datasets.check_dataset("dataset", dataset)
        return datasets.packed("dataset", dataset, _ADVICE) if travels else OwnData(dataset)
    if isinstance(dataset, Arrays) or is_frame(dataset) or is_of_arrays(dataset):
        return _of_arrays(dataset if isinstance(dataset, Arrays) else Arrays(dataset), config, seed)
    return creator_of(dataset, config)


def _of_arrays(data: Arrays, config: Mapping[str, Any], seed: int) -> ArrayDataset:
    if data.transform is not None:
        raise ValueError(
            "`Arrays(transform=...)` with a `TFTrainer` cannot work: `tf.data` transforms in graphs. Pass a "
            "`tf.data.Dataset` with `map`."
        )
    size = size_of(f"a `{type(data.data).__name__}`", data.batch_size, config)
    rows = as_arrays(plain(data.data), in_columns=data.feature_columns is not None)
    num_rows_of(rows)
    return ArrayDataset(as_batch(rows, data.form), size, data.shuffle, data.drop_last, seed)


def made(data: Any, is_distributed: bool) -> Any:
    """Return the dataset of batches that such data make.

    Raises:
        TypeError, ValueError: A creator returned something else.
        ValueError: A shuffled dataset would come in another order on each worker.
    """
    dataset = data.make()
    if isinstance(dataset, Stream):
        return dataset
    datasets.check_dataset("what the creator in `dataset=` returned", dataset)
    is_own_order = not isinstance(data, ArrayDataset) and datasets.is_shuffled(dataset)
    if is_distributed and is_own_order and datasets.is_divided(dataset):
        raise ValueError(
            "`dataset=` got a shuffled `tf.data.Dataset`, whose order each worker would draw by itself. Pass "
            "`raysgd.data.Arrays(data, shuffle=True)`, or register the dataset in `setup`."
        )
    return dataset


class PlainBatches:
    """Batches of a share that are no `tf.data`: of Ray Data, or of an object with `get_shard`.

    Args:
        share: The share.
    """

    def __init__(self, share: Any) -> None:
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._share, RayShare):
            return (as_batch(arrays, self._share.form) for arrays in self._share.arrays())
        return map(_in_arrays, self._share)

    def cardinality(self) -> int:
        """Return -2, which says to `tf.data` that it is unknown."""
        return -2


def _in_arrays(batch: Any) -> Any:
    """Make one array for each place of lists of tuples of numbers or arrays."""
    if isinstance(batch, list) and batch and isinstance(batch[0], tuple):
        return tuple(_joined([np.asarray(part) for part in parts]) for parts in zip(*batch, strict=True))
    return tuple(batch) if isinstance(batch, list) else batch


def _joined(parts: list[Any]) -> Any:
    join: Callable[..., Any] = np.stack if parts[0].ndim == 0 else np.concatenate
    return join(parts)


KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a `tf.data.Dataset` of batches, a dataset of Ray Data, "
    "a stream, or an iterator over batches"
)


def source_to_predict(data: Any, asked: BatchRequest) -> Found:
    """Return where the batches come from, and what the results are returned in.

    Raises:
        TypeError: It is of an unknown kind.
        ValueError: The order of its rows cannot be kept.
    """
    if isinstance(data, Arrays):
        data = replace(data, data=plain(data.data))
    found = prediction_data.source_of(plain(data), asked)
    if found is not None:
        return found
    if isinstance(data, Stream):
        batches = BatchesInOrder(data, asked.size, array_collate())
        return BatchSource(batches, batches.num_batches), ArrayContainer()
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return _of_dataset(data), ArrayContainer()
    if not isinstance(data, Iterable) or isinstance(data, Sequence | Mapping | set | frozenset):
        raise refuse(data, KINDS)
    return BatchSource(map(_as_given, data)), ArrayContainer()


def _of_dataset(dataset: Any) -> BatchSource:
    datasets.check_dataset("data", dataset)
    if datasets.is_shuffled(dataset):
        raise ValueError(
            "`predict` got a shuffled `tf.data.Dataset`, so you could not tell which row a result belongs to. Pass the "
            "dataset without `shuffle`."
        )
    number = int(dataset.cardinality())
    return BatchSource(dataset.as_numpy_iterator(), number if number >= 0 else None)


def _as_given(batch: Any) -> Any:
    """Return a batch of any iterable, with arrays for tensors: those of another framework cannot be taken here."""
    return plain(tuple(batch) if isinstance(batch, list) else batch)


def batches_to_predict(work: Work) -> Iterator[tuple[Any, int]]:
    """Yield the batches of a round, and the rows of each."""
    assert not isinstance(work, Rows), "datasets of PyTorch only"
    if isinstance(work, RowSlice):
        yield from ((as_batch(arrays, work.form), size) for arrays, size in work.batches())
        return
    for given in work.batches:
        batch = given if work.form is None else as_batch(given, work.form)
        leaf = next(iter(trees.leaves(batch)))[1]
        yield batch, trees.rows_of(leaf) or 0


def plain(data: Any) -> Any:
    """Return the same with arrays for tensors."""
    is_tree = isinstance(data, tuple | Mapping) or hasattr(data, "numpy")
    return trees.mapped(data, lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf) if is_tree else data


def inputs(batch: Any, has_target: bool) -> Any:
    """Return what a model gets of a batch to predict, without target and weights."""
    if not isinstance(batch, tuple):
        return batch
    return batch[0] if has_target or len(batch) == 1 else batch
