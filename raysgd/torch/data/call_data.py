"""Handles data that a user passes to a single call of `train`, `validate` or `predict`.

For `train` and `validate`, each worker creates a loader over the data and reads its shard. For `predict`, the driver
decides which rows each worker reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from raysgd.core.arrays import trees, user_data
from raysgd.core.arrays.user_data import (
    Arrays,
    BatchForm,
    CallData,
    Convert,
    Kind,
    RepeatedBatches,
    as_arrays,
    size_of,
)
from raysgd.streams.source import BatchesInOrder
from raysgd.streams.stream import Stream
from raysgd.torch.data.batches import TensorCollate, as_batch, count_samples
from raysgd.torch.data.sample_order import length_of
from raysgd.torch.data.sampling import GlobalBatchRule, ShardedLoader, ending_with_parent, kept_options, shard_loader
from raysgd.trainer.messages import prediction
from raysgd.trainer.messages.prediction import (
    ArrayContainer,
    BatchRequest,
    PredictionSource,
    PredictRequest,
    Work,
    num_rows_of,
    refuse,
)


def kind_of(dataset: Any) -> Kind | None:
    """Return the kind of the data that a user passed to a call, such as "rows" or "batches".

    The kind determines how the data is read. Return None if the type of the data is not supported.
    """
    kind = user_data.kind_of(dataset)
    if kind is None and isinstance(dataset, DataLoader | Stream):
        return "batches"
    if kind is None and (isinstance(dataset, Dataset) or has_samples(dataset)):
        return "rows"
    return kind


def has_samples(dataset: Any) -> bool:
    """Return True if `dataset` yields samples by index: a map-style dataset, a similar object, or a list of dicts."""
    if isinstance(dataset, list):
        return bool(dataset) and all(isinstance(sample, Mapping) for sample in dataset)
    has_rows = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_rows and not isinstance(dataset, Sequence | Mapping)


def call_data_of(dataset: Any, config: Mapping[str, Any]) -> CallData | None:
    """Wrap the data that a user passed to a call, so that it can be sent to the workers.

    Return None if the type of the data is not supported.

    Args:
        dataset: The data that the user passed to the call.
        config: The operator's config in one worker, which has the batch size.

    Raises:
        ValueError: Neither the data nor the config has a batch size, arrays have different numbers of rows, or a data
            frame has non-numeric columns and no `feature_columns` were selected.
    """
    kind = kind_of(dataset)
    if kind == "batches":
        return CallData(kind, dataset)
    if kind != "rows":
        return user_data.call_data_of(dataset, config)
    if user_data.kind_of(dataset) != "rows":  # the data is a map-style dataset or a list of dicts instead of arrays
        size = size_of(f"a `{type(dataset).__name__}`", None, config)
        return CallData(kind, partial(_loader_over, dataset, {"batch_size": size}))
    data = dataset if isinstance(dataset, Arrays) else Arrays(dataset)
    size = size_of(f"a `{type(data.data).__name__}`", data.batch_size, config)
    arrays = as_arrays(data.data, in_columns=data.feature_columns is not None)
    num_rows_of(arrays)  # raises if the arrays have different numbers of rows
    options = {"batch_size": size, "shuffle": data.shuffle, "drop_last": data.drop_last}
    return CallData(kind, partial(_loader_over_arrays, arrays, data.form, options))


def _loader_over(dataset: Any, options: Mapping[str, Any], collate_fn: Any, make_batch: Convert) -> DataLoader[Any]:
    return DataLoader(dataset, collate_fn=collate_fn, **options)


def _loader_over_arrays(
    arrays: Any, form: BatchForm, options: Mapping[str, Any], collate_fn: Any, make_batch: Convert
) -> DataLoader[Any]:
    return DataLoader(ArrayRows(arrays, lambda taken: make_batch(taken, form)), collate_fn=_unchanged, **options)


def _unchanged(batch: Any) -> Any:
    return batch


class ArrayRows(Dataset[Any]):
    """A dataset over the rows of arrays that returns a complete batch for a list of indices.

    Args:
        arrays: An array, or a tuple or dict of arrays.
        make_batch: Converts the selected rows of the arrays to a batch.
    """

    def __init__(self, arrays: Any, make_batch: Callable[[Any], Any]) -> None:
        self._arrays, self._make_batch = arrays, make_batch
        self._num_rows = num_rows_of(arrays)

    def __len__(self) -> int:
        return self._num_rows

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch of the rows at the positions in `indices`."""
        return self._make_batch(trees.mapped(self._arrays, lambda array: _taken(array, indices)))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])


def _taken(array: Any, indices: list[int]) -> Any:
    return array[torch.tensor(indices) if isinstance(array, torch.Tensor) else np.asarray(indices)]


def batches_of(share: CallData, collate_fn: Any, make_batch: Convert = as_batch) -> Any:
    """Return an iterable of batches over the data that a worker received. Return a stream unchanged.

    From a Ray Data dataset or an object with `get_shard`, a worker receives only its shard. From any other data, it
    receives all samples, and the caller passes the result to `divided`.

    Args:
        share: Data that this worker received.
        collate_fn: Function that creates batches from samples, if the data itself has no such function.
        make_batch: Function that creates batches from arrays.

    Raises:
        TypeError: The user passed a function as `dataset`, and it returned neither an iterable of batches nor a stream.
    """
    match share.kind:
        case "ray":
            return RepeatedBatches(lambda: share.data.batches(make_batch))
        case "shards":
            return RepeatedBatches(lambda: map(_in_tensors, share.data))
        case "rows":
            return share.data(collate_fn, make_batch)
        case "batches":
            return share.data
    made = share.data()
    if not hasattr(made, "__iter__") and not isinstance(made, Stream):
        raise TypeError(
            f"The creator in `dataset=` returned a `{type(made).__name__}`: return a `DataLoader`, or another "
            "iterable of batches that can be iterated over again and again."
        )
    return made


def _in_tensors(batch: Any) -> Any:
    """Convert a batch that is a list of tuples of tensors to a tuple of tensors. Return any other batch unchanged."""
    if isinstance(batch, list) and batch and isinstance(batch[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*batch, strict=True))
    return batch


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    tensors = [torch.as_tensor(part) for part in parts]
    return torch.stack(tensors) if tensors[0].ndim == 0 else torch.cat(tensors)


def collate_fn_of(loaders: Iterable[Any]) -> Any:
    """Return the `collate_fn` of the first `DataLoader` that creates batches from samples; None if none does."""
    found = (each for each in loaders if isinstance(each, DataLoader) and each.batch_sampler is not None)
    return next((loader.collate_fn for loader in found), None)


def divided(
    loader: Any, rank: int, world_size: int, training: bool, rule: GlobalBatchRule | None = None
) -> ShardedLoader | Any:
    """Return a loader that yields only this worker's shard of the data.

    If the library cannot shard the loader by samples, the shard consists of every `world_size`-th batch. A loader whose
    own sampler already shards the data is returned unchanged.

    Args:
        loader: Loader over the full data.
        rank: Rank of this worker.
        world_size: Number of workers.
        training: True for training data.
        rule: Rule for splitting each global batch, the batch of one step of all workers, among the workers. None if the
            loader's batch size is the batch size of one worker.

    Raises:
        ValueError: The rule requires sharding by samples, which this loader does not support.
    """
    sharded = shard_loader(loader, rank=rank, world_size=world_size, training=training, rule=rule)
    if isinstance(sharded, ShardedLoader):
        return sharded
    if rule is not None and training and (world_size > 1 or rule.num_shards or rule.cap):
        raise ValueError(
            "`train(dataset=...)` with `split_batches=True` or `deterministic=True` needs data that the library "
            f"shards by samples, but this data is not sharded ({sharded.reason}): pass arrays, a map-style dataset, or "
            "a `DataLoader` over one."
        )
    if sharded.divides_data or world_size == 1:
        return loader
    return RepeatedBatches(lambda: islice(iter(loader), rank, None, world_size))


KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a dataset or `DataLoader` of PyTorch, a list of "
    "dicts (the samples), a dataset of Ray Data, a stream, or an iterator over batches"
)


def source_to_predict(data: Any, asked: BatchRequest) -> PredictionSource:
    """Return the source of the batches to predict.

    Args:
        data: Data that the user passed to `predict`.
        asked: Batch size and columns that the user requested.

    Raises:
        TypeError: The data's type is not supported.
        ValueError: The loader may not keep the order of the dataset, so it is unclear which row each result belongs to.
            Or the loader forms no batches.
    """
    leaf = as_tensor if _is_of_tensors(data.data if isinstance(data, Arrays) else data) else trees.own
    found = prediction.source_of(data, asked, leaf)
    if found is not None:
        return found
    if isinstance(data, Stream):
        batches = BatchesInOrder(data, asked.size, TensorCollate())
        return PredictionSource(iter(batches), batches.num_batches, ArrayContainer(as_tensor))
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=asked.batch_size)
    if type(data) is DataLoader and not isinstance(data.dataset, IterableDataset):
        return _of_loader(data, asked)
    if isinstance(data, DataLoader):
        _check_iterable(data)
        return PredictionSource(_apart(data), length_of(data), ArrayContainer(as_tensor))
    if kind_of(data) == "rows":
        return _source_of_rows(len(data), asked.batch_size, partial(_loader_to_predict, data, {}))
    if not isinstance(data, Iterable) or isinstance(data, Sequence | Mapping | set | frozenset):
        raise refuse(data, KINDS)
    return PredictionSource(iter(data), length_of(data), ArrayContainer(as_tensor))


def _is_of_tensors(data: Any) -> bool:
    is_tree = isinstance(data, torch.Tensor | tuple | Mapping)
    return is_tree and any(isinstance(leaf, torch.Tensor) for _, leaf in trees.leaves(data))


def as_tensor(array: Any) -> Any:
    """Convert a NumPy array of numbers to a tensor. Return anything else unchanged.

    The array is copied only if it is read-only or not contiguous. Otherwise, the tensor shares the array's memory.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        return array
    return torch.from_numpy(np.ascontiguousarray(trees.own(array)))


def _of_loader(loader: DataLoader[Any], asked: BatchRequest) -> PredictionSource:
    """Return a source that lets each worker load some of the rows of a map-style loader.

    All rows are predicted, even if the loader has `drop_last=True`.
    """
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(
            "`predict` got a `DataLoader` with `batch_size=None`, which forms no batches: pass its dataset, or a "
            "loader with a batch size."
        )
    if type(batches) is not BatchSampler:
        raise _unordered(f"the batch sampler `{type(batches).__name__}`")
    sampler = batches.sampler
    if isinstance(sampler, RandomSampler):
        raise _unordered("`shuffle=True`")
    if type(sampler) is not SequentialSampler:
        raise _unordered(f"the sampler `{type(sampler).__name__}`")
    make_loader = partial(_loader_to_predict, loader.dataset, kept_options(loader))
    return _source_of_rows(len(cast(Sized, loader.dataset)), asked.size(batches.batch_size), make_loader)


def _source_of_rows(num_rows: int, size: int, make_loader: Any) -> PredictionSource:
    ranges = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    return PredictionSource(iter(ranges), len(ranges), ArrayContainer(as_tensor), share=make_loader)


def _unordered(what: str) -> ValueError:
    return ValueError(
        f"`predict` got a `DataLoader` with {what}, so its rows come in another order than those of the dataset, and "
        "no result could be assigned to a row. Pass `DataLoader(dataset, batch_size=...)` without it, or the dataset. "
        "For some of the rows pass `torch.utils.data.Subset(dataset, indices)`."
    )


def _check_iterable(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1 and isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"`predict` got a `DataLoader` over an `IterableDataset` with `num_workers={loader.num_workers}`, whose "
            "processes read the rows in parallel, so their order cannot be kept. Pass `num_workers=1` or 0, or a "
            "dataset with `__getitem__` and `__len__`."
        )


def _apart(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of a loader. Undo its draw of a seed from PyTorch's global generator, which training uses."""
    before = torch.get_rng_state()
    batches = iter(loader)
    torch.set_rng_state(before)
    yield from batches


class PredictionLoader:
    """Loads the batches that one worker predicts. The driver assigns rows or batches in each round of a call.

    Args:
        collate_fn: Function without arguments that returns a `collate_fn`, for data that has none.
        make_batch: Function that creates batches from arrays.
    """

    def __init__(self, collate_fn: Callable[[], Any], make_batch: Convert = as_batch) -> None:
        self._collate_fn, self._make_batch = collate_fn, make_batch
        self._key: str | None = None
        self._indices: list[list[int]] = []  # the loader's batch sampler, changed in place for each round
        self._loader: DataLoader[Any] | None = None

    def batches(self, request: PredictRequest, work: Work, make_loader: Any) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a round, each with its number of rows.

        Args:
            request: Request of the driver for one round. Its `key` identifies the call and thus the dataset.
            work: Batches or row ranges that this worker predicts in the round.
            make_loader: Function that creates a loader over the rows of the dataset. The driver sends it only in the
                first round of a call. None in later rounds, and if `work` contains batches.
        """
        if request.key != self._key:
            self.close()
        if not work.are_rows:
            yield from work.made(self._make_batch, count_samples)
        else:
            if make_loader is not None:
                self._key, self._loader = request.key, make_loader(self._indices, self._collate_fn())
            assert self._loader is not None, "the first round brings the dataset"
            self._indices[:] = map(list, work.batches)
            if self._indices:
                yield from zip(self._loader, map(len, work.batches), strict=True)
        if request.is_last:
            self.close()

    def close(self) -> None:
        """Release the dataset and end the loader's processes."""
        self._key = self._loader = None


def _loader_to_predict(
    dataset: Any, options: Mapping[str, Any], indices: list[list[int]], collate_fn: Any
) -> DataLoader[Any]:
    options = {"collate_fn": collate_fn, **options}
    if options.get("num_workers"):
        options["worker_init_fn"] = ending_with_parent(options["worker_init_fn"])
        options["persistent_workers"] = True
    generator = torch.Generator()  # otherwise, the loader would draw from the global generator, which training uses
    return DataLoader(dataset, batch_sampler=indices, generator=generator, **options)


def plain(value: Any) -> Any:
    """Convert a tensor to a NumPy array. Return any other value unchanged.

    A bfloat16 tensor becomes a float32 array, because NumPy has no bfloat16.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
