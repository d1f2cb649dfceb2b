"""`IterableStream`: whatever a function makes, as a stream with one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from raysgd._arguments.checks import is_integer
from raysgd.streams.stream import Shard, Stream, from_row


class IterableStream(Stream):
    """Rows of an iterable, which has to yield the same ones whenever it is iterated over, in every process.

    It is read from its beginning to get to a row in the middle.

    Args:
        rows: An iterable that can be iterated over again and again, or a function without arguments that returns an
            iterable, such as a generator function.
        num_rows: How many rows there are; None for `len(rows)` if it has one, else unknown.

    Raises:
        TypeError: `rows` are no such thing, or an iterator, which can be used only once.
        ValueError: `num_rows` is negative or no integer.

    Examples:
        >>> len(IterableStream([1, 2, 3])), list(IterableStream(lambda: iter("abc")).open("rows", 1))
        (3, ['b', 'c'])
    """

    def __init__(self, rows: Iterable[Any] | Callable[[], Iterable[Any]], num_rows: int | None = None) -> None:
        if isinstance(rows, Iterator):
            raise TypeError(
                f"`IterableStream` got a `{type(rows).__name__}`, which can be read only once: pass the function that "
                "makes it, without calling it."
            )
        if not callable(rows) and (isinstance(rows, str | bytes) or not isinstance(rows, Iterable)):
            raise TypeError(
                f"`IterableStream` got a `{type(rows).__name__}`: need an iterable of rows, or a function without "
                "arguments that returns one."
            )
        if num_rows is not None and (not is_integer(num_rows) or num_rows < 0):
            raise ValueError(f"`num_rows={num_rows!r}`: need an integer, 0 or more, or None.")
        self._rows = rows
        self._num_rows = _length_of(rows) if num_rows is None else num_rows

    def shards(self) -> Sequence[Shard]:
        return [Shard("rows", self._num_rows)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        rows = self._rows if isinstance(self._rows, Iterable) else self._rows()
        return from_row(iter(rows), start)


def _length_of(rows: Any) -> int | None:
    try:
        return len(rows)
    except TypeError:
        return None
