"""Calls of callbacks and loggers of Ray Tune, which are shown a run as a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.air.trial import FitTrialView
from raysgd.callbacks.calling.dispatcher import Dispatcher
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.exceptions import CallbackError

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


class TrialCalls:
    """The callbacks of one trial. When one of them has failed, none is called before the end.

    Args:
        callbacks: Objects with hooks of Ray Tune.
        trial: The trial that they are shown.
        advice: What to do where one of them fails.
    """

    def __init__(self, callbacks: Sequence[Any], trial: FitTrialView, advice: str) -> None:
        self._dispatcher = Dispatcher(callbacks, advice)
        self._events: Callable[[], Sequence[GroupEvent]] = tuple
        self._trial = trial
        self._iteration = 0
        self._has_failed = False

    def watch(self, events: Callable[[], Sequence[GroupEvent]]) -> None:
        """Lets callbacks see what happens to the workers."""
        self._events = events

    def setup(self, stop: Any) -> None:
        """Called once, before the first attempt."""
        self._on("setup", stop=stop, num_samples=1, total_num_samples=1)

    def start(self, *, after_failure: bool, restores: bool, num_reports: int = 0) -> None:
        """An attempt starts.

        Args:
            after_failure: Whether one has failed before it.
            restores: Whether it continues from a checkpoint.
            num_reports: How many reports that checkpoint has.
        """
        if after_failure:
            self._on_trial("on_trial_recover")
        self._on_trial("on_trial_start", num_reports=num_reports)
        if restores:
            self._on_trial("on_trial_restore")

    def report(self, result: Mapping[str, Any]) -> None:
        """There is a report. `trial.last_result` is still the one before."""
        self._on_step("on_step_begin")
        self._on_trial("on_trial_result", result=dict(result), events=self._events())

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
        hooks = ["on_trial_error" if has_failed else "on_trial_complete", "on_experiment_end"]
        trial = self._trial
        self._dispatcher.finish(
            hooks, has_failed=has_failed, iteration=self._iteration, trials=[trial], trial=trial, error=error
        )

    # ------------------------------------------------------------------------------------------------ their state

    def states(self) -> dict[int, Any]:
        """Return what callbacks want to find again in a run that continues this one, by their position."""
        dispatcher = self._dispatcher
        found = {index: dispatcher.call(each, "get_state") for index, each in enumerate(dispatcher.callbacks)}
        return {index: state for index, state in found.items() if state}

    def restore_states(self, states: Mapping[int, Any]) -> None:
        """Gives callbacks back what `states` found."""
        for index, callback in enumerate(self._dispatcher.callbacks):
            if index in states:
                self._dispatcher.call(callback, "set_state", states[index])

    # ------------------------------------------------------------------------------------------------ calls

    def _on_trial(self, hook: str, **info: Any) -> None:
        self._on_step(hook, trial=self._trial, **info)

    def _on_step(self, hook: str, **info: Any) -> None:
        if not self._has_failed:
            self._on(hook, iteration=self._iteration, trials=[self._trial], **info)

    def _on(self, hook: str, **info: Any) -> None:
        try:
            self._dispatcher.on(hook, **info)
        except CallbackError:
            self._has_failed = True
            raise
