"""One shard: where its elements come from, and what becomes of them. A description that can be pickled."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

_MOST_CALLS = 64  # at a time, where their number is left open


Stage = Callable[[Iterator[Any]], Iterable[Any]]
"""One stage that the elements of a shard go through: a function from those before it to those that follow."""


@dataclass(frozen=True)
class ItemShard:
    """The source of elements, and the stages that they go through.

    Attributes:
        source: Makes an iterator over what the stages begin with.
        stages: In order.
    """

    source: Callable[[], Iterator[Any]]
    stages: tuple[Stage, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        elements: Iterable[Any] = self.source()
        for stage in self.stages:
            elements = stage(iter(elements))
        return iter(elements)

    def then(self, stage: Stage) -> ItemShard:
        """The same with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    def every(self, step: int, start: int) -> ItemShard:
        """Each `step`-th element from the one at `start` on.

        Elements are left out as early as it makes no difference, so that no one works on what is not used.
        """
        place, size = len(self.stages), 1
        while place and isinstance(self.stages[place - 1], Map | Batch):
            place -= 1
            stage = self.stages[place]
            size *= stage.size if isinstance(stage, Batch) else 1
        pick = EveryNthGroup(step, start, size)
        return replace(self, stages=(*self.stages[:place], pick, *self.stages[place:]))


@dataclass(frozen=True)
class ItemSource:
    """The items of an iterable, or of what a function without arguments returns; again and again if it repeats."""

    items: Any
    repeat: bool = False

    def __call__(self) -> Iterator[Any]:
        yield from self._one_pass()
        while self.repeat:
            is_empty = True
            for item in self._another_pass():
                is_empty = False
                yield item
            if is_empty:
                return

    def _one_pass(self) -> Iterator[Any]:
        return iter(self.items() if callable(self.items) else self.items)

    def _another_pass(self) -> Iterator[Any]:
        if not callable(self.items) and iter(self.items) is self.items:
            raise ValueError(
                f"A `{type(self.items).__name__}` can be iterated over once, and a second pass begins: pass a list, "
                "an object whose `__iter__` starts again, or a function that returns a new iterator each time."
            )
        return self._one_pass()


@dataclass(frozen=True)
class InterleavedShards:
    """One element of each shard after the other, until all have ended."""

    shards: Sequence[ItemShard]

    def __call__(self) -> Iterator[Any]:
        live = deque(iter(shard) for shard in self.shards)
        while live:
            elements = live.popleft()
            try:
                element = next(elements)
            except StopIteration:
                continue
            live.append(elements)
            yield element


@dataclass(frozen=True)
class Map:
    """A function of each element, called in so many threads; 0 leaves their number open. The order stays."""

    function: Callable[[Any], Any]
    max_concurrency: int = 1

    def __call__(self, elements: Iterator[Any]) -> Iterator[Any]:
        if self.max_concurrency == 1:
            return map(self.function, elements)
        return self._in_threads(elements)

    def _in_threads(self, elements: Iterator[Any]) -> Iterator[Any]:
        num_threads = self.max_concurrency or _MOST_CALLS
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="raysgd-map")
        try:
            waiting: deque[Future[Any]] = deque()
            for element in elements:
                waiting.append(pool.submit(self.function, element))
                if len(waiting) >= num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Batch:
    """Lists of so many elements; the last one may be shorter."""

    size: int

    def __call__(self, elements: Iterator[Any]) -> Iterator[list[Any]]:
        while batch := list(islice(elements, self.size)):
            yield batch


@dataclass(frozen=True)
class Shuffle:
    """Shuffled elements: each is drawn from a buffer of so many."""

    buffer_size: int
    seed: int | None = None

    def __call__(self, elements: Iterator[Any]) -> Iterator[Any]:
        draw, buffer = random.Random(self.seed), list(islice(elements, self.buffer_size))
        for element in elements:
            place = draw.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = element
        draw.shuffle(buffer)
        yield from buffer


@dataclass(frozen=True)
class EveryNthGroup:
    """Of groups of `size` elements each `step`-th, from the one at `start` on."""

    step: int
    start: int
    size: int = 1

    def __call__(self, elements: Iterator[Any]) -> Iterator[Any]:
        for index, element in enumerate(elements):
            if index // self.size % self.step == self.start:
                yield element
