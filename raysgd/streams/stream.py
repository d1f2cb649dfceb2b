"""`Stream`: data without an index, as the rows of named shards, and what becomes of the rows."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from raysgd._arguments import check_count, check_num_workers, check_seed, refuse_text
from raysgd._numbers.seeds import digest
from raysgd.exceptions import StreamError

logger = logging.getLogger(__name__)
_MOST_WARNINGS = 10  # of one process


class Shard(NamedTuple):
    """A part of a stream that is read by itself, such as a file.

    Attributes:
        name: What it is called; no other shard has the same name.
        num_rows: How many rows it has; None where that is not known before they are read.
        version: Anything that changes with its rows, such as a checksum: a position in another version is refused.
    """

    name: str
    num_rows: int | None = None
    version: str | None = None


class Stream(ABC):
    """Rows in shards. A subclass says which shards there are, and opens one at a row.

    Both must say the same in every process and in every run: the position in a stream counts rows.

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
        """Return the rows of a shard from the row `start` on; the first one has the number 0.

        Raises:
            ValueError: The shard has fewer rows than `start`.
        """

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        """Return the same rows, with anything in the place of those that are not needed here.

        Called for a shard that several workers share. Override it where a row can be passed over at a lower cost.

        Args:
            shard: As for `open`.
            start: As for `open`.
            is_needed: Says of the number of a row, just before it is made, whether it is needed.
        """
        return self.open(shard, start)

    def map(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Return the stream with a function of each row in its place.

        A function that draws random numbers gives a row that is read again, as after a failure, other ones; `seeded`
        prevents that.

        Args:
            function: Called with a row, in the worker that trains on it.
            seeded: Whether it is called with `(row, generator)`: a generator of NumPy, whose seed depends on the row,
                the pass and the seed of the training.

        Raises:
            TypeError: It cannot be called.
            ValueError: The rows are in batches already.
        """
        return self._with_step("map", function, seeded)

    def filter(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Return the stream without the rows for which a function is false; arguments and errors are those of `map`.

        It is called in the workers that read a row, which may be several.
        """
        return self._with_step("filter", function, seeded)

    def shuffle(self, buffer: int, seed: int | None = None) -> Pipeline:
        """Return the stream in another order in each pass: of the shards, and of rows that are near each other.

        Where in a chain of calls this stands makes no difference.

        Args:
            buffer: How many rows are kept in all workers together, to be mixed; at least two for each lane.
            seed: Decides the order. None: the seed of the training.

        Raises:
            ValueError: `buffer` is not a positive number; the stream is shuffled already, or cut off by `take`.
        """
        check_count("buffer", buffer, "It is the number of rows to mix.")
        if seed is not None:
            check_seed(seed)
        rows = self._of_rows("shuffle")
        if rows.buffer > 1 or rows.limit is not None:
            raise ValueError("`shuffle` after another `shuffle` or after `take`: a stream is shuffled once, before.")
        return replace(rows, buffer=buffer, seed=seed)

    def take(self, num_rows: int) -> Pipeline:
        """Return the stream with the first rows of each pass only, of all workers together.

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
            size: Rows in a global batch: of all workers together, however many there are.
            drop_last: Whether to leave out a last global batch that is not full.
            collate: Makes a batch of a list of rows. None: what the framework uses. With several loader processes the
                worker itself calls it. A batch counts by its rows, unless the operator says otherwise.
            num_workers: How many processes load for each worker, side by side; 0: the worker loads what it needs next.
            prefetch: How many global batches they load ahead.
            on_error: What follows a row that cannot be read, or that a function fails for: "raise", or "skip" to leave
                it out. Warnings and `status()` say how many were left out.

        Raises:
            TypeError: `collate` cannot be called.
            ValueError: A number is out of range; the rows are in batches already.
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
        """Return the stream for a method about rows, ahead of `batch`."""
        rows = self._pipeline()
        if rows.batch_size is not None:
            raise ValueError(f"`{name}` after `batch`: it is about rows, so it has to come first.")
        return rows

    def _pipeline(self) -> Pipeline:
        return self if isinstance(self, Pipeline) else Pipeline(self)

    def __len__(self) -> int:
        """Return the number of rows in a pass; of global batches once they are formed.

        Raises:
            TypeError: It is not known.
        """
        num_rows = total(self.shards())
        if num_rows is None:
            raise TypeError(f"a `{type(self).__name__}` with shards of unknown lengths has no length.")
        return num_rows

    def __bool__(self) -> bool:
        return True  # without this, a truth value would be that of the length, which may not be known


def total(shards: Sequence[Shard]) -> int | None:
    """Return the rows of all shards together; None where that of one is not known."""
    lengths = [shard.num_rows for shard in shards]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_shards(stream: Stream) -> list[Shard]:
    """Return the shards of a stream.

    Raises:
        TypeError: One is no `Shard`.
        ValueError: There is none, or two have the same name, or a length is negative.
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
    """Pass over the rows of a shard ahead of `start`, and return the others; the first one has the number `at`.

    Raises:
        ValueError: There are fewer rows.
    """
    at += sum(1 for _ in islice(rows, start - at))
    if at < start:
        raise ValueError(f"`start={start}`: the shard has {at} rows only.")
    return rows


_NUM_WARNINGS = itertools.count()

DROPPED = object()
"""Instead of a row that a filter left out."""


def warn_of_row(error: StreamError) -> None:
    """Say what is left out; after some warnings rows are only counted."""
    number = next(_NUM_WARNINGS)
    if number < _MOST_WARNINGS:
        more = "; further ones are counted and not named" if number == _MOST_WARNINGS - 1 else ""
        logger.warning("left out of a stream: %s%s", error, more)


class RowStep(NamedTuple):
    """One function that is called with each row.

    Attributes:
        function: What is called.
        is_filter: Whether its result says if the row stays; else the result takes the place of the row.
        is_seeded: Whether it gets a generator of random numbers as well.
    """

    function: Callable[..., Any]
    is_filter: bool
    is_seeded: bool


@dataclass(frozen=True)
class RowSteps:
    """Some steps, one after the other.

    Attributes:
        steps: The steps.
        seed: What random numbers of this pass depend on.
        first: The place of the first step in the stream.
    """

    steps: Sequence[RowStep]
    seed: str
    first: int = 0

    def __call__(self, row: Any, shard: str, number: int) -> Any:
        """Return what becomes of a row, or `DROPPED`.

        Args:
            row: The row.
            shard: The name of the shard that it is from.
            number: Its number there.

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
        except Exception as error:  # of a function of the user
            name = getattr(function, "__name__", type(function).__name__)
            what = f"`{name}` failed with {type(error).__name__}: {error}"
            raise StreamError(f"shard {shard!r}, row {number}: {what}") from error
        return row


@dataclass(frozen=True)
class Pipeline(Stream):
    """A stream with what becomes of its rows. The methods of `Stream` make it.

    Attributes:
        source: Where rows come from.
        steps: Functions and filters.
        buffer: How many rows are mixed, by all workers together; 1 for the order of the source.
        seed: Decides the order; None for the seed of the training.
        limit: How many rows a pass has at most; None for all.
        batch_size: Rows in a global batch; None until that was said.
        drop_last: Whether a last global batch that is not full is left out.
        collate: Makes a batch of a list of rows; None for what the framework uses.
        num_workers: How many processes make the batches of a worker; 0 for none.
        prefetch: How many global batches they make ahead.
        skips: Whether rows are left out that cannot be read, or that a step fails for.
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
        """Return what becomes of the rows of a shard, from the row `start` of the source on, in its order."""
        steps = RowSteps(self.steps, seed=f"{self.seed or 0}/0")
        for number, row in enumerate(self.source.open(shard, start), start):
            prepared = steps(row, shard, number)
            if prepared is not DROPPED:
                yield prepared

    @property
    def num_to_count(self) -> int:
        """The number of steps that decide which rows there are: all up to the last filter, or all that may fail."""
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
        """Return the rows of a pass over these shards; None if that is not known."""
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
