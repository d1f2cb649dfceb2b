"""Sinks: classes that write metrics, and a wrapper that turns their failures into warnings.

The formats of files are JSON lines, a JSON list, a CSV table, and TensorBoard event files.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from raysgd.core.files import inside, replacing
from raysgd.core.imports import require, require_installed
from raysgd.core.numbers.results import flattened
from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import masked
from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0


@dataclass(frozen=True)
class RunInFolder:
    """A stand-in for a run: a folder, a config and a name. It is for sinks that need no other part of a run."""

    folder: Path
    config: Any = None
    name: str | None = None


class Sink(ABC):
    """Writes a run's rows of metrics to one destination in one format. Methods raise errors instead of logging them.

    Before `open`, a sink is plain data that can be copied and pickled.
    """

    @abstractmethod
    def open(self, run: Any, first_step: int | None = None) -> None:
        """Start writing for a run.

        Args:
            run: The run, with the attributes `folder`, `config` and `name`. A sink that does not write to the folder
                must not read `folder`, because reading it may create the folder.
            first_step: The epoch, or the `training_iteration`, from which the run continues. Later rows in the
                destination come from a previous run. Sinks that can remove rows remove them. 0 for a new run. None to
                keep all rows.
        """

    @abstractmethod
    def write(self, row: Any, step: int) -> None:
        """Write one row of metrics to the destination."""

    def close(self, *, has_failed: bool = False) -> None:  # noqa: B027
        """Close the sink, even if `open` failed halfway. The sink may be opened again for the next run.

        Args:
            has_failed: True if the run has failed.
        """


class FileSink(Sink):
    """Base class of sinks that write one file. When `write` returns, the row is completely in the file.

    Args:
        name: The file: an absolute path, or a name in the run's folder.

    Attributes:
        path: The file's path. Before `open`, the file's name.
        last_step: If a run continues in the middle of an epoch, rows of that epoch are kept up to this step. None to
            keep no rows of that epoch.
    """

    last_step: int | None = None

    def __init__(self, name: str | Path) -> None:
        self._name = self.path = Path(name)

    def open(self, run: Any, first_step: int | None = None) -> None:
        self.path = place_in(run, self._name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(first_step)

    @abstractmethod
    def _begin(self, first_step: int | None) -> None:
        """Create the file. If the file exists, remove the rows after `first_step`.

        Args:
            first_step: The epoch, or the `training_iteration`, from which the run continues. See `Sink.open`.
        """


def place_in(run: Any, name: Path) -> Path:
    """Return the path of a file in a run's folder. If `name` is an absolute path, return it unchanged.

    Raises:
        OSError: A link leads out of the run's folder.
    """
    return name if name.is_absolute() else inside(run.folder, name)


class SafeSink:
    """Wraps a sink so that failed writes become warnings, one per error type. Later rows are still written.

    Errors in `close` become warnings, too.

    Args:
        sink: The sink to write to.
        owner: Name by which warnings refer to the sink.
        hidden: Names of metrics that are not written.
    """

    def __init__(self, sink: Sink, owner: str, hidden: Collection[str] = ()) -> None:
        self._sink, self._hidden = sink, hidden
        self._owner, self._warned = owner, Once()
        self._run: Any = None
        self._first_step: int | None = None
        self._is_open = False

    def warns(self) -> AbstractContextManager[None]:
        """Return a context manager that turns an exception raised in the `with` block into a warning."""
        return failures_warned(self._owner, self._warned)

    def open(self, run: Any, first_step: int | None = None) -> None:
        """Open the wrapped sink.

        Raises:
            Exception: The sink cannot be opened. Each later `write` tries to open it again.
        """
        self.begin(run, first_step)
        self._open_once()

    def begin(self, run: Any, first_step: int | None = None) -> None:
        """Set the run without opening the wrapped sink. The first `write` opens the sink."""
        self._run, self._first_step, self._is_open = run, first_step, False

    def write(self, row: Any, step: int) -> None:
        """Write one row to the wrapped sink. If that fails, log a warning."""
        with self.warns():
            self._open_once()
            shown = {name: row[name] for name in row if name not in self._hidden} if self._hidden else row
            self._sink.write(shown, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the wrapped sink if it is open. If that fails, log a warning."""
        with self.warns():
            if self._is_open:
                self._is_open, self._run = False, None
                self._sink.close(has_failed=has_failed)

    def _open_once(self) -> None:
        if self._is_open:
            return
        assert self._run is not None, "a sink is opened before it is written to"

        def end() -> None:
            with suppress(Exception):  # the sink may be half open, so closing it may fail
                self._sink.close(has_failed=True)

        with OnFailure(end):
            self._sink.open(self._run, self._first_step)
        self._is_open = True


@contextmanager
def failures_warned(owner: str, warned: Once) -> Iterator[None]:
    """Turn an exception raised in the `with` block into a warning, once per error type.

    Args:
        owner: Name by which the warning refers to the failing object.
        warned: Remembers for which error types a warning was logged.
    """
    try:
        yield
    except Exception as error:  # no error, whether caused by a disk, a service or a bug, may end a long run
        kind = type(error).__name__
        if warned.is_first(kind):
            logger.warning(
                "%s: could not write (%s: %s); the run continues, and the next result is tried again",
                owner,
                kind,
                masked(str(error)),
            )


class SafeFallbackEncoder(json.JSONEncoder):
    """Encodes arrays as lists, NumPy scalars as numbers, and all other values that JSON does not support as strings."""

    def default(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, np.generic):
            return value.item()
        return str(value)


class JsonLines(FileSink):
    """Writes one JSON object per line.

    If the disk was full or the process was killed, the last line may be cut off. Writing then continues on a new line.

    Args:
        name: The file: an absolute path, or a name in the run's folder.
        last: Entries to add at the end of each line.
        strict: True to write NaN and infinity as null. False to write them as `NaN` and `Infinity`.
    """

    def __init__(self, name: str | Path, last: Mapping[str, Any] | None = None, *, strict: bool = True) -> None:
        super().__init__(name)
        self._strict = strict
        self._last = as_json(dict(last), strict=strict)[1:] if last else "}"

    def _begin(self, first_step: int | None) -> None:
        if first_step is not None and self.path.exists():
            keep_lines(self.path, first_step, self.last_step)
        open_to_append(self.path).close()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        text = as_json(dict(row), strict=self._strict)[:-1]
        separator = ", " if row and self._last != "}" else ""
        with open_to_append(self.path) as file:
            file.write(f"{text}{separator}{self._last}\n".encode())


def keep_lines(path: Path, step: int, last_step: int | None = None) -> None:
    """Remove all lines from a file of JSON lines except the reports for which `is_until` returns True.

    Args:
        path: The file to rewrite.
        step: The last epoch, or the last `training_iteration`, to keep.
        last_step: In the epoch after `step`, keep the reports up to this step. None to keep no reports from that epoch.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (report := report_in(line)) is not None and is_until(step, report, last_step)]
    with replacing(str(path)) as file:
        file.write("".join(f"{line}\n" for line in kept).encode())


def is_until(step: int, report: Mapping[str, Any], last_step: int | None = None) -> bool:
    """Return True if a report's number is at most `step`, or if `last_step` includes the report.

    A report's number is its epoch. The number of a training function's report is its `training_iteration`. Return False
    for a report without a number.

    Args:
        step: The last epoch, or the last `training_iteration`, that counts.
        report: The report, a dict of metrics.
        last_step: In the epoch after `step`, reports count if their own step is at most `last_step`. None if no reports
            from that epoch count.
    """
    try:
        number = int(report.get("training_iteration") or report["epoch"])
        is_inside = last_step is not None and number == step + 1 and int(report["step"]) <= last_step
        return number <= step or is_inside
    except (KeyError, TypeError, ValueError):
        return False


def report_in(line: str) -> dict[str, Any] | None:
    """Return the report in a line of JSON.

    Return None if the line is not a JSON dict, for example because it was cut off.
    """
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


class JsonList(FileSink):
    """Writes a file that contains one JSON list. The file is valid JSON after each row.

    An existing file is replaced.
    """

    def _begin(self, first_step: int | None) -> None:
        self._num_bytes = self.path.write_text("[]") - 1

    def write(self, row: Any, step: int) -> None:
        """Write a row before the list's closing bracket. This works even if writing an earlier row has failed."""
        text = f"{', ' if self._num_bytes > 1 else ''}{as_json(row)}".encode()
        with open(self.path, "r+b") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(text + b"]")
        self._num_bytes += len(text)


def as_json(value: Any, indent: int | None = None, *, strict: bool = True) -> str:
    """Encode a value as JSON. Values and keys that JSON does not support become strings.

    NaN and infinity become null. With `strict=False`, they are written as `NaN` and `Infinity`.
    """
    dump = partial(json.dumps, cls=SafeFallbackEncoder, indent=indent, allow_nan=not strict)
    try:
        return dump(value)
    # Raised for keys that are not strings, a dict that contains itself, NaN, or very deep nesting.
    except (TypeError, ValueError, RecursionError):
        return dump(_plain(value, strict, depth=0))


def _plain(value: Any, strict: bool, depth: int) -> Any:
    if depth > 50:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _plain(each, strict, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, strict, depth + 1) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), strict, depth + 1)
    return None if strict and isinstance(value, float) and not math.isfinite(value) else value


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file of lines for appending. If its last line has no line break, add a line break.

    Close the file after each report, because a file object on which a write failed may reject all later writes.
    """
    file = open(path, "ab+")  # noqa: SIM115
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


class CsvTable(FileSink):
    """Writes metrics to a CSV table. Metrics in nested dicts get columns such as `val/loss`.

    If a row has a new metric, the whole table is rewritten with an additional column.
    """

    def _begin(self, first_step: int | None) -> None:
        if first_step == 0 and self.last_step is None:  # a new run, which may have other columns
            self.path.unlink(missing_ok=True)
        self._columns = _columns_in(self.path)
        if first_step is not None and self.path.exists():
            self._rewrite(partial(is_until, first_step, last_step=self.last_step))
        open_to_append(self.path).close()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        flat = flattened(row)
        added = [key for key in flat if key not in self._columns]
        if added:
            self._columns = self._rewrite(lambda row: True, added)
        with open_to_append(self.path) as file:
            file.write(_encoded(self._columns, [flat]))

    def _rewrite(self, is_kept: Callable[[Mapping[str, Any]], bool], added: Sequence[str] = ()) -> list[str]:
        """Rewrite the table with only some of its rows. Return the names of all columns.

        Args:
            is_kept: Returns True for the rows to keep.
            added: Names of columns to add.
        """
        columns = [*self._columns, *added]
        with _reading(self.path) as lines:
            rows = [row for row in csv.DictReader(lines) if is_kept(row)]
        with replacing(str(self.path)) as new:
            new.write(_encoded(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        return columns


def _columns_in(path: Path) -> list[str]:
    """Return the columns of an existing table, or an empty list if there is no file."""
    if not path.exists():
        return []
    with _reading(path) as lines:
        return next(csv.reader(lines), [])


@contextmanager
def _reading(path: Path) -> Iterator[Iterator[str]]:
    """Yield the lines of a table, even if the table is damaged.

    Null bytes are removed, because `csv` in Python 3.10 rejects them.
    """
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        yield (line.replace("\0", "") for line in file)


def _encoded(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class EventFile(Sink):
    """Writes metrics to a TensorBoard event file. A background thread flushes the file within two seconds.

    tensorboardX imports PyTorch, which takes a second if the driver has not imported it. Another thread therefore opens
    the file after the first row. The start of a run never waits for the import. `close` waits for it, and `write` waits
    only with `flushes`.

    Args:
        folder: The file's folder: an absolute path, or a path relative to the run's folder. "" stands for the run's
            folder.
        prefix: Prefix of all metric names, without a trailing slash. "" for no prefix.
        flushes: True to flush each row before `write` returns.
        purpose: What needs tensorboardX, for the error if it is not installed.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    VALID_SUMMARY_TYPES = (int, float, np.float32, np.float64, np.int32, np.int64)

    def __init__(
        self, folder: str | Path, prefix: str, *, flushes: bool = False, purpose: str = "a file for TensorBoard"
    ) -> None:
        require_installed("tensorboardX", extra="tensorboard", purpose=purpose)
        self._folder, self._prefix, self._flushes = Path(folder), f"{prefix}/" if prefix else "", flushes
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._once = Once()
        self._opener: ThreadPoolExecutor | None = None

    def open(self, run: Any, first_step: int | None = None) -> None:
        self._path = place_in(run, self._folder)
        self._path.mkdir(parents=True, exist_ok=True)
        self._opener, self._waiting = None, []

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Write a row of metrics. If the file is not open yet, store the row for a later `write` or `close`.

        Skip NaN without a warning, and unsupported values with one warning per name.
        """
        self._waiting.append((dict(row), step))
        if self._opener is None:
            self._opener = ThreadPoolExecutor(1, thread_name_prefix="raysgd-tensorboard")
            self._opening = self._opener.submit(_writer_in, self._path)
        if self._flushes or self._opening.done():
            self._write_waiting()

    def close(self, *, has_failed: bool = False) -> None:
        """Write the rows that are still stored, then close the file and end its threads."""
        opener, self._opener = self._opener, None
        if opener is None:
            return
        opener.shutdown()
        try:
            self._write_waiting()
        finally:
            self._opening.result().close()

    def _write_waiting(self) -> None:
        writer = self._opening.result()
        # If writing a row fails, the rows after it stay stored and are tried again on the next call.
        while self._waiting:
            self._write_row(writer, *self._waiting.pop(0))
        if self._flushes:
            writer.flush()

    def _write_row(self, writer: Any, row: Mapping[str, Any], step: int) -> None:
        scalars = {}
        for name, value in flattened(row).items():
            value = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
            if not isinstance(value, self.VALID_SUMMARY_TYPES):
                self._write_value(writer, f"{self._prefix}{name}", value, step)
            elif not math.isnan(value):
                scalars[f"{self._prefix}{name}"] = value
        _write_scalars(writer, scalars, step)

    def _write_value(self, writer: Any, name: str, value: Any, step: int) -> None:
        if isinstance(value, np.ndarray) and value.ndim == 5:
            writer.add_video(name, value, global_step=step, fps=20)
        elif isinstance(value, list | np.ndarray) and len(value) > 0:
            try:
                writer.add_histogram(name, value, global_step=step)
            except (TypeError, ValueError):  # raised for a list that contains anything but numbers
                self._warn(name, value)
        elif not isinstance(value, Mapping):
            self._warn(name, value)

    def _warn(self, name: str, value: Any) -> None:
        if self._once.is_first(name):
            logger.warning("`%s` is not written for TensorBoard, because its value is a %s", name, type(value).__name__)


def _writer_in(folder: Path) -> Any:
    tensorboard = require("tensorboardX", extra="tensorboard", purpose="a file for TensorBoard")
    return tensorboard.SummaryWriter(str(folder), flush_secs=_FLUSH_S)


def _write_scalars(writer: Any, scalars: Mapping[str, Any], step: int) -> None:
    """Write all scalars of a row in a single event, because each event wakes the thread that writes the file."""
    summary = require("tensorboardX.summary", extra="tensorboard", purpose="a file for TensorBoard")
    if scalars:
        first, *others = (summary.scalar(name, value) for name, value in scalars.items())
        for other in others:
            first.MergeFrom(other)
        writer.file_writer.add_summary(first, step)
