"""Metrics as a table in a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from raysgd._files.atomic_file import replacing
from raysgd._numbers.nested import flattened
from raysgd.writers.json_files import is_until, open_to_append
from raysgd.writers.sink import FileSink


class CsvTable(FileSink):
    """Writes a table. Nested metrics have columns such as `val/loss`; a new metric adds a column to the whole table."""

    def _begin(self, first_step: int | None) -> None:
        self._columns = _columns_in(self.path)
        if first_step is not None and self.path.exists():
            self._rewrite(partial(is_until, first_step))
        open_to_append(self.path).close()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        flat = flattened(row)
        added = [key for key in flat if key not in self._columns]
        if added:
            self._columns = self._rewrite(lambda row: True, added)
        with open_to_append(self.path) as file:
            file.write(_encoded(self._columns, [flat]))

    def _rewrite(self, is_kept: Callable[[Mapping[str, Any]], bool], added: Sequence[str] = ()) -> list[str]:
        """Write the rows that are kept with more columns, and return the columns."""
        columns = [*self._columns, *added]
        with _reading(self.path) as lines:
            rows = [row for row in csv.DictReader(lines) if is_kept(row)]
        with replacing(str(self.path)) as new:
            new.write(_encoded(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        return columns


def _columns_in(path: Path) -> list[str]:
    """Return the columns of the run that this one continues."""
    if not path.exists():
        return []
    with _reading(path) as lines:
        return next(csv.reader(lines), [])


@contextmanager
def _reading(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a table, also of one that is damaged: without zero bytes, which `csv` of Python 3.10 refuses."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        yield (line.replace("\0", "") for line in file)


def _encoded(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
