"""The common base class of the ready-made operators, whose `setup` seeds PyTorch and creates data loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from raysgd.operators import options
from raysgd.streams.stream import Pipeline, Stream
from raysgd.torch import TrainingOperator

_ALLOWED = (
    "return `(train, validation)`, each a dataset, a `DataLoader` or a stream, with None for `validation` if there is "
    "none"
)


Collator = Callable[[list[Any]], Any]


def make_loaders(
    data: Any, batch_size: int, collator: Collator | None = None, stream_collator: Collator | None = None
) -> tuple[Any, Any]:
    """Return the training and the validation loader. Each is None if its data is None.

    Datasets are wrapped in a `DataLoader`, which shuffles training data unless the dataset is iterable-style. Streams
    whose method `batch` was called without `collate` get `stream_collator`. Loaders and other iterables are returned
    unchanged. This function does not shard the samples; `register_data` does.

    Args:
        data: `(train, validation)`, or only the training data.
        batch_size: Samples per batch and worker.
        collator: Function that collates samples of a dataset into a batch. Default: PyTorch's `default_collate`.
        stream_collator: Function that collates rows of a stream into a batch, if the stream forms batches but has no
            `collate` function. None leaves the stream unchanged.

    Raises:
        TypeError: `data` has another type or length.

    Examples:
        >>> train, validation = make_loaders((range(10), range(4)), batch_size=2)
        >>> len(train), list(validation)
        (5, [tensor([0, 1]), tensor([2, 3])])
    """
    train, validation = _pair(data)
    options = {"batch_size": batch_size, "collate_fn": collator}
    loaders = _loader(train, options, shuffle=True), _loader(validation, options, shuffle=False)
    return _collating(loaders[0], stream_collator), _collating(loaders[1], stream_collator)


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple | list):
        if not _is_data(data):
            raise TypeError(f"`build_data` returned {data!r}: {_ALLOWED}.")
        return data, None
    if len(data) != 2:
        raise TypeError(f"`build_data` returned a {type(data).__name__} of {len(data)}: {_ALLOWED}.")
    for part in data:
        if part is not None and not _is_data(part):
            raise TypeError(f"`build_data` returned {part!r} as one of its parts: {_ALLOWED}.")
    return data[0], data[1]


def _loader(data: Any, options: dict[str, Any], *, shuffle: bool) -> Any:
    if isinstance(data, IterableDataset):
        return DataLoader(data, **options)  # PyTorch does not allow `shuffle` for an iterable dataset
    if data is None or isinstance(data, DataLoader) or not _is_indexed(data):
        return data
    return DataLoader(data, shuffle=shuffle, **options)


def _collating(data: Any, collator: Collator | None) -> Any:
    """Add a collate function to a stream that forms batches but has no such function. Return other data unchanged."""
    lacks_one = isinstance(data, Pipeline) and data.batch_size is not None and data.collate is None
    return replace(data, collate=collator) if lacks_one and collator is not None else data


def _is_data(value: Any) -> bool:
    is_known = hasattr(value, "__iter__") or _is_indexed(value) or isinstance(value, Stream)
    return is_known and not isinstance(value, str | bytes | dict)


def _is_indexed(value: Any) -> bool:
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


class ReadyMadeOperator(TrainingOperator):
    """Base class of the ready-made operators. Subclass a concrete operator, such as `ClassificationOperator`."""

    def build_data(self, config: dict[str, Any]) -> Any:
        """Create the data. Override this.

        Returns:
            `(train, validation)`. Each is a dataset, a loader, a stream, or None. Datasets are wrapped in a loader.
        """
        raise NotImplementedError(f"Override `{type(self).__name__}.build_data` to return `(train, validation)`.")

    def setup(self, config: dict[str, Any]) -> None:
        """Build and register models, optimizers and data. If you override this, call `super().setup(config)`.

        With a seed, all ranks first get the same seed, because they must agree on the order of the training data. After
        that, each rank gets a different seed, so that dropout and noise differ between ranks during training.

        Raises:
            ValueError: A config value is invalid.
            NotImplementedError: A required `build_...` method is not overridden.
            TypeError: A `build_...` method returned an object of the wrong type.
        """
        seed, batch_size = options.seed(config), options.batch_size(config)
        if seed is not None:
            torch.manual_seed(seed)
        self._register_parts(config)
        train, validation = make_loaders(self.build_data(config), batch_size, *self._collators(config))
        self.register_data(train_loader=train, validation_loader=validation)
        if seed is not None:
            torch.manual_seed(seed + 1 + self.world_rank)

    def _register_parts(self, config: dict[str, Any]) -> None:
        """Build and register everything but the data."""
        raise NotImplementedError

    def _collators(self, config: dict[str, Any]) -> tuple[Collator | None, Collator | None]:
        """Return the functions that collate samples of datasets and rows of streams, as for `make_loaders`."""
        return None, None
