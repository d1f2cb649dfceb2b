"""Metrics as a table in a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd._atomic_file import replacing
from raysgd._nested import flattened
from raysgd.writers.json_files import appending


class CsvTable:
    """Writes a table. Nested metrics have columns such as `val/loss`; a new metric adds a column to the whole table.

    Args:
        path: The file; one that is there is continued.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = self._found_columns()
        appending(path).close()

    def write(self, report: Mapping[str, Any]) -> None:
        """Writes a row, which is in the file when this returns."""
        row = flattened(report)
        added = [key for key in row if key not in self._columns]
        if added:
            self._widen(added)
        with appending(self._path) as file:
            file.write(_encoded(self._columns, [row]))

    def _found_columns(self) -> list[str]:
        """The columns of the run that this one continues."""
        if not self._path.exists():
            return []
        with _reading(self._path) as lines:
            return next(csv.reader(lines), [])

    def _widen(self, added: Sequence[str]) -> None:
        columns = [*self._columns, *added]
        with _reading(self._path) as lines:
            rows = list(csv.DictReader(lines))
        with replacing(str(self._path)) as new:
            new.write(_table(columns, rows))
        self._columns = columns


def keep_rows(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leaves only some rows in a table, if there is one. Their values are texts."""
    if not path.exists():
        return
    with _reading(path) as lines:
        reader = csv.DictReader(lines)
        columns, rows = list(reader.fieldnames or ()), [row for row in reader if is_kept(row)]
    with replacing(str(path)) as new:
        new.write(_table(columns, rows))


@contextmanager
def _reading(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a table, also of one that is damaged: without zero bytes, which `csv` of Python 3.10 refuses."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        yield (line.replace("\0", "") for line in file)


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    return _encoded(columns, [dict(zip(columns, columns, strict=True)), *rows])


def _encoded(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
