"""`Dataset`: samples from any source, in batches that are sharded across workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from raysgd.core.arguments import check_count
from raysgd.util.iter import LocalIterator, ParallelIterator, from_iterators

logger = logging.getLogger(__name__)


class Dataset:
    """Samples in batches, for `TorchTrainer.train(dataset=...)`. Batches are dealt to the workers round-robin.

    A list or another iterable repeats indefinitely, so pass `num_steps` to `train`. An epoch over `len(data)` samples
    has `len(data) / (num_workers * batch_size)` steps. A call to `train` continues where the previous call with the
    same dataset stopped. After a failure, or with another number of workers, the call starts at the first sample.

    Args:
        data: An iterable that can be iterated repeatedly, a function without arguments that returns an iterable, or a
            `ParallelIterator`.
        batch_size: Number of samples per worker in each step.
        download_func: Function that converts an item to a pair of input and label. Without it, the items must be pairs
            of input and label.
        max_concurrency: Maximum number of concurrent calls to `download_func` in a worker, in threads. With 0, at most
            64 calls run at the same time.
        transform: Function to apply to each input, in the worker.

    Attributes:
        iter: The parallel iterator of the batches, which are lists of pairs.

    Raises:
        TypeError: `data` cannot be iterated, or is a string or bytes.
        InvalidCountError: `batch_size` is not a positive integer.

    Examples:
        >>> dataset = Dataset([(1, 2), (3, 4), (5, 6)], batch_size=2)
        >>> dataset.set_num_shards(1)
        >>> dataset.get_shard(0).take(2)
        [[(1, 2), (3, 4)], [(5, 6), (1, 2)]]
    """

    keeps_position = True
    """If True, each worker continues its shard in the next call to `train`, instead of starting at the beginning."""

    def __init__(
        self,
        data: Iterable[Any] | Callable[[], Iterable[Any]] | ParallelIterator,
        batch_size: int = 32,
        download_func: Callable[[Any], tuple[Any, Any]] | None = None,
        max_concurrency: int = 0,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.batch_size = check_count("batch_size", batch_size, "It is the number of samples for each worker.")
        self.max_concurrency = max_concurrency
        self.transform = transform
        items = _in_one_shard(data)
        if download_func is not None:
            items = items.for_each(download_func, max_concurrency=max_concurrency)
        if transform is not None:
            items = items.for_each(partial(_on_input, transform))
        self.iter = items.batch(self.batch_size)

    def set_num_shards(self, num_shards: int) -> None:
        """Split the batches into `num_shards` shards. A trainer calls this with its number of workers."""
        if num_shards != self.iter.num_shards():
            logger.info("dividing a dataset over %s shards instead of %s", num_shards, self.iter.num_shards())
            self.iter = self.iter.repartition(num_shards)

    def get_shard(self, i: int) -> LocalIterator:
        """Return one worker's shard of the batches, as an iterator that can be pickled.

        Raises:
            AssertionError: The shard does not exist.
        """
        num_shards = self.iter.num_shards()
        assert 0 <= i < num_shards, f"`get_shard({i})`: there are {num_shards} shards; call `set_num_shards` first."
        return self.iter.get_shard(i)


def _on_input(function: Callable[[Any], Any], sample: tuple[Any, ...]) -> tuple[Any, ...]:
    first, *rest = sample
    return (function(first), *rest)


def _in_one_shard(data: Any) -> ParallelIterator:
    if isinstance(data, ParallelIterator):
        return data if data.num_shards() == 1 else data.repartition(1)
    if not callable(data) and (isinstance(data, str | bytes) or not isinstance(data, Iterable)):
        raise TypeError(
            f"`Dataset` got a `{type(data).__name__}`: need an iterable of samples, a function without arguments that "
            "returns one, or a `ParallelIterator`."
        )
    return from_iterators([data], repeat=True)
