"""`JSONLinesStream`: files with one value in JSON on each line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.streams.formats.files import FileStream, StreamFile
from raysgd.streams.stream import from_row


class JSONLinesStream(FileStream):
    """Rows are what `json.loads` makes of each line that is not empty. Files may be compressed with gzip.

    Arguments and errors are those of `FileStream`. A file is read from its beginning to get to a row in the middle.
    """

    endings = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")

    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        with file.folder.reading(file.name) as content:
            lines = gzip.GzipFile(fileobj=content) if file.name.endswith(".gz") else content
            for number, line in enumerate(from_row(filter(bytes.strip, lines), start), start):
                yield json.loads(line) if is_needed(number) else None
