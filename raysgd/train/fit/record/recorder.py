"""`Recorder`: writes down a run of `fit()` in the driver, and makes the `Result` of it.

A report is in `result.json` before any callback sees it. Everything that the run leaves behind is in the trial's
folder, so that a new process can continue it: see `raysgd.train.fit.restore`.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from raysgd._text.secrets import masked
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig
from raysgd.air.constants import ERROR_FILE, ERROR_PICKLE_FILE, VALIDATION_FILE
from raysgd.air.layout import EXPERIMENT_TAG, TrialFolder
from raysgd.air.metrics import DONE, SHOULD_CHECKPOINT, TRAINING_ITERATION, MetricsFiller
from raysgd.air.reports import ReportedCheckpoint, ReportedCheckpointStatus
from raysgd.air.result import Result, read_reports, read_validations
from raysgd.air.trial import FitTrialView
from raysgd.callbacks.adapters import RunCallbacks
from raysgd.engine.decisions.group_events import GroupEvent
from raysgd.train.fit.record.chores import BackgroundTasks, Logs
from raysgd.train.fit.record.console import ConsoleReporter, LogFiles, Reporter
from raysgd.train.fit.record.kept_checkpoints import KeptCheckpoints, name_of
from raysgd.train.fit.record.shown_config import shown_config
from raysgd.train.fit.record.stopping import make_stop
from raysgd.train.fit.record.writers import open_writers, write_error
from raysgd.writers.json_files import as_json
from raysgd.writers.sink import SafeSink

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
CALLBACK_STATES_FILE = "callback_states.pkl"
RECOVERED_ERROR_FILE = "recovered_errors.txt"


class Recorder:
    """Writes down a run. All methods run in the driver, in one thread.

    Args:
        folder: Where the run keeps its files.
        config: The config of the trial: `{"train_loop_config": ...}`.
        run_config: What the user wants to know of the run.
        trainer_name: The name of the trainer's class.
        resources: The resources of the trial, which callbacks are shown.

    Attributes:
        returned: What the function of rank 0 returned, if that is plain data.

    Raises:
        TypeError: Something in `run_config` cannot be used.
        ValueError: Something in `run_config` cannot be used.
    """

    def __init__(
        self,
        folder: TrialFolder,
        config: Mapping[str, Any],
        run_config: RunConfig,
        trainer_name: str,
        resources: Any = None,
    ) -> None:
        self._folder = folder
        self._trial = FitTrialView(folder, masked(config), resources)
        self._trial.trainable_name = trainer_name
        self._stop = make_stop(run_config.stop)
        self._given_stop = run_config.stop
        self._callbacks = RunCallbacks([*(run_config.callbacks or ()), *_console(run_config)], self._trial)
        self._log_files = LogFiles(run_config.log_to_file)
        self._trial.log_to_file = self._log_files.names
        self._config = shown_config(config)
        self._filler = MetricsFiller(folder.id, self._config, EXPERIMENT_TAG)
        self._chores = BackgroundTasks()
        self._logs = Logs(folder, self._chores)
        self._checkpoints = KeptCheckpoints(folder, run_config.checkpoint_config, self._chores)
        self._writers: list[SafeSink] = []
        self.returned: Any = None
        self._is_open = False
        self._last_failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------------ the run

    def begin(self) -> None:
        """An attempt starts, the first one or one after a failure.

        Raises:
            CallbackError: A callback failed.
            OSError: The folder cannot be written to.
        """
        if not self._is_open:
            self._open()
        self._filler.begin(self._checkpoints.progress)
        self._callbacks.start(
            after_failure=self._last_failure is not None,
            restores=self._checkpoints.latest is not None,
            num_reports=self._filler.progress.iteration,
        )
        self._trial.set_status(FitTrialView.RUNNING)

    def take(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, is_pending: bool = False) -> bool:
        """There is a report.

        Args:
            metrics: Those of rank 0.
            checkpoint: What was reported with it, in the trial's folder already.
            is_pending: Whether it is going to be validated, so that `settle` is called with it later.

        Returns:
            Whether the run stops here, by a condition of the user.

        Raises:
            CallbackError: A callback failed.
            OSError: The folder cannot be written to.
        """
        result = self._filler.fill(metrics, name_of(checkpoint) if checkpoint is not None else None)
        result[DONE] = result[DONE] or self._stop(self._trial.trial_id, result)
        if checkpoint is not None:
            result[SHOULD_CHECKPOINT] = True
        for writer in self._writers:
            writer.write(result, result[TRAINING_ITERATION])
        self._callbacks.report(result)
        result[DONE] = result[DONE] or self._callbacks.is_stopping
        self._trial.update_last_result(result)
        if checkpoint is not None:
            self._keep(checkpoint, result, is_pending)
        self._callbacks.end_step()
        self._logs.upload_soon()
        return bool(result[DONE])

    def settle(self, checkpoint: Checkpoint, metrics: Mapping[str, Any], status: ReportedCheckpointStatus) -> None:
        """A checkpoint is validated, or will not be: its metrics are complete."""
        self._checkpoints.settle(checkpoint, metrics, status)
        if self._trial.checkpoint is checkpoint:
            self._trial.last_result |= metrics
        name = name_of(checkpoint)
        if name is not None and status is ReportedCheckpointStatus.VALIDATED:
            logger.info("%s is validated: %s", name, dict(metrics))
            found = {**read_validations(self._folder.trial), name: dict(metrics)}
            self._folder.trial.write(VALIDATION_FILE, as_json(found).encode())

    def reported(self) -> list[ReportedCheckpoint]:
        """The checkpoints that are kept, oldest first."""
        return self._checkpoints.by_age

    def watch(self, events: Callable[[], Sequence[GroupEvent]]) -> None:
        """Lets callbacks see what happens to the workers."""
        self._callbacks.watch(events)

    def fail(self, error: BaseException) -> None:
        """An attempt has ended with an error, which goes into `error.txt`."""
        if not self._is_open:
            self._open()
        self._last_failure = error
        self._trial.count_failure()
        write_error(self._folder.local_path, error, self._trial.num_failures)
        self._logs.upload_soon()

    def end(self, error: BaseException | None = None) -> Result:
        """The run has ended. Closes everything, whatever fails meanwhile.

        Args:
            error: What it failed with; None if it ended well.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        if error is not None and error is not self._last_failure:
            self.fail(error)
        if not self._is_open:
            self._open()
        self._trial.set_status(FitTrialView.ERROR if error is not None else FitTrialView.TERMINATED)
        if error is None:
            self._trial.last_result[DONE] = True
        try:
            self._callbacks.end(has_failed=error is not None, error=error)
        finally:
            self._close(has_failed=error is not None)
        return self._result(error)

    # ------------------------------------------------------------------------------------------------ its parts

    def _open(self) -> None:
        self._is_open = True
        self._folder.make()
        self._logs.fetch()
        self._note(FitTrialView.RUNNING)
        self._trial.last_result |= self._filler.initial()
        if not self._folder.is_new:
            self._take_over()
        self._log_files.start(self._folder.local_path)
        self._writers = open_writers(self._folder.local_path, self._config, self._callbacks.replaced_loggers)
        self._callbacks.setup(self._given_stop)

    def _take_over(self) -> None:
        """Continues where an earlier process stopped."""
        self._folder.trial.discard_staged("checkpoint_")
        reports = read_reports(self._folder.trial)
        if reports:
            self._trial.update_last_result(dict(reports[-1]))
        self._checkpoints.take_over(reports)
        self._trial.checkpoint = self._checkpoints.latest
        self._load_callback_states()

    def _keep(self, checkpoint: Checkpoint, result: Mapping[str, Any], is_pending: bool) -> None:
        self._callbacks.save(checkpoint)
        self._trial.checkpoint = checkpoint
        self._checkpoints.add(checkpoint, result, self._filler.progress, is_pending)
        self._callbacks.saved()
        self._save_callback_states()

    def _load_callback_states(self) -> None:
        experiment = self._folder.experiment
        if not experiment.has(CALLBACK_STATES_FILE):
            return
        try:
            self._callbacks.restore_states(pickle.loads(experiment.read(CALLBACK_STATES_FILE)))
        except Exception as error:  # of a damaged file, or of a callback that has changed meanwhile
            logger.warning("the callbacks start without their former state (%s): %r", CALLBACK_STATES_FILE, error)

    def _save_callback_states(self) -> None:
        from ray import cloudpickle

        states = self._callbacks.states()
        if states:
            self._folder.experiment.write(CALLBACK_STATES_FILE, cloudpickle.dumps(states), sealed=True)

    def _close(self, has_failed: bool) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._note, self._trial.status)
            last_first.callback(self._logs.upload_all)
            last_first.callback(self._chores.close)
            if not has_failed:
                last_first.callback(self._forget_errors)
                last_first.callback(self._checkpoints.end)
            for writer in self._writers:
                last_first.callback(writer.close)
            last_first.callback(self._log_files.stop)
        self._writers = []

    def _forget_errors(self) -> None:
        """A run that ended well has no `error.txt`, whatever its attempts met."""
        if not self._folder.is_new or self._trial.num_failures:
            self._logs.rename(ERROR_FILE, RECOVERED_ERROR_FILE)
            self._logs.remove(ERROR_PICKLE_FILE)

    def _note(self, status: str) -> None:
        """Notes for `restore` which trial is the last one of the experiment, and how it is."""
        note = {"trial": self._folder.dir_name, "trainer": self._folder.trainer_name, "status": status}
        self._folder.experiment.write(RUN_FILE, json.dumps(note).encode(), sealed=True)

    def _result(self, error: BaseException | None) -> Result:
        return Result(
            metrics=dict(self._trial.last_result) if self._trial.has_reported_at_least_once else None,
            checkpoint=self._checkpoints.latest,
            error=error if isinstance(error, Exception) else None,
            folder=self._folder.trial,
            best_checkpoints=self._checkpoints.best,
            return_value=self.returned,
        )


def _console(run_config: RunConfig) -> list[Any]:
    """Return what shows the run on the screen."""
    shown: list[Any] = [ConsoleReporter(run_config.verbose)] if run_config.verbose else []
    return [*shown, Reporter(run_config.progress_reporter)] if run_config.progress_reporter is not None else shown
