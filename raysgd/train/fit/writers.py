"""The files of a trial: `result.json`, `progress.csv`, TensorBoard's, `params.json`, `error.txt`.

They have the names and the content that Ray Tune gives them. Each report is on the disk when its call returns, except
for TensorBoard's file, which follows within seconds: a driver that is killed loses at most the report it was writing.
"""

from __future__ import annotations

import abc
import csv
import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from raysgd._atomic_file import replacing
from raysgd._once import Once
from raysgd._optional import require_installed
from raysgd.air.constants import ERROR_FILE, ERROR_PICKLE_FILE, RESULT_FILE
from raysgd.air.result import flattened
from raysgd.train.callbacks._event_file import EventFile
from raysgd.train.callbacks.logging import SafeFallbackEncoder

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.csv"
PARAMS_FILE = "params.json"
PARAMS_PICKLE_FILE = "params.pkl"
_NOT_FOR_TENSORBOARD = frozenset(
    {
        "config",
        "checkpoint_dir_name",
        "date",
        "experiment_tag",
        "hostname",
        "node_ip",
        "pid",
        "time_total_s",
        "timestamp",
        "training_iteration",
        "trial_id",
    }
)


class ReportWriter(abc.ABC):
    """Writes the reports of a trial to one file.

    Attributes:
        tune_name: The logger of Ray Tune that writes the same; with it in `RunConfig(callbacks=...)`, this one does not
            write.
    """

    tune_name: str

    @abc.abstractmethod
    def write(self, result: Mapping[str, Any]) -> None:
        """Writes one report."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file."""


class ResultFile(ReportWriter):
    """Writes one JSON object a line. A line that was cut off when a driver was killed stays alone in its line.

    Args:
        folder: The folder of the trial.
        config: The trial's config, which stands in each line.
    """

    tune_name = "JsonLoggerCallback"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = _appending(folder / RESULT_FILE)
        self._config = f', "config": {as_json(config)}}}\n'

    def write(self, result: Mapping[str, Any]) -> None:
        line = as_json({key: value for key, value in result.items() if key != "config"})
        self._file.write(f"{line[:-1]}{self._config}".encode())

    def close(self) -> None:
        self._file.close()


class ProgressFile(ReportWriter):
    """Writes a table. Nested metrics have columns such as `val/loss`; a new metric adds a column to the whole table.

    Args:
        folder: The folder of the trial.
    """

    tune_name = "CSVLoggerCallback"

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS_FILE
        self._columns = self._found_columns()
        self._file = self._open()

    def write(self, result: Mapping[str, Any]) -> None:
        row = flattened({key: value for key, value in result.items() if key != "config"})
        added = [key for key in row if key not in self._columns]
        if added:
            self._widen(added)
        csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> IO[str]:
        _appending(self._path).close()
        return open(self._path, "a", encoding="utf-8", newline="")

    def _found_columns(self) -> list[str]:
        """The columns of the run that this one continues."""
        if not self._path.exists():
            return []
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            return next(csv.reader(file), [])

    def _widen(self, added: list[str]) -> None:
        self._file.close()
        self._columns = [*self._columns, *added]
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file))
        text = _Table(self._columns)
        for row in rows:
            text.add({key: value for key, value in row.items() if key in self._columns})
        with replacing(str(self._path)) as new:
            new.write(text.encoded())
        self._file = self._open()


class _Table:
    """A table in memory."""

    def __init__(self, columns: list[str]) -> None:
        import io

        self._text = io.StringIO(newline="")
        self._writer = csv.DictWriter(self._text, columns, lineterminator="\n")
        self._writer.writeheader()

    def add(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)

    def encoded(self) -> bytes:
        return self._text.getvalue().encode()


class TensorBoardFile(ReportWriter):
    """Writes what TensorBoard shows.

    tensorboardX imports PyTorch, which takes a second where the driver has not done so. That happens in a thread, from
    the first report on, so that neither the start of a run nor a report waits for it.

    Args:
        folder: The folder of the trial.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    tune_name = "TBXLoggerCallback"

    def __init__(self, folder: Path) -> None:
        require_installed("tensorboardX", extra="tensorboard", purpose="a file for TensorBoard")
        self._folder = folder
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="raysgd-tensorboard")
        self._opening: Future[EventFile] | None = None
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._once = Once()

    def write(self, result: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in result.items() if key not in _NOT_FOR_TENSORBOARD}
        self._waiting.append((shown, int(result["training_iteration"])))
        if self._opening is None:
            self._opening = self._opener.submit(EventFile, self._folder, "ray/tune")
        if self._opening.done():
            self._write_waiting()

    def close(self) -> None:
        self._opener.shutdown()
        if self._opening is not None:
            self._write_waiting()
            if self._opening.exception() is None:
                self._opening.result().close()

    def _write_waiting(self) -> None:
        assert self._opening is not None
        waiting, self._waiting = self._waiting, []
        error = self._opening.exception()
        for metrics, step in waiting if error is None else []:
            self._opening.result().write(metrics, step)
        if error is not None and self._once.is_first("broken"):
            logger.warning("no file for TensorBoard: %s", error)


def open_writers(folder: Path, config: Mapping[str, Any], replaced: frozenset[str] = frozenset()) -> list[ReportWriter]:
    """Opens the files of a trial, to write on where they end.

    Args:
        folder: The folder of the trial.
        config: The trial's config.
        replaced: The loggers of Ray Tune, by name, that the user passed: they write instead.
    """
    writers: list[ReportWriter] = []
    if ResultFile.tune_name not in replaced:
        write_params(folder, config)
        writers.append(ResultFile(folder, config))
    if ProgressFile.tune_name not in replaced:
        writers.append(ProgressFile(folder))
    if TensorBoardFile.tune_name not in replaced:
        try:
            writers.append(TensorBoardFile(folder))
        except ModuleNotFoundError as missing:
            logger.info("no files for TensorBoard: %s", missing)
    return writers


def write_params(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the config as JSON, for people, and as a pickle, for programs."""
    from ray import cloudpickle

    (folder / PARAMS_FILE).write_text(as_json(config, indent=2), encoding="utf-8")
    try:
        content = cloudpickle.dumps(dict(config))
    except Exception as error:  # whatever an object in it raises
        logger.warning("no %s: the config cannot be pickled: %r", PARAMS_PICKLE_FILE, error)
        return
    (folder / PARAMS_PICKLE_FILE).write_bytes(content)


def write_error(folder: Path, error: BaseException, number: int) -> None:
    """Adds an error to `error.txt`, and replaces `error.pkl`, if the error can be pickled.

    Args:
        folder: The folder of the trial.
        error: What a run, or one attempt, ended with.
        number: Which failure of the run it is, from 1.
    """
    from ray import cloudpickle

    date = time.strftime("%Y-%m-%d_%H-%M-%S")
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    with open(folder / ERROR_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"Failure # {number} (occurred at {date})\n{text}\n")
    try:
        content = cloudpickle.dumps(error)
    except Exception as reason:  # whatever an object in it raises
        logger.warning("no %s: the error cannot be pickled: %r", ERROR_PICKLE_FILE, reason)
        return
    with replacing(str(folder / ERROR_PICKLE_FILE)) as pickled:
        pickled.write(content)


def as_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON. What JSON does not know is written as text, also as a key."""
    try:
        return json.dumps(value, cls=SafeFallbackEncoder, indent=indent)
    except (TypeError, ValueError):  # keys that are not text, or a dict inside of itself
        return json.dumps(_plain(value, depth=0), cls=SafeFallbackEncoder, indent=indent)


def _plain(value: Any, depth: int) -> Any:
    if depth > 50:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    return value


def _appending(path: Path) -> IO[bytes]:
    """Opens a file of lines to write on. A last line without an end gets one."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
