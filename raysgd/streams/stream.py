"""`Stream`: data without an index, as the rows of named shards, and the steps that rows go through."""

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
_MOST_WARNINGS = 10  # in one process


class Shard(NamedTuple):
    """A part of a stream that can be read separately, such as a file.

    Attributes:
        name: Its name, which no other shard has.
        num_rows: Number of its rows; None if it is not known before they are read.
        version: Anything that changes with its rows, such as a checksum. A position in another version is refused.
    """

    name: str
    num_rows: int | None = None
    version: str | None = None


class Stream(ABC):
    """Rows in shards. A subclass lists the shards, and opens a shard at a row.

    Both must give the same result in every process and every run, because a position in a stream counts rows.

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
        """Return all shards, in the order in which they are read."""

    @abstractmethod
    def open(self, shard: str, start: int) -> Iterator[Any]:
        """Return the rows of a shard from row `start` on. The first row has the number 0.

        Raises:
            ValueError: The shard has fewer rows than `start`.
        """

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        """Return the rows like `open`. A row that is not needed here may be replaced by anything.

        Called for a shard that several workers share. Override it if skipping a row can be cheaper than reading it.

        Args:
            shard: As for `open`.
            start: As for `open`.
            is_needed: Takes the number of a row, just before it is made, and returns True if the row is needed.
        """
        return self.open(shard, start)

    def map(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Return the stream with each row replaced by `function(row)`.

        If the function draws random numbers, use `seeded`. Otherwise a row that is read again, for example after a
        failure, may come out differently.

        Args:
            function: Called with a row, in the worker that trains on it.
            seeded: True to call it with `(row, generator)`: a NumPy generator whose seed depends on the row, the pass
                and the seed of the training.

        Raises:
            TypeError: It cannot be called.
            ValueError: The rows are in batches already.
        """
        return self._with_step("map", function, seeded)

    def filter(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Return the stream without the rows for which `function` is false. Arguments and errors are those of `map`.

        The function runs in each worker that reads the row, so it may run more than once.
        """
        return self._with_step("filter", function, seeded)

    def shuffle(self, buffer: int, seed: int | None = None) -> Pipeline:
        """Return the stream in a different order in each pass: of the shards, and of rows that are near each other.

        It may be called anywhere in the chain, with the same result.

        Args:
            buffer: Number of rows that all workers together hold to mix them; at least two for each lane.
            seed: Seed of the order. None for the seed of the training.

        Raises:
            ValueError: `buffer` is not a positive number, or the stream is already shuffled, or cut off by `take`.
        """
        check_count("buffer", buffer, "It is the number of rows to mix.")
        if seed is not None:
            check_seed(seed)
        rows = self._of_rows("shuffle")
        if rows.buffer > 1 or rows.limit is not None:
            raise ValueError("`shuffle` after another `shuffle` or after `take`: shuffle a stream once, before `take`.")
        return replace(rows, buffer=buffer, seed=seed)

    def take(self, num_rows: int) -> Pipeline:
        """Return the stream with only the first `num_rows` rows of each pass, of all workers together.

        Raises:
            ValueError: `num_rows` is not a positive number.
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
        """Return the stream in global batches. This is the last call in a chain.

        Args:
            size: Number of rows in a global batch, of all workers together, however many there are.
            drop_last: True to leave out a last global batch that is not full.
            collate: Makes a batch of a list of rows. None for the framework's usual function. With several loader
                processes, the worker itself calls it. A batch counts by its rows unless the operator gives it another
                weight.
            num_workers: Number of loader processes of each worker. With 0, the worker loads each batch when it is
                needed.
            prefetch: How many global batches they load in advance.
            on_error: What happens if a row cannot be read, or a function fails for it: "raise", or "skip" to leave it
                out. Warnings and `status()` say how many rows were left out.

        Raises:
            TypeError: `collate` cannot be called.
            ValueError: A number is out of range, or the rows are in batches already.
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
        """Return the stream for a method that works on rows. Refuse one that is in batches."""
        rows = self._pipeline()
        if rows.batch_size is not None:
            raise ValueError(f"`{name}` after `batch`: `{name}` works on rows, so call it before `batch`.")
        return rows

    def _pipeline(self) -> Pipeline:
        return self if isinstance(self, Pipeline) else Pipeline(self)

    def __len__(self) -> int:
        """Return the number of rows in a pass; after `batch`, the number of global batches.

        Raises:
            TypeError: It is not known.
        """
        num_rows = total(self.shards())
        if num_rows is None:
            raise TypeError(f"a `{type(self).__name__}` with shards of unknown lengths has no length.")
        return num_rows

    def __bool__(self) -> bool:
        return True  # otherwise the truth value would need the length, which may not be known


def total(shards: Sequence[Shard]) -> int | None:
    """Return the number of rows of all shards; None if that of one is not known."""
    lengths = [shard.num_rows for shard in shards]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_shards(stream: Stream) -> list[Shard]:
    """Return the shards of a stream.

    Raises:
        TypeError: One is not a `Shard`.
        ValueError: There are none, or two have the same name, or a length is negative.
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
    """Skip the rows of a shard before `start` and return the rest. The iterator is at row number `at`.

    Raises:
        ValueError: There are fewer rows.
    """
    at += sum(1 for _ in islice(rows, start - at))
    if at < start:
        raise ValueError(f"`start={start}`: the shard has only {at} rows.")
    return rows


_NUM_WARNINGS = itertools.count()

DROPPED = object()
"""Stands for a row that a filter dropped."""


def warn_of_row(error: StreamError) -> None:
    """Warn of a row that is left out. After some warnings, rows are only counted."""
    number = next(_NUM_WARNINGS)
    if number < _MOST_WARNINGS:
        more = "; further skipped rows are counted, but not logged" if number == _MOST_WARNINGS - 1 else ""
        logger.warning("skipped in a stream: %s%s", error, more)


class RowStep(NamedTuple):
    """A function that is called with each row.

    Attributes:
        function: The function.
        is_filter: True if its result says whether to keep the row. Otherwise the result replaces the row.
        is_seeded: True if it also takes a generator of random numbers.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool


@dataclass(frozen=True)
class RowSteps:
    """Steps that each row goes through, one after the other.

    Attributes:
        steps: The steps.
        seed: Seed of the random numbers of this pass.
        first: Index of the first step in the stream.
    """

    steps: Sequence[RowStep]
    seed: str
    first: int = 0

    def __call__(self, row: Any, shard: str, number: int) -> Any:
        """Return a row after all steps, or `DROPPED`.

        Args:
            row: The row.
            shard: Name of its shard.
            number: Its number in the shard.

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
        except Exception as error:  # a function of the user may raise anything
            name = getattr(function, "__name__", type(function).__name__)
            what = f"`{name}` failed with {type(error).__name__}: {error}"
            raise StreamError(f"shard {shard!r}, row {number}: {what}") from error
        return row


@dataclass(frozen=True)
class Pipeline(Stream):
    """A stream with the steps for its rows. The methods of `Stream` make it.

    Attributes:
        source: The source of the rows.
        steps: Functions and filters.
        buffer: Number of rows that all workers together mix; 1 for the order of the source.
        seed: Seed of the order; None for the seed of the training.
        limit: Largest number of rows in a pass; None for all.
        batch_size: Number of rows in a global batch; None before `batch`.
        drop_last: True to leave out a last global batch that is not full.
        collate: Makes a batch of a list of rows; None for the framework's usual function.
        num_workers: Number of loader processes of a worker; 0 for none.
        prefetch: How many global batches they make in advance.
        skips: True to leave out rows that cannot be read, or for which a step fails.
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
        """Return the rows of a shard after all steps, from row `start` of the source on, in the order of the source."""
        steps = RowSteps(self.steps, seed=f"{self.seed or 0}/0")
        for number, row in enumerate(self.source.open(shard, start), start):
            prepared = steps(row, shard, number)
            if prepared is not DROPPED:
                yield prepared

    @property
    def num_to_count(self) -> int:
        """Number of steps that decide which rows remain, up to the last filter; with `skips`, all steps."""
        return (
            len(self.steps)
            if self.skips
            else max((number for number, step in enumerate(self.steps, 1) if step.is_filter), default=0)
        )

    @property
    def keeps_rows(self) -> bool:
        """True if no row is left out."""
        return not self.skips and not self.num_to_count

    def num_rows(self, shards: Sequence[Shard]) -> int | None:
        """Return the number of rows in a pass over these shards; None if it is not known."""
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
