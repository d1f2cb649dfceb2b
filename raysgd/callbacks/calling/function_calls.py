"""Calls of the callbacks of `raysgd.callbacks` while a training function runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air.metrics import OF_PLACE, OF_TRIAL, SHOULD_CHECKPOINT, TRAINING_ITERATION
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling.adapters import TrainAdapter
from raysgd.callbacks.calling.calling import CallbackCalls

if TYPE_CHECKING:
    from raysgd.engine.shared.group_events import GroupEvent

_NOT_SHOWN = OF_TRIAL | OF_PLACE | {SHOULD_CHECKPOINT}


class FunctionCalls(CallbackCalls):
    """Calls our callbacks while a training function runs: there is one result per report, and no epochs.

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

    def begin(self, num_reports: int = 0) -> None:
        """The function is started; when it is started again, nothing happens.

        Args:
            num_reports: How many reports the checkpoint has from which it continues.
        """
        if not self._begun:
            self._run.epoch = num_reports
            super().begin()

    def report(self, metrics: Mapping[str, Any], events: Sequence[GroupEvent] = ()) -> None:
        """The function has reported. `events` are all that happened to the workers so far."""
        run = self._run
        for event in events[len(run.history.events) :]:
            run.history.events.append(event)
            self.event(event)
        run.epoch, run._report = int(metrics.get(TRAINING_ITERATION) or run.epoch + 1), metrics
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        row = {TRAINING_ITERATION: run.epoch, **shown}
        self.result(run.history.add_row(row) if self._keeps_history else row)


class TrialHooks:
    """Our callbacks with the hooks of a callback of Ray Tune, and what only ours are told.

    Args:
        calls: Calls them.
    """

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def on_trial_start(self, num_reports: int) -> None:
        self._calls.begin(num_reports)

    def on_trial_result(self, result: Mapping[str, Any], events: Sequence[GroupEvent]) -> None:
        self._calls.report(result, events)

    def on_checkpoint(self, checkpoint: Any) -> None:
        self._calls.checkpoint(str(checkpoint.path))

    def on_trial_complete(self) -> None:
        self._calls.end(None)

    def on_trial_error(self, error: BaseException | None) -> None:
        self._calls.end(error or RuntimeError("the run has failed"))

    def get_state(self) -> list[dict[str, Any]]:
        return [each for each in self._calls.states() if each["state"] is not None]

    def set_state(self, state: Sequence[Any]) -> None:
        self._calls.load_states(state)
