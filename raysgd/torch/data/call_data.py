"""Data of PyTorch for one call: loaders over arrays, datasets and loaders of the user, made in each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.arrays import trees
from raysgd.arrays.arrays import Arrays, as_arrays, is_frame, is_of_arrays
from raysgd.arrays.ray_batches import BatchForm
from raysgd.arrays.whole_data import Creator, DealtBatches, OwnData, creator_of, is_creator, size_of
from raysgd.engine.shared.types import World
from raysgd.messages.prediction_data import num_rows_of
from raysgd.streams.stream import Stream
from raysgd.torch.data.batch_sampler import GlobalBatchRule
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.data.sampling import ShardedLoader, shard_loader


class ArrayRows(Dataset[Any]):
    """The rows of arrays, taken a batch at a time.

    Args:
        arrays: An array, or a tuple or dict of them.
        form: What becomes of a batch.
    """

    def __init__(self, arrays: Any, form: BatchForm) -> None:
        self._arrays, self._form = arrays, form
        self._num_rows = num_rows_of(arrays)

    def __len__(self) -> int:
        return self._num_rows

    def __getitems__(self, indices: list[int]) -> Any:
        """A batch."""
        return as_batch(trees.mapped(self._arrays, lambda array: _taken(array, indices)), self._form)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])


def _taken(array: Any, indices: list[int]) -> Any:
    return array[torch.tensor(indices) if isinstance(array, torch.Tensor) else np.asarray(indices)]


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class DatasetLoader:
    """A loader that is made over a dataset.

    Attributes:
        dataset: Map-style or iterable.
        batch_size: Of one worker.
        options: For the loader.
    """

    dataset: Any
    batch_size: int
    options: Mapping[str, Any]

    def make(self, collate_fn: Any = None) -> DataLoader[Any]:
        """The loader; `collate_fn` makes its batches, unless the options say what does."""
        return DataLoader(self.dataset, self.batch_size, **{"collate_fn": collate_fn, **self.options})


def is_known(dataset: Any) -> bool:
    """Return whether it is data that every worker can be given whole."""
    if isinstance(dataset, Arrays | DataLoader | Dataset | Stream) or is_frame(dataset) or is_of_arrays(dataset):
        return True
    return has_samples(dataset) or is_creator(dataset)


def has_samples(dataset: Any) -> bool:
    """Return whether it gives samples by their numbers: a map-style dataset, something like one, or a list of dicts."""
    if isinstance(dataset, list):
        return bool(dataset) and all(isinstance(sample, Mapping) for sample in dataset)
    has_rows = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_rows and not isinstance(dataset, Sequence | Mapping)


def collate_fn_of(loaders: Iterable[Any]) -> Any:
    """Returns the `collate_fn` of the first of these loaders that makes batches of samples; None where none does."""
    found = (each for each in loaders if isinstance(each, DataLoader) and each.batch_sampler is not None)
    return next((loader.collate_fn for loader in found), None)


def whole(dataset: Any, config: Mapping[str, Any]) -> DatasetLoader | OwnData | Creator | None:
    """Return what every worker makes its loader of; None for data of another kind.

    Args:
        dataset: What the call was given.
        config: That of one worker.

    Raises:
        ValueError: There is no batch size, or arrays differ in their number of rows.
    """
    if isinstance(dataset, DataLoader | Stream):
        return OwnData(dataset)
    if isinstance(dataset, Arrays):
        return _of_arrays(dataset, config)
    if is_frame(dataset) or is_of_arrays(dataset):
        return _of_arrays(Arrays(dataset), config)
    if isinstance(dataset, Dataset) or has_samples(dataset):
        return DatasetLoader(dataset, size_of(f"a `{type(dataset).__name__}`", None, config), {})
    return creator_of(dataset, config)


def _of_arrays(data: Arrays, config: Mapping[str, Any]) -> DatasetLoader:
    size = size_of(f"a `{type(data.data).__name__}`", data.batch_size, config)
    rows = ArrayRows(as_arrays(data.data, in_columns=data.feature_columns is not None), data.form)
    return DatasetLoader(rows, size, {"shuffle": data.shuffle, "drop_last": data.drop_last, "collate_fn": _as_it_is})


def seed_of(loader: Any, seed: int) -> int:
    """Return what the order of the samples comes from: the generator of the user's loader, or else `seed`."""
    generators = [getattr(holder, "generator", None) for holder in (loader, getattr(loader, "sampler", None))]
    own = next((each for each in generators if isinstance(each, torch.Generator)), None)
    return seed if own is None else own.initial_seed()


def divided(loader: Any, world: World, training: bool, rule: GlobalBatchRule | None = None) -> ShardedLoader | Any:
    """The loader as this worker uses it: divided by samples, or else dealt by batches.

    Raises:
        TypeError: It is no iterable of batches.
        ValueError: It is to be divided by global batches, and cannot be.
    """
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            f"The creator in `dataset=` returned a `{type(loader).__name__}`: return a `DataLoader`, or another "
            "iterable of batches that can be iterated over again and again."
        )
    sharded = shard_loader(loader, rank=world.rank, world_size=world.size, training=training, rule=rule)
    if rule is not None and training and not isinstance(sharded, ShardedLoader):
        raise ValueError(
            "`train(dataset=...)` with `split_batches=True` or `deterministic=True` needs data that the library "
            f"divides by samples, and these are not divided ({sharded.reason}): pass arrays, a map-style dataset, or a "
            "`DataLoader` over one."
        )
    if isinstance(sharded, ShardedLoader) or sharded.divides_data or not world.is_distributed:
        return sharded if isinstance(sharded, ShardedLoader) else loader
    return DealtBatches(loader, world)
