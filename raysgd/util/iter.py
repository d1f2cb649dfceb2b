"""Parallel iterators over sharded elements. Each shard is read by one worker. The former `ray.util.iter`.

Nothing runs until you iterate over a shard. The elements are then computed in the iterating process and thread. Each
iteration starts from the beginning. A shard only stores the source of its elements and the stages, such as functions
and filters, that the elements pass through. It can be pickled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from raysgd.core.arguments import check_count

__all__ = ["LocalIterator", "ParallelIterator", "from_items", "from_iterators", "from_range"]

StagesT = TypeVar("StagesT", bound="_Stages")
Stage = Callable[[Iterator[Any]], Iterable[Any]]
"""One stage of a shard: a function from an iterator over elements to an iterable of new elements."""

_MOST_CALLS = 64  # number of concurrent calls with `max_concurrency=0`, which means no limit


def from_items(items: Iterable[Any], num_shards: int = 2, repeat: bool = False) -> ParallelIterator:
    """Distribute items over shards round-robin.

    >>> list(from_items([1, 2, 3], num_shards=2).get_shard(0))
    [1, 3]

    Args:
        items: The elements of the iterator.
        num_shards: Number of shards.
        repeat: True to repeat each shard indefinitely.
    """
    known = list(items)
    num_shards = _check_shards(num_shards)
    parts = [known[start::num_shards] for start in range(num_shards)]
    return from_iterators(parts, repeat, f"from_items[{len(known)}, shards={num_shards}{_repeats(repeat)}]")


def from_range(n: int, num_shards: int = 2, repeat: bool = False) -> ParallelIterator:
    """Return the numbers below `n` in shards of consecutive numbers. The last shard may be larger.

    >>> [list(shard) for shard in from_range(5, num_shards=2).shards()]
    [[0, 1], [2, 3, 4]]
    """
    num_shards = _check_shards(num_shards)
    size = n // num_shards
    starts = [size * index for index in range(num_shards)]
    parts = [range(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=True)]
    return from_iterators(parts, repeat, f"from_range[{n}, shards={num_shards}{_repeats(repeat)}]")


def from_iterators(generators: Iterable[Any], repeat: bool = False, name: str | None = None) -> ParallelIterator:
    """Create a shard from each iterable, or from each function without arguments that returns an iterable.

    Args:
        generators: The iterables or functions.
        repeat: True to repeat each shard indefinitely. In this case, an iterable that can be iterated over only once
            raises `ValueError` at its end.
        name: Name to show in `repr`.
    """
    shards = [ItemShard(partial(_items_of, each, repeat)) for each in generators]
    return ParallelIterator(shards, name or f"from_iterators[shards={len(shards)}{_repeats(repeat)}]")


@dataclass(frozen=True)
class ItemShard:
    """One shard: the source of its elements, and the stages that the elements pass through.

    Attributes:
        source: Returns an iterator over the elements before the first stage.
        stages: The stages in order, each with the number of elements that it combines into one, or None if that number
            varies.
    """

    source: Callable[[], Iterator[Any]]
    stages: tuple[tuple[Stage, int | None], ...] = ()

    def __iter__(self) -> Iterator[Any]:
        elements: Iterable[Any] = self.source()
        for stage, _ in self.stages:
            elements = stage(iter(elements))
        return iter(elements)

    def then(self, stage: Stage, size: int | None = None) -> ItemShard:
        """Return the shard with an additional last stage.

        Args:
            stage: The stage to add.
            size: Number of elements that the stage combines into one, or None if the number varies.
        """
        return ItemShard(self.source, (*self.stages, (stage, size)))

    def every(self, step: int, start: int) -> ItemShard:
        """Return the shard with only every `step`-th element, starting at index `start`.

        Elements are dropped at the earliest stage possible, so that no work is done on them.
        """
        place, size = len(self.stages), 1
        while place and (of_one := self.stages[place - 1][1]) is not None:
            place, size = place - 1, size * of_one
        pick = partial(_every_nth_group, step, start, size)
        return ItemShard(self.source, (*self.stages[:place], (pick, None), *self.stages[place:]))


def _items_of(items: Any, repeat: bool) -> Iterator[Any]:
    """Yield the items of an iterable, or of a function's result. Repeat them if `repeat`."""
    yield from items() if callable(items) else items
    while repeat:
        if not callable(items) and iter(items) is items:
            raise ValueError(
                f"A `{type(items).__name__}` can be iterated over once, and a second pass begins: pass a list, an "
                "object whose `__iter__` starts again, or a function that returns a new iterator each time."
            )
        is_empty = True
        for item in items() if callable(items) else items:
            is_empty = False
            yield item
        if is_empty:
            return


def _interleaved(shards: Sequence[ItemShard]) -> Iterator[Any]:
    """Yield elements of all shards round-robin, until all shards are exhausted."""
    live = deque(iter(shard) for shard in shards)
    while live:
        elements = live.popleft()
        try:
            element = next(elements)
        except StopIteration:
            continue
        live.append(elements)
        yield element


def _in_threads(function: Callable[[Any], Any], num_threads: int, elements: Iterator[Any]) -> Iterator[Any]:
    """Call a function on each element in `num_threads` threads, and yield the results in order."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="raysgd-map")
    try:
        waiting: deque[Future[Any]] = deque()
        for element in elements:
            waiting.append(pool.submit(function, element))
            if len(waiting) >= num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batches(size: int, elements: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(elements, size)):
        yield batch


def shuffled(buffer_size: int, seed: int | None, elements: Iterator[Any]) -> Iterator[Any]:
    """Yield the elements in random order, drawing each from a buffer of `buffer_size` elements."""
    draw, buffer = random.Random(seed), list(islice(elements, buffer_size))
    for element in elements:
        place = draw.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = element
    draw.shuffle(buffer)
    yield from buffer


def _every_nth_group(step: int, start: int, size: int, elements: Iterator[Any]) -> Iterator[Any]:
    """Split elements into groups of `size`, and yield every `step`-th group, starting at index `start`."""
    return (element for index, element in enumerate(elements) if index // size % step == start)


class _Stages:
    """Base class of `ParallelIterator` and `LocalIterator`. Its methods return an iterator with an additional stage."""

    def _then(self: StagesT, stage: Stage, name: str, size: int | None = None) -> StagesT:
        raise NotImplementedError

    def for_each(self: StagesT, fn: Callable[[Any], Any], max_concurrency: int = 1, resources: Any = None) -> StagesT:
        """Apply a function to each element.

        Args:
            fn: Function to call on each element.
            max_concurrency: Maximum number of concurrent calls in one shard, in threads; 0 for no limit.
            resources: Accepted for compatibility and ignored, because the calls run in the iterating process.

        Raises:
            AssertionError: `max_concurrency` is negative.
        """
        assert max_concurrency >= 0, f"`max_concurrency={max_concurrency}`: need 0 or more."
        stage: Stage = partial(map, fn)
        if max_concurrency != 1:
            stage = partial(_in_threads, fn, max_concurrency or _MOST_CALLS)
        return self._then(stage, ".for_each()", size=1)

    def filter(self: StagesT, filter_fn: Callable[[Any], bool]) -> StagesT:
        """Keep the elements for which `filter_fn` returns True."""
        return self._then(partial(filter, filter_fn), ".filter()")

    def batch(self: StagesT, n: int) -> StagesT:
        """Combine every `n` elements into a list. The last list of a shard may be shorter."""
        size = check_count("n", n, "It is the size of a batch.")
        return self._then(partial(_batches, size), f".batch({n})", size)

    def flatten(self: StagesT) -> StagesT:
        """Replace each element, which must be iterable, with its elements."""
        return self._then(chain.from_iterable, ".flatten()")

    def combine(self: StagesT, fn: Callable[[Any], Iterable[Any]]) -> StagesT:
        """Apply a function to each element and flatten the results."""
        return self.for_each(fn).flatten()

    def transform(self: StagesT, fn: Callable[[Iterable[Any]], Iterable[Any]]) -> StagesT:
        """Apply a function to each whole shard. The function takes an iterator and returns an iterable."""
        return self._then(fn, ".transform()")

    def _shuffled(self: StagesT, buffer_size: int, seed: int | None) -> StagesT:
        size = check_count("shuffle_buffer_size", buffer_size, "Elements are drawn from a buffer of so many.")
        return self._then(partial(shuffled, size, seed), f".local_shuffle({size}, {seed})")


class ParallelIterator(_Stages):
    """An iterator over sharded elements. Methods return new iterators. Nothing runs until you iterate over a shard.

    Args:
        shards: The shards, in order of their indices.
        name: Name to show in `repr`.
    """

    def __init__(self, shards: Sequence[ItemShard], name: str) -> None:
        self._shards = tuple(shards)
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A `ParallelIterator` has shards, so say in which order you want their elements: iterate over "
            "`gather_sync()`, or over the shards of `shards()`."
        )

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"ParallelIterator[{self.name}]"

    def _then(self, stage: Stage, name: str, size: int | None = None) -> ParallelIterator:
        return self._with([shard.then(stage, size) for shard in self._shards], self.name + name)

    def _with(self, shards: Sequence[ItemShard], name: str) -> ParallelIterator:
        return type(self)(shards, name)

    def local_shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> ParallelIterator:
        """Shuffle each shard by drawing elements from a buffer of `shuffle_buffer_size` elements."""
        return self._shuffled(shuffle_buffer_size, seed)

    def repartition(self, num_partitions: int, batch_ms: int = 0) -> ParallelIterator:
        """Change the number of shards. Elements are distributed over the new shards round-robin.

        Each new shard reads all former shards, and drops the elements of other new shards as early as possible. Stages
        such as `for_each` and `batch` therefore run only once per element. Stages up to the last `filter`, `transform`
        or other stage that changes the number of elements unpredictably run in every new shard.

        Args:
            num_partitions: Number of shards.
            batch_ms: Accepted for compatibility and ignored, because nothing is sent.
        """
        number = _check_shards(num_partitions)
        parts = [
            ItemShard(partial(_interleaved, [shard.every(number, index) for shard in self._shards]))
            for index in range(number)
        ]
        if len(self._shards) == 1:
            parts = [self._shards[0].every(number, index) for index in range(number)]
        return self._with(parts, f"{self.name}.repartition[num_partitions={number}]")

    def union(self, other: ParallelIterator) -> ParallelIterator:
        """Return an iterator with the shards of both iterators."""
        return self._with([*self._shards, *other._shards], f"ParallelUnion[{self}, {other}]")

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator:
        """Select shards by index.

        Raises:
            ValueError: A shard does not exist, or no shard is selected.
        """
        if not shards_to_keep:
            raise ValueError("`shards_to_keep` is empty: name at least one shard.")
        kept = [self._shard(index) for index in shards_to_keep]
        return self._with(kept, f"{self.name}.select_shards({len(kept)} total)")

    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    def shards(self) -> list[LocalIterator]:
        """Return a list of iterators, one per shard, in order of the shards' indices."""
        return [self.get_shard(index) for index in range(len(self._shards))]

    def get_shard(self, shard_index: int, batch_ms: int = 0, num_async: int = 1) -> LocalIterator:
        """Return one shard, which can be iterated over in any process.

        Args:
            shard_index: Index of the shard.
            batch_ms: Accepted for compatibility and ignored, because nothing is sent.
            num_async: Accepted for compatibility and ignored.

        Raises:
            ValueError: The shard does not exist.
        """
        return LocalIterator(self._shard(shard_index), f"{self.name}.shard[{shard_index}]")

    def gather_sync(self) -> LocalIterator:
        """Return an iterator over all elements, taking one element from each shard in turn."""
        return LocalIterator(ItemShard(partial(_interleaved, self._shards)), f"{self}.gather_sync()")

    def gather_async(self, batch_ms: int = 0, num_async: int = 1) -> LocalIterator:
        """Return an iterator over all elements, whose order is not guaranteed."""
        return LocalIterator(ItemShard(partial(_interleaved, self._shards)), f"{self}.gather_async()")

    def take(self, n: int) -> list[Any]:
        """Return up to `n` elements."""
        return self.gather_sync().take(n)

    def show(self, n: int = 20) -> None:
        """Print up to `n` elements."""
        self.gather_sync().show(n)

    def _shard(self, index: int) -> ItemShard:
        if not 0 <= index < len(self._shards):
            raise ValueError(f"`shard_index={index}`: there are shards 0 to {len(self._shards) - 1}.")
        return self._shards[index]


class LocalIterator(_Stages):
    """An iterator over one shard. Each call to `iter()` starts from the beginning; `next()` continues.

    Args:
        shard: The shard to read.
        name: Name to show in `repr`.
    """

    def __init__(self, shard: ItemShard, name: str) -> None:
        self._shard = shard
        self.name = name
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard)

    def __next__(self) -> Any:
        if self._running is None:
            self._running = iter(self)
        return next(self._running)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_running": None}

    def __repr__(self) -> str:
        return f"LocalIterator[{self.name}]"

    def _then(self, stage: Stage, name: str, size: int | None = None) -> LocalIterator:
        return LocalIterator(self._shard.then(stage, size), self.name + name)

    def shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> LocalIterator:
        """Shuffle by drawing elements from a buffer of `shuffle_buffer_size` elements."""
        return self._shuffled(shuffle_buffer_size, seed)

    def union(self, other: LocalIterator) -> LocalIterator:
        """Return an iterator that alternates between the elements of both iterators."""
        both = ItemShard(partial(_interleaved, [self._shard, other._shard]))
        return LocalIterator(both, f"LocalUnion[{self}, {other}]")

    def take(self, n: int) -> list[Any]:
        """Return up to `n` elements, starting with the first."""
        return list(islice(iter(self), n))

    def show(self, n: int = 20) -> None:
        """Print up to `n` elements."""
        for element in self.take(n):
            print(element)


def _check_shards(num_shards: int) -> int:
    return check_count("num_shards", num_shards, "Each shard is for one worker.")


def _repeats(repeat: bool) -> str:
    return ", repeat=True" if repeat else ""
