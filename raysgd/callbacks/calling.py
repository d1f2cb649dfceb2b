"""Calls of callbacks with what happens in a run; one that fails is named.

`Dispatcher` calls hooks of any objects, `CallbackCalls` those of the callbacks of one run, and `TrialCalls` those of
callbacks and loggers of Ray Tune, which are shown a run as a trial.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysgd.air.trial import FitTrialView
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.exceptions import CallbackError

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
            name = name_of(callback)
            raise CallbackError(
                f"The callback `{name}` failed in `{hook}`: {said}. The run ends. {self._advice}"
            ) from error

    def finish(
        self, hooks: Sequence[str], *args: Any, has_failed: bool, only: Iterable[Any] | None = None, **info: Any
    ) -> None:
        """Call the last hooks of each callback, whatever fails. Failures that are not raised are logged.

        Args:
            hooks: Their names.
            args: What is passed to them.
            has_failed: Whether something else has ended the run, which matters more.
            only: The callbacks, if not all.
            info: What is passed to them as far as they take it.

        Raises:
            CallbackError: The first failure in a run that had not failed.
        """
        first: Exception | None = None
        for callback in self.callbacks if only is None else only:
            try:
                for hook in hooks:
                    self.call(callback, hook, *args, **info)
            except Exception as error:  # user code: the others see the end all the same
                if has_failed or first is not None:
                    logger.error("the callback `%s` failed at the end: %s", name_of(callback), error)
                first = first or error
        if first is not None and not has_failed:
            raise first


def call_with_known(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call an override of any generation with those of `named` that it takes."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return method(*args, **named)
    known = {parameter.name for parameter in parameters}
    return method(*args, **{name: value for name, value in named.items() if name in known})


def name_of(callback: Any) -> str:
    """Return what a callback is called: the name of the class that the user gave."""
    return type(getattr(callback, "adapted", callback)).__name__


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

    def worker_callbacks(self) -> list[tuple[str, WorkerCallback]]:
        """Return what callbacks need in each worker, with the name of the callback that brings it.

        Raises:
            TypeError: A callback returned something else.
        """
        found: list[tuple[str, WorkerCallback]] = []
        for callback in self.callbacks:
            brought = self.call(callback, "worker_callback")
            if brought is not None and not isinstance(brought, WorkerCallback):
                raise TypeError(
                    f"`{type(callback).__name__}.worker_callback` returned {brought!r}: need an object of a subclass "
                    "of `raysgd.callbacks.WorkerCallback`, or None."
                )
            if brought is not None:
                found.append((name_of(callback), brought))
        return found

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

    def begin_epoch(self) -> None:
        """Tell callbacks that an epoch begins."""
        self.on("on_epoch_begin", self._run)

    def epoch_trained(self) -> None:
        """Tell callbacks that an epoch was trained."""
        self.on("on_epoch_trained", self._run)

    @property
    def wants_progress(self) -> bool:
        """True if a callback asks how far a running epoch is."""
        return bool(self._watching)

    @property
    def _watching(self) -> list[Callback]:
        return [each for each in self.callbacks if overrides(each, "on_progress")]

    def progress(self, progress: CallProgress) -> None:
        """Tell callbacks how far a running epoch is. An error is kept until `check_progress` raises it."""
        if self._failed_in_progress is not None:
            return
        try:
            for callback in self._watching:
                self.call(callback, "on_progress", self._run, progress)
        except CallbackError as error:
            self._failed_in_progress = error

    def check_progress(self) -> None:
        """Raise what a callback raised while an epoch was running."""
        if self._failed_in_progress is not None:
            raise self._failed_in_progress

    def result(self, result: dict[str, Any]) -> None:
        """Tell callbacks a result."""
        self.on("on_result", self._run, result)

    def checkpoint(self, checkpoint: str) -> None:
        """Tell callbacks that a checkpoint was saved."""
        self.on("on_checkpoint", self._run, checkpoint)

    def event(self, event: GroupEvent) -> None:
        """Tell callbacks what happened to the workers."""
        self.on("on_event", self._run, event)

    def end_run(self, error: BaseException | None) -> None:
        """Tell each callback whose `on_run_begin` was called that the run has ended, also when one fails.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        has_failed = error is not None
        self.finish(["on_run_end"], self._run, error, has_failed=has_failed, only=self._begun)

    def states(self) -> list[dict[str, Any]]:
        """Return what the callbacks need to go on in another run: for each its class and its state."""
        return [{"name": name_of(callback), "state": self.call(callback, "state_dict")} for callback in self.callbacks]

    def load_states(self, states: Iterable[Any]) -> None:
        """Give callbacks back what `states` returned. Each gets the first state of its class that no other has got."""
        left = [dict(entry) for entry in states]
        for callback in self.callbacks:
            found = next((entry for entry in left if entry.get("name") == name_of(callback)), None)
            if found is not None:
                left.remove(found)
                if found.get("state") is not None:
                    self.call(callback, "load_state_dict", found["state"])


def overrides(callback: Callback, method: str) -> bool:
    """Return whether a callback does something in a method."""
    return getattr(type(callback), method, None) is not getattr(Callback, method)


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
        """Let callbacks see what happens to the workers."""
        self._events = events

    def setup(self, stop: Any) -> None:
        """Tell callbacks of the run, once, before the first attempt."""
        self._on("setup", stop=stop, num_samples=1, total_num_samples=1)

    def start(self, *, after_failure: bool, restores: bool, num_reports: int = 0) -> None:
        """Tell callbacks that an attempt starts.

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
        """Tell callbacks of a report, while `trial.last_result` is still the one before."""
        self._on_step("on_step_begin")
        self._on_trial("on_trial_result", result=dict(result), events=self._events())

    def save(self, checkpoint: Any) -> None:
        """Tell callbacks of a checkpoint, while `trial.checkpoint` is still the one before."""
        self._on_trial("on_checkpoint", checkpoint=checkpoint)

    def saved(self) -> None:
        """Tell callbacks that `trial.checkpoint` is the new one."""
        self._on_trial("on_trial_save")

    def end_step(self) -> None:
        """Tell callbacks that the report is done with."""
        self._iteration += 1
        self._on_step("on_step_end")

    def end_run(self, *, has_failed: bool, error: BaseException | None = None) -> None:
        """Tell every callback that the run has ended, maybe with `error`, also when one of them fails.

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
        """Give callbacks back what `states` found."""
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
