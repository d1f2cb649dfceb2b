"""`Callback`, which runs in the driver, and `Run`, what it sees of the run that it belongs to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.worker_callback import warn_of_unknown_events
from raysgd.history.history import History
from raysgd.storage import open_folder
from raysgd.storage.opening import make_new

if TYPE_CHECKING:
    from raysgd._numbers.results import CallProgress
    from raysgd.engine.shared.group_events import GroupEvent

logger = logging.getLogger(__name__)

RESULTS_FOLDER = Path("~/ray_results")
"""The folder of runs that have none of their own."""


class Callback:
    """Called while a run goes on, in the driver. Every method does nothing; override what you need.

    Give objects of subclasses to `trainer.fit(callbacks=[...])`, `Trainer.run(callbacks=[...])` or
    `RunConfig(callbacks=[...])`. What a method raises ends the run with a `CallbackError` that names the class and
    the method; the state of the training is kept.

    Examples:
        >>> class Patience(Callback):
        ...     def on_result(self, run, result):
        ...         if result["val_loss"] < 0.1:
        ...             run.stop("good enough")

    Attributes:
        runs_last: Whether this callback is called after all others that do not say so, wherever it is in the list, as
            one that saves their states.
    """

    runs_last: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn of methods that look like events but would never be called."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, Callback)

    def on_run_begin(self, run: Run) -> None:
        """Called once, before the first epoch. With `resume_from` the state is loaded by then."""

    def on_epoch_begin(self, run: Run) -> None:
        """Called before each epoch of a class-based trainer."""

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        """Called some ten times a second while an epoch runs. The workers are asked only if this is overridden.

        No call of the trainer can run meanwhile: `run.trainer.validate` and `run.save` raise a `ValueError`.
        """

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Called while an epoch of a `TorchTrainer` runs, some time after every `log_every_n_steps` steps of `fit`.

        The workers are in later steps by then, so no call of the trainer can run, as in `on_progress`.

        Args:
            run: The run.
            step: How many batches a worker has trained on. No step comes twice, also after a failure.
            metrics: Those that batches reported, averaged over all workers and the steps since the last call.
        """

    def on_epoch_trained(self, run: Run) -> None:
        """Called after each epoch of a class-based trainer, before its result is told.

        With `fit(validate="async")` that comes an epoch later.
        """

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Called after each epoch, or for each report of a function.

        Args:
            run: The run.
            result: The metrics. Entries that you add are kept in the history, and callbacks after this one see them.

        With `fit(validate="async")` it is called once the validation is over: at the end of the next epoch, with that
        of the result as `run.epoch`. The weights are by then those of the next epoch.
        """

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        """Called when a checkpoint was saved, with its path or URI."""

    def on_leave(self, run: Run) -> None:
        """Called when a run is left before its end, because of a signal to the program or of `max_time`.

        `run.epoch` epochs and `run.step` batches of the next one are trained. `run.save` saves that very state.
        """

    def on_event(self, run: Run, event: GroupEvent) -> None:
        """Called after the epoch in which workers were lost, added, or replaced."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called once at the end, whatever the end is, also when another callback fails.

        Not called if a callback before this one failed in `on_run_begin`, so that this one was not told of the run.

        Args:
            run: The run.
            error: What ended the run, if something did.
        """

    def left_behind(self, run: Run) -> str | None:
        """Return what this callback has written and where, such as "report: /tmp/run/report.html"; None for nothing."""
        return None

    def newest_checkpoint(self, run: Run) -> str | None:
        """Return the path or URI of the newest checkpoint of this callback; `resume_from="auto"` asks for it."""
        return None

    def state_dict(self) -> Any:
        """Return what this callback needs to go on in another run: plain data, as JSON has it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned."""

    _pauses: bool = False
    """Whether it acts inside epochs, while all workers are held at a step."""

    def _pause_at(self, global_step: int) -> int | None:
        """Return the next step to do so at, as batches in all; None for no certain one. The run is at `global_step`."""
        return None

    def _pauses_now(self) -> bool:
        """Return whether to do so at the next step; called now and then while an epoch runs."""
        return False

    def _on_pause(self, run: Run, global_step: int) -> None:
        """Called when the workers are held. `run.epoch` and `run.step` say where; `run.save` saves that very state."""

    def _check_run(self, run: Run) -> None:
        """Refuse a run that this callback cannot be part of; nothing has begun."""


def refuse_one_place(callback: Any, argument: str, run: Run) -> None:
    """Refuse a run in which another callback of the class writes to the same place, which `_given` says.

    Raises:
        ValueError: There is one.
    """
    others: list[Any] = [each for each in run.callbacks if isinstance(each, type(callback)) and each is not callback]
    if any(other._given == callback._given for other in others):
        kind, place = type(callback).__name__, callback._given or "the folder of the run"
        raise ValueError(
            f"`callbacks` has two `{kind}` that write to {place}: pass another `{argument}` to one of them, or leave "
            "it out."
        )


class Run:
    """One run, as callbacks see it.

    Attributes:
        trainer: The class-based trainer; None for functions.
        name: What the run is called.
        config: The config of the trainer or the function.
        epoch: The epoch that is trained, or was trained last, from 1; 0 before the first one. For functions the number
            of the last report.
        step: How many batches of the epoch after `epoch` each worker has trained on, where the run was left or resumes
            inside an epoch; else 0.
        epochs: The last epoch of the run, if it is not stopped before; None for functions.
        history: The results so far. A run that resumes has those of the checkpoint too.
        callbacks: The callbacks of the run, in the order in which they are called.
        started_at: When it began, in seconds since the Unix epoch.
        validates_beside: Whether validations run beside the training, so that results come later.
    """

    def __init__(
        self,
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        trainer: Any | None = None,
        epochs: int | None = None,
        history: History | None = None,
        folder: str | Path | None = None,
        callbacks: list[Callback] | None = None,
        save: Callable[[Run, str], None] | None = None,
        obstacle_to_stop: str | None = None,
        may_validate: bool = True,
    ) -> None:
        self.trainer = trainer
        self.name = name
        self.config = dict(config or {})
        self.epoch = self.step = 0
        self.epochs = epochs
        self.history = History() if history is None else history
        self.callbacks = callbacks if callbacks is not None else []
        self.started_at = time.time()
        self.validates_beside = False
        self._last_told: int | None = None
        self._global_step: int | None = None  # where it resumes inside an epoch
        self._folder = folder
        self._save = save
        self._obstacle_to_stop = obstacle_to_stop
        self._may_validate = may_validate

    @cached_property
    def folder(self) -> Path:
        """The folder in which callbacks put files. It is made when this is first read."""
        if self._folder is None:
            moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(self.started_at))
            return make_new(open_folder(RESULTS_FOLDER), f"{self.name}_{moment}").local_path
        folder = Path(self._folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stop(self, reason: str) -> None:
        """End the run after the epoch that is running.

        Args:
            reason: Why; `history.stop_reason` keeps it.

        Raises:
            NotImplementedError: Nothing can stop this kind of run from outside.
        """
        if self._obstacle_to_stop is not None:
            raise NotImplementedError(self._obstacle_to_stop)
        self.history.stop_reason = self.history.stop_reason or str(reason)

    @property
    def is_stopping(self) -> bool:
        """True if `stop` was called."""
        return self.history.stop_reason is not None

    def save(self, location: str | Path) -> None:
        """Save the state of the trainer, and beside it the history and the callbacks' states, for `resume_from`.

        Args:
            location: A path, or the URI of a file, as for `trainer.save`.

        Raises:
            NotImplementedError: There is no class-based trainer; a function saves its state itself.
            OSError: The file could not be written. The state is kept.
        """
        if self._save is None:
            raise NotImplementedError(
                "`run.save` needs a class-based trainer: a training function saves its own checkpoints, with "
                "`session.report(..., checkpoint=...)` or `train.save_checkpoint(...)`."
            )
        self._save(self, str(location))
