"""Checks the user's callbacks, and calls their methods (hooks) during a run. If a hook fails, the error names it.

`Dispatcher` calls methods of any objects by name. `CallbackCalls` calls raysgd callbacks during `fit` of a
`TorchTrainer` or `TFTrainer`. `FunctionCalls` calls raysgd callbacks while a training function runs. `RunCallbacks`
also calls Ray Tune callbacks, to which the run is presented as a trial.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air.constants import DEFAULT_LOGGERS
from raysgd.air.reports import OF_PLACE, OF_TRIAL, SHOULD_CHECKPOINT, TRAINING_ITERATION
from raysgd.air.trial import FitTrialView
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.synonyms import callback_instead_of
from raysgd.exceptions import CallbackError, OnFailure

if TYPE_CHECKING:
    from raysgd.core.engine.shared.interface import GroupEvent


logger = logging.getLogger(__name__)

ADVICE = "What was trained and saved is kept: fix the callback or leave it out, and continue."
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
"""Methods of Ray Tune callbacks. An object with any of these methods counts as a Ray Tune callback."""
_ADVICE_IN_RUN = (
    "Its checkpoints and results are kept: fix the callback, or leave it out of `RunConfig(callbacks=...)`, and "
    "continue with `restore`."
)
_NOT_SHOWN = OF_TRIAL | OF_PLACE | {SHOULD_CHECKPOINT}


def checked(callbacks: Any) -> tuple[list[Callback], list[WorkerCallback]]:
    """Check the `callbacks` that the user passed to `fit`.

    Returns:
        The callbacks for the driver, in the order in which they are called, and the worker callbacks.

    Raises:
        TypeError: `callbacks` is neither an iterable nor None, or contains an object that is not a callback.
        ValueError: A callback is in the list twice.
    """
    listed = as_list(callbacks)
    for number, each in enumerate(listed):
        if any(each is other for other in listed[:number]):
            raise ValueError(f"`callbacks` has {each!r} twice, which would be called twice: pass each object once.")
        if not isinstance(each, Callback | WorkerCallback):
            is_class = isinstance(each, type) and issubclass(each, Callback | WorkerCallback)
            instead = f" Did you mean `{each.__name__}()`?" if is_class else callback_instead_of(each)
            raise TypeError(
                f"`callbacks` has {each!r}: need objects of subclasses of `raysgd.callbacks.Callback` or "
                f"`WorkerCallback`.{instead}"
            )
    return _own_in_order(listed), [each for each in listed if isinstance(each, WorkerCallback)]


def as_list(callbacks: Any) -> list[Any]:
    """Return the `callbacks` that the user passed, as a list. For None, the list is empty.

    Raises:
        TypeError: `callbacks` is neither an iterable nor None, or it is a string or a single callback.
    """
    if isinstance(callbacks, Callback | str | bytes) or not isinstance(callbacks, Iterable | None):
        raise TypeError(f"`callbacks={callbacks!r}`: need a list of callbacks, or None.")
    return list(callbacks or ())


def own_among(callbacks: Iterable[Any]) -> list[Callback]:
    """Return the raysgd callbacks from the list for the run of a training function, in the order of their calls.

    Raises:
        TypeError: The list contains a worker callback.
    """
    listed = list(callbacks)
    for each in listed:
        if isinstance(each, WorkerCallback):
            raise TypeError(
                f"`{type(each).__name__}` runs in the workers, around each step, and a training function takes its "
                "steps itself: leave it out, or use `TorchTrainer.fit`."
            )
    return _own_in_order(listed)


def _own_in_order(callbacks: Iterable[Any]) -> list[Callback]:
    return sorted((each for each in callbacks if isinstance(each, Callback)), key=lambda each: each.runs_last)


class Dispatcher:
    """Calls methods (hooks) of callbacks, one callback after the other.

    If a callback fails, the code that uses this object must end the run.

    Args:
        callbacks: The callbacks, which may be any objects. A callback without the method to call is skipped.
        advice: Advice for the user in the `CallbackError` that is raised if a callback fails. If None, the callback's
            own exception is raised instead.
    """

    def __init__(self, callbacks: Iterable[Any], advice: str | None = ADVICE) -> None:
        self.callbacks = list(callbacks)
        self._advice = advice

    def on(self, hook: str, *args: Any, **info: Any) -> None:
        """Call a method of all callbacks.

        Args:
            hook: Name of the method.
            *args: Positional arguments for the method.
            **info: Keyword arguments. Arguments that a callback's method does not accept are left out.

        Raises:
            CallbackError: A callback failed. The remaining callbacks are not called.
        """
        for callback in self.callbacks:
            self.call(callback, hook, *args, **info)

    def call(self, callback: Any, hook: str, *args: Any, **info: Any) -> Any:
        """Call a method of one callback, and return the result. Return None if the callback has no such method.

        Args:
            callback: The callback.
            hook: Name of the method.
            *args: Positional arguments for the method.
            **info: Keyword arguments. Arguments that the method does not accept are left out.

        Raises:
            CallbackError: The method failed.
        """
        method = getattr(callback, hook, None)
        if method is None:  # a user's class need not define all methods
            return None
        try:
            return call_with_known(method, *args, **info) if info else method(*args)
        except CallbackError:  # this callback calls others, and the error already names the one that failed
            raise
        except Exception as error:  # a user's callback may raise any exception
            if self._advice is None:
                raise
            said = f"{type(error).__name__}: {str(error).rstrip('.')}"
            name = type(callback).__name__
            raise CallbackError(
                f"The callback `{name}` failed in `{hook}`: {said}. The run ends. {self._advice}"
            ) from error

    def finish(
        self, hooks: Sequence[str], *args: Any, has_failed: bool, only: Iterable[Any] | None = None, **info: Any
    ) -> None:
        """Call methods of all callbacks at the end of a run, even if some callbacks fail.

        If a method fails, the remaining methods of the same callback are skipped. At most one failure is raised. The
        others are logged.

        Args:
            hooks: Names of the methods.
            *args: Positional arguments for the methods.
            has_failed: Whether the run has already failed. Failures of callbacks are then only logged.
            only: The callbacks to call. Default: all callbacks of this object.
            **info: Keyword arguments. Arguments that a method does not accept are left out.

        Raises:
            KeyboardInterrupt, SystemExit: A method raised this exception, for example because of Ctrl-C. It is raised
                even if `has_failed` is True.
            CallbackError: A method failed in a run that had not failed. The first failure is raised.
        """
        failures: list[tuple[Any, BaseException]] = []
        for callback in self.callbacks if only is None else only:
            try:
                for hook in hooks:
                    self.call(callback, hook, *args, **info)
            except BaseException as error:  # also on Ctrl-C, because the remaining callbacks must still be called
                failures.append((callback, error))
        interrupts = [failure for _, failure in failures if not isinstance(failure, Exception)]
        raised = next(iter(interrupts or ([] if has_failed else [failure for _, failure in failures])), None)
        for callback, failure in failures:
            if failure is not raised:
                logger.error("the callback `%s` failed at the end: %s", type(callback).__name__, failure)
        if raised is not None:
            raise raised


def call_with_known(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a method, and leave out the keyword arguments that the method does not accept.

    This way, methods of callbacks that were written for older versions, with fewer parameters, still work.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return method(*args, **named)
    known = {parameter.name for parameter in parameters}
    return method(*args, **{name: value for name, value in named.items() if name in known})


class CallbackCalls(Dispatcher):
    """Calls the methods of the raysgd callbacks in one run.

    Args:
        callbacks: The callbacks, in the order in which they are called.
        run: The `Run` that most methods of callbacks receive as their first argument.

    Attributes:
        run: The `Run`.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        super().__init__(callbacks)
        self.run = run
        self._begun: list[Callback] = []
        self._failed_in_progress: CallbackError | None = None

    def check(self) -> None:
        """Check before the run that all callbacks can work in it.

        Raises:
            ValueError: A callback cannot work in this run.
        """
        for callback in self.callbacks:
            callback._check_run(self.run)

    def begin_run(self) -> None:
        """Call `on_run_begin` of all callbacks."""
        for callback in self.callbacks:
            self._begun.append(callback)
            self.call(callback, "on_run_begin", self.run)

    def tell(self, hook: str, *args: Any) -> None:
        """Call a method of all callbacks, with the run as the first argument.

        Args:
            hook: Name of the method.
            *args: The arguments after the run.

        Raises:
            CallbackError: A callback failed.
        """
        self.on(hook, self.run, *args)

    def wants(self, hook: str) -> bool:
        """Return True if any callback overrides the method with this name."""
        return any(overrides(each, hook) for each in self.callbacks)

    def tell_inside(self, hook: str, *args: Any) -> None:
        """Call a method of all callbacks while a call runs. If one fails, `check_progress` raises the error later.

        See `tell` for the arguments.
        """
        try:
            if self._failed_in_progress is None:
                self.tell(hook, *args)
        except CallbackError as error:
            self._failed_in_progress = error

    def check_progress(self) -> None:
        """If a callback has failed in `tell_inside`, raise the first such error."""
        if self._failed_in_progress is not None:
            raise self._failed_in_progress

    def end_run(self, error: BaseException | None) -> None:
        """Call `on_run_end` of each callback whose `on_run_begin` was called, even if a callback fails.

        Raises:
            CallbackError: A callback failed in a run that had not failed.
        """
        has_failed = error is not None
        self.finish(["on_run_end"], self.run, error, has_failed=has_failed, only=self._begun)

    def states(self) -> list[dict[str, Any]]:
        """Return the class name and the state of each callback. A run that continues this run loads them."""
        return [
            {"name": type(callback).__name__, "state": self.call(callback, "state_dict")} for callback in self.callbacks
        ]

    def load_states(self, states: Iterable[Any]) -> None:
        """Load the states that `states` returned in an earlier run.

        Each callback gets a state that was saved under its class name. If several callbacks have the same class, they
        get their states in order.
        """
        left = [dict(entry) for entry in states]
        for callback in self.callbacks:
            saved = next((entry for entry in left if entry.get("name") == type(callback).__name__), None)
            if saved is not None:
                left.remove(saved)
                if saved.get("state") is not None:
                    self.call(callback, "load_state_dict", saved["state"])


def overrides(callback: Callback, method: str) -> bool:
    """Return True if the class of a callback overrides the method of `Callback` with this name."""
    return getattr(type(callback), method, None) is not getattr(Callback, method)


class FunctionCalls(CallbackCalls):
    """Calls raysgd callbacks while a training function runs.

    Callbacks receive each report of the function as one result. There are no epochs.

    Args:
        callbacks: The callbacks, in the order in which they are called.
        name: Name of the run.
        config: The config that the training function receives. If it is a mapping, callbacks see it as `run.config`.
        folder: Folder for the files of the callbacks.
        obstacle_to_stop: Reason why `run.stop` cannot end a run of this kind, or None if it can.

    Raises:
        ValueError: Two callbacks write to the same file.
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
        self.check()

    def begin_run(self, num_reports: int = 0) -> None:
        """Call `on_run_begin` of all callbacks when the training function starts. Do nothing when it restarts.

        Args:
            num_reports: Number of reports before the checkpoint from which the function continues. 0 if it continues
                from no checkpoint.
        """
        if not self._begun:
            self.run.epoch = num_reports
            super().begin_run()

    def report(self, metrics: Mapping[str, Any], events: Sequence[GroupEvent] = ()) -> None:
        """Call `on_event` of the callbacks for each new event, and then `on_result` with a report.

        Args:
            metrics: The metrics that the training function has reported.
            events: All events of the run so far in which workers were lost, added or replaced.
        """
        if not self.callbacks:
            return
        run = self.run
        for event in events[len(run.history.events) :]:
            run.history.events.append(event)
            self.tell("on_event", event)
        run.epoch = int(metrics.get(TRAINING_ITERATION) or run.epoch + 1)
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        self.tell("on_result", run.history.add_row({TRAINING_ITERATION: run.epoch, **shown}))


class RunCallbacks(Dispatcher):
    """Calls the callbacks that the user passed in `RunConfig(callbacks=[...])`, during a run of `fit()`.

    Ray Tune callbacks and loggers are called first. They receive a `FitTrialView`, which presents the run as a trial.
    Then raysgd callbacks are called, and receive the `Run`. After a callback has failed, only the methods for the end
    of the run are still called.

    Args:
        callbacks: The user's callbacks of both kinds.
        trial: The trial that Ray Tune callbacks receive.

    Raises:
        TypeError: An object is not a callback, or is a worker callback.
        ValueError: Two raysgd callbacks write to the same file.
    """

    def __init__(self, callbacks: Sequence[Any] | None, trial: FitTrialView) -> None:
        listed = list(callbacks or ())
        config = trial.config.get("train_loop_config", trial.config)
        self._own = FunctionCalls(own_among(listed), trial.trainable_name, config, trial.local_path)
        super().__init__(of_tune_among(listed), _ADVICE_IN_RUN)
        self._trial = trial
        self._iteration = 0
        self._has_failed = False

    @property
    def replaced_loggers(self) -> frozenset[str]:
        """Names of Ray Tune's default loggers that the user passed as callbacks.

        The library does not write the files of these loggers itself.
        """
        bases = (base for callback in self.callbacks for base in type(callback).__mro__)
        names = (base.__name__ for base in bases if base.__module__.startswith("ray.tune.logger"))
        return frozenset(DEFAULT_LOGGERS).intersection(names)

    @property
    def is_stopping(self) -> bool:
        """True if a callback has called `run.stop`."""
        return self._own.run.is_stopping

    def start(self, *, after_failure: bool, restores: bool, num_reports: int = 0) -> None:
        """Call the callbacks' methods for the start of an attempt to run the training function.

        Args:
            after_failure: Whether an earlier attempt has failed.
            restores: Whether this attempt continues from a checkpoint.
            num_reports: Number of reports before that checkpoint.
        """
        hooks = ["on_trial_recover"] * after_failure + ["on_trial_start"] + ["on_trial_restore"] * restores
        for hook in hooks:
            self.tell(hook)
        self._unless_failed(self._own.begin_run, num_reports)

    def report(self, result: Mapping[str, Any], events: Sequence[GroupEvent] = ()) -> None:
        """Pass a report of the training function, and new events of its workers, to the callbacks.

        Call this method before you update `trial.last_result`, as Ray Tune does.

        Args:
            result: The report.
            events: All events of the run so far in which workers were lost, added or replaced.
        """
        self.tell("on_step_begin")
        self.tell("on_trial_result", result=dict(result))
        self._unless_failed(self._own.report, result, events)

    def save(self, checkpoint: Any) -> None:
        """Pass a new checkpoint to the callbacks.

        Call this method before you update `trial.checkpoint`, as Ray Tune does.
        """
        self.tell("on_checkpoint", checkpoint=checkpoint)
        _, place = checkpoint.get_internal_representation()
        if isinstance(place, str):  # with `num_to_keep=0`, the checkpoint is in memory and has no place
            self._unless_failed(self._own.tell, "on_checkpoint", place)

    def end_step(self) -> None:
        """Call `on_step_end` of the Ray Tune callbacks, after a report was processed."""
        self._iteration += 1
        self.tell("on_step_end")

    def end_run(self, error: BaseException | None) -> None:
        """Call the methods of all callbacks for the end of the run, even if a callback fails.

        Args:
            error: The error that ended the run, or None.

        Raises:
            CallbackError: A callback failed in a run that had not failed.
        """
        hooks = ["on_trial_error" if error is not None else "on_trial_complete", "on_experiment_end"]
        shown: dict[str, Any] = {"iteration": self._iteration, "trials": [self._trial], "trial": self._trial}
        with OnFailure(with_error=self._own.end_run):
            self.finish(hooks, has_failed=error is not None, **shown)
        self._own.end_run(error)

    def states(self) -> dict[int, Any]:
        """Return the states of the callbacks, for a run that continues this run.

        The key of a Ray Tune callback's state is the callback's position among the Ray Tune callbacks. The next number
        is the key of a list with the states of all raysgd callbacks. Empty states are left out.
        """
        states = {index: self.call(each, "get_state") for index, each in enumerate(self.callbacks)}
        own = [each for each in self._own.states() if each["state"] is not None]
        return {index: state for index, state in {**states, len(states): own}.items() if state}

    def restore_states(self, states: Mapping[int, Any]) -> None:
        """Load the states that `states` returned in an earlier run."""
        for index, callback in enumerate(self.callbacks):
            if index in states:
                self.call(callback, "set_state", states[index])
        self._own.load_states(states.get(len(self.callbacks), ()))

    def tell(self, hook: str, **info: Any) -> None:
        """Call a method of the Ray Tune callbacks, with the trial. See `on` for the arguments."""
        trial = self._trial
        self._unless_failed(self.on, hook, iteration=self._iteration, trials=[trial], trial=trial, **info)

    def _unless_failed(self, call: Callable[..., None], *args: Any, **info: Any) -> None:
        if self._has_failed:
            return
        try:
            call(*args, **info)
        except CallbackError:
            self._has_failed = True
            raise


def of_tune_among(callbacks: Iterable[Any]) -> list[Any]:
    """Return the Ray Tune callbacks from the list that the user passed for a run of `fit()` or for a sweep.

    Raises:
        TypeError: An object is neither a raysgd callback nor an instance of a class with methods that Ray Tune calls.
    """
    of_tune = [each for each in callbacks if not isinstance(each, Callback)]
    for each in of_tune:
        _check_of_tune(each)
    return of_tune


def _check_of_tune(callback: Any) -> None:
    if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        instead = f"; did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
        if hasattr(callback, "start_training"):
            instead = ". A `TrainingCallback` is for `raysgd.train.Trainer.run(callbacks=[...])`"
        if hasattr(callback, "after_report"):  # this is a callback of Ray Train, such as `TuneReportCallback`
            instead = (
                ". Callbacks of Ray Train are for its own trainers. To let Ray Tune see a run, pass the trainer to "
                "`raysgd.tune.Tuner`, or call `ray.tune.report(trainer.fit().metrics)` in your function"
            )
        raise TypeError(
            f"`RunConfig(callbacks=[{callback!r}])`: need objects of subclasses of `ray.tune.Callback`, "
            f"`ray.tune.logger.LoggerCallback` or `raysgd.callbacks.Callback`{instead}"
        )
