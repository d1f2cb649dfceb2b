"""Formats of streams: files, iterables, and streaming datasets of Hugging Face's `datasets`.

Files are on disk or in a store. Usually, each is a shard of the stream: JSON lines, tar files in the layout of
WebDataset, or tables in Parquet or Arrow files.
"""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from raysgd.core.arguments import is_integer
from raysgd.core.imports import require
from raysgd.exceptions import StreamError
from raysgd.storage import Folder, open_folder
from raysgd.storage._transfers import on_threads
from raysgd.storage._uris import checked_text, child_of, divided, is_local
from raysgd.streams.lanes import NUM_LANES
from raysgd.streams.stream import Pipeline, RowStep, Shard, Stream, from_row

_NUM_BYTES = 4096
_NUM_DIGESTS = 64

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
_ROWS_AT_ONCE = 1024
_MAGIC = b"ARROW1"
_NOTE_EVERY = 256
_NUM_STATES = 4
_ROWS_OF_TABLE = 32
_FORMATS = (None, "torch")  # formats in which rows can be converted together without changing the values


class StreamFile(NamedTuple):
    """A file of a stream.

    Attributes:
        folder: The folder that contains the file.
        name: Name of the file in this folder.
    """

    folder: Folder
    name: str

    @property
    def shard(self) -> str:
        """Name of this file as a shard: the path or URI of the file, without credentials."""
        return str(self.folder / self.name)

    @property
    def path(self) -> str:
        """Path of the file in the file system of its folder."""
        return f"{self.folder.path}/{self.name}"

    def version(self, has_digest: bool) -> str:
        """Return a string that usually changes if the content of the file changes.

        Return an empty string if the file is missing, is a folder, or may not be read.

        Args:
            has_digest: If True, return the size, and a hash of the first and the last 4096 bytes. If False, return the
                size of a local file, and an empty string for a file in a store.
        """
        try:
            if not has_digest:
                return str(os.path.getsize(self.path)) if self.folder.is_local else ""
            store = None if self.folder.is_local else self.folder.filesystem
            with open(self.path, "rb") if store is None else store.open_input_file(self.path) as content:
                begin, size = content.read(_NUM_BYTES), content.seek(0, os.SEEK_END)
                content.seek(max(0, size - _NUM_BYTES))
                return f"{size} {blake2b(begin + content.read(_NUM_BYTES), digest_size=8).hexdigest()}"
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return ""  # reading the rows of the file will raise the error again


class FileStream(Stream):
    """Base class of streams that read files. Files are ordered as in `paths`, and then by name.

    Each file is a shard, unless a subclass divides files into several shards.

    Args:
        paths: A path or several paths: a file, a folder (all its files with a supported ending are read), or a path
            with a pattern as its last component, such as `"s3://bucket/data/part-*.parquet"`.

    Raises:
        TypeError: `paths` contains an object that is not a path.
        ValueError: `paths` is empty.
    """

    endings: ClassVar[tuple[str, ...]]

    def __init__(self, paths: Paths) -> None:
        several = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else paths
        self._paths = [checked_text("paths", path) for path in several]
        if not self._paths:
            raise ValueError("`paths=[]`: need at least one file, folder or pattern.")

    @cached_property
    def files(self) -> list[StreamFile]:
        """The files of the stream. The first access searches `paths` for them.

        Raises:
            FileNotFoundError: A folder has no file with a supported ending, or no file matches a pattern. Whether a
                single file exists is not checked here.
            ValueError: A path is a local file whose ending is not supported.
        """
        return [file for path in self._paths for file in self._found(path)]

    @cached_property
    def versions(self) -> list[str]:
        """The version of each file, as `StreamFile.version` returns it. At most 64 evenly spaced files are hashed."""
        chosen = {file.shard for file in self.files[:: -(-len(self.files) // _NUM_DIGESTS)]}
        versions = on_threads(lambda name: self._by_shard[name].version(name in chosen), self._by_shard)
        return [versions[file.shard] for file in self.files]

    def shards(self) -> Sequence[Shard]:
        return [Shard(file.shard, None, version) for file, version in zip(self.files, self.versions, strict=True)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        return self._rows(self._by_shard[shard], start)

    @abstractmethod
    def _rows(self, file: StreamFile, start: int) -> Iterator[Any]:
        """Yield the rows of a file from row number `start` on, counted from 0."""

    @cached_property
    def _by_shard(self) -> dict[str, StreamFile]:
        return {file.shard: file for file in self.files}

    def _found(self, path: str) -> list[StreamFile]:
        parent, name = _divided(path)
        is_pattern = any(each in name for each in "*?[")
        # A folder may have the ending of a file. Spark, for example, writes folders with names such as `x.parquet`.
        if not is_pattern and name.endswith(self.endings) and not os.path.isdir(path):
            return [StreamFile(open_folder(parent, argument="paths"), name)]
        if not is_pattern and is_local(path) and os.path.isfile(path):
            known = " or ".join(map(repr, self.endings))
            raise ValueError(f"`paths={path!r}`: a `{type(self).__name__}` reads files that end with {known}.")
        folder = open_folder(parent if is_pattern else path, argument="paths")
        names = [
            each for each in folder.names() if (fnmatchcase(each, name) if is_pattern else each.endswith(self.endings))
        ]
        if not names:
            what = f"that fits {name!r}" if is_pattern else f"that ends with {' or '.join(self.endings)}"
            raise FileNotFoundError(f"`paths`: {folder} has no file {what}.")
        return [StreamFile(folder, each) for each in names]


def _divided(path: str) -> tuple[str, str]:
    """Split a path or URI into its parent and its last component, which is empty if the path ends with a slash."""
    if is_local(path):
        parent, slash, name = path.rpartition("/")
        return parent or slash or ".", name
    store, inside, query = divided(path)
    parent, _, name = inside.rpartition("/")
    return child_of(store + query, parent), "" if path.removesuffix(query).endswith("/") else name


class _Lines(FileStream):
    """Stream whose rows are the lines of text files, as bytes. Empty lines are left out."""

    endings = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")

    def _rows(self, file: StreamFile, start: int) -> Iterator[Any]:
        with file.folder.reading(file.name) as content:
            lines = gzip.GzipFile(fileobj=content) if file.name.endswith(".gz") else content
            yield from from_row(filter(bytes.strip, lines), start)


class JSONLinesStream(_Lines):
    """Reads JSON lines. Each non-empty line, parsed with `json.loads`, is a row. Files may be gzip-compressed.

    Arguments and errors are the same as for `FileStream`. To continue at a row, the file with this row is read from its
    beginning.
    """

    def open(self, shard: str, start: int) -> Iterator[Any]:
        return map(json.loads, super().open(shard, start))

    def _pipeline(self) -> Pipeline:
        """Return a pipeline that reads lines, and parses each line in a `map` step.

        If a line cannot be parsed, this step fails, and the row can be skipped without affecting later lines.
        """
        if type(self) is not JSONLinesStream:  # a subclass may make its rows in another way
            return super()._pipeline()
        return Pipeline(_Lines(self._paths), (RowStep(json.loads, is_filter=False, is_seeded=False),))


class TarStream(FileStream):
    """Reads tar files. Consecutive members form a row if their names differ only after the first dot of the file name.

    A row is a dict. For example, `a/0.jpg` and `a/0.cls` become `{"__key__": "a/0", "jpg": b"...", "cls": b"..."}`.
    Decode the bytes with `map`. Tar files may be compressed. To continue at a row of an uncompressed file, earlier rows
    are skipped without reading their content. Arguments and errors are the same as for `FileStream`.
    """

    endings = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        return self._rows(self._by_shard[shard], start, is_needed)

    def _rows(
        self, file: StreamFile, start: int, is_needed: Callable[[int], bool] = lambda number: True
    ) -> Iterator[Any]:
        with file.folder.reading(file.name) as content, tarfile.open(fileobj=content, mode="r:*") as tar:
            samples = groupby(_members(tar), key=lambda member: _key_and_field(member.name)[0])
            for number, (key, members) in enumerate(from_row(samples, start), start):
                yield _sample(tar, key, members) if is_needed(number) else None


def _members(tar: Any) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # otherwise, `tar` would keep information about every member in memory
        if member.isreg():
            yield member
    # `tarfile` stops without an error at anything that it cannot read. Check for the block that marks the end of the
    # archive, because a truncated file would otherwise look like a shorter file.
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the file is truncated or damaged: its end marker is missing")


def _key_and_field(name: str) -> tuple[str, str]:
    """Split the name of a tar member into the key of its row and the name of the field in the row.

    The name is split at the first dot of its last component.

    >>> _key_and_field("a.b/0.seg.png")
    ('a.b/0', 'seg.png')
    """
    folder, slash, last = name.rpartition("/")
    key, _, field = last.partition(".")
    return f"{folder}{slash}{key}", field


def _sample(tar: tarfile.TarFile, key: str, members: Iterator[tarfile.TarInfo]) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": key}
    for member in members:
        field = _key_and_field(member.name)[1]
        if field in sample:
            raise ValueError(f"sample {key!r} has two files {field!r}: each sample of a tar file needs its own name.")
        content = tar.extractfile(member)
        assert content is not None, "a regular file"
        sample[field] = content.read()
    return sample


_BYTES_AT_ONCE = 2**20


class TableStream(FileStream):
    """Base class of streams that read tables. Each row is a dict from column names to values.

    Fixed-size lists of numbers become NumPy arrays, unless they contain nulls.

    Args:
        paths: The same as for `FileStream`.
        columns: Names of the columns to read. Default: all columns.

    Raises:
        TypeError: `columns` is a string.
        ModuleNotFoundError: PyArrow is not installed.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        super().__init__(paths)
        if isinstance(columns, str):
            raise TypeError(f"`columns={columns!r}`: need a list of names, or None.")
        self._columns = None if columns is None else list(columns)
        require("pyarrow", "storage", f"`{type(self).__name__}`")

    def _content(self, file: StreamFile) -> AbstractContextManager[Any]:
        return file.folder.filesystem.open_input_file(file.path)


class ParquetStream(TableStream):
    """Reads Parquet files. To continue at a row, the stream skips the whole row groups before this row.

    If there are fewer than 64 files (the number of lanes), each row group is a shard of known length. Otherwise, each
    file is a shard. The lengths of the files are then unknown, because finding them would require opening every file.

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

    def open(self, shard: str, start: int) -> Iterator[Any]:
        name, _, group = shard.rpartition("#")
        if name not in self._by_shard:
            return super().open(shard, start)
        return self._rows(self._by_shard[name], start, int(group))

    @cached_property
    def _row_groups(self) -> list[list[int]]:
        """For each file, the number of rows in each of its row groups."""
        lengths = []
        for file in self.files:
            try:
                with self._content(file) as content:
                    lengths.append(_lengths(self._table(content)))
            except Exception as error:  # file systems may raise any exception
                raise StreamError(f"{file.shard!r} cannot be read: {type(error).__name__}: {error}") from error
        return lengths

    def _table(self, content: Any) -> Any:
        """Open a Parquet file, and check that it has all columns that the user asked for.

        `a.b` is the column `b` inside the column `a`.
        """
        table = require("pyarrow.parquet", "storage", "`ParquetStream`").ParquetFile(content)
        paths = [f"{table.metadata.schema.column(number).path}." for number in range(table.metadata.num_columns)]
        missing = [name for name in self._columns or () if not any(path.startswith(f"{name}.") for path in paths)]
        if missing:
            raise ValueError(f"`columns={missing}` are not in the file. Available: {table.schema_arrow.names}.")
        return table

    def _rows(self, file: StreamFile, start: int, group: int | None = None) -> Iterator[Any]:
        with self._content(file) as content:
            table = self._table(content)
            lengths = _lengths(table)
            groups = list(range(len(lengths))) if group is None else [group]
            while groups and start >= lengths[groups[0]]:
                start -= lengths[groups.pop(0)]
            num_bytes = sum(table.metadata.row_group(group).total_byte_size for group in groups)
            num_at_once = _num_at_once(num_bytes, sum(lengths[group] for group in groups))
            batches = table.iter_batches(num_at_once, groups, self._columns) if groups else ()
            yield from _rows_from(batches, start)


class ArrowStream(TableStream):
    """Reads Arrow files in the IPC file format, or in the IPC stream format (as Hugging Face's `datasets` writes)."""

    endings = (".arrow", ".feather", ".ipc")

    def _rows(self, file: StreamFile, start: int) -> Iterator[Any]:
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
    """Return how many rows of a table to convert at a time: as many as take about 1 MiB, but at most 1024.

    A worker reads many files at the same time, and buffers this many rows of each file.

    Args:
        num_bytes: Size of the table in bytes.
        num_rows: Number of rows in the table.
    """
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * num_rows // max(1, num_bytes)))


def _rows_from(batches: Iterable[Any], start: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow record batches from row number `start` on.

    Raises:
        ValueError: The batches have fewer than `start` rows.
    """
    for batch in batches:
        names, num_at_once = batch.schema.names, _num_at_once(batch.nbytes, batch.num_rows)
        for first in range(start, batch.num_rows, num_at_once):
            for values in zip(*map(_values, batch.slice(first, num_at_once).columns), strict=True):
                yield dict(zip(names, values, strict=True))
        start = max(0, start - batch.num_rows)
    if start:
        raise ValueError(f"the shard ends {start} rows before the first row to read.")


def _values(column: Any) -> Any:
    """Convert a column to a sequence with one value per row.

    The type of a value must not depend on which other rows are converted at the same time.
    """
    types = require("pyarrow.types", "storage", "`TableStream`")
    if not types.is_fixed_size_list(column.type) or not types.is_primitive(column.type.value_type):
        return column.to_pylist()
    if not column.null_count and not column.flatten().null_count:
        values = np.array(column.flatten().to_numpy(zero_copy_only=False))  # copied, so that users may change the rows
        return values.reshape(len(column), column.type.list_size)
    if len(column) == 1:
        return column.to_pylist()
    return [_values(column.slice(number, 1))[0] for number in range(len(column))]


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
        blocks = ([row] for row in part) if self._formatter is None else map(self._formatted, part.iter(_ROWS_OF_TABLE))
        for block in blocks:
            at, before = at + len(block), at
            if at // _NOTE_EVERY > before // _NOTE_EVERY:
                note((at, part.state_dict()))
            yield from block

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
