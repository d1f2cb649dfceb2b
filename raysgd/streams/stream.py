"""`Stream`: data without random access, which consists of rows in named shards, and steps that change the rows."""

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
        num_rows: Number of rows in the shard, or None if it is only known after reading the shard.
        version: String that changes when the rows change, such as a checksum. If the version has changed, training does
            not continue from a saved position.
    """

    name: str
    num_rows: int | None = None
    version: str | None = None


class Stream(ABC):
    """Base class of streams, which consist of rows in shards. Subclasses implement `shards` and `open`.

    Both methods must give the same results in every process and every run, because positions in a stream are numbers
    of rows.

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
        """Return all shards of the stream, in the order in which they are read."""

    @abstractmethod
    def open(self, shard: str, start: int) -> Iterator[Any]:
        """Return the rows of a shard from row `start` on, counted from 0.

        Raises:
            ValueError: The shard has fewer than `start` rows.
        """

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        """Return the rows of a shard as `open` does, but with any values in place of rows that are not needed.

        This method is called instead of `open` for shards that several workers may share, unless the stream skips rows
        on errors (`on_error="skip"`). Override it if skipping a row is faster than reading it.

        Args:
            shard: Name of the shard.
            start: Number of the first row to return, from 0.
            is_needed: Function that takes the number of a row and returns True if this process needs the row. Call it
                right before you read the row.
        """
        return self.open(shard, start)

    def map(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Replace each row with `function(row)`.

        If the function draws random numbers, use `seeded`. Otherwise, a row that is read again, for example after a
        failure, may be transformed differently.

        Args:
            function: Function of a row. It runs in the worker that trains on the row. If a `filter` follows, or with
                `batch(on_error="skip")`, it runs in every worker that reads the row.
            seeded: Whether to call `function(row, generator)` with a NumPy generator. Its seed depends on the row, the
                epoch, and the seed of `shuffle` or, if there is none, the trainer's seed.

        Raises:
            TypeError: `function` is not callable.
            ValueError: The stream is already batched, or `seeded` is a string.
        """
        return self._with_step("map", function, seeded)

    def filter(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Keep only the rows for which `function` returns true. Arguments and errors are the same as for `map`.

        Calling this method after `take` also raises a `ValueError`. The function runs in every worker that reads the
        row, so it may run more than once per row.
        """
        return self._with_step("filter", function, seeded)

    def shuffle(self, buffer: int, seed: int | None = None) -> Pipeline:
        """Shuffle the shards of the stream, and rows within a buffer. The order is different in each epoch.

        The result does not depend on where in the chain of method calls you call this method.

        Args:
            buffer: Number of rows that all workers together keep in memory for shuffling. At least two rows are kept
                for each of the 64 row sequences (lanes) into which a stream is divided. With 1, nothing is shuffled.
            seed: Seed of the order, and of functions with `seeded=True`. Default: the trainer's seed.

        Raises:
            ValueError: `buffer` is not a positive integer, or `seed` is not valid. Or the stream is already shuffled,
                limited by `take`, or batched.
        """
        check_count("buffer", buffer, "It is the number of rows to mix.")
        if seed is not None:
            check_seed(seed)
        rows = self._of_rows("shuffle")
        if rows.buffer > 1 or rows.limit is not None:
            raise ValueError("`shuffle` after another `shuffle` or after `take`: shuffle a stream once, before `take`.")
        return replace(rows, buffer=buffer, seed=seed)

    def take(self, num_rows: int) -> Pipeline:
        """Limit each epoch to its first `num_rows` rows, over all workers together.

        Training and validation read several shards in turn, so these rows come from several shards. `predict` reads one
        shard after the other.

        Raises:
            ValueError: `num_rows` is not a positive integer, or the stream is already batched.
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
        """Group the rows into global batches. This must be the last method that you call in a chain.

        Args:
            size: Number of rows in a global batch, which all workers use together in a step. It does not depend on the
                number of workers.
            drop_last: Whether to drop the last global batch if it is incomplete.
            collate: Function that combines a list of rows into a batch. Default: the standard function of the
                framework. With several loader processes, your function runs in the worker itself. A batch is weighted
                by its number of rows unless the operator returns another weight.
            num_workers: Number of loader processes per worker. With 0, the worker loads each batch when it needs it.
            prefetch: Number of global batches that the loader processes load in advance.
            on_error: What to do if a row cannot be read, or if a function of `map` or `filter` fails for it: "raise",
                or "skip" the row. Warnings and `status()` report the number of skipped rows. `predict` always raises.

        Raises:
            TypeError: `collate` is not callable.
            ValueError: An argument has an invalid value, or the stream is already batched.
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
        """Return this stream as a `Pipeline`, to which a method such as `map` adds a step or an option.

        Raise an error if the stream is already batched.

        Args:
            name: Name of the method, for the error message.
        """
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
        return True  # by default, Python would call `__len__`, which raises an error if the length is unknown


def total(shards: Sequence[Shard]) -> int | None:
    """Return the number of rows in all shards together, or None if the length of any shard is unknown."""
    lengths = [shard.num_rows for shard in shards]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_shards(stream: Stream) -> list[Shard]:
    """Check the shards of a stream and return them.

    Raises:
        TypeError: `shards()` returned an object that is not a `Shard` with a string as its name.
        ValueError: There are no shards, two shards have the same name, or a length is negative.
    """
    shards = list(stream.shards())
    for shard in shards:
        if not isinstance(shard, Shard) or not isinstance(shard.name, str):
            raise TypeError(f"`shards()` returned {shard!r}: need a `Shard` with a name, such as `Shard('a', 10)`.")
        if shard.num_rows is not None and shard.num_rows < 0:
            raise ValueError(f"shard {shard.name!r} has `num_rows={shard.num_rows}`: need 0 or more, or None.")
    if not shards:
        raise ValueError("a stream has no shards: `shards()` has to return at least one `Shard`.")
    names = [shard.name for shard in shards]
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"two shards have the name {twice!r}: need a different name for each.")
    return shards


RowT = TypeVar("RowT")


def from_row(rows: Iterator[RowT], start: int, at: int = 0) -> Iterator[RowT]:
    """Advance an iterator over the rows of a shard to row `start`, and return the iterator.

    Args:
        rows: The iterator.
        start: Number of the row that the returned iterator yields first.
        at: Number of the row that the iterator would return next.

    Raises:
        ValueError: The shard has fewer than `start` rows.
    """
    at += sum(1 for _ in islice(rows, start - at))
    if at < start:
        raise ValueError(f"`start={start}`: the shard has only {at} rows.")
    return rows


_NUM_WARNINGS = itertools.count()

DROPPED = object()
"""Placeholder for a row that a filter has dropped."""
FAILED = object()
"""Placeholder for a row that was skipped because of an error."""


def warn_of_row(error: StreamError) -> None:
    """Log a warning about a row that is skipped. After ten such warnings in this process, log no more."""
    number = next(_NUM_WARNINGS)
    if number < _MOST_WARNINGS:
        more = "; further skipped rows are counted, but not logged" if number == _MOST_WARNINGS - 1 else ""
        logger.warning("skipped in a stream: %s%s", error, more)


class RowStep(NamedTuple):
    """A step of a stream: a function that is called with each row.

    Attributes:
        function: The function that the user has passed to `map` or `filter`.
        is_filter: True if the function's result decides whether to keep the row. False if the result replaces the row.
        is_seeded: True if the function also takes a random number generator.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool


@dataclass(frozen=True)
class RowSteps:
    """Applies some steps of a stream to rows.

    Attributes:
        steps: The steps, in the order in which they are applied.
        seed: Seed of the random numbers in this pass over the stream.
        first: Index of `steps[0]` among all steps of the stream.
        skips: Whether to skip a row for which a step fails.
    """

    steps: Sequence[RowStep]
    seed: str
    first: int = 0
    skips: bool = False

    def __call__(self, row: Any, shard: str, number: int) -> Any:
        """Apply all steps to a row. Return the result, or `DROPPED` if a filter drops it, or `FAILED` if it is skipped.

        Args:
            row: The row.
            shard: Name of the shard with this row.
            number: Number of the row in the shard.

        Raises:
            StreamError: A step failed, and the row is not skipped.
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
            failed = StreamError(f"shard {shard!r}, row {number}: {what}")
            if not self.skips:
                raise failed from error
            warn_of_row(failed)
            return FAILED
        return row


@dataclass(frozen=True)
class Pipeline(Stream):
    """A stream with steps, and with options for shuffling and batches. Methods such as `Stream.map` return it.

    Attributes:
        source: The stream that reads the rows.
        steps: The functions of `map` and `filter`, in the order in which they are applied.
        buffer: Number of rows that all workers together keep in memory for shuffling. 1 if the stream is not shuffled.
        seed: Seed of the random order and of functions with `seeded=True`, or None for the trainer's seed.
        limit: Maximum number of rows per epoch, or None for no limit.
        batch_size: Number of rows in a global batch, or None before `batch`.
        drop_last: Whether to drop the last global batch if it is incomplete.
        collate: Function that combines a list of rows into a batch, or None for the standard function of the framework.
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
        """Return the rows of a shard after all steps, without shuffling. `take` has no effect here.

        Args:
            shard: Name of the shard.
            start: Number of the first row in the shard. Rows are counted before filters.
        """
        steps = RowSteps(self.steps, seed=f"{self.seed or 0}/0")
        for number, row in enumerate(self.source.open(shard, start), start):
            prepared = steps(row, shard, number)
            if prepared is not DROPPED:
                yield prepared

    @property
    def num_to_count(self) -> int:
        """Number of steps, from the first one on, that decide which rows remain.

        These are the steps up to the last filter. If rows are skipped when a step fails, all steps count.
        """
        return (
            len(self.steps)
            if self.skips
            else max((number for number, step in enumerate(self.steps, 1) if step.is_filter), default=0)
        )

    @property
    def keeps_rows(self) -> bool:
        """True if every row of the source remains, because there is no filter and no row is skipped after an error."""
        return not self.skips and not self.num_to_count

    def num_rows(self, shards: Sequence[Shard]) -> int | None:
        """Return the number of rows in a pass over the stream, or None if it is unknown.

        The rows of an incomplete last global batch are included, even with `drop_last`.

        Args:
            shards: The shards of the stream.
        """
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
