"""Callbacks that users give, checked: each becomes one of `raysgd.callbacks`, whatever front end it was written for.

`TrainAdapter` and `TuneAdapter` stand around a callback that was written for `raysgd.train.Trainer` or for Ray Tune.
The other way round, `FunctionCalls` and `RunCallbacks` call our callbacks while a training function runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from raysgd.air import constants
from raysgd.air.constants import DEFAULT_LOGGERS
from raysgd.air.reports import OF_PLACE, OF_TRIAL, SHOULD_CHECKPOINT, TRAINING_ITERATION
from raysgd.air.trial import FitTrialView
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import TUNE_HOOKS, CallbackCalls, TrialCalls, call_with_known
from raysgd.callbacks.worker_callback import WorkerCallback

if TYPE_CHECKING:
    from ray.tune import Callback as TuneCallback

    from raysgd.engine.shared.group_events import GroupEvent

_ADVICE = (
    "Its checkpoints and results are kept: fix the callback, or leave it out of `RunConfig(callbacks=...)`, and "
    "continue with `restore`."
)


class FunctionCallback(Protocol):
    """A `raysgd.train.TrainingCallback`, or what is like one."""

    def start_training(self, *args: Any, **kwargs: Any) -> Any:
        """Called at the beginning."""

    def process_results(self, *args: Any, **kwargs: Any) -> Any:
        """Called with each report."""


AnyCallback: TypeAlias = "Callback | WorkerCallback | FunctionCallback | TuneCallback"


def checked(callbacks: Any, argument: str = "callbacks") -> list[Callback]:
    """Return the callbacks that a user gave, in the order in which they are called.

    Raises:
        TypeError: They are no list, or one of them is no callback.
        ValueError: One of them is there twice.
    """
    callbacks = as_list(callbacks, argument)
    for number, each in enumerate(callbacks):
        if any(each is other for other in callbacks[:number]):
            raise ValueError(f"`{argument}` has {each!r} twice, which would be called twice: pass each object once.")
    return sorted((_one(each, argument) for each in callbacks), key=lambda each: each.runs_last)


def as_list(callbacks: Any, argument: str = "callbacks") -> list[Any]:
    """Return the callbacks that a user gave.

    Raises:
        TypeError: They are no list.
    """
    if isinstance(callbacks, Callback | str | bytes) or not isinstance(callbacks, Iterable | None):
        raise TypeError(f"`{argument}={callbacks!r}`: need a list of callbacks, or None.")
    return list(callbacks or ())


def _one(callback: Any, argument: str) -> Callback:
    if isinstance(callback, WorkerCallback):
        return WorkerCallbackEntry(callback)
    other = adapted(callback)
    if other is not None:
        return other
    instead = f" Did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
    raise TypeError(
        f"`{argument}` has {callback!r}: need objects of subclasses of `raysgd.callbacks.Callback`.{instead}"
    )


def adapted(callback: Any) -> Callback | None:
    """Return one of our callbacks that calls `callback`; None if it is of no kind that we know."""
    own = as_own(callback)
    if own is None and not isinstance(callback, type) and any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        return TuneAdapter(callback)
    return own


def as_own(callback: Any) -> Callback | None:
    """Return one of our callbacks as it is, or around one of `raysgd.train.Trainer`; None if it is neither."""
    if isinstance(callback, Callback):
        return callback
    is_of_trainer = hasattr(callback, "start_training") and hasattr(callback, "process_results")
    return TrainAdapter(callback) if is_of_trainer and not isinstance(callback, type) else None


class TrainAdapter(Callback):
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
        shown = {name: value for name, value in report.items() if name not in OF_TRIAL}
        self.adapted.process_results([{**shown, **counted}])

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.adapted.finish_training(error=error is not None)


class TuneAdapter(Callback):
    """A callback or a logger of Ray Tune, which is shown the run as a trial.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: Any) -> None:
        self.adapted = callback
        self._trial: Any = None
        self._filler: Any = None
        self._calls: TrialCalls | None = None

    def on_run_begin(self, run: Run) -> None:
        from raysgd.air.reports import MetricsFiller
        from raysgd.air.trial import EXPERIMENT_TAG, FitTrialView, new_trial
        from raysgd.storage import open_folder

        folder = new_trial(open_folder(str(run.folder)), run.name)
        folder.make()
        self._trial = FitTrialView(folder, run.config)
        self._filler = MetricsFiller(folder.id, run.config, EXPERIMENT_TAG)
        self._calls = TrialCalls([self.adapted], self._trial, "Fix the callback or leave it out.")
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
            calls.end_run(has_failed=error is not None)


class WorkerCallbackEntry(Callback):
    """A worker callback that was given by itself.

    Args:
        adapted: The worker callback.
    """

    def __init__(self, adapted: WorkerCallback) -> None:
        self.adapted = adapted

    def worker_callback(self) -> WorkerCallback:
        return self.adapted


_NOT_SHOWN = OF_TRIAL | OF_PLACE | {SHOULD_CHECKPOINT}


class FunctionCalls(CallbackCalls):
    """Calls our callbacks while a training function runs: there is one result per report, and no epochs.

    It has the hooks of a callback of Ray Tune, too, to take its place among them.

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
        self._keeps_history = not all(isinstance(each, TrainAdapter) for each in callbacks)  # which cannot see it
        for owner, _ in self.worker_callbacks():
            raise TypeError(
                f"`{owner}` runs in the workers, around each step, and a training function takes its steps itself: "
                "leave it out, or use `TorchTrainer.fit`."
            )
        self.check()

    @property
    def is_stopping(self) -> bool:
        """True if a callback has called `run.stop`."""
        return self._run.is_stopping

    def begin_run(self, num_reports: int = 0) -> None:
        """Tell callbacks that the function starts; when it starts again, do nothing.

        Args:
            num_reports: How many reports the checkpoint has from which it continues.
        """
        if not self._begun:
            self._run.epoch = num_reports
            super().begin_run()

    def report(self, metrics: Mapping[str, Any], events: Sequence[GroupEvent] = ()) -> None:
        """Tell callbacks of a report. `events` are all that happened to the workers so far."""
        run = self._run
        for event in events[len(run.history.events) :]:
            run.history.events.append(event)
            self.event(event)
        run.epoch, run._report = int(metrics.get(TRAINING_ITERATION) or run.epoch + 1), metrics
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        row = {TRAINING_ITERATION: run.epoch, **shown}
        self.result(run.history.add_row(row) if self._keeps_history else row)

    # ------------------------------------------------------------------------------------ as a callback of Ray Tune

    def on_trial_start(self, num_reports: int) -> None:
        self.begin_run(num_reports)

    def on_trial_result(self, result: Mapping[str, Any], events: Sequence[GroupEvent]) -> None:
        self.report(result, events)

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.checkpoint(str(checkpoint.path))

    def on_trial_complete(self) -> None:
        self.end_run(None)

    def on_trial_error(self, error: BaseException | None) -> None:
        self.end_run(error or RuntimeError("the run has failed"))

    def get_state(self) -> list[dict[str, Any]]:
        return [each for each in self.states() if each["state"] is not None]

    def set_state(self, state: Sequence[Any]) -> None:
        self.load_states(state)


class RunCallbacks(TrialCalls):
    """The callbacks of a run: those of `RunConfig(callbacks=[...])`, called in their order.

    Callbacks and loggers of Ray Tune are called with the trial; after them those of `raysgd.callbacks` with the run,
    and those of `raysgd.train.callbacks` with the reports of rank 0.

    Args:
        callbacks: What the user gave.
        trial: The trial that they are shown.

    Raises:
        TypeError: One of them is not a callback.
    """

    def __init__(self, callbacks: Sequence[Any] | None, trial: FitTrialView) -> None:
        given = list(callbacks or ())
        own = [own for each in given if (own := as_own(each)) is not None]
        config = trial.config.get("train_loop_config", trial.config)
        self._calls = FunctionCalls(own, trial.trainable_name, config, trial.local_path)
        of_tune = [_checked(each) for each in given if as_own(each) is None]
        super().__init__([*of_tune, self._calls] if own else of_tune, trial, _ADVICE)

    @property
    def replaced_loggers(self) -> frozenset[str]:
        """The default loggers of Ray Tune that the user passed, by name."""
        return frozenset(name for callback in self._dispatcher.callbacks for name in _default_loggers(callback))

    @property
    def is_stopping(self) -> bool:
        """True if a callback has called `run.stop`."""
        return self._calls.is_stopping


def _checked(callback: Any) -> Any:
    """Return a callback with hooks of Ray Tune.

    Raises:
        TypeError: It is not a callback.
    """
    if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        instead = f"; did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
        if hasattr(callback, "after_report"):  # one of Ray Train, such as its `TuneReportCallback`
            instead = (
                ". Callbacks of Ray Train are for its own trainers. To let Ray Tune see a run, pass the trainer to "
                "`raysgd.tune.Tuner`, or call `ray.tune.report(trainer.fit().metrics)` in your function"
            )
        raise TypeError(
            f"`RunConfig(callbacks=[{callback!r}])`: need objects of subclasses of `ray.tune.Callback`, "
            "`ray.tune.logger.LoggerCallback`, `raysgd.train.TrainingCallback` or "
            f"`raysgd.callbacks.Callback`{instead}"
        )
    return callback


def _default_loggers(callback: Any) -> list[str]:
    """Return which of the default loggers of Ray Tune this is."""
    return [
        base.__name__
        for base in type(callback).__mro__
        if base.__name__ in DEFAULT_LOGGERS and base.__module__.startswith("ray.tune.logger")
    ]
