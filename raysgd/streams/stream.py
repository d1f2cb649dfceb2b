"""`Stream`: data without an index, as the rows of named shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from raysgd.streams.pipeline import Pipeline


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

        A function that draws random numbers gives a row that is read again, as after a loss, other ones; `seeded`
        prevents that.

        Args:
            function: Called with a row, in the worker that trains on it.
            seeded: Whether it is called with `(row, generator)`: a generator of NumPy, whose seed depends on the row,
                the pass and the seed of the training.

        Raises:
            TypeError: It cannot be called.
            ValueError: The rows are in batches already.
        """
        return self._pipeline().with_step(function, is_filter=False, is_seeded=seeded)

    def filter(self, function: Callable[..., Any], *, seeded: bool = False) -> Pipeline:
        """Return the stream without the rows for which a function is false; arguments and errors are those of `map`.

        It is called in the workers that read a row, which may be several.
        """
        return self._pipeline().with_step(function, is_filter=True, is_seeded=seeded)

    def shuffle(self, buffer: int, seed: int | None = None) -> Pipeline:
        """Return the stream in another order in each pass: of the shards, and of rows that are near each other.

        Where in a chain of calls this stands makes no difference.

        Args:
            buffer: How many rows are kept in all workers together, to be mixed; at least two for each lane.
            seed: Decides the order. None: the seed of the training.

        Raises:
            ValueError: `buffer` is not a positive number; the stream is shuffled already, or cut off by `take`.
        """
        return self._pipeline().shuffled(buffer, seed)

    def take(self, num_rows: int) -> Pipeline:
        """Return the stream with the first rows of each pass only, of all workers together.

        Raises:
            ValueError: `num_rows` is not a positive number.
        """
        return self._pipeline().cut_off(num_rows)

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
        """Return the stream in joint batches. This is the last call in a chain.

        Args:
            size: Rows in a joint batch: of all workers together, however many there are.
            drop_last: Whether to leave out a last joint batch that is not full.
            collate: Makes a batch of a list of rows. None: what the framework uses. With several loader processes the
                worker itself calls it.
            num_workers: How many processes load for each worker, side by side; 0: the worker loads what it needs next.
            prefetch: How many joint batches they load ahead.
            on_error: What follows a row that cannot be read, or that a function fails for: "raise", or "skip" to leave
                it out. Warnings and `status()` say how many were left out.

        Raises:
            TypeError: `collate` cannot be called.
            ValueError: A number is out of range; the rows are in batches already.
        """
        options = {"drop_last": drop_last, "collate": collate, "num_workers": num_workers, "prefetch": prefetch}
        return self._pipeline().batched(size, on_error, **options)

    def _pipeline(self) -> Pipeline:
        from raysgd.streams.pipeline import Pipeline

        return self if isinstance(self, Pipeline) else Pipeline(self)

    def __len__(self) -> int:
        """Return the number of rows in a pass; of joint batches once they are formed.

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
