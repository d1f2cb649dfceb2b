"""`Recorder`: writes the results of a `fit()` run to files, in the driver, and creates its `Result`.

The files are `result.json`, `progress.csv`, `params.json`, `error.txt` and TensorBoard's. They have the same names and
content as Ray Tune's files. A report is on disk when the call that writes it returns, and before any callback receives
it; TensorBoard's file follows within seconds. A driver that is killed loses at most the report that it was writing.
With remote storage, a thread in the driver copies the files to the storage during the run.

The trial's folder contains everything that a new process needs to continue the run; see `raysgd.train.fit.restore`.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig
from raysgd.air.constants import CSV_LOGGER, ERROR_FILE, ERROR_PICKLE_FILE, JSON_LOGGER, RESULT_FILE, TENSORBOARD_LOGGER
from raysgd.air.reports import (
    CHECKPOINT_DIR_NAME,
    DONE,
    FILLED_IN,
    OF_PLACE,
    OF_TRIAL,
    SHOULD_CHECKPOINT,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAINING_ITERATION,
    MetricsFiller,
    iteration_of,
)
from raysgd.air.result import Kept, Result, flattened, read_checkpoints, read_reports, value_at
from raysgd.air.trial import FitTrialView, TrialFolder, checkpoint_index
from raysgd.callbacks.calling import RunCallbacks
from raysgd.core.arguments import is_integer, is_number, takes
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.files import replacing
from raysgd.core.numbers.ranking import BestCheckpoints, SavedCheckpoint, as_score
from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import has_secret, masked
from raysgd.core.writers.sinks import CsvTable, EventFile, JsonLines, RunInFolder, SafeSink, as_json
from raysgd.exceptions import failure_logged
from raysgd.train.constants import TUNE_CHECKPOINT_ID

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
CALLBACK_STATES_FILE = "callback_states.pkl"
PROGRESS_FILE = "progress.csv"
PARAMS_FILE = "params.json"
PARAMS_PICKLE_FILE = "params.pkl"
RECOVERED_ERROR_FILE = "recovered_errors.txt"

_NOT_FOR_TENSORBOARD = OF_TRIAL | OF_PLACE | {CHECKPOINT_DIR_NAME, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION}
_UPLOAD_EVERY_S = 5.0
# Config values with a larger pickle, in bytes, are shortened in reports, because each report contains the config.
_LARGEST_VALUE = 10_000
_MOST_ENTRIES = 1_000
_ALLOWED = (
    "need a dict of metrics and the values at which to stop, such as `{'training_iteration': 10}`, a function "
    "`stop(trial_id, result)` that returns True or False, or a `ray.tune.Stopper`."
)


class Recorder:
    """Writes a run's reports and status, decides which checkpoints to keep, and calls the callbacks.

    All methods are called in the driver, in one thread.

    Args:
        folder: The trial's local folder and its folder in the storage.
        config: The trial's config: `{"train_loop_config": ...}`.
        run_config: The user's `RunConfig`.

    Attributes:
        returned: The function's return value on rank 0, if it is plain data.
        events: The events of the worker group, such as a lost worker. The next report passes new events to the
            callbacks.

    Raises:
        TypeError: A value in `run_config` has the wrong type.
        ValueError: A value in `run_config` is invalid.
    """

    def __init__(
        self,
        folder: TrialFolder,
        config: Mapping[str, Any],
        run_config: RunConfig,
    ) -> None:
        self._folder = folder
        self._trial = FitTrialView(folder, masked(config))
        self._stop = make_stop(run_config.stop)
        self._given_stop = run_config.stop
        self._callbacks = RunCallbacks([*(run_config.callbacks or ()), *_console(run_config)], self._trial)
        self._config = shown_config(config)
        self._filler = MetricsFiller(folder.id, self._config)
        self._chores = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raysgd-fit")
        self._logs = Logs(folder, self._chores)
        kept = run_config.checkpoint_config
        self._score_attribute, self._keeps_none = kept.checkpoint_score_attribute, kept.num_to_keep == 0
        self._rule = BestCheckpoints(kept.num_to_keep, kept.checkpoint_score_order, num_newest=1)
        self._saved: list[SavedCheckpoint[Kept]] = []
        self._once = Once()
        # The report that came with the newest checkpoint. A restarted run continues the report's counters.
        self._saved_report: Mapping[str, Any] = {}
        self._writers: list[SafeSink] = []
        self.returned: Any = None
        self.events: Sequence[GroupEvent] = ()
        self._is_open = False
        self._last_failure: BaseException | None = None

    # ---------------------------------------------------------------------------------------------------------- the run

    def begin_attempt(self) -> None:
        """Record that the training function starts, or restarts after a failure.

        Raises:
            CallbackError: A callback failed.
            OSError: The folder is not writable.
        """
        self._open()
        self._filler.begin_attempt(self._saved_report)
        self._callbacks.start(
            after_failure=self._last_failure is not None,
            restores=self._trial.has_checkpoint(),
            num_reports=self._filler.iteration,
        )
        self._trial.status = FitTrialView.RUNNING

    def record(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> bool:
        """Write a report to the run's files and pass it to the callbacks.

        Args:
            metrics: Rank 0's metrics.
            checkpoint: The checkpoint that was reported with the metrics. It is already in the trial's folder, or in
                memory if the run writes no files. None if there is no checkpoint, or if it was lost.

        Returns:
            True if the run ends here: a stop condition is met, a callback has called `run.stop`, or the metrics have a
            true value under `done`.

        Raises:
            CallbackError: A callback failed.
            OSError: The folder is not writable.
        """
        result = self._filler.fill(metrics, name_of(checkpoint) if checkpoint is not None else None)
        result[DONE] = result[DONE] or self._stop(self._trial.trial_id, result)
        if checkpoint is not None:
            result[SHOULD_CHECKPOINT] = True
        for writer in self._writers:
            writer.write(result, result[TRAINING_ITERATION])
        self._callbacks.report(result, self.events)
        result[DONE] = result[DONE] or self._callbacks.is_stopping
        self._trial.last_result = result
        if checkpoint is not None:
            self._keep(checkpoint, result)
        self._callbacks.end_step()
        self._logs.upload_soon()
        return bool(result[DONE])

    def fail(self, error: BaseException) -> None:
        """Count a failed attempt of the run, and append its error to `error.txt`."""
        self._open()
        self._last_failure = error
        self._trial.num_failures += 1
        write_error(self._folder.local_path, error, self._trial.num_failures)
        self._logs.upload_soon()

    def end_run(self, error: BaseException | None = None) -> Result:
        """Notify the callbacks that the run has ended, close all files, and return the `Result`.

        All files are closed even if a callback or closing a file fails.

        Args:
            error: The error that ended the run; None if it succeeded.

        Raises:
            CallbackError: A callback failed, but the run itself did not.
        """
        if error is not None and error is not self._last_failure:
            self.fail(error)
        self._open()
        self._trial.status = FitTrialView.ERROR if error is not None else FitTrialView.TERMINATED
        if error is None:
            self._trial.last_result[DONE] = True
        try:
            self._callbacks.end_run(error)
        finally:
            self._close(has_failed=error is not None)
        return Result(
            metrics=dict(self._trial.last_result) if self._trial.has_reported_at_least_once else None,
            checkpoint=self._trial.checkpoint,
            error=error if isinstance(error, Exception) else None,
            folder=self._folder.trial,
            best_checkpoints=[each.content for each in replace(self._rule, num_best=None).best(self._saved)],
            return_value=self.returned,
        )

    # -------------------------------------------------------------------------------------------------------- its parts

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._folder.make()
        self._logs.fetch()
        self._note(FitTrialView.RUNNING)
        self._trial.last_result |= self._filler.initial()
        if not self._folder.is_new:
            self._take_over()
        self._writers = open_writers(self._folder.local_path, self._config, self._callbacks.replaced_loggers)
        self._callbacks.on("setup", stop=self._given_stop, num_samples=1, total_num_samples=1)

    def _take_over(self) -> None:
        """Load the reports, checkpoints and callback states that an earlier process of this run has stored."""
        self._folder.trial.discard_staged("checkpoint_")
        reports = read_reports(self._folder.trial)
        if reports:
            self._trial.last_result = dict(reports[-1])
        for checkpoint, report in read_checkpoints(self._folder.trial, reports):
            self._retain(checkpoint, report)
        # If the newest checkpoint has no report, the driver died between storing the checkpoint and writing the report.
        if self._trial.has_checkpoint() and not self._saved_report:
            last = reports[-1] if reports else {}
            self._saved_report = {**last, TRAINING_ITERATION: iteration_of(last) + 1}
        experiment = self._folder.experiment
        if experiment.has(CALLBACK_STATES_FILE):
            # Restoring fails if the file is damaged, or if a callback's class has changed.
            words = "the callbacks start without their former state (%s): %r"
            with failure_logged(logger.warning, words, CALLBACK_STATES_FILE):
                self._callbacks.restore_states(pickle.loads(experiment.read(CALLBACK_STATES_FILE)))

    def _keep(self, checkpoint: Checkpoint, result: Mapping[str, Any]) -> None:
        self._callbacks.save(checkpoint)
        self._retain(checkpoint, result)
        self._callbacks.tell("on_trial_save")
        states = self._callbacks.states()
        if states:
            from ray import cloudpickle

            self._folder.experiment.write(CALLBACK_STATES_FILE, cloudpickle.dumps(states))

    def _retain(self, checkpoint: Checkpoint, metrics: Mapping[str, Any]) -> None:
        """Add a new checkpoint, and delete checkpoints that the run does not keep anymore."""
        name = name_of(checkpoint)
        number = checkpoint_index(name) if name is not None else None
        if number is None:
            number = self._saved[-1].number + 1 if self._saved else 0
        self._trial.checkpoint, self._saved_report = checkpoint, metrics
        new = SavedCheckpoint(number, self._score(metrics), (checkpoint, dict(metrics)))
        self._saved, dropped = self._rule.divide([*self._saved, new])
        self._delete(dropped)

    def _delete(self, checkpoints: Sequence[SavedCheckpoint[Kept]]) -> None:
        for each in checkpoints:
            name = name_of(each.content[0])
            if name is not None:
                self._chores.submit(attempt, f"delete {name}", (self._folder.trial / name).delete)

    def _move_to_memory(self) -> None:
        """With `num_to_keep=0`, load the latest checkpoint into memory after a successful run and delete its files."""
        newest = self._trial.checkpoint
        if self._keeps_none and newest is not None and name_of(newest) is not None:
            self._trial.checkpoint = Checkpoint.from_dict(newest.to_dict())
            self._delete(self._saved)
            self._saved = []

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        name = self._score_attribute
        if name is None:
            return None
        value = value_at(metrics, name)
        score = as_score(value)
        if score is None and self._once.is_first(name):
            what = "is missing" if value is None else f"is {value!r:.80}, not a number"
            logger.error(
                "`checkpoint_score_attribute=%r` %s in a report, so its checkpoint counts as the worst. The "
                "report has: %s",
                name,
                what,
                ", ".join(map(str, metrics)),
            )
        return score

    def _close(self, has_failed: bool) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._note, self._trial.status)
            last_first.callback(self._logs.upload_all)
            if not has_failed and (self._trial.num_failures or not self._folder.is_new):
                # This runs after `shutdown` of the background thread, when no log file is being uploaded.
                last_first.callback(self._logs.forget_errors)
            last_first.callback(self._chores.shutdown)
            if not has_failed:
                last_first.callback(self._move_to_memory)
            for writer in self._writers:
                last_first.callback(writer.close)
        self._writers = []

    def _note(self, status: str) -> None:
        """Write the trial's name and status to `run.json`, which `restore` reads."""
        note = {"trial": self._folder.dir_name, "trainer": self._folder.trainer_name, "status": status}
        self._folder.experiment.write(RUN_FILE, json.dumps(note).encode())


def _console(run_config: RunConfig) -> list[ConsoleReporter]:
    """Return a list with the callback that prints the run's events, or an empty list if `verbose` is 0 or None."""
    if run_config.progress_reporter is not None:
        logger.warning("`progress_reporter` shows the trials of a `Tuner`; to print this run, pass `verbose=3`")
    if run_config.log_to_file:
        logger.warning("`log_to_file` is for the trials of a `Tuner`; run the program with `| tee log.txt`")
    return [ConsoleReporter(run_config.verbose)] if run_config.verbose else []


def name_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of a checkpoint's folder, or None for a checkpoint in memory."""
    return PurePosixPath(checkpoint.path).name if checkpoint.uri is not None else None


def number_of(checkpoint: Checkpoint) -> int:
    """Return a checkpoint's number in its run, from its folder name or its content. Return 0 if it has no number."""
    name = name_of(checkpoint)
    number: Any = checkpoint.to_dict().get(TUNE_CHECKPOINT_ID) if name is None else checkpoint_index(name)
    return number if is_integer(number) and number >= 0 else 0


Stop = Callable[[str, Mapping[str, Any]], bool]
"""A stop condition. Receives the trial's ID and the metrics of a report, and returns True to end the run."""


def make_stop(stop: Any) -> Stop:
    """Convert the `stop` of a `RunConfig` to one function that decides after each report whether the run must stop.

    Raises:
        TypeError: `stop` has the wrong type.
        ValueError: A limit is not a number, or the function cannot be called with two arguments.
    """
    if stop is None:
        return lambda trial_id, result: False
    if isinstance(stop, Mapping):
        return _limits(stop)
    if isinstance(stop, Sequence) and not isinstance(stop, str | bytes):
        conditions = [make_stop(each) for each in stop]
        # `any` gets a list and not a generator, so that every condition receives every report.
        return lambda trial_id, result: any([each(trial_id, result) for each in conditions])
    if hasattr(stop, "stop_all"):
        return lambda trial_id, result: bool(stop(trial_id, dict(result))) or bool(stop.stop_all())
    if callable(stop) and not isinstance(stop, type):
        if not takes(stop, "trial", {}):
            raise ValueError(f"`RunConfig(stop={stop!r})`: need a function of two arguments, `stop(trial_id, result)`.")
        return lambda trial_id, result: bool(stop(trial_id, dict(result)))
    raise TypeError(f"`RunConfig(stop={stop!r})`: {_ALLOWED}")


def _limits(limits: Mapping[str, Any]) -> Stop:
    """Return a stop condition that is met when one of the metrics reaches its limit."""
    for name, limit in limits.items():
        if not isinstance(name, str) or not is_number(limit):
            raise ValueError(
                f"`RunConfig(stop={{{name!r}: {limit!r}}})`: need the name of a metric and a number. The run stops "
                "when the metric reaches it."
            )
    limits, once = dict(limits), Once()

    def is_reached(name: str, limit: float, result: Mapping[str, Any]) -> bool:
        value = value_at(result, name)
        if value is None and once.is_first(name):
            logger.warning(
                "`RunConfig(stop=...)` names the metric %r, which this report does not have. It has: %s",
                name,
                ", ".join(map(str, result)),
            )
        return value is not None and bool(value >= limit)

    return lambda trial_id, result: any(is_reached(name, limit, result) for name, limit in limits.items())


# ------------------------------------------------------------------------------------------------------- the files


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
