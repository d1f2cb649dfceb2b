"""The callbacks of a run: those of `RunConfig(callbacks=[...])`, called in their order.

Callbacks and loggers of Ray Tune are called with the trial; after them those of `raysgd.callbacks` with the run, and of
`raysgd.train.callbacks` with the reports of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.air.constants import DEFAULT_LOGGERS
from raysgd.air.trial import FitTrialView
from raysgd.callbacks.calling.adapters import as_own
from raysgd.callbacks.calling.function_calls import FunctionCalls, TrialHooks
from raysgd.callbacks.calling.trial_calls import TUNE_HOOKS, TrialCalls

_ADVICE = (
    "Its checkpoints and results are kept: fix the callback, or leave it out of `RunConfig(callbacks=...)`, and "
    "continue with `restore`."
)


class RunCallbacks(TrialCalls):
    """The callbacks of one run.

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
        super().__init__([*of_tune, TrialHooks(self._calls)] if own else of_tune, trial, _ADVICE)

    @property
    def replaced_loggers(self) -> frozenset[str]:
        """The default loggers of Ray Tune that the user passed, by name."""
        return frozenset(name for callback in self._dispatcher.callbacks for name in _default_loggers(callback))

    @property
    def is_stopping(self) -> bool:
        """True if a callback has called `run.stop`."""
        return self._calls.is_stopping


def _checked(callback: Any) -> Any:
    """A callback with hooks of Ray Tune.

    Raises:
        TypeError: It is not a callback.
    """
    if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in TUNE_HOOKS):
        instead = f"; did you mean `{callback.__name__}()`?" if isinstance(callback, type) else ""
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
