"""The callbacks of a run: those of `RunConfig(callbacks=[...])`, called in their order.

Callbacks and loggers of Ray Tune are called with the trial; callbacks of `raysgd.train.callbacks` with the reports;
callbacks of `raysgd.callbacks` with the run, after the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.callbacks.adapters import TUNE_HOOKS, FunctionCalls, InTrial
from raysgd.callbacks.callback import Callback
from raysgd.engine.history import Event
from raysgd.exceptions import CallbackError
from raysgd.train.callbacks.callback import TrainingCallback, call_with_known
from raysgd.train.constants import TIME_THIS_ITER_S, TIMESTAMP, TRAINING_ITERATION
from raysgd.train.fit.trial import Trial
from raysgd.train.fit.writers import DEFAULT_LOGGERS

logger = logging.getLogger(__name__)

_ADVICE = (
    "Its checkpoints and results are kept: fix the callback, or leave it out of `RunConfig(callbacks=...)`, and "
    "continue with `restore`."
)


class RunCallbacks:
    """The callbacks of one run. When one of them has failed, none is called before the end.

    Args:
        callbacks: What the user gave.
        trial: The trial that they are shown.
        advice: What to do where one of them fails.

    Raises:
        TypeError: One of them is not a callback.
    """

    def __init__(self, callbacks: Sequence[Any] | None, trial: Trial, advice: str = _ADVICE) -> None:
        given = list(callbacks or ())
        self._callbacks = [_adapted(callback) for callback in given if not isinstance(callback, Callback)]
        self._own = _in_trial([callback for callback in given if isinstance(callback, Callback)], trial)
        self._callbacks += self._own
        self._advice = advice
        self._trial = trial
        self._iteration = 0
        self._has_failed = False

    @property
    def replaced_loggers(self) -> frozenset[str]:
        """The default loggers of Ray Tune that the user passed, by name."""
        return frozenset(name for callback in self._callbacks for name in _default_loggers(callback))

    @property
    def is_stopping(self) -> bool:
        """Whether a callback has called `run.stop`."""
        return any(own.is_stopping for own in self._own)

    def watch(self, events: Callable[[], Sequence[Event]]) -> None:
        """Lets callbacks see what happens to the workers."""
        for own in self._own:
            own.events = events

    def setup(self, stop: Any) -> None:
        """Called once, before the first attempt."""
        for callback in self._callbacks:
            self._call(callback, "setup", stop=stop, num_samples=1, total_num_samples=1)

    def start(self, *, after_failure: bool, restores: bool, num_reports: int = 0) -> None:
        """An attempt starts.

        Args:
            after_failure: Whether one has failed before it.
            restores: Whether it continues from a checkpoint.
            num_reports: How many reports that checkpoint has.
        """
        for own in self._own:
            own.num_reports = num_reports
        if after_failure:
            self._on_trial("on_trial_recover")
        self._on_trial("on_trial_start")
        if restores:
            self._on_trial("on_trial_restore")

    def report(self, result: Mapping[str, Any]) -> None:
        """There is a report. `trial.last_result` is still the one before."""
        self._on_step("on_step_begin")
        self._on_trial("on_trial_result", result=dict(result))

    def save(self, checkpoint: Any) -> None:
        """There is a checkpoint. `trial.checkpoint` is still the one before."""
        self._on_trial("on_checkpoint", checkpoint=checkpoint)

    def saved(self) -> None:
        """`trial.checkpoint` is the new one."""
        self._on_trial("on_trial_save")

    def end_step(self) -> None:
        """The report is done with."""
        self._iteration += 1
        self._on_step("on_step_end")

    def end(self, *, has_failed: bool, error: BaseException | None = None) -> None:
        """The run has ended, maybe with `error`. Every callback is called, also when one of them fails.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        for own in self._own:
            own.error = error
        errors: list[CallbackError] = []
        trial = {"iteration": self._iteration, "trials": [self._trial], "trial": self._trial}
        for callback in self._callbacks:
            try:
                self._call(callback, "on_trial_error" if has_failed else "on_trial_complete", **trial)
                self._call(callback, "on_experiment_end", trials=[self._trial])
            except CallbackError as failed:
                errors.append(failed)
        for hidden in errors if has_failed else errors[1:]:
            logger.error("%s", hidden)
        if errors and not has_failed:
            raise errors[0]

    # ------------------------------------------------------------------------------------------------ their state

    def states(self) -> dict[int, Any]:
        """What callbacks want to find again in a run that continues this one, by their position."""
        found = {
            index: callback.get_state()
            for index, callback in enumerate(self._callbacks)
            if hasattr(callback, "get_state")
        }
        return {index: state for index, state in found.items() if state}

    def restore_states(self, states: Mapping[int, Any]) -> None:
        """Gives callbacks back what `states` found."""
        for index, callback in enumerate(self._callbacks):
            if index in states and hasattr(callback, "set_state"):
                callback.set_state(states[index])

    # ------------------------------------------------------------------------------------------------ calls

    def _on_trial(self, hook: str, **info: Any) -> None:
        self._on_step(hook, trial=self._trial, **info)

    def _on_step(self, hook: str, **info: Any) -> None:
        for callback in self._callbacks if not self._has_failed else ():
            self._call(callback, hook, iteration=self._iteration, trials=[self._trial], **info)

    def _call(self, callback: Any, hook: str, **info: Any) -> None:
        method = getattr(callback, hook, None)
        if method is None:  # an object of the user's own class, with only some of the hooks
            return
        try:
            call_with_known(method, **info)
        except CallbackError:  # of one of our callbacks
            self._has_failed = True
            raise
        except Exception as error:
            self._has_failed = True
            name = type(getattr(callback, "callback", callback)).__name__
            raise CallbackError(
                f"The callback `{name}` failed in `{hook}`: {type(error).__name__}: {error}. The run ends. "
                f"{self._advice}"
            ) from error


def _in_trial(callbacks: Sequence[Callback], trial: Trial) -> list[InTrial]:
    """What calls our own callbacks; nothing if there are none."""
    if not callbacks:
        return []
    config = trial.config.get("train_loop_config", trial.config)
    return [InTrial(FunctionCalls(callbacks, trial.trainable_name, config, trial.local_path))]


def _adapted(callback: Any) -> Any:
    """The callback with the hooks of Ray Tune.

    Raises:
        TypeError: It is not a callback.
    """
    if isinstance(callback, TrainingCallback):
        return _FunctionCallback(callback)
    if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        instead = f"; did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
        raise TypeError(
            f"`RunConfig(callbacks=[{callback!r}])`: need objects of subclasses of `ray.tune.Callback`, "
            "`ray.tune.logger.LoggerCallback`, `raysgd.train.TrainingCallback` or "
            f"`raysgd.callbacks.Callback`{instead}"
        )
    return callback


def _default_loggers(callback: Any) -> list[str]:
    """Which of the default loggers of Ray Tune this is."""
    return [
        base.__name__
        for base in type(callback).__mro__
        if base.__name__ in DEFAULT_LOGGERS and base.__module__.startswith("ray.tune.logger")
    ]


class _FunctionCallback:
    """Calls a callback of `raysgd.train.callbacks` from the hooks of Ray Tune. It sees the reports of rank 0.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: TrainingCallback) -> None:
        self.callback = callback
        self._has_started = False

    def on_trial_start(self, trial: Trial) -> None:
        if not self._has_started:
            self._has_started = True
            config = trial.config.get("train_loop_config", trial.config)
            call_with_known(self.callback.start_training, logdir=trial.local_path, config=config)

    def on_trial_result(self, result: Mapping[str, Any]) -> None:
        reported = {key: value for key, value in result.items() if key not in ("config", "trial_id", "experiment_tag")}
        named = {
            TIMESTAMP: result["timestamp"],
            TIME_THIS_ITER_S: result["time_this_iter_s"],
            TRAINING_ITERATION: result["training_iteration"],
        }
        self.callback.process_results([{**reported, **named}])

    def on_trial_complete(self) -> None:
        self.callback.finish_training(error=False)

    def on_trial_error(self) -> None:
        self.callback.finish_training(error=True)
