"""`Callback`, which runs in the driver, and `Run`, the run that its methods get."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.worker_callback import warn_of_unknown_events
from raysgd.core.history.history import History
from raysgd.storage import open_folder
from raysgd.storage.opening import make_new

if TYPE_CHECKING:
    from raysgd.core.engine.shared.group_events import GroupEvent
    from raysgd.core.numbers.results import CallProgress
    from raysgd.storage.background_writer import SubmittedWrite

logger = logging.getLogger(__name__)

RESULTS_FOLDER = Path("~/ray_results")
"""Folder for runs that have no folder of their own."""


class Callback:
    """Base class for callbacks in the driver. Its methods do nothing; override the ones you need.

    Pass instances of subclasses to `trainer.fit(callbacks=[...])`, `Trainer.run(callbacks=[...])` or
    `RunConfig(callbacks=[...])`. If a method raises an error, the run ends with a `CallbackError` that names the class
    and the method, and the state of the training is kept.

    Examples:
        >>> class Patience(Callback):
        ...     def on_result(self, run, result):
        ...         if result["val_loss"] < 0.1:
        ...             run.stop("good enough")

    Attributes:
        runs_last: True if this callback is called after those with False, wherever it is in the list. A callback that
            saves the states of others needs this.
    """

    runs_last: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn about methods that look like events but are never called."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, Callback)

    def on_run_begin(self, run: Run) -> None:
        """Called once, before the first epoch. With `resume_from` the state is already loaded."""

    def on_epoch_begin(self, run: Run) -> None:
        """Called before each epoch of a class-based trainer."""

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        """Called about ten times a second while an epoch runs. Workers are asked only if a class overrides this.

        The trainer cannot run another call meanwhile: `run.trainer.validate` and `run.save` raise a `ValueError`.
        """

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Called while an epoch of a `TorchTrainer` runs, soon after every `log_every_n_steps` steps of `fit`.

        The workers are already in later steps, so the trainer cannot run another call, as in `on_progress`.

        Args:
            run: The run.
            step: Number of batches that a worker has trained on. No step comes twice, even after a failure.
            metrics: Metrics of the batches, averaged over all workers and the steps since the last call.
        """

    def on_epoch_trained(self, run: Run) -> None:
        """Called after each epoch of a class-based trainer, before `on_result`.

        With `fit(validate="async")`, `on_result` comes an epoch later.
        """

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Called after each epoch, or for each report of a function.

        Args:
            run: The run.
            result: The metrics. Entries that you add are kept in the history, and callbacks after this one see them.

        With `fit(validate="async")` it is called after the validation, at the end of the next epoch. `run.epoch` is
        then the epoch of the result, but the weights are those of the next epoch.
        """

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Called after each validation inside an epoch (`validate_every_n_steps` of `fit`), while all workers wait.

        `run.epoch` epochs and `run.step` batches of the next one are trained. `run.save` saves exactly that state, and
        `run.stop` ends the run there.

        Args:
            run: The run.
            step: Number of batches that a worker has trained on, over all epochs.
            metrics: The metrics of the validation, with names as in a row of the history, such as `val_loss`.
        """

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        """Called after a checkpoint was saved, with its path or URI."""

    def on_leave(self, run: Run) -> None:
        """Called when a run stops inside an epoch, or early because of a signal to the program or `max_time`.

        `run.epoch` epochs and `run.step` batches of the next one are trained. `run.save` saves exactly that state.
        """

    def on_event(self, run: Run, event: GroupEvent) -> None:
        """Called after the epoch in which workers were lost, added, or replaced."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called once at the end of the run, however it ends, even if another callback fails.

        It is not called if an earlier callback failed in `on_run_begin`, because this callback never saw the beginning.

        Args:
            run: The run.
            error: The error that ended the run, or None.
        """

    def left_behind(self, run: Run) -> str | None:
        """Return what this callback has written, such as "report: /tmp/run/report.html". None if nothing."""
        return None

    def newest_checkpoint(self, run: Run) -> str | None:
        """Return the path or URI of the newest checkpoint of this callback, or None, for `resume_from="auto"`."""
        return None

    def state_dict(self) -> Any:
        """Return the state that this callback needs to continue in another run, as plain data for JSON.

        `fit` and `epochs` of a trainer, and the `fit()` trainers, save it beside each checkpoint and load it when they
        resume. `Trainer.run` does not.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load a state that `state_dict` returned."""

    _pauses: bool = False
    """True if this callback acts inside epochs, while all workers wait at a step."""

    def _pause_at(self, global_step: int) -> int | None:
        """Return the step of the next pause, counted over all epochs, or None. The run is at `global_step` now."""
        return None

    def _pauses_now(self) -> bool:
        """Return True to pause at the next step. Called now and then while an epoch runs."""
        return False

    def _on_pause(self, run: Run, global_step: int) -> None:
        """Called while the workers wait after `run.step` batches of an epoch. `run.save` saves exactly that state."""

    def _check_run(self, run: Run) -> None:
        """Raise an error if this callback cannot work in the run. Called before the run begins."""


def refuse_one_place(callback: Any, argument: str, run: Run) -> None:
    """Refuse a run in which another callback of the same class writes to the same place, by its `_given`.

    Raises:
        ValueError: There is such a callback.
    """
    others: list[Any] = [each for each in run.callbacks if isinstance(each, type(callback)) and each is not callback]
    if any(other._given == callback._given for other in others):
        kind, place = type(callback).__name__, callback._given or "the folder of the run"
        raise ValueError(
            f"`callbacks` has two `{kind}` that write to {place}: pass another `{argument}` to one of them, or leave "
            "it out."
        )


def uses_folder_of_run(callback: Callback) -> bool:
    """Return True if a callback of the library writes to the folder of the run, because the user passed no path."""
    return vars(callback).get("_given", callback) is None


class SaveBehind:
    """A save whose file is written while the training continues.

    Args:
        write: The write; None if the file is complete already.
        note: Called once the file is complete.
    """

    def __init__(self, write: SubmittedWrite | None, note: Callable[[], None]) -> None:
        self._write, self._note = write, note

    @property
    def is_done(self) -> bool:
        """True if `finish` need not wait."""
        return self._write is None or self._write.is_done

    def finish(self) -> None:
        """Wait until the file is complete, and tell callbacks so.

        Raises:
            BaseException: It could not be written.
        """
        if self._write is not None:
            self._write.wait()
        self._note()


class Run:
    """A run, as callbacks see it.

    Attributes:
        trainer: The class-based trainer; None for functions.
        name: Name of the run.
        config: The config of the trainer or the function.
        epoch: The current or last epoch, from 1; 0 before the first one. For functions it is the number of the last
            report.
        step: Number of batches that each worker has trained on in the epoch after `epoch`, if the run pauses, stops or
            resumes inside an epoch; else 0.
        epochs: The last epoch of the run, unless it stops early; None for functions, and if only steps limit the run.
        history: The results so far. A run that resumes also has those of the checkpoint.
        callbacks: The callbacks of the run, in the order of their calls.
        started_at: Start of the run, in seconds since the Unix epoch.
        validates_beside: True if validations run beside the training, so that results come later.
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
        save_behind: Callable[[str], SaveBehind] | None = None,
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
        self._global_step: int | None = None  # set if the run resumes inside an epoch
        self._folder = folder
        self._save, self._save_behind = save, save_behind
        self._obstacle_to_stop = obstacle_to_stop
        self._may_validate = may_validate

    @cached_property
    def folder(self) -> Path:
        """Folder for the files of callbacks. It is created when you first read this."""
        if self._folder is None:
            moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(self.started_at))
            return make_new(open_folder(RESULTS_FOLDER), f"{self.name}_{moment}").local_path
        folder = Path(self._folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stop(self, reason: str) -> None:
        """End the run after the current epoch, or at the step where the workers wait in `on_validation`.

        Args:
            reason: Why the run ends. It is kept in `history.stop_reason`.

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
        """Save the state of the trainer, and beside it the history and the states of callbacks, for `resume_from`.

        Args:
            location: A path, or the URI of a file, as for `trainer.save`.

        Raises:
            NotImplementedError: The run is that of a function, which saves its state itself.
            OSError: The file could not be written. The state is kept.
        """
        if self._save is None:
            raise NotImplementedError(
                "`run.save` needs a class-based trainer: a training function saves its own checkpoints, with "
                "`session.report(..., checkpoint=...)` or `train.save_checkpoint(...)`."
            )
        self._save(self, str(location))
