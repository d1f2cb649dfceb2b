"""Data of PyTorch for `predict`: which order they have, and what a worker makes of its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from raysgd.arrays import trees
from raysgd.arrays.arrays import Arrays
from raysgd.arrays.containers import ArrayContainer
from raysgd.messages import prediction_data
from raysgd.messages.prediction import PredictRequest, Rows, RowSlice, Work
from raysgd.messages.prediction_data import BatchRequest, BatchSource, Found, RowRanges, refuse
from raysgd.streams.source import BatchesInOrder
from raysgd.streams.stream import Stream
from raysgd.torch.data.batch_streams import length_of
from raysgd.torch.data.batches import TensorCollate, count_samples
from raysgd.torch.data.call_data import has_samples
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.data.sampling import EndsWithParent, kept_options

KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a dataset or `DataLoader` of PyTorch, a list of "
    "dicts (the samples), a dataset of Ray Data, a stream, or an iterator over batches"
)


@dataclass(frozen=True)
class LoaderParts:
    """The parts that a worker makes its own loader of.

    Attributes:
        dataset: Map-style.
        options: Of the user's loader.
    """

    dataset: Any
    options: Mapping[str, Any]


def source_of(data: Any, asked: BatchRequest) -> Found:
    """Return where the batches come from, and what the results are returned in.

    Raises:
        TypeError: It is of an unknown kind.
        ValueError: The order of its rows cannot be kept.
    """
    leaf = as_tensor if _is_of_tensors(data.data if isinstance(data, Arrays) else data) else trees.own
    found = prediction_data.source_of(data, BatchRequest(asked.batch_size, asked.has_size, asked.feature_columns, leaf))
    if found is not None:
        return found
    if isinstance(data, Stream):
        batches = BatchesInOrder(data, asked.size, TensorCollate())
        return BatchSource(batches, batches.num_batches), ArrayContainer(as_tensor)
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=asked.batch_size)
    if type(data) is DataLoader and not isinstance(data.dataset, IterableDataset):
        return _of_loader(data, asked), ArrayContainer(as_tensor)
    if isinstance(data, DataLoader):
        _check_iterable(data)
        return BatchSource(_apart(data), length_of(data)), ArrayContainer(as_tensor)
    if isinstance(data, Dataset) or has_samples(data):
        return RowRanges(len(cast(Sized, data)), asked.batch_size, LoaderParts(data, {})), ArrayContainer(as_tensor)
    if not isinstance(data, Iterable) or isinstance(data, Sequence | Mapping | set | frozenset):
        raise refuse(data, KINDS)
    return BatchSource(data, length_of(data)), ArrayContainer(as_tensor)


def _is_of_tensors(data: Any) -> bool:
    is_tree = isinstance(data, torch.Tensor | tuple | Mapping)
    return is_tree and any(isinstance(leaf, torch.Tensor) for _, leaf in trees.leaves(data))


def as_tensor(array: Any) -> Any:
    """An array as a separate tensor; text stays an array."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        return array
    return torch.from_numpy(np.ascontiguousarray(trees.own(array)))


def _of_loader(loader: DataLoader[Any], asked: BatchRequest) -> RowRanges:
    """A map-style loader: every worker loads its own rows. `drop_last` has no effect, so that no row is lost."""
    parts = LoaderParts(loader.dataset, kept_options(loader))
    num_rows = len(cast(Sized, loader.dataset))
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
    return RowRanges(num_rows, asked.size(batches.batch_size), parts)


def _unordered(what: str) -> ValueError:
    return ValueError(
        f"`predict` got a `DataLoader` with {what}, so its rows come in an order of their own, and no result could be "
        "told from another. Pass `DataLoader(dataset, batch_size=...)` without it, or the dataset. For some of the "
        "rows pass `torch.utils.data.Subset(dataset, indices)`."
    )


def _check_iterable(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1 and isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"`predict` got a `DataLoader` over an `IterableDataset` with `num_workers={loader.num_workers}`, whose "
            "processes read the rows side by side, so their order cannot be kept. Pass `num_workers=1` or 0, or a "
            "dataset with `__getitem__` and `__len__`."
        )


def _apart(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader; what it draws for its processes is not drawn from the generator that training uses."""
    before = torch.get_rng_state()
    batches = iter(loader)
    torch.set_rng_state(before)
    yield from batches


class PredictionLoader:
    """The batches of one worker, for one prediction after the other.

    Args:
        collate_fn: Returns what makes batches of samples, where the data do not say it.
    """

    def __init__(self, collate_fn: Callable[[], Any]) -> None:
        self._collate_fn = collate_fn
        self._key: str | None = None
        self._indices: list[list[int]] = []  # a loader with processes goes on living between rounds, and looks here
        self._loader: DataLoader[Any] | None = None

    def batches(self, request: PredictRequest, work: Work, share: LoaderParts | None) -> Iterator[tuple[Any, int]]:
        """The batches of a round, and the rows of each."""
        if request.key != self._key:
            self.close()
        if isinstance(work, RowSlice):
            yield from ((as_batch(arrays, work.form), size) for arrays, size in work.batches())
        elif isinstance(work, Rows):
            yield from self._loaded(request, work, share)
        else:
            form = work.form
            ready = work.batches if form is None else map(partial(as_batch, form=form), work.batches)
            yield from ((batch, count_samples(batch)) for batch in ready)
        if request.is_last:
            self.close()

    def _loaded(self, request: PredictRequest, work: Rows, share: LoaderParts | None) -> Iterator[tuple[Any, int]]:
        if share is not None:
            self._key, self._loader = request.key, _loader_of(share, self._indices, self._collate_fn())
        assert self._loader is not None, "the first round brings the dataset"
        self._indices[:] = map(list, work.ranges)
        if self._indices:
            yield from zip(self._loader, map(len, work.ranges), strict=True)

    def close(self) -> None:
        """Lets go of the dataset, and of the processes that load it."""
        self._key = self._loader = None


def _loader_of(parts: LoaderParts, indices: list[list[int]], collate_fn: Any) -> DataLoader[Any]:
    options = {"collate_fn": collate_fn, **parts.options}
    if options.get("num_workers"):
        options["worker_init_fn"] = EndsWithParent(options["worker_init_fn"])
        options["persistent_workers"] = True
    generator = torch.Generator()  # else it would draw from the one that training uses
    return DataLoader(parts.dataset, batch_sampler=indices, generator=generator, **options)


def plain(value: Any) -> Any:
    """A tensor as an array; other values as they are. NumPy has no bfloat16, so that becomes float32."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
