"""Callbacks that users give, checked, and their calls with what happens in a run; one that fails is named.

`Dispatcher` calls hooks of any objects, `CallbackCalls` those of our callbacks in a `fit` of a class-based trainer, and
`FunctionCalls` while a training function runs. `RunCallbacks` calls ours beside callbacks of Ray Tune, which are shown
the run as a trial.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd._synonyms import callback_instead_of
from raysgd.air.constants import DEFAULT_LOGGERS
from raysgd.air.reports import OF_PLACE, OF_TRIAL, SHOULD_CHECKPOINT, TRAINING_ITERATION
from raysgd.air.trial import FitTrialView
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.exceptions import CallbackError, OnFailure

if TYPE_CHECKING:
    from raysgd._numbers.results import CallProgress
    from raysgd.engine.shared.group_events import GroupEvent


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
"""The methods of callbacks of Ray Tune, of which one makes an object a callback."""
_ADVICE_IN_RUN = (
    "Its checkpoints and results are kept: fix the callback, or leave it out of `RunConfig(callbacks=...)`, and "
    "continue with `restore`."
)
_NOT_SHOWN = OF_TRIAL | OF_PLACE | {SHOULD_CHECKPOINT}


def checked(callbacks: Any) -> tuple[list[Callback], list[WorkerCallback]]:
    """Return the callbacks that a user gave to `fit`: those of the driver in the order of their calls, and the others.

    Raises:
        TypeError: They are no list, or one of them is no callback.
        ValueError: One of them is there twice.
    """
    given = as_list(callbacks)
    for number, each in enumerate(given):
        if any(each is other for other in given[:number]):
            raise ValueError(f"`callbacks` has {each!r} twice, which would be called twice: pass each object once.")
        if not isinstance(each, Callback | WorkerCallback):
            is_class = isinstance(each, type) and issubclass(each, Callback | WorkerCallback)
            instead = f" Did you mean `{each.__name__}()`?" if is_class else callback_instead_of(each)
            raise TypeError(
                f"`callbacks` has {each!r}: need objects of subclasses of `raysgd.callbacks.Callback` or "
                f"`WorkerCallback`.{instead}"
            )
    own = sorted((each for each in given if isinstance(each, Callback)), key=lambda each: each.runs_last)
    return own, [each for each in given if isinstance(each, WorkerCallback)]


def as_list(callbacks: Any) -> list[Any]:
    """Return the callbacks that a user gave.

    Raises:
        TypeError: They are no list.
    """
    if isinstance(callbacks, Callback | str | bytes) or not isinstance(callbacks, Iterable | None):
        raise TypeError(f"`callbacks={callbacks!r}`: need a list of callbacks, or None.")
    return list(callbacks or ())


def own_among(callbacks: Iterable[Any]) -> list[Callback]:
    """Return which of the callbacks that a user gave for a training function are ours.

    Raises:
        TypeError: One of them runs in the workers.
    """
    given = list(callbacks)
    for each in given:
        if isinstance(each, WorkerCallback):
            raise TypeError(
                f"`{type(each).__name__}` runs in the workers, around each step, and a training function takes its "
                "steps itself: leave it out, or use `TorchTrainer.fit`."
            )
    return [each for each in given if isinstance(each, Callback)]


class Dispatcher:
    """Calls callbacks in their order, with what their methods take. After one has failed, the caller ends the run.

    Args:
        callbacks: Objects with hooks: methods that are called by name. A hook that one does not have is left out.
        advice: What the user can do where one fails. None lets errors of callbacks through as they are.
    """

    def __init__(self, callbacks: Iterable[Any], advice: str | None = ADVICE) -> None:
        self.callbacks = list(callbacks)
        self._advice = advice

    def on(self, hook: str, *args: Any, **info: Any) -> None:
        """Call a hook of all callbacks.

        Raises:
            CallbackError: One of them failed; those after it are not called.
        """
        for callback in self.callbacks:
            self.call(callback, hook, *args, **info)

    def call(self, callback: Any, hook: str, *args: Any, **info: Any) -> Any:
        """Call a hook of one callback, with what it takes of `info`, and return what it returns.

        Raises:
            CallbackError: It failed.
        """
        method = getattr(callback, hook, None)
        if method is None:  # an object of the user's own class, with only some of the hooks
            return None
        try:
            return call_with_known(method, *args, **info) if info else method(*args)
        except CallbackError:  # of a callback inside this one
            raise
        except Exception as error:  # user code
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
        """Call the last hooks of each callback, whatever fails. Only one failure is raised; the others are logged.

        Args:
            hooks: Their names.
            args: What is passed to them.
            has_failed: Whether something else has ended the run, which matters more.
            only: The callbacks, if not all.
            info: What is passed to them as far as they take it.

        Raises:
            KeyboardInterrupt: Ctrl-C in one of them; `SystemExit` in the same way.
            CallbackError: The first failure in a run that had not failed.
        """
        failures: list[tuple[Any, BaseException]] = []
        for callback in self.callbacks if only is None else only:
            try:
                for hook in hooks:
                    self.call(callback, hook, *args, **info)
            except BaseException as error:  # user code, and Ctrl-C: the others see the end all the same
                failures.append((callback, error))
        interrupts = [failure for _, failure in failures if not isinstance(failure, Exception)]
        raised = next(iter(interrupts or ([] if has_failed else [failure for _, failure in failures])), None)
        for callback, failure in failures:
            if failure is not raised:
                logger.error("the callback `%s` failed at the end: %s", type(callback).__name__, failure)
        if raised is not None:
            raise raised


def call_with_known(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call an override of any generation with those of `named` that it takes."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return method(*args, **named)
    known = {parameter.name for parameter in parameters}
    return method(*args, **{name: value for name, value in named.items() if name in known})


class CallbackCalls(Dispatcher):
    """The callbacks of one run.

    Args:
        callbacks: Called in this order.
        run: What they are shown.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        super().__init__(callbacks)
        self._run = run
        self._begun: list[Callback] = []
        self._failed_in_progress: CallbackError | None = None

    def check(self) -> None:
        """Refuse a run that a callback cannot be part of; nothing has begun.

        Raises:
            ValueError: There is one.
        """
        for callback in self.callbacks:
            callback._check_run(self._run)

    def begin_run(self) -> None:
        """Tell callbacks that the run begins."""
        for callback in self.callbacks:
            self._begun.append(callback)
            self.call(callback, "on_run_begin", self._run)

    def tell(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks, with the run.

        Raises:
            CallbackError: One of them failed.
        """
        self.on(hook, self._run, *args)

    def wants(self, hook: str) -> bool:
        """Return whether a callback does something in a hook."""
        return any(overrides(each, hook) for each in self.callbacks)

    def progress(self, progress: CallProgress) -> None:
        """Tell callbacks how far a running epoch is. An error is kept until `check_progress` raises it."""
        self._tell_inside("on_progress", progress)

    def step_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Tell callbacks what the last steps have measured, in the same way."""
        self._tell_inside("on_step_metrics", step, metrics)

    def _tell_inside(self, hook: str, *args: Any) -> None:
        try:
            if self._failed_in_progress is None:
                self.tell(hook, *args)
        except CallbackError as error:
            self._failed_in_progress = error

    def check_progress(self) -> None:
        """Raise what a callback raised while an epoch was running."""
        if self._failed_in_progress is not None:
            raise self._failed_in_progress

    def end_run(self, error: BaseException | None) -> None:
        """Tell each callback whose `on_run_begin` was called that the run has ended, also when one fails.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        has_failed = error is not None
        self.finish(["on_run_end"], self._run, error, has_failed=has_failed, only=self._begun)

    def states(self) -> list[dict[str, Any]]:
        """Return what the callbacks need to go on in another run: for each its class and its state."""
        return [
            {"name": type(callback).__name__, "state": self.call(callback, "state_dict")} for callback in self.callbacks
        ]

    def load_states(self, states: Iterable[Any]) -> None:
        """Give callbacks back what `states` returned. Each gets the first state of its class that no other has got."""
        left = [dict(entry) for entry in states]
        for callback in self.callbacks:
            found = next((entry for entry in left if entry.get("name") == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                if found.get("state") is not None:
                    self.call(callback, "load_state_dict", found["state"])


def overrides(callback: Callback, method: str) -> bool:
    """Return whether a callback does something in a method."""
    return getattr(type(callback), method, None) is not getattr(Callback, method)


class FunctionCalls(CallbackCalls):
    """Calls our callbacks while a training function runs: there is one result per report, and no epochs.

    Args:
        callbacks: Called in this order.
        name: What the run is called.
        config: The config of the function.
        folder: Where callbacks put files.
        obstacle_to_stop: Why `run.stop` cannot end this kind of run; None if it can.

    Raises:
        ValueError: Two of the callbacks write to the same place.
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
        if not self.callbacks:
            return
        run = self._run
        for event in events[len(run.history.events) :]:
            run.history.events.append(event)
            self.tell("on_event", event)
        run.epoch = int(metrics.get(TRAINING_ITERATION) or run.epoch + 1)
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        self.tell("on_result", run.history.add_row({TRAINING_ITERATION: run.epoch, **shown}))


class RunCallbacks(Dispatcher):
    """The callbacks of a run of `fit()`: those of `RunConfig(callbacks=[...])`, called in their order.

    Callbacks and loggers of Ray Tune are called with the trial; after them ours with the run. When one of them has
    failed, none is called before the end.

    Args:
        callbacks: What the user gave.
        trial: The trial that they are shown.

    Raises:
        TypeError: One of them is not a callback, or runs in the workers.
    """

    def __init__(self, callbacks: Sequence[Any] | None, trial: FitTrialView) -> None:
        given = list(callbacks or ())
        config = trial.config.get("train_loop_config", trial.config)
        self._own = FunctionCalls(own_among(given), trial.trainable_name, config, trial.local_path)
        super().__init__(of_tune_among(given), _ADVICE_IN_RUN)
        self._events: Callable[[], Sequence[GroupEvent]] = tuple
        self._trial = trial
        self._iteration = 0
        self._has_failed = False

    @property
    def replaced_loggers(self) -> frozenset[str]:
        """The default loggers of Ray Tune that the user passed, by name."""
        return frozenset(name for callback in self.callbacks for name in _default_loggers(callback))

    @property
    def is_stopping(self) -> bool:
        """True if a callback has called `run.stop`."""
        return self._own.is_stopping

    def watch(self, events: Callable[[], Sequence[GroupEvent]]) -> None:
        """Let callbacks see what happens to the workers."""
        self._events = events

    def setup(self, stop: Any) -> None:
        """Tell callbacks of the run, once, before the first attempt."""
        self._unless_failed(self.on, "setup", stop=stop, num_samples=1, total_num_samples=1)

    def start(self, *, after_failure: bool, restores: bool, num_reports: int = 0) -> None:
        """Tell callbacks that an attempt starts.

        Args:
            after_failure: Whether one has failed before it.
            restores: Whether it continues from a checkpoint.
            num_reports: How many reports that checkpoint has.
        """
        hooks = ["on_trial_recover"] * after_failure + ["on_trial_start"] + ["on_trial_restore"] * restores
        for hook in hooks:
            self._on(hook)
        self._unless_failed(self._own.begin_run, num_reports)

    def report(self, result: Mapping[str, Any]) -> None:
        """Tell callbacks of a report, while `trial.last_result` is still the one before."""
        self._on("on_step_begin")
        self._on("on_trial_result", result=dict(result))
        self._unless_failed(self._own.report, result, self._events())

    def save(self, checkpoint: Any) -> None:
        """Tell callbacks of a checkpoint, while `trial.checkpoint` is still the one before."""
        self._on("on_checkpoint", checkpoint=checkpoint)
        path = getattr(checkpoint, "path", None)
        if path is not None:  # one that is not kept lies in memory
            self._unless_failed(self._own.tell, "on_checkpoint", str(path))

    def saved(self) -> None:
        """Tell callbacks that `trial.checkpoint` is the new one."""
        self._on("on_trial_save")

    def end_step(self) -> None:
        """Tell callbacks that the report is done with."""
        self._iteration += 1
        self._on("on_step_end")

    def end_run(self, error: BaseException | None) -> None:
        """Tell every callback that the run has ended, maybe with `error`, also when one of them fails.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        hooks = ["on_trial_error" if error is not None else "on_trial_complete", "on_experiment_end"]
        shown: dict[str, Any] = {"iteration": self._iteration, "trials": [self._trial], "trial": self._trial}
        with OnFailure(told=self._own.end_run):
            self.finish(hooks, has_failed=error is not None, **shown)
        self._own.end_run(error)

    def states(self) -> dict[int, Any]:
        """Return what callbacks want to find again in a run that continues this one: by their position, ours last."""
        found = {index: self.call(each, "get_state") for index, each in enumerate(self.callbacks)}
        own = [each for each in self._own.states() if each["state"] is not None]
        return {index: state for index, state in {**found, len(found): own}.items() if state}

    def restore_states(self, states: Mapping[int, Any]) -> None:
        """Give callbacks back what `states` found."""
        for index, callback in enumerate(self.callbacks):
            if index in states:
                self.call(callback, "set_state", states[index])
        self._own.load_states(states.get(len(self.callbacks), ()))

    def _on(self, hook: str, **info: Any) -> None:
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
    """Return which of the callbacks that a user gave for a run of `fit()`, or for a sweep, are not ours.

    Raises:
        TypeError: One of them has no hook of Ray Tune.
    """
    found = [each for each in callbacks if not isinstance(each, Callback)]
    for each in found:
        _check_of_tune(each)
    return found


def _check_of_tune(callback: Any) -> None:
    if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        instead = f"; did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
        if hasattr(callback, "start_training"):
            instead = ". A `TrainingCallback` is for `raysgd.train.Trainer.run(callbacks=[...])`"
        if hasattr(callback, "after_report"):  # one of Ray Train, such as its `TuneReportCallback`
            instead = (
                ". Callbacks of Ray Train are for its own trainers. To let Ray Tune see a run, pass the trainer to "
                "`raysgd.tune.Tuner`, or call `ray.tune.report(trainer.fit().metrics)` in your function"
            )
        raise TypeError(
            f"`RunConfig(callbacks=[{callback!r}])`: need objects of subclasses of `ray.tune.Callback`, "
            f"`ray.tune.logger.LoggerCallback` or `raysgd.callbacks.Callback`{instead}"
        )


def _default_loggers(callback: Any) -> list[str]:
    """Return which of the default loggers of Ray Tune this is."""
    return [
        base.__name__
        for base in type(callback).__mro__
        if base.__name__ in DEFAULT_LOGGERS and base.__module__.startswith("ray.tune.logger")
    ]
