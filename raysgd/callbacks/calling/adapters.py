"""Callbacks that users give, checked: each becomes one of `raysgd.callbacks`, whatever front end it was written for.

`TrainAdapter` and `TuneAdapter` stand around a callback that was written for `raysgd.train.Trainer` or for Ray Tune.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from raysgd.air import constants
from raysgd.air.metrics import OF_TRIAL
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling.dispatcher import call_with_known
from raysgd.callbacks.calling.trial_calls import TUNE_HOOKS, TrialCalls
from raysgd.callbacks.worker_callback import WorkerCallback

if TYPE_CHECKING:
    from ray.tune import Callback as TuneCallback


class FunctionCallback(Protocol):
    """A `raysgd.train.TrainingCallback`, or what is like one."""

    def start_training(self, *args: Any, **kwargs: Any) -> Any:
        """Called at the beginning."""

    def process_results(self, *args: Any, **kwargs: Any) -> Any:
        """Called with each report."""


AnyCallback: TypeAlias = "Callback | WorkerCallback | FunctionCallback | TuneCallback"


def checked(callbacks: Any, argument: str = "callbacks") -> list[Callback]:
    """The callbacks that a user gave, in the order in which they are called.

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
    """One of our callbacks that calls `callback`; None if it is of no kind that we know."""
    own = as_own(callback)
    if own is None and not isinstance(callback, type) and any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        return TuneAdapter(callback)
    return own


def as_own(callback: Any) -> Callback | None:
    """One of our callbacks as it is, or around one of `raysgd.train.Trainer`; None if it is neither."""
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
        from raysgd.air.layout import EXPERIMENT_TAG, new_trial
        from raysgd.air.metrics import MetricsFiller
        from raysgd.air.trial import FitTrialView
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
            calls.end(has_failed=error is not None)


class WorkerCallbackEntry(Callback):
    """A worker callback that was given by itself.

    Args:
        adapted: The worker callback.
    """

    def __init__(self, adapted: WorkerCallback) -> None:
        self.adapted = adapted

    def worker_callback(self) -> WorkerCallback:
        return self.adapted
