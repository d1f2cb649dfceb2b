"""`JSONLinesStream`: files with one value in JSON on each line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.streams.formats.files import FileStream, StreamFile
from raysgd.streams.pipeline import Pipeline
from raysgd.streams.row_steps import RowStep
from raysgd.streams.stream import from_row


class _Lines(FileStream):
    """Rows are the lines that are not empty, as bytes."""

    endings = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")

    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        with file.folder.reading(file.name) as content:
            lines = gzip.GzipFile(fileobj=content) if file.name.endswith(".gz") else content
            yield from from_row(filter(bytes.strip, lines), start)


class JSONLinesStream(_Lines):
    """Rows are what `json.loads` makes of each line that is not empty. Files may be compressed with gzip.

    Arguments and errors are those of `FileStream`. A file is read from its beginning to get to a row in the middle.
    """

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        return map(json.loads, super().open_some(shard, start, is_needed))

    def _pipeline(self) -> Pipeline:
        """Return the lines, parsed in a step: a line that cannot be parsed says nothing about the next ones."""
        if type(self) is not JSONLinesStream:  # it may read other rows
            return super()._pipeline()
        return Pipeline(_Lines(self._paths, self._filesystem), (RowStep(json.loads, is_filter=False, is_seeded=False),))
