"""The callbacks of raysgd in a sweep: each trial gets its own copy of them, and is a run for them.

Ray Tune calls callbacks in the driver, with the trial that a report is from. Its own callbacks go to it as they are.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd import _trials
from raysgd.callbacks.adapters import FunctionCalls, adapted
from raysgd.callbacks.callback import Callback
from raysgd.train.callbacks.callback import TrainingCallback

_CANNOT_STOP = "it is a trial of Ray Tune, which ends by `RunConfig(stop=...)` or by the scheduler"


class CallsInTrials:
    """Calls copies of callbacks with what happens to each trial.

    Args:
        callbacks: What is copied for each trial, in this order.

    Raises:
        TypeError: One of them needs something in the workers.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._of_trial: dict[str, FunctionCalls] = {}
        self._saved: dict[str, Any] = {}
        self._make("trial", {}, ".")  # refuses before the first trial what cannot be called

    def start(self, trial: Any) -> None:
        """A trial starts, maybe again."""
        if trial.trial_id not in self._of_trial:
            calls = self._make(str(trial), trial.config, trial.local_path)
            calls.load_states(self._saved.get(trial.trial_id, ()))
            self._of_trial[trial.trial_id] = calls
        self._of_trial[trial.trial_id].begin()

    def report(self, trial: Any, result: Mapping[str, Any]) -> None:
        """A trial has reported."""
        self._of_trial[trial.trial_id].report(result)

    def save(self, trial: Any, checkpoint: Any) -> None:
        """A trial has a checkpoint."""
        self._of_trial[trial.trial_id].checkpoint(str(checkpoint.path))

    def end(self, trial: Any, error: BaseException | None) -> None:
        """A trial has ended; it may never have started."""
        calls = self._of_trial.pop(trial.trial_id, None)
        if calls is not None:
            calls.end(error)

    def states(self) -> dict[str, Any]:
        """What the callbacks of each running trial need to go on in a sweep that is restored."""
        return {trial: calls.states() for trial, calls in self._of_trial.items()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Keeps it for the trials that start from now on."""
        self._saved = dict(states)

    def _make(self, name: str, config: Any, folder: str) -> FunctionCalls:
        return FunctionCalls(copy.deepcopy(self._callbacks), name, config, folder, _CANNOT_STOP)


def for_tune(callbacks: Sequence[Any], purpose: str) -> list[Any]:
    """The callbacks of a sweep as Ray Tune takes them.

    Raises:
        TypeError: A callback of raysgd needs something in the workers.
    """
    ours = [callback if isinstance(callback, Callback) else _from_function(callback) for callback in callbacks]
    given = [callback for callback, own in zip(callbacks, ours, strict=True) if own is None]
    own = [callback for callback in ours if callback is not None]
    return [*given, _tune_class(purpose)(CallsInTrials(own))] if own else given


def _from_function(callback: Any) -> Callback | None:
    return adapted(callback) if isinstance(callback, TrainingCallback) else None


@functools.cache
def _tune_class(purpose: str) -> Callable[[CallsInTrials], Any]:
    tune = _trials.require_tune(purpose)

    class InTrials(tune.Callback):  # type: ignore[name-defined]
        """Tells `CallsInTrials` what Ray Tune says."""

        def __init__(self, calls: CallsInTrials) -> None:
            self._calls = calls

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._calls.start(trial)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            self._calls.report(trial, result)

        def on_checkpoint(self, iteration: int, trials: Any, trial: Any, checkpoint: Any, **info: Any) -> None:
            self._calls.save(trial, checkpoint)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._calls.end(trial, None)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._calls.end(trial, trial.get_error() or RuntimeError(f"the trial {trial} failed"))

        def get_state(self) -> dict[str, Any]:
            return self._calls.states()

        def set_state(self, state: dict[str, Any]) -> None:
            self._calls.load_states(state)

    return InTrials
