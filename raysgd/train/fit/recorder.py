"""`Recorder`: writes the results of a `fit()` run to files, in the driver, and creates its `Result`.

A report is in `result.json` before any callback receives it. The trial's folder contains everything that a new process
needs to continue the run; see `raysgd.train.fit.restore`.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig
from raysgd.air.reports import (
    DONE,
    SHOULD_CHECKPOINT,
    TRAINING_ITERATION,
    MetricsFiller,
    iteration_of,
)
from raysgd.air.result import Kept, Result, read_checkpoints, read_reports, value_at
from raysgd.air.trial import FitTrialView, TrialFolder, checkpoint_index
from raysgd.callbacks.calling import RunCallbacks
from raysgd.core.arguments import is_integer, is_number, takes
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.numbers.ranking import BestCheckpoints, SavedCheckpoint, as_score
from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import SafeSink
from raysgd.exceptions import failure_logged
from raysgd.train.constants import TUNE_CHECKPOINT_ID
from raysgd.train.fit.output import (
    ConsoleReporter,
    Logs,
    attempt,
    open_writers,
    shown_config,
    write_error,
)

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
CALLBACK_STATES_FILE = "callback_states.pkl"
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
        if not self._is_open:
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
        if not self._is_open:
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
        if not self._is_open:
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
        self._is_open = True
        self._folder.make()
        self._logs.fetch()
        self._note(FitTrialView.RUNNING)
        self._trial.last_result |= self._filler.initial()
        if not self._folder.is_new:
            self._take_over()
        self._writers = open_writers(self._folder.local_path, self._config, self._callbacks.replaced_loggers)
        self._callbacks.setup(self._given_stop)

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
        self._load_callback_states()

    def _keep(self, checkpoint: Checkpoint, result: Mapping[str, Any]) -> None:
        self._callbacks.save(checkpoint)
        self._retain(checkpoint, result)
        self._callbacks.saved()
        self._save_callback_states()

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

    def _load_callback_states(self) -> None:
        experiment = self._folder.experiment
        if not experiment.has(CALLBACK_STATES_FILE):
            return
        # Restoring fails if the file is damaged, or if a callback's class has changed.
        words = "the callbacks start without their former state (%s): %r"
        with failure_logged(logger.warning, words, CALLBACK_STATES_FILE):
            self._callbacks.restore_states(pickle.loads(experiment.read(CALLBACK_STATES_FILE)))

    def _save_callback_states(self) -> None:
        from ray import cloudpickle

        states = self._callbacks.states()
        if states:
            self._folder.experiment.write(CALLBACK_STATES_FILE, cloudpickle.dumps(states))

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
