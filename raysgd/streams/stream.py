"""`Stream`: data without random access, as rows in named shards, and the steps applied to the rows."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from raysgd.core.arguments import check_count, check_num_workers, check_seed, refuse_text
from raysgd.core.numbers.seeds import digest
from raysgd.exceptions import StreamError

logger = logging.getLogger(__name__)
_MOST_WARNINGS = 10  # maximum number of warnings about skipped rows per process


class Shard(NamedTuple):
    """A part of a stream that can be read independently, such as a file.

    Attributes:
        name: Unique name of the shard.
        num_rows: Number of rows in the shard, or None if it is unknown before reading.
        version: String that changes with the rows, such as a checksum. A position saved with another version is
            rejected.
    """

    name: str
    num_rows: int | None = None
    version: str | None = None


class Stream(ABC):
    """Base class of streams: rows in shards. Subclasses implement `shards` and `open`.

    Both methods must give the same result in every process and every run, because a position in a stream counts rows.

    Examples:
        >>> class Numbers(Stream):
        ...     def shards(self):
        ...         return [Shard("even", 5), Shard("odd", 5)]
        ...
        ...     def open(self, shard, start):
        ...         return iter(range(0 if shard == "even" else 1, 10, 2)[start:])
        >>> stream = Numbers().map(lambda number: -number).filter(lambda number: number < -2).batch(4)
        >>> list(stream.open("odd", 1)), stream.batch_size
        ([-3, -5, -7, -9], 4)
    """

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Return all shards in reading order."""

    @abstractmethod
    def open(self, shard: str, start: int) -> Iterator[Any]:
        """Return the rows of a shard from row `start` on, counted from 0.

        Raises:
            ValueError: The shard has fewer than `start` rows.
        """

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        """Return a shard's rows, like `open`. Rows that this process does not need may be replaced with any value.

        This method is called for shards that several workers share. Override it if skipping a row is cheaper than
        reading it.

        Args:
            shard: Name of the shard.
            start: Number of the first row.
            is_needed: Takes a row number and returns True if the row is needed. Call it right before producing the row.
        """
        return self.open(shard, start)

    def map(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Replace each row with `function(row)`.

        If the function draws random numbers, use `seeded`. Otherwise, a row that is reread, for example after a
        failure, may be transformed differently.

        Args:
            function: Function of a row. It runs in the worker that trains on the row.
            seeded: Whether to call `function(row, generator)` with a NumPy generator. Its seed depends on the row, the
                epoch and the trainer's seed.

        Raises:
            TypeError: `function` is not callable.
            ValueError: The stream is already batched.
        """
        return self._with_step("map", function, seeded)

    def filter(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Keep only the rows for which `function` returns true. Arguments and errors are the same as for `map`.

        The function runs in every worker that reads the row, so it may run more than once per row.
        """
        return self._with_step("filter", function, seeded)

    def shuffle(self, buffer: int, seed: int | None = None) -> Pipeline:
        """Shuffle the stream differently in each epoch: the order of the shards, and rows within a buffer.

        The result does not depend on where in the chain you call this method.

        Args:
            buffer: Number of rows that all workers together buffer for shuffling. Each lane buffers at least two rows.
            seed: Seed of the order. Default: the trainer's seed.

        Raises:
            ValueError: `buffer` is not a positive integer, or the stream is already shuffled or limited by `take`.
        """
        check_count("buffer", buffer, "It is the number of rows to mix.")
        if seed is not None:
            check_seed(seed)
        rows = self._of_rows("shuffle")
        if rows.buffer > 1 or rows.limit is not None:
            raise ValueError("`shuffle` after another `shuffle` or after `take`: shuffle a stream once, before `take`.")
        return replace(rows, buffer=buffer, seed=seed)

    def take(self, num_rows: int) -> Pipeline:
        """Limit each epoch to the first `num_rows` rows over all workers.

        Raises:
            ValueError: `num_rows` is not a positive integer.
        """
        check_count("num_rows", num_rows, "It is the number of rows in a pass.")
        rows = self._of_rows("take")
        return replace(rows, limit=min(num_rows, rows.limit or num_rows))

    def batch(
        self,
        size: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        on_error: str = "raise",
    ) -> Pipeline:
        """Group the rows into global batches. This must be the last call in a chain.

        Args:
            size: Number of rows in a global batch, over all workers. It does not depend on the number of workers.
            drop_last: Whether to drop the last global batch if it is incomplete.
            collate: Function that collates a list of rows into a batch. Default: the framework's standard function.
                With several loader processes, the worker itself calls it. A batch is weighted by its number of rows
                unless the operator returns another weight.
            num_workers: Number of loader processes per worker. With 0, the worker loads each batch when it needs it.
            prefetch: Number of global batches that the loader processes load in advance.
            on_error: What to do if a row cannot be read or a function fails for it: "raise", or "skip" the row.
                Warnings and `status()` report the number of skipped rows.

        Raises:
            TypeError: `collate` is not callable.
            ValueError: A number is out of range, or the stream is already batched.
        """
        check_count("size", size, "It is the number of rows of all workers together in a step.")
        refuse_text(drop_last=drop_last)
        if on_error not in ("raise", "skip"):
            raise ValueError(f'`on_error={on_error!r}`: allowed are "raise" and "skip".')
        if collate is not None and not callable(collate):
            raise TypeError(f"`collate={collate!r}`: need a function of a list of rows, or None.")
        check_num_workers("num_workers", num_workers, "It is the number of loader processes.", least=0)
        check_count("prefetch", prefetch, "It is the number of global batches to load ahead.")
        return replace(
            self._of_rows("batch"),
            batch_size=size,
            drop_last=drop_last,
            collate=collate,
            num_workers=num_workers,
            prefetch=prefetch,
            skips=on_error == "skip",
        )

    def _with_step(self, name: str, function: Callable[..., Any], is_seeded: bool) -> Pipeline:
        if not callable(function):
            raise TypeError(f"`{name}({function!r})`: need a function of a row.")
        refuse_text(seeded=is_seeded)
        rows, is_filter = self._of_rows(name), name == "filter"
        if is_filter and rows.limit is not None:
            raise ValueError("`filter` after `take`: filter first, then take.")
        return replace(rows, steps=(*rows.steps, RowStep(function, is_filter, is_seeded)))

    def _of_rows(self, name: str) -> Pipeline:
        """Return the stream for the method `name`, which adds a row step. Reject a stream that is already batched."""
        rows = self._pipeline()
        if rows.batch_size is not None:
            raise ValueError(f"`{name}` after `batch`: `{name}` works on rows, so call it before `batch`.")
        return rows

    def _pipeline(self) -> Pipeline:
        return self if isinstance(self, Pipeline) else Pipeline(self)

    def __len__(self) -> int:
        """Return the number of rows per epoch. After `batch`, return the number of global batches.

        Raises:
            TypeError: The length is unknown.
        """
        num_rows = total(self.shards())
        if num_rows is None:
            raise TypeError(f"a `{type(self).__name__}` with shards of unknown lengths has no length.")
        return num_rows

    def __bool__(self) -> bool:
        return True  # by default, Python would call `__len__`, which raises if the length is unknown


def total(shards: Sequence[Shard]) -> int | None:
    """Return the total number of rows, or None if the length of any shard is unknown."""
    lengths = [shard.num_rows for shard in shards]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_shards(stream: Stream) -> list[Shard]:
    """Return a stream's shards after validating them.

    Raises:
        TypeError: `shards()` returned an object that is not a `Shard`.
        ValueError: There are no shards, two shards have the same name, or a length is negative.
    """
    shards = list(stream.shards())
    for shard in shards:
        if not isinstance(shard, Shard) or not isinstance(shard.name, str):
            raise TypeError(f"`shards()` returned {shard!r}: need a `Shard` with a name, as `Shard('a', 10)`.")
        if shard.num_rows is not None and shard.num_rows < 0:
            raise ValueError(f"shard {shard.name!r} has `num_rows={shard.num_rows}`: need 0 or more, or None.")
    if not shards:
        raise ValueError("a stream has no shards: `shards()` has to return at least one `Shard`.")
    names = [shard.name for shard in shards]
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"two shards have the name {twice!r}: a position in a stream needs a name for each.")
    return shards


RowT = TypeVar("RowT")


def from_row(rows: Iterator[RowT], start: int, at: int = 0) -> Iterator[RowT]:
    """Advance an iterator over a shard's rows to row `start` and return it. `at` is the number of its next row.

    Raises:
        ValueError: The shard has fewer than `start` rows.
    """
    at += sum(1 for _ in islice(rows, start - at))
    if at < start:
        raise ValueError(f"`start={start}`: the shard has only {at} rows.")
    return rows


_NUM_WARNINGS = itertools.count()

DROPPED = object()
"""Placeholder for a row that a filter dropped or that was skipped because of an error."""


def warn_of_row(error: StreamError) -> None:
    """Log a warning about a skipped row. After a few warnings in this process, log no more."""
    number = next(_NUM_WARNINGS)
    if number < _MOST_WARNINGS:
        more = "; further skipped rows are counted, but not logged" if number == _MOST_WARNINGS - 1 else ""
        logger.warning("skipped in a stream: %s%s", error, more)


class RowStep(NamedTuple):
    """A function to call with each row.

    Attributes:
        function: The function that the user passed to `map` or `filter`.
        is_filter: True if the function's result decides whether to keep the row. Otherwise, it replaces the row.
        is_seeded: True if the function also takes a random number generator.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool


@dataclass(frozen=True)
class RowSteps:
    """Applies a sequence of steps to rows.

    Attributes:
        steps: The steps, in order.
        seed: Seed for random numbers in this pass.
        first: Index of `steps[0]` among all steps of the stream.
    """

    steps: Sequence[RowStep]
    seed: str
    first: int = 0

    def __call__(self, row: Any, shard: str, number: int) -> Any:
        """Apply all steps to a row. Return the result, or `DROPPED` if a filter drops the row.

        Args:
            row: The row to process.
            shard: Name of the row's shard.
            number: The row's number in the shard.

        Raises:
            StreamError: A step failed.
        """
        try:
            for place, (function, is_filter, is_seeded) in enumerate(self.steps, self.first):
                if is_seeded:
                    seed = digest(f"{self.seed}/{shard}/{number}/{place}")
                    from numpy.random import default_rng

                    result = function(row, default_rng(seed))
                else:
                    result = function(row)
                if not is_filter:
                    row = result
                elif not result:
                    return DROPPED
        except Exception as error:  # a user's function may raise any exception
            name = getattr(function, "__name__", type(function).__name__)
            what = f"`{name}` failed with {type(error).__name__}: {error}"
            raise StreamError(f"shard {shard!r}, row {number}: {what}") from error
        return row


@dataclass(frozen=True)
class Pipeline(Stream):
    """A stream with steps and batching options. The methods of `Stream` return it.

    Attributes:
        source: Source of the rows.
        steps: Functions and filters, in order.
        buffer: Number of rows that all workers together buffer for shuffling; 1 if the stream is not shuffled.
        seed: Seed of the order, or None for the trainer's seed.
        limit: Maximum number of rows per epoch, or None for no limit.
        batch_size: Number of rows in a global batch, or None before `batch`.
        drop_last: Whether to drop the last global batch if it is incomplete.
        collate: Function that collates a list of rows into a batch, or None for the framework's standard function.
        num_workers: Number of loader processes per worker.
        prefetch: Number of global batches that the loader processes load in advance.
        skips: Whether to skip rows that cannot be read or for which a step fails.
    """

    source: Stream
    steps: tuple[RowStep, ...] = ()
    buffer: int = 1
    seed: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    prefetch: int = 2
    skips: bool = False

    def shards(self) -> Sequence[Shard]:
        return self.source.shards()

    def open(self, shard: str, start: int) -> Iterator[Any]:
        """Return a shard's rows after all steps, from row `start` of the source on, without shuffling."""
        steps = RowSteps(self.steps, seed=f"{self.seed or 0}/0")
        for number, row in enumerate(self.source.open(shard, start), start):
            prepared = steps(row, shard, number)
            if prepared is not DROPPED:
                yield prepared

    @property
    def num_to_count(self) -> int:
        """Number of leading steps that decide which rows remain: up to the last filter, or all steps with `skips`."""
        return (
            len(self.steps)
            if self.skips
            else max((number for number, step in enumerate(self.steps, 1) if step.is_filter), default=0)
        )

    @property
    def keeps_rows(self) -> bool:
        """True if every row of the source remains, because nothing filters or skips rows."""
        return not self.skips and not self.num_to_count

    def num_rows(self, shards: Sequence[Shard]) -> int | None:
        """Return the number of rows in a pass over these shards, or None if it is unknown."""
        of_shards = total(shards) if self.keeps_rows else None
        return of_shards if of_shards is None or self.limit is None else min(of_shards, self.limit)

    def __len__(self) -> int:
        num_rows = self.num_rows(self.shards())
        if num_rows is None:
            raise TypeError("a stream with a filter, or with shards of unknown lengths, has no length.")
        if self.batch_size is None:
            return num_rows
        full, rest = divmod(num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)
