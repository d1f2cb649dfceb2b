"""The files of a trial: `result.json`, `progress.csv`, TensorBoard's, `params.json`, `error.txt`.

They have the names and the content that Ray Tune gives them. Each report is on the disk when its call returns, except
for TensorBoard's file, which follows within seconds: a driver that is killed loses at most the report it was writing.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd._files.atomic_file import replacing
from raysgd._text.secrets import has_secret, masked
from raysgd.air.constants import CSV_LOGGER, ERROR_FILE, ERROR_PICKLE_FILE, JSON_LOGGER, RESULT_FILE, TENSORBOARD_LOGGER
from raysgd.air.metrics import CHECKPOINT_DIR_NAME, OF_PLACE, OF_TRIAL, TIME_TOTAL_S, TIMESTAMP, TRAINING_ITERATION
from raysgd.writers.csv_table import CsvTable
from raysgd.writers.event_file import EventFile
from raysgd.writers.json_files import JsonLines, as_json
from raysgd.writers.sink import RunInFolder, SafeSink

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.csv"
PARAMS_FILE = "params.json"
PARAMS_PICKLE_FILE = "params.pkl"

_NOT_FOR_TENSORBOARD = OF_TRIAL | OF_PLACE | {CHECKPOINT_DIR_NAME, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION}


def open_writers(folder: Path, config: Mapping[str, Any], replaced: Collection[str] = ()) -> list[SafeSink]:
    """Open the files of a trial, to write on where they end.

    Args:
        folder: The folder of the trial.
        config: The config of the trial, which stands in each line of `result.json`.
        replaced: The loggers of Ray Tune, by name, that the user passed: they write instead.

    Raises:
        OSError: The folder cannot be written to.
    """
    if JSON_LOGGER not in replaced:
        write_params(folder, config)
    writers = [writer for name, writer in _writers(config) if name not in replaced]
    for writer in writers:
        writer.open(RunInFolder(folder))
    return writers


def _writers(config: Mapping[str, Any]) -> Iterator[tuple[str, SafeSink]]:
    """Make what writes the files, with the name of the logger of Ray Tune that writes the same."""
    yield JSON_LOGGER, SafeSink(JsonLines(RESULT_FILE, {"config": config}), RESULT_FILE, hidden=("config",))
    yield CSV_LOGGER, SafeSink(CsvTable(PROGRESS_FILE), PROGRESS_FILE, hidden=("config",))
    try:
        yield TENSORBOARD_LOGGER, SafeSink(EventFile("", "ray/tune"), "TensorBoard", hidden=_NOT_FOR_TENSORBOARD)
    except ModuleNotFoundError as missing:
        logger.info("no files for TensorBoard: %s", missing)


def write_params(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the config as JSON, for people, and as a pickle, for programs."""
    (folder / PARAMS_FILE).write_text(as_json(config, indent=2), encoding="utf-8")
    content = _pickled(dict(config), "the config", PARAMS_PICKLE_FILE)
    if content is not None:
        (folder / PARAMS_PICKLE_FILE).write_bytes(content)


def write_error(folder: Path, error: BaseException, number: int) -> None:
    """Adds an error to `error.txt`, and replaces `error.pkl`, if the error can be pickled.

    Args:
        folder: The folder of the trial.
        error: What a run, or one attempt, ended with.
        number: Which failure of the run it is, from 1.
    """
    date = time.strftime("%Y-%m-%d_%H-%M-%S")
    text = masked("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    with open(folder / ERROR_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"Failure # {number} (occurred at {date})\n{text}\n")
    content = _pickled(error, "the error", ERROR_PICKLE_FILE)
    if content is not None and has_secret(content.decode("latin-1")):
        logger.warning("no %s: the error shows a key or a password", ERROR_PICKLE_FILE)
    elif content is not None:
        with replacing(str(folder / ERROR_PICKLE_FILE)) as pickled:
            pickled.write(content)


def _pickled(value: Any, shown: str, file: str) -> bytes | None:
    """The value as a pickle; None, and a warning, where it cannot be one."""
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as reason:  # whatever an object in it raises
        logger.warning("no %s: %s cannot be pickled: %s", file, shown, masked(repr(reason)))
        return None
