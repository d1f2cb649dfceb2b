"""Streams that read rows from iterables, generator functions, and streaming datasets of Hugging Face's `datasets`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from operator import itemgetter
from typing import Any

from raysgd.core.arguments import is_integer
from raysgd.streams.stream import Shard, Stream, from_row

_NOTE_EVERY = 256
_NUM_STATES = 4
_ROWS_AT_ONCE = 32
_FORMATS = (None, "torch")  # formats in which rows can be converted together without changing the values


class IterableStream(Stream):
    """Reads rows from an iterable, which must yield the same rows in every iteration and in every process.

    To continue at a row, the iterable is read from its beginning.

    Args:
        rows: An iterable that can be iterated over several times, or a function without arguments that returns an
            iterable, such as a generator function.
        num_rows: Number of rows. Default: `len(rows)` if `rows` has a length, and otherwise unknown.

    Raises:
        TypeError: `rows` is neither an iterable nor a function, or is an iterator, which can be used only once.
        ValueError: `num_rows` is negative or not an integer.

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


# Names of the classes in `datasets` that process each shard separately, without the endings `Examples` and `Iterable`.
# Other classes, such as those for `take` and `skip`, count rows across all shards.
_IN_SHARDS = (
    *(
        "",
        "Arrow",
        "BufferShuffled",
        "Filtered",
        "Formatted",
        "InterleavedShards",
        "Mapped",
        "RebatchedArrow",
        "Repeat",
    ),
    *("SelectColumns", "ShuffledDataSources", "ShuffledDataSourcesArrow", "VerticallyConcatenatedMultiSources"),
)


class HuggingFaceStream(Stream):
    """Reads a `datasets.IterableDataset`. Each shard of the dataset is a shard of the stream.

    If the dataset has operations that count rows across shards, such as `take` and `skip`, the whole dataset is one
    shard. The `shuffle` method of the dataset does not mix rows of different shards. Use `Stream.shuffle` instead.

    To continue in the middle of a shard, the shard is normally read from its beginning. If this process has already
    read rows near that position, for example before another worker was lost, it continues from a `state_dict` of the
    dataset instead.

    Args:
        dataset: The result of `load_dataset(..., streaming=True)` or `dataset.to_iterable_dataset(num_shards=...)`.

    Raises:
        TypeError: `dataset` is not a `datasets.IterableDataset`.
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "n_shards") or not hasattr(dataset, "shard"):
            raise TypeError(
                f"`HuggingFaceStream` got a `{type(dataset).__name__}`: need a `datasets.IterableDataset`, as "
                "`load_dataset(..., streaming=True)` returns it for a split."
            )
        self._dataset = dataset
        self._states: dict[str, deque[tuple[int, Any]]] = {}

    def shards(self) -> Sequence[Shard]:
        return [Shard(f"shard-{index}") for index in range(self._num_shards)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        index = int(shard.rpartition("-")[2])
        num = self._num_shards
        part = self._dataset.shard(num_shards=num, index=index) if num > 1 else deepcopy(self._dataset)
        if self._formatter is not None:
            part = part.with_format("arrow")
        states = self._states.setdefault(shard, deque(maxlen=_NUM_STATES))
        at, state = max((each for each in states if each[0] <= start), default=(0, None), key=itemgetter(0))
        if state is not None:
            part.load_state_dict(state)
        return from_row(self._rows(part, at, states.append), start, at)

    def _rows(self, part: Any, at: int, note: Callable[[tuple[int, Any]], None]) -> Iterator[Any]:
        """Yield the rows of a part of the dataset. From time to time, record the state of the dataset.

        Args:
            part: The part of the dataset, already advanced to row `at`.
            at: Number of the first row to yield.
            note: Function that records the number of the next row and the state of the dataset there.
        """
        for block in self._blocks(part):
            at, before = at + len(block), at
            if at // _NOTE_EVERY > before // _NOTE_EVERY:
                note((at, part.state_dict()))
            yield from block

    def _blocks(self, part: Any) -> Iterator[list[Any]]:
        if self._formatter is None:
            return ([row] for row in part)
        return (self._formatted(table) for table in part.iter(_ROWS_AT_ONCE))

    def _formatted(self, table: Any) -> list[Any]:
        """Convert a table to the rows that the dataset would yield. This is faster than converting row by row."""
        assert self._formatter is not None, "there are tables"
        if any(map(_has_nulls, table.columns)):  # convert each row, because a null changes the type of its whole column
            return [self._formatter.format_row(table.slice(number, 1)) for number in range(len(table))]
        columns = self._formatter.format_batch(table)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    @cached_property
    def _num_shards(self) -> int:
        return self._dataset.n_shards if _is_in_shards(getattr(self._dataset, "_ex_iterable", None)) else 1

    @cached_property
    def _formatter(self) -> Any:
        """The object of the library `datasets` that converts tables to rows.

        None if rows cannot be converted together, for example because the values of a column must be decoded.
        """
        try:
            form, tables = self._dataset._formatting, self._dataset._ex_iterable.iter_arrow
        except AttributeError:  # other versions of the library do not have these private attributes
            return None
        kind, features = None if form is None else form.format_type, self._dataset.features
        is_quick = tables is not None and kind in _FORMATS and features
        if not is_quick or not all(map(_is_plain, features.arrow_schema.types)):
            return None
        from datasets.formatting import get_formatter

        return get_formatter(kind, features=features)


def _is_in_shards(rows: Any) -> bool:
    """Return True if a dataset is known to process each of its shards separately."""
    sources = [*getattr(rows, "ex_iterables", ()), *([rows.ex_iterable] if hasattr(rows, "ex_iterable") else ())]
    name = type(rows).__name__.removesuffix("Iterable").removesuffix("Examples")
    return name in _IN_SHARDS and not getattr(rows, "with_indices", False) and all(map(_is_in_shards, sources))


def _is_plain(column_type: Any) -> bool:
    """Return True if a column needs no decoding, because it holds numbers, strings, bytes, or lists of these."""
    from pyarrow import BaseExtensionType, types

    of_list = types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type)
    inner = column_type.value_type if of_list else column_type
    return not types.is_nested(inner) and not isinstance(inner, BaseExtensionType)


def _has_nulls(column: Any) -> bool:
    from pyarrow import types

    return bool(column.null_count) or (
        types.is_nested(column.type) and any(chunk.flatten().null_count for chunk in column.chunks)
    )
