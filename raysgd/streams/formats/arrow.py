"""`ParquetStream` and `ArrowStream`: tables in files, read by PyArrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np

from raysgd._imports.optional import require
from raysgd.exceptions import StreamError
from raysgd.streams.formats.files import FileStream, Paths, StreamFile
from raysgd.streams.lanes import NUM_LANES
from raysgd.streams.stream import Shard

_ROWS_AT_ONCE = 1024
_BYTES_AT_ONCE = 2**20
_MAGIC = b"ARROW1"


class TableStream(FileStream):
    """Rows are dicts with the value of each column: a number, a string, an array of NumPy for a list of fixed size.

    Args:
        paths: As for `FileStream`.
        columns: Which columns to read; None for all.
        filesystem: As for `FileStream`.

    Raises:
        ModuleNotFoundError: PyArrow is missing.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, filesystem: Any = None) -> None:
        super().__init__(paths, filesystem)
        if isinstance(columns, str):
            raise TypeError(f"`columns={columns!r}`: need a list of names, or None.")
        self._columns = None if columns is None else list(columns)
        require("pyarrow", "storage", f"`{type(self).__name__}`")

    def _content(self, file: StreamFile) -> AbstractContextManager[Any]:
        content: AbstractContextManager[Any] = file.folder.filesystem.open_input_file(file.path)
        return content


class ParquetStream(TableStream):
    """Rows of Parquet files. A position is reached by whole row groups.

    Fewer files than lanes are divided into their row groups, each of which is a shard of known length. The lengths of
    many files are not asked for beforehand, because each answer takes a reading.

    Examples:
        >>> import tempfile, pyarrow as pa
        >>> from pyarrow import parquet
        >>> with tempfile.TemporaryDirectory() as path:
        ...     parquet.write_table(pa.table({"x": [1, 2, 3]}), f"{path}/a.parquet", row_group_size=2)
        ...     stream = ParquetStream(path)
        ...     print([shard.num_rows for shard in stream.shards()], len(stream.batch(2)))
        [2, 1] 2
    """

    endings = (".parquet", ".pq")

    def shards(self) -> Sequence[Shard]:
        if len(self.files) >= NUM_LANES:
            return super().shards()
        return [
            Shard(f"{file.shard}#{group}", num_rows, version)
            for file, lengths, version in zip(self.files, self._row_groups, self.versions, strict=True)
            for group, num_rows in enumerate(lengths)
        ]

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        name, _, group = shard.rpartition("#")
        if name not in self._by_shard:
            return super().open_some(shard, start, is_needed)
        return self._rows_of(self._by_shard[name], start, [int(group)])

    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        return self._rows_of(file, start, None)

    @cached_property
    def _row_groups(self) -> list[list[int]]:
        """The lengths of the row groups of each file."""
        return [self._lengths_of(file) for file in self.files]

    def _lengths_of(self, file: StreamFile) -> list[int]:
        try:
            with self._content(file) as content:
                return _lengths(self._table(content))
        except Exception as error:
            raise StreamError(f"{file.shard!r} cannot be read: {type(error).__name__}: {error}") from error

    def _table(self, content: Any) -> Any:
        """Open a file that has all columns to read, where `a.b` is the column `b` in the column `a`."""
        table = require("pyarrow.parquet", "storage", "`ParquetStream`").ParquetFile(content)
        paths = [f"{table.metadata.schema.column(number).path}." for number in range(table.metadata.num_columns)]
        missing = [name for name in self._columns or () if not any(path.startswith(f"{name}.") for path in paths)]
        if missing:
            raise ValueError(f"`columns={missing}` are not in it: it has {table.schema_arrow.names}.")
        return table

    def _rows_of(self, file: StreamFile, start: int, groups: list[int] | None) -> Iterator[Any]:
        with self._content(file) as content:
            table = self._table(content)
            lengths = _lengths(table)
            groups = list(range(len(lengths))) if groups is None else groups
            while groups and start >= lengths[groups[0]]:
                start -= lengths[groups.pop(0)]
            num_bytes = sum(table.metadata.row_group(group).total_byte_size for group in groups)
            num_at_once = _num_at_once(num_bytes, sum(lengths[group] for group in groups))
            batches = table.iter_batches(num_at_once, groups, self._columns) if groups else ()
            yield from _rows_from(batches, start)


class ArrowStream(TableStream):
    """Rows of Arrow's own files, in both of its formats, also as `datasets` writes them."""

    endings = (".arrow", ".feather", ".ipc")

    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        ipc = require("pyarrow.ipc", "storage", "`ArrowStream`")
        with self._content(file) as content:
            is_stream = content.read(len(_MAGIC)) != _MAGIC
            content.seek(0)
            options = ipc.IpcReadOptions(use_threads=False)
            if is_stream:
                batches: Iterable[Any] = ipc.open_stream(content, options=options)
            else:
                table = ipc.open_file(content, options=options)
                batches = map(table.get_batch, range(table.num_record_batches))
            chosen = batches if self._columns is None else (batch.select(self._columns) for batch in batches)
            yield from _rows_from(chosen, start)


def _lengths(table: Any) -> list[int]:
    return [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]


def _num_at_once(num_bytes: int, num_rows: int) -> int:
    """Returns how many rows to make at a time: each of many lanes keeps them."""
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * num_rows // max(1, num_bytes)))


def _rows_from(batches: Iterable[Any], start: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of record batches from one on.

    Raises:
        ValueError: There are fewer.
    """
    for batch in batches:
        num_at_once = _num_at_once(batch.nbytes, batch.num_rows)
        for first in range(start, batch.num_rows, num_at_once):
            yield from _rows_of_batch(batch.slice(first, num_at_once))
        start = max(0, start - batch.num_rows)
    if start:
        raise ValueError(f"the shard ends {start} rows ahead of the row to begin with.")


def _rows_of_batch(batch: Any) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for values in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: Any) -> Any:
    """Return what is in a column, row by row: of each row the same, whichever rows are beside it."""
    types = require("pyarrow.types", "storage", "`TableStream`")
    if not types.is_fixed_size_list(column.type) or not types.is_primitive(column.type.value_type):
        return column.to_pylist()
    if not column.null_count and not column.flatten().null_count:
        values = np.array(column.flatten().to_numpy(zero_copy_only=False))  # a copy, which may be written to
        return values.reshape(len(column), column.type.list_size)
    if len(column) == 1:
        return column.to_pylist()
    return [_values(column.slice(number, 1))[0] for number in range(len(column))]
