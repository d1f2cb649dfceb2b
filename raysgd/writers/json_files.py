"""Metrics as JSON: a line for each report, or a list of all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from raysgd._files.atomic_file import replacing
from raysgd.writers.sink import FileSink


class SafeFallbackEncoder(json.JSONEncoder):
    """Writes arrays as lists, scalars of numpy as numbers, and everything else that JSON does not know as text."""

    def default(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, np.generic):
            return value.item()
        return str(value)


class JsonLines(FileSink):
    """Writes one JSON object a line. One that was cut off, by a full disk or a killed driver, stays alone in its line.

    Args:
        name: The file.
        last: What stands at the end of each line.
    """

    def __init__(self, name: str | Path, last: Mapping[str, Any] | None = None) -> None:
        super().__init__(name)
        self._last = as_json(dict(last))[1:] if last else "}"

    def _begin(self, first_step: int | None) -> None:
        if first_step is not None and self.path.exists():
            keep_lines(self.path, first_step)
        open_to_append(self.path).close()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        text = as_json(dict(row))[:-1]
        separator = ", " if row and self._last != "}" else ""
        with open_to_append(self.path) as file:
            file.write(f"{text}{separator}{self._last}\n".encode())


def keep_lines(path: Path, step: int) -> None:
    """Leave only the reports until a step in a file of lines. What is no report goes too."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (report := report_in(line)) is not None and is_until(step, report)]
    with replacing(str(path)) as file:
        file.write("".join(f"{line}\n" for line in kept).encode())


def is_until(step: int, report: Mapping[str, Any]) -> bool:
    """Return whether a report is of one of the first epochs; or of the first reports, which functions have."""
    try:
        return int(report.get("training_iteration") or report["epoch"]) <= step
    except (KeyError, TypeError, ValueError):
        return False


def report_in(line: str) -> dict[str, Any] | None:
    """Return the report in a line; None where it is not whole, as after a kill."""
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


class JsonList(FileSink):
    """Writes a file that is one list, whole after each row. A file that is there is replaced by an empty list."""

    def _begin(self, first_step: int | None) -> None:
        self._num_bytes = self.path.write_text("[]") - 1

    def write(self, row: Any, step: int) -> None:
        """Put a row before the closing bracket, also of a file where one before could not be written."""
        text = f"{', ' if self._num_bytes > 1 else ''}{as_json(row)}".encode()
        with open(self.path, "r+b") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(text + b"]")
        self._num_bytes += len(text)


def as_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON. What JSON does not know is written as text, also as a key; NaN and infinity as null."""
    try:
        return json.dumps(value, cls=SafeFallbackEncoder, indent=indent, allow_nan=False)
    except (TypeError, ValueError):  # keys that are not text, a dict inside of itself, or NaN
        return json.dumps(_plain(value, depth=0), cls=SafeFallbackEncoder, indent=indent, allow_nan=False)


def _plain(value: Any, depth: int) -> Any:
    if depth > 50:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), depth + 1)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a file of lines to write on. A last line without an end gets one.

    Open it for one report and close it: a handle that has failed would refuse all that follow.
    """
    file = open(path, "ab+")  # noqa: SIM115
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
