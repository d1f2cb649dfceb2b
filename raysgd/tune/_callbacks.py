"""The callbacks of raysgd in a sweep: each trial gets its own copy of them, and is a run for them.

Ray Tune calls callbacks in the driver, with the trial that a report is from. Its own callbacks go to it as they are.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.callbacks.adapters import FunctionCalls, as_own
from raysgd.callbacks.callback import Callback
from raysgd.driver import tune_trial

_CANNOT_STOP = "it is a trial of Ray Tune, which ends by `RunConfig(stop=...)` or by the scheduler"


class CallsInTrials:
    """Calls copies of callbacks with what happens to each trial; Ray Tune calls its hooks.

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

    def on_trial_start(self, trial: Any, **info: Any) -> None:
        """A trial starts, maybe again."""
        if trial.trial_id not in self._of_trial:
            calls = self._make(str(trial), trial.config, trial.local_path)
            calls.load_states(self._saved.get(trial.trial_id, ()))
            self._of_trial[trial.trial_id] = calls
        self._of_trial[trial.trial_id].begin_run()

    def on_trial_result(self, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        """A trial has reported."""
        self._of_trial[trial.trial_id].report(result)

    def on_checkpoint(self, trial: Any, checkpoint: Any, **info: Any) -> None:
        """A trial has a checkpoint."""
        self._of_trial[trial.trial_id].checkpoint(str(checkpoint.path))

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        """A trial has ended well."""
        self._end(trial, None)

    def on_trial_error(self, trial: Any, **info: Any) -> None:
        """A trial has failed; it may never have started."""
        self._end(trial, trial.get_error() or RuntimeError(f"the trial {trial} failed"))

    def get_state(self) -> dict[str, Any]:
        """Return what the callbacks of each running trial need to go on in a sweep that is restored."""
        return {trial: calls.states() for trial, calls in self._of_trial.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Keeps it for the trials that start from now on."""
        self._saved = dict(state)

    def _end(self, trial: Any, error: BaseException | None) -> None:
        calls = self._of_trial.pop(trial.trial_id, None)
        if calls is not None:
            calls.end_run(error)

    def _make(self, name: str, config: Any, folder: str) -> FunctionCalls:
        return FunctionCalls(copy.deepcopy(self._callbacks), name, config, folder, _CANNOT_STOP)


def for_tune(callbacks: Sequence[Any], purpose: str) -> list[Any]:
    """The callbacks of a sweep as Ray Tune takes them.

    Raises:
        TypeError: A callback of raysgd needs something in the workers.
    """
    own = [own for callback in callbacks if (own := as_own(callback)) is not None]
    given = [callback for callback in callbacks if as_own(callback) is None]
    return [*given, _tune_class(purpose)(own)] if own else given


@functools.cache
def _tune_class(purpose: str) -> type[CallsInTrials]:
    """`CallsInTrials` as a callback of Ray Tune, which calls every hook that it has."""

    class SweepCallbacks(CallsInTrials, tune_trial.require_tune(purpose).Callback):  # type: ignore[misc]
        """The same."""

    return SweepCallbacks
