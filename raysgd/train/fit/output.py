"""Writes a run's output while it runs: its trial's files, their copies in the storage, and lines in the terminal.

The files are `result.json`, `progress.csv`, `params.json`, `error.txt` and TensorBoard's. They have the same names and
content as Ray Tune's files. A report is on disk when the call that writes it returns; TensorBoard's file follows within
seconds. A driver that is killed loses at most the report that it was writing.

With remote storage, a thread in the driver copies the files to the storage during the run.
"""

from __future__ import annotations

import logging
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raysgd.air.constants import CSV_LOGGER, ERROR_FILE, ERROR_PICKLE_FILE, JSON_LOGGER, RESULT_FILE, TENSORBOARD_LOGGER
from raysgd.air.reports import (
    CHECKPOINT_DIR_NAME,
    FILLED_IN,
    OF_PLACE,
    OF_TRIAL,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)
from raysgd.air.result import flattened
from raysgd.air.trial import FitTrialView, TrialFolder
from raysgd.core.files import replacing
from raysgd.core.text.secrets import has_secret, masked
from raysgd.core.writers.sinks import CsvTable, EventFile, JsonLines, RunInFolder, SafeSink, as_json
from raysgd.exceptions import failure_logged

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.csv"
PARAMS_FILE = "params.json"
PARAMS_PICKLE_FILE = "params.pkl"
RECOVERED_ERROR_FILE = "recovered_errors.txt"

_NOT_FOR_TENSORBOARD = OF_TRIAL | OF_PLACE | {CHECKPOINT_DIR_NAME, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION}
_UPLOAD_EVERY_S = 5.0
# Config values with a larger pickle, in bytes, are shortened in reports, because each report contains the config.
_LARGEST_VALUE = 10_000
_MOST_ENTRIES = 1_000


def open_writers(folder: Path, config: Mapping[str, Any], replaced: Collection[str] = ()) -> list[SafeSink]:
    """Open a trial's files for appending.

    Args:
        folder: The trial's folder.
        config: The trial's config, which each line of `result.json` contains.
        replaced: Names of the Ray Tune loggers that the user passed. These loggers write their files themselves.

    Raises:
        OSError: The folder is not writable.
    """
    if JSON_LOGGER not in replaced:
        write_params(folder, config)
    writers = [writer for name, writer in _writers(config) if name not in replaced]
    for writer in writers:
        writer.open(RunInFolder(folder))
    return writers


def _writers(config: Mapping[str, Any]) -> Iterator[tuple[str, SafeSink]]:
    """Yield pairs: the name of a Ray Tune logger, and raysgd's own writer of the file that this logger writes."""
    # Not strict, so that NaN and infinity are written as numbers and not as null.
    results = JsonLines(RESULT_FILE, {"config": config}, strict=False)
    yield JSON_LOGGER, SafeSink(results, RESULT_FILE, hidden=("config",))
    yield CSV_LOGGER, SafeSink(CsvTable(PROGRESS_FILE), PROGRESS_FILE, hidden=("config",))
    try:
        yield TENSORBOARD_LOGGER, SafeSink(EventFile("", "ray/tune"), "TensorBoard", hidden=_NOT_FOR_TENSORBOARD)
    except ModuleNotFoundError as missing:
        logger.info("no files for TensorBoard are written: %s", missing)


def write_params(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a trial's config to `params.json` for people and to `params.pkl` for programs."""
    (folder / PARAMS_FILE).write_text(as_json(config, indent=2), encoding="utf-8")
    content = _pickled(dict(config), "the config", PARAMS_PICKLE_FILE)
    if content is not None:
        (folder / PARAMS_PICKLE_FILE).write_bytes(content)


def write_error(folder: Path, error: BaseException, number: int) -> None:
    """Append an error to `error.txt`, and write it to `error.pkl` if it can be pickled.

    An `error.pkl` of an earlier attempt is deleted in any case.

    Args:
        folder: The trial's folder.
        error: The error that ended a run or an attempt.
        number: Number of this failure in the run, starting at 1.
    """
    date = time.strftime("%Y-%m-%d_%H-%M-%S")
    text = masked("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    with open(folder / ERROR_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"Failure # {number} (occurred at {date})\n{text}\n")
    content = _pickled(error, "the error", ERROR_PICKLE_FILE)
    (folder / ERROR_PICKLE_FILE).unlink(missing_ok=True)  # it may contain the error of an earlier attempt
    if content is not None and has_secret(content.decode("latin-1")):
        logger.warning("%s was not written, because the error contains a key or a password", ERROR_PICKLE_FILE)
    elif content is not None:
        with replacing(str(folder / ERROR_PICKLE_FILE)) as pickled:
            pickled.write(content)


def _pickled(value: Any, shown: str, file: str) -> bytes | None:
    """Return a pickle of a value. If the value cannot be pickled, log a warning and return None.

    Args:
        value: The value.
        shown: Description of the value for the warning, such as "the config".
        file: Name of the file that would contain the pickle, for the warning.
    """
    content, reason = pickled(value)
    if content is None:
        logger.warning("%s was not written, because %s cannot be pickled: %s", file, shown, reason)
    return content


def pickled(value: Any) -> tuple[bytes | None, str]:
    """Return a pickle of a value and an empty string, or None and the reason why the value cannot be pickled."""
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value)), ""
    except Exception as reason:  # user objects may raise anything
        return None, masked(repr(reason))


def attempt(what: str, work: Callable[[], object]) -> None:
    """Call a function. If it raises an exception, only log a warning.

    Args:
        what: Description of the work for the warning, such as "delete checkpoint_000003".
        work: The function.
    """
    with failure_logged(logger.warning, "could not %s: %r", what):
        work()


class Logs:
    """A trial's log files. With remote storage, they are written to a local folder and copied to the storage.

    Args:
        folder: The trial's local folder and its folder in the storage.
        chores: Background thread that copies the logs.
    """

    def __init__(self, folder: TrialFolder, chores: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._chores = chores
        self._last = time.monotonic()
        self._running: Future[None] | None = None

    def fetch(self) -> None:
        """If this run continues an earlier run in remote storage, download the log files of the earlier run.

        New reports are then appended to these files.
        """
        if not self._folder.is_local and not self._folder.is_new:
            for name in self._folder.trial.names():
                if self._folder.trial.has(name):
                    (self._folder.local_path / name).write_bytes(self._folder.trial.read(name))

    def upload_soon(self) -> None:
        """Copy the log files to remote storage in the background, at most once every few seconds."""
        if self._folder.is_local or time.monotonic() - self._last < _UPLOAD_EVERY_S:
            return
        if self._running is None or self._running.done():
            self._last = time.monotonic()
            self._running = self._chores.submit(attempt, f"copy the logs to {self._folder.trial}", self._upload)

    def upload_all(self) -> None:
        """Copy the log files to remote storage now, and then delete the local copies.

        If copying fails, keep the local files, and log an error with their folder.
        """
        if self._folder.is_local:
            return
        try:
            self._upload()
        except OSError as error:
            self._folder.expect_little()
            kept = self._folder.local_path
            logger.error("could not copy the logs to %s; they stay in %s: %s", self._folder.trial, kept, error)
        else:
            self._folder.remove_staging()

    def forget_errors(self) -> None:
        """Rename `error.txt` and delete `error.pkl`, after a run that has succeeded despite failures."""
        path = self._folder.local_path / ERROR_FILE
        if path.exists():
            shutil.copyfile(path, path.with_name(RECOVERED_ERROR_FILE))
        for name in (ERROR_FILE, ERROR_PICKLE_FILE):
            (self._folder.local_path / name).unlink(missing_ok=True)
            self._folder.trial.remove(name)

    def _upload(self) -> None:
        self._folder.trial.upload(Path(self._folder.local_path))


def shown_config(config: Mapping[str, Any]) -> Any:
    """Return a copy of a trial's config for reports. Long values are shortened, and keys and passwords are masked.

    >>> shown_config({"data": "s3://id:secret@bucket/a", "lr": 0.1, "words": bytes(1_000_000)})
    {'data': 's3://***@bucket/a', 'lr': 0.1, 'words': '(bytes: 1,000,... bytes)'}
    """
    return _shortened(masked(config))


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) <= _MOST_ENTRIES:
        return {key: _shortened(each) for key, each in value.items()}
    size = _size_of(value)
    if size > _LARGEST_VALUE:
        return f"({type(value).__name__}: {size:,} bytes)"
    return [_shortened(each) for each in value] if type(value) is list else value


def _size_of(value: Any) -> int:
    """Return the size of a value's pickle in bytes; 0 for numbers and values that cannot be pickled."""
    return 0 if isinstance(value, bool | int | float | None) else len(pickled(value)[0] or b"")


# -------------------------------------------------------------------------------------------------------- on the screen


class ConsoleReporter:
    """A callback that prints the events of a run, for `RunConfig(verbose=...)`.

    Args:
        verbose: 1 prints the run's folder at the start, and a line when the run ends. 2 also prints attempts and
            checkpoints, and 3 also prints each report.
    """

    def __init__(self, verbose: int) -> None:
        self._verbose = verbose
        self._num_starts = 0

    def on_trial_start(self, trial: FitTrialView) -> None:
        self._num_starts += 1
        if self._num_starts == 1:
            self._say(1, trial, f"running; results in {trial.path}")
        else:
            self._say(2, trial, f"attempt {self._num_starts}")

    def on_trial_result(self, trial: FitTrialView, result: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in result.items() if key not in FILLED_IN}
        text = ", ".join(f"{name}={_short(value)}" for name, value in flattened(shown).items())
        self._say(3, trial, f"report {result['training_iteration']}: {text}")

    def on_checkpoint(self, trial: FitTrialView, checkpoint: Any) -> None:
        self._say(2, trial, f"checkpoint {Path(str(checkpoint.path)).name}")

    def on_trial_complete(self, trial: FitTrialView) -> None:
        self._say(1, trial, f"finished after {trial.last_result.get('training_iteration', 0)} reports")

    def on_trial_error(self, trial: FitTrialView) -> None:
        self._say(1, trial, f"failed; see {trial.error_file}")

    def _say(self, verbose: int, trial: FitTrialView, text: str) -> None:
        if self._verbose >= verbose:
            print(f"{trial}: {text}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]
