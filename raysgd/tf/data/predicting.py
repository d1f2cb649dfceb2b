"""Data of TensorFlow for `predict`: which order they have, and what a worker makes of its part."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.arrays import trees
from raysgd.arrays.arrays import Arrays
from raysgd.arrays.containers import ArrayContainer
from raysgd.messages import prediction_data
from raysgd.messages.prediction import Rows, RowSlice, Work
from raysgd.messages.prediction_data import BatchRequest, BatchSource, Found, refuse
from raysgd.streams.source import BatchesInOrder
from raysgd.streams.stream import Stream
from raysgd.tf.data.ray_dataset import array_collate, as_batch
from raysgd.tf.objects import datasets

KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a `tf.data.Dataset` of batches, a dataset of Ray Data, "
    "a stream, or an iterator over batches"
)


def source_of(data: Any, asked: BatchRequest) -> Found:
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
    """A batch of any iterable, with arrays for tensors: those of another framework cannot be taken here."""
    return plain(tuple(batch) if isinstance(batch, list) else batch)


def batches(work: Work) -> Iterator[tuple[Any, int]]:
    """The batches of a round, and the rows of each."""
    assert not isinstance(work, Rows), "datasets of PyTorch only"
    if isinstance(work, RowSlice):
        yield from ((as_batch(arrays, work.form), size) for arrays, size in work.batches())
        return
    for given in work.batches:
        batch = given if work.form is None else as_batch(given, work.form)
        leaf = next(iter(trees.leaves(batch)))[1]
        yield batch, trees.rows_of(leaf) or 0


def plain(data: Any) -> Any:
    """The same with arrays for tensors."""
    is_tree = isinstance(data, tuple | Mapping) or hasattr(data, "numpy")
    return trees.mapped(data, lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf) if is_tree else data


def inputs(batch: Any, has_target: bool) -> Any:
    """Return what a model gets of a batch to predict, without target and weights."""
    if not isinstance(batch, tuple):
        return batch
    return batch[0] if has_target or len(batch) == 1 else batch
