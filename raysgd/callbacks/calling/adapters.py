"""Callbacks of one front end in another one: the only place that knows more than one kind of callback.

`FunctionCalls` calls the callbacks of `raysgd.callbacks` while a training function runs. `OfTrainer` and `OfTune` are
callbacks of that kind around one that was written for `raysgd.train.Trainer` or for Ray Tune; `InTrial` shows them to
what calls the hooks of Ray Tune.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air import constants
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling.calling import CallbackCalls
from raysgd.callbacks.calling.dispatcher import call_with_known

if TYPE_CHECKING:
    from raysgd.callbacks.calling.run_callbacks import RunCallbacks
    from raysgd.engine.decisions.history import GroupEvent

TUNE_HOOKS = (
    "on_step_begin",
    "on_step_end",
    "on_trial_start",
    "on_trial_restore",
    "on_trial_save",
    "on_trial_result",
    "on_trial_complete",
    "on_trial_recover",
    "on_trial_error",
    "on_checkpoint",
    "on_experiment_end",
)
"""The methods of callbacks of Ray Tune, of which one makes an object a callback."""

TRAINING_ITERATION = "training_iteration"
_OF_TRIAL = ("config", "trial_id", "experiment_tag")
_NOT_SHOWN = (*_OF_TRIAL, "date", "pid", "hostname", "node_ip", "should_checkpoint")


class FunctionCalls(CallbackCalls):
    """Calls our callbacks while a training function runs: there is one result per report, and no epochs.

    Args:
        callbacks: Called in this order.
        name: What the run is called.
        config: The config of the function.
        folder: Where callbacks put files.
        obstacle_to_stop: Why `run.stop` cannot end this kind of run; None if it can.

    Raises:
        TypeError: One of the callbacks needs something in the workers.
        ValueError: Two of them write to the same place.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        name: str,
        config: Any,
        folder: str | Path,
        obstacle_to_stop: str | None = None,
    ) -> None:
        run = Run(
            name=name,
            config=config if isinstance(config, Mapping) else {},
            folder=folder,
            callbacks=list(callbacks),
            obstacle_to_stop=obstacle_to_stop,
        )
        super().__init__(callbacks, run)
        self._keeps_history = not all(isinstance(each, OfTrainer) for each in callbacks)  # which cannot see it
        for owner, _ in self.worker_callbacks():
            raise TypeError(
                f"`{owner}` runs in the workers, around each step, and a training function takes its steps itself: "
                "leave it out, or use `TorchTrainer.fit`."
            )
        self.check()

    @property
    def is_stopping(self) -> bool:
        """Whether a callback has called `run.stop`."""
        return self._run.is_stopping

    def begin(self, num_reports: int = 0) -> None:
        """The function is started; when it is started again, nothing happens.

        Args:
            num_reports: How many reports the checkpoint has from which it continues.
        """
        if not self._begun:
            self._run.epoch = num_reports
            super().begin()

    def report(self, metrics: Mapping[str, Any], events: Sequence[GroupEvent] = ()) -> None:
        """The function has reported. `events` are all that happened to the workers so far."""
        run = self._run
        for event in events[len(run.history.events) :]:
            run.history.events.append(event)
            self.event(event)
        run.epoch, run._report = int(metrics.get(TRAINING_ITERATION) or run.epoch + 1), metrics
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        row = {TRAINING_ITERATION: run.epoch, **shown}
        self.result(run.history.add_row(row) if self._keeps_history else row)


class InTrial:
    """Our callbacks with the hooks of a callback of Ray Tune, and what only ours are told.

    Args:
        calls: Calls them.
    """

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def on_trial_start(self, num_reports: int) -> None:
        self._calls.begin(num_reports)

    def on_trial_result(self, result: Mapping[str, Any], events: Sequence[GroupEvent]) -> None:
        self._calls.report(result, events)

    def on_checkpoint(self, checkpoint: Any) -> None:
        self._calls.checkpoint(str(checkpoint.path))

    def on_trial_complete(self) -> None:
        self._calls.end(None)

    def on_trial_error(self, error: BaseException | None) -> None:
        self._calls.end(error or RuntimeError("the run has failed"))

    def get_state(self) -> list[dict[str, Any]]:
        return [each for each in self._calls.states() if each["state"] is not None]

    def set_state(self, state: Sequence[Any]) -> None:
        self._calls.load_states(state)


def adapted(callback: Any) -> Callback | None:
    """One of our callbacks that calls `callback`; None if it is of no kind that we know."""
    own = as_own(callback)
    if own is None and not isinstance(callback, type) and any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        return OfTune(callback)
    return own


def as_own(callback: Any) -> Callback | None:
    """One of our callbacks as it is, or around one of `raysgd.train.Trainer`; None if it is neither."""
    if isinstance(callback, Callback):
        return callback
    is_of_trainer = hasattr(callback, "start_training") and hasattr(callback, "process_results")
    return OfTrainer(callback) if is_of_trainer and not isinstance(callback, type) else None


class OfTrainer(Callback):
    """A `raysgd.train.TrainingCallback`.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: Any) -> None:
        self.adapted = callback

    def on_run_begin(self, run: Run) -> None:
        call_with_known(self.adapted.start_training, logdir=str(run.folder), config=run.config)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        report = run._report if run._report is not None else result
        counted = {
            constants.TIMESTAMP: report.get("timestamp", int(time.time())),
            constants.TIME_THIS_ITER_S: report.get("time_this_iter_s", report.get("seconds", 0.0)),
            constants.TRAINING_ITERATION: run.epoch,
        }
        shown = {name: value for name, value in report.items() if name not in _OF_TRIAL}
        self.adapted.process_results([{**shown, **counted}])

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.adapted.finish_training(error=error is not None)


class OfTune(Callback):
    """A callback or a logger of Ray Tune, which is shown the run as a trial.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: Any) -> None:
        self.adapted = callback
        self._trial: Any = None
        self._filler: Any = None
        self._calls: RunCallbacks | None = None

    def on_run_begin(self, run: Run) -> None:
        from raysgd.air.layout import EXPERIMENT_TAG, new_trial
        from raysgd.air.metrics import MetricsFiller
        from raysgd.air.trial import FitTrialView
        from raysgd.callbacks.calling.run_callbacks import RunCallbacks
        from raysgd.storage import open_folder

        folder = new_trial(open_folder(str(run.folder)), run.name)
        folder.make()
        self._trial = FitTrialView(folder, run.config)
        self._filler = MetricsFiller(folder.id, run.config, EXPERIMENT_TAG)
        self._calls = RunCallbacks([self.adapted], self._trial, advice="Fix the callback or leave it out.")
        self._calls.setup(None)
        self._calls.start(after_failure=False, restores=run.epoch > 0)
        self._trial.set_status(self._trial.RUNNING)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        assert self._calls is not None, "a run begins before it has results"
        report = self._filler.fill(result, None)
        self._calls.report(report)
        self._trial.update_last_result(report)
        self._calls.end_step()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if self._calls is not None:
            self._trial.set_status(self._trial.ERROR if error is not None else self._trial.TERMINATED)
            calls, self._calls = self._calls, None
            calls.end(has_failed=error is not None)
