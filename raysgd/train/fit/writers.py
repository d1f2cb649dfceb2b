"""The files of a trial: `result.json`, `progress.csv`, TensorBoard's, `params.json`, `error.txt`.

They have the names and the content that Ray Tune gives them. Each report is on the disk when its call returns, except
for TensorBoard's file, which follows within seconds: a driver that is killed loses at most the report it was writing.
"""

from __future__ import annotations

import abc
import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd._atomic_file import replacing
from raysgd._secrets import has_secret, masked
from raysgd.air.constants import ERROR_FILE, ERROR_PICKLE_FILE, RESULT_FILE
from raysgd.writers.csv_table import CsvTable
from raysgd.writers.event_file import LateEventFile
from raysgd.writers.failing import never_ends_a_run
from raysgd.writers.json_files import JsonLines, as_json

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

    @never_ends_a_run
    def write(self, result: Mapping[str, Any]) -> None:
        """Writes one report."""
        self._write(result)

    @abc.abstractmethod
    def _write(self, result: Mapping[str, Any]) -> None:
        """Writes one report."""

    def close(self) -> None:  # noqa: B027
        """Closes the file, if it stays open between two reports."""


class ResultFile(ReportWriter):
    """Writes `result.json`, one JSON object a line.

    Args:
        folder: The folder of the trial.
        config: The trial's config, which stands in each line.
    """

    tune_name = "JsonLoggerCallback"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = JsonLines(folder / RESULT_FILE, {"config": config})

    def _write(self, result: Mapping[str, Any]) -> None:
        self._file.write(_without_config(result))


class ProgressFile(ReportWriter):
    """Writes `progress.csv`, a table.

    Args:
        folder: The folder of the trial.
    """

    tune_name = "CSVLoggerCallback"

    def __init__(self, folder: Path) -> None:
        self._table = CsvTable(folder / PROGRESS_FILE)

    def _write(self, result: Mapping[str, Any]) -> None:
        self._table.write(_without_config(result))


class TensorBoardFile(ReportWriter):
    """Writes what TensorBoard shows.

    Args:
        folder: The folder of the trial.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    tune_name = "TBXLoggerCallback"

    def __init__(self, folder: Path) -> None:
        self._file = LateEventFile(folder, "ray/tune")

    def _write(self, result: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in result.items() if key not in _NOT_FOR_TENSORBOARD}
        self._file.write(shown, int(result["training_iteration"]))

    @never_ends_a_run
    def close(self) -> None:
        self._file.close()


def _without_config(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "config"}


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
        logger.warning("no %s: the config cannot be pickled: %s", PARAMS_PICKLE_FILE, masked(repr(error)))
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
    text = masked("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    with open(folder / ERROR_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"Failure # {number} (occurred at {date})\n{text}\n")
    try:
        content = cloudpickle.dumps(error)
    except Exception as reason:  # whatever an object in it raises
        logger.warning("no %s: the error cannot be pickled: %s", ERROR_PICKLE_FILE, masked(repr(reason)))
        return
    if has_secret(content.decode("latin-1")):
        logger.warning("no %s: the error shows a key or a password", ERROR_PICKLE_FILE)
        return
    with replacing(str(folder / ERROR_PICKLE_FILE)) as pickled:
        pickled.write(content)
