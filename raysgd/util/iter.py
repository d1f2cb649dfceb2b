"""Iterators over elements that are divided into shards, so that each worker can read one shard.

This module is the former `ray.util.iter`. A shard stores the source of its elements and the stages that the elements
pass through, such as functions and filters. It can be pickled. Nothing is computed until a program iterates over the
shard. The elements are then computed in the process that iterates, and in the same thread unless `for_each` uses
several threads. Each iteration starts from the beginning, except over a source that can be read only once, such as a
generator.
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
"""One stage of a shard: a function that takes an iterator over elements and returns an iterable of new elements."""

_MOST_CALLS = 64  # number of threads for `max_concurrency=0`, which `ray.util.iter` did not limit


def from_items(items: Iterable[Any], num_shards: int = 2, repeat: bool = False) -> ParallelIterator:
    """Create a parallel iterator by distributing items over shards in turn (round-robin).

    >>> list(from_items([1, 2, 3], num_shards=2).get_shard(0))
    [1, 3]

    Args:
        items: The items to distribute.
        num_shards: Number of shards.
        repeat: True to repeat each shard indefinitely.
    """
    known = list(items)
    num_shards = _check_shards(num_shards)
    parts = [known[start::num_shards] for start in range(num_shards)]
    return from_iterators(parts, repeat, f"from_items[{len(known)}, shards={num_shards}{_repeats(repeat)}]")


def from_range(n: int, num_shards: int = 2, repeat: bool = False) -> ParallelIterator:
    """Create a parallel iterator over the numbers from 0 to `n - 1`, with consecutive numbers in each shard.

    If the numbers cannot be divided evenly, the last shard has more numbers than the other shards.

    >>> [list(shard) for shard in from_range(5, num_shards=2).shards()]
    [[0, 1], [2, 3, 4]]
    """
    num_shards = _check_shards(num_shards)
    size = n // num_shards
    starts = [size * index for index in range(num_shards)]
    parts = [range(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=True)]
    return from_iterators(parts, repeat, f"from_range[{n}, shards={num_shards}{_repeats(repeat)}]")


def from_iterators(generators: Iterable[Any], repeat: bool = False, name: str | None = None) -> ParallelIterator:
    """Create a parallel iterator with one shard for each iterable.

    Args:
        generators: The iterables, or functions without arguments that each return an iterable.
        repeat: True to repeat each shard indefinitely. A shard whose iterable can be iterated over only once, such as
            a generator, then raises `ValueError` after its last element.
        name: Name to show in `repr`.
    """
    shards = [ItemShard(partial(_items_of, each, repeat)) for each in generators]
    return ParallelIterator(shards, name or f"from_iterators[shards={len(shards)}{_repeats(repeat)}]")


@dataclass(frozen=True)
class ItemShard:
    """One shard of an iterator: the source of its elements, and the stages that the elements pass through.

    Attributes:
        source: Function that returns an iterator over the elements before the first stage.
        stages: The stages in order. Each entry is a pair: a stage, and the number of input elements from which the
            stage makes one output element, or None if this number varies.
    """

    source: Callable[[], Iterator[Any]]
    stages: tuple[tuple[Stage, int | None], ...] = ()

    def __iter__(self) -> Iterator[Any]:
        elements: Iterable[Any] = self.source()
        for stage, _ in self.stages:
            elements = stage(iter(elements))
        return iter(elements)

    def then(self, stage: Stage, size: int | None = None) -> ItemShard:
        """Return a copy of the shard with one more stage at the end.

        Args:
            stage: The stage to add.
            size: Number of input elements from which the stage makes one output element. None if the number varies.
        """
        return ItemShard(self.source, (*self.stages, (stage, size)))

    def in_one_order(self) -> ItemShard:
        """Return a copy of the shard that several readers can divide: each reads the same elements in the same order.

        Shuffles without a seed get a random seed.

        Raises:
            ValueError: The elements can be read only once.
        """
        for items in self.source.args[:1] if isinstance(self.source, partial) else ():
            if _is_read_once(items):
                raise ValueError(
                    f"Each new shard reads the `{type(items).__name__}`, which can be iterated over once: pass a list, "
                    "or a function that returns a new iterator each time, to `from_iterators`."
                )
        return ItemShard(self.source, tuple((_seeded(stage), size) for stage, size in self.stages))

    def every(self, step: int, start: int) -> ItemShard:
        """Return a copy of the shard that yields only every `step`-th of its elements, starting at index `start`.

        The other elements are dropped as early as possible, so that the last stages of the shard do no work for them.
        Elements can be dropped before a stage if it makes each new element from a fixed number of elements, as
        `for_each` and `batch` do.
        """
        place, size = len(self.stages), 1
        while place and (of_one := self.stages[place - 1][1]) is not None:
            place, size = place - 1, size * of_one
        pick = partial(_every_nth_group, step, start, size)
        return ItemShard(self.source, (*self.stages[:place], (pick, None), *self.stages[place:]))


def _items_of(items: Any, repeat: bool) -> Iterator[Any]:
    """Yield the items of an iterable, or of the iterable that a function returns.

    Args:
        items: The iterable or the function.
        repeat: True to start again after the last item, indefinitely. If there are no items, iteration ends.
    """
    yield from items() if callable(items) else items
    while repeat:
        if _is_read_once(items):
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


def _is_read_once(items: Any) -> bool:
    return not callable(items) and hasattr(items, "__next__") and iter(items) is items


def _interleaved(shards: Sequence[ItemShard]) -> Iterator[Any]:
    """Yield one element of each shard in turn (round-robin), until all shards are exhausted."""
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
    """Call a function on each element in `num_threads` threads, and yield the results in the order of the elements."""
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
    """Yield the elements in random order, by drawing each from a buffer that is refilled to `buffer_size` elements."""
    draw, buffer = random.Random(seed), list(islice(elements, buffer_size))
    for element in elements:
        place = draw.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = element
    draw.shuffle(buffer)
    yield from buffer


def _seeded(stage: Stage) -> Stage:
    if isinstance(stage, partial) and stage.func is shuffled and stage.args[1] is None:
        return partial(shuffled, stage.args[0], random.getrandbits(64))
    return stage


def _every_nth_group(step: int, start: int, size: int, elements: Iterator[Any]) -> Iterator[Any]:
    """Split elements into groups of `size`, and yield the elements of every `step`-th group from index `start` on."""
    return (element for index, element in enumerate(elements) if index // size % step == start)


class _Stages:
    """Base class of `ParallelIterator` and `LocalIterator`. Each method returns an iterator with one more stage."""

    def _then(self: StagesT, stage: Stage, name: str, size: int | None = None) -> StagesT:
        raise NotImplementedError

    def for_each(self: StagesT, fn: Callable[[Any], Any], max_concurrency: int = 1, resources: Any = None) -> StagesT:
        """Return an iterator over the results of calling a function on each element.

        Args:
            fn: Function to call on each element.
            max_concurrency: Maximum number of calls that run at the same time, in threads, for one shard. With 0, at
                most 64 calls run at the same time.
            resources: Accepted for compatibility with `ray.util.iter` and ignored. The function runs in the process
                that iterates over the shard.

        Raises:
            AssertionError: `max_concurrency` is negative.
        """
        assert max_concurrency >= 0, f"`max_concurrency={max_concurrency}`: need 0 or more."
        stage: Stage = partial(map, fn)
        if max_concurrency != 1:
            stage = partial(_in_threads, fn, max_concurrency or _MOST_CALLS)
        return self._then(stage, ".for_each()", size=1)

    def filter(self: StagesT, filter_fn: Callable[[Any], bool]) -> StagesT:
        """Return an iterator over only those elements for which `filter_fn` returns True."""
        return self._then(partial(filter, filter_fn), ".filter()")

    def batch(self: StagesT, n: int) -> StagesT:
        """Return an iterator over lists of `n` consecutive elements. The last list of a shard may be shorter."""
        size = check_count("n", n, "It is the size of a batch.")
        return self._then(partial(_batches, size), f".batch({n})", size)

    def flatten(self: StagesT) -> StagesT:
        """Return an iterator over the items of all elements. Each element must be an iterable, such as a list."""
        return self._then(chain.from_iterable, ".flatten()")

    def combine(self: StagesT, fn: Callable[[Any], Iterable[Any]]) -> StagesT:
        """Return an iterator over all items of the lists (or other iterables) that `fn` returns for the elements."""
        return self.for_each(fn).flatten()

    def transform(self: StagesT, fn: Callable[[Iterable[Any]], Iterable[Any]]) -> StagesT:
        """Return an iterator over what `fn` makes of each whole shard.

        Args:
            fn: Function that takes an iterator over a shard's elements and returns an iterable of new elements.
        """
        return self._then(fn, ".transform()")

    def _shuffled(self: StagesT, buffer_size: int, seed: int | None) -> StagesT:
        size = check_count("shuffle_buffer_size", buffer_size, "Elements are drawn from a buffer of so many.")
        return self._then(partial(shuffled, size, seed), f".local_shuffle({size}, {seed})")


class ParallelIterator(_Stages):
    """An iterator whose elements are divided into shards. Nothing is computed until a program iterates over a shard.

    The methods that change the elements or shards return a new iterator.

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

    def __repr__(self) -> str:
        return f"ParallelIterator[{self.name}]"

    def _then(self, stage: Stage, name: str, size: int | None = None) -> ParallelIterator:
        return self._with([shard.then(stage, size) for shard in self._shards], self.name + name)

    def _with(self, shards: Sequence[ItemShard], name: str) -> ParallelIterator:
        return type(self)(shards, name)

    def local_shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> ParallelIterator:
        """Return an iterator that shuffles each shard separately.

        Args:
            shuffle_buffer_size: Number of elements in the buffer from which the next element is drawn at random.
            seed: Seed for the order. With None, each iteration has a different order.
        """
        return self._shuffled(shuffle_buffer_size, seed)

    def repartition(self, num_partitions: int, batch_ms: int = 0) -> ParallelIterator:
        """Return an iterator with another number of shards, over which the elements are distributed in turn.

        Each new shard reads all the former shards, and drops the elements that belong to other new shards. It drops
        them before any `for_each` or `batch` stage at the end of a former shard, so these stages run once per element
        in total. Earlier stages, up to the last `filter`, `transform` or other stage with a varying number of outputs,
        run again in every new shard. They must therefore produce the same elements each time. An earlier shuffle
        without a seed gets a seed, so that all new shards read the same order.

        Args:
            num_partitions: Number of new shards.
            batch_ms: Accepted for compatibility with `ray.util.iter` and ignored. No data is sent between processes.

        Raises:
            ValueError: A shard's elements can be read only once, as those of a generator, for several new shards.
        """
        number = _check_shards(num_partitions)
        shards = [shard.in_one_order() for shard in self._shards] if number > 1 else self._shards
        parts = [
            ItemShard(partial(_interleaved, [shard.every(number, index) for shard in shards]))
            for index in range(number)
        ]
        if len(shards) == 1:
            parts = [shards[0].every(number, index) for index in range(number)]
        return self._with(parts, f"{self.name}.repartition[num_partitions={number}]")

    def union(self, other: ParallelIterator) -> ParallelIterator:
        """Return an iterator with the shards of this iterator, followed by the shards of `other`."""
        return self._with([*self._shards, *other._shards], f"ParallelUnion[{self}, {other}]")

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator:
        """Return an iterator with only the shards that have the given indices.

        Raises:
            ValueError: A shard with one of the indices does not exist, or `shards_to_keep` is empty.
        """
        if not shards_to_keep:
            raise ValueError("`shards_to_keep` is empty: name at least one shard.")
        kept = [self._shard(index) for index in shards_to_keep]
        return self._with(kept, f"{self.name}.select_shards({len(kept)} total)")

    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    def shards(self) -> list[LocalIterator]:
        """Return a list with an iterator for each shard, in the order of the shards' indices."""
        return [self.get_shard(index) for index in range(len(self._shards))]

    def get_shard(self, shard_index: int, batch_ms: int = 0, num_async: int = 1) -> LocalIterator:
        """Return an iterator over the elements of one shard. It can be pickled and used in any process.

        Args:
            shard_index: Index of the shard.
            batch_ms: Accepted for compatibility with `ray.util.iter` and ignored. No data is sent between processes.
            num_async: Accepted for compatibility with `ray.util.iter` and ignored.

        Raises:
            ValueError: The shard does not exist.
        """
        return LocalIterator(self._shard(shard_index), f"{self.name}.shard[{shard_index}]")

    def gather_sync(self) -> LocalIterator:
        """Return an iterator over the elements of all shards, taking one element from each shard in turn."""
        return LocalIterator(ItemShard(partial(_interleaved, self._shards)), f"{self}.gather_sync()")

    def gather_async(self, batch_ms: int = 0, num_async: int = 1) -> LocalIterator:
        """Return an iterator over the elements of all shards. Do not rely on their order.

        Args:
            batch_ms: Accepted for compatibility with `ray.util.iter` and ignored. No data is sent between processes.
            num_async: Accepted for compatibility with `ray.util.iter` and ignored.
        """
        return LocalIterator(ItemShard(partial(_interleaved, self._shards)), f"{self}.gather_async()")

    def take(self, n: int) -> list[Any]:
        """Return the first `n` elements that `gather_sync` yields, or all elements if there are fewer."""
        return self.gather_sync().take(n)

    def show(self, n: int = 20) -> None:
        """Print the first `n` elements that `gather_sync` yields, or all elements if there are fewer."""
        self.gather_sync().show(n)

    def _shard(self, index: int) -> ItemShard:
        if not 0 <= index < len(self._shards):
            raise ValueError(f"`shard_index={index}`: there are shards 0 to {len(self._shards) - 1}.")
        return self._shards[index]


class LocalIterator(_Stages):
    """An iterator over the elements of one shard, or of several shards in turn.

    Each call to `iter()` starts again at the first element. `next()` continues after the element that it last returned.

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
        """Return an iterator that shuffles the elements.

        Args:
            shuffle_buffer_size: Number of elements in the buffer from which the next element is drawn at random.
            seed: Seed for the order. With None, each iteration has a different order.
        """
        return self._shuffled(shuffle_buffer_size, seed)

    def union(self, other: LocalIterator) -> LocalIterator:
        """Return an iterator that takes elements from this iterator and from `other` in turn."""
        both = ItemShard(partial(_interleaved, [self._shard, other._shard]))
        return LocalIterator(both, f"LocalUnion[{self}, {other}]")

    def take(self, n: int) -> list[Any]:
        """Return the first `n` elements, or all elements if there are fewer."""
        return list(islice(iter(self), n))

    def show(self, n: int = 20) -> None:
        """Print the first `n` elements, or all elements if there are fewer."""
        for element in self.take(n):
            print(element)


def _check_shards(num_shards: int) -> int:
    return check_count("num_shards", num_shards, "Each shard is for one worker.")


def _repeats(repeat: bool) -> str:
    return ", repeat=True" if repeat else ""
