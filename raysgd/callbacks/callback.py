"""`Callback`, the base class of callbacks in the driver, and `Run`, the object that its methods receive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from raysgd.callbacks.worker_callback import warn_of_unknown_events
from raysgd.core.files import check_path
from raysgd.core.history.history import History
from raysgd.storage import Folder, open_folder
from raysgd.storage._store import make_new

if TYPE_CHECKING:
    from raysgd.core.engine.shared.interface import GroupEvent
    from raysgd.core.numbers.results import CallProgress
    from raysgd.storage.background_writer import SubmittedWrite

logger = logging.getLogger(__name__)

RESULTS_FOLDER = Path("~/ray_results")
"""Folder that contains the folders of all runs for which the user sets no `folder`."""


class Callback:
    """Base class for callbacks in the driver. By default, the methods do nothing. Override what you need.

    Pass instances of subclasses to `trainer.fit(callbacks=[...])`, `Trainer.run(callbacks=[...])` or
    `RunConfig(callbacks=[...])`. If a method raises an error, the run ends with a `CallbackError` that names the class
    and the method. The training state is not lost.

    Examples:
        >>> class Patience(Callback):
        ...     def on_result(self, run, result):
        ...         if result["val_loss"] < 0.1:
        ...             run.stop("good enough")

    Attributes:
        runs_last: If True, `trainer.fit` calls this callback after all callbacks for which `runs_last` is False,
            whatever its position in the list. Set it to True in a callback that saves the states of other callbacks.
            Runs of training functions ignore `runs_last`.
    """

    runs_last: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn if the subclass defines a method that is never called although its name starts with `on_`."""
        super().__init_subclass__(**options)
        warn_of_unknown_events(cls, Callback)

    def on_run_begin(self, run: Run) -> None:
        """Called once, before the first epoch of a run. With `resume_from`, the checkpoint is already loaded."""

    def on_epoch_begin(self, run: Run) -> None:
        """Called before each epoch of a `TorchTrainer` or `TFTrainer`."""

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        """Called about ten times a second during an epoch and its validation, with the progress of rank 0.

        The trainer asks the workers for their progress only if a callback overrides this method. The trainer is busy
        training, so you cannot validate or save here: `run.trainer.validate` and `run.save` raise a `ValueError`.
        """

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Called during an epoch of a `TorchTrainer`, shortly after every `log_every_n_steps` steps (see `fit`).

        The workers are already running later steps, so `run.trainer.validate` and `run.save` raise a `ValueError` here.

        Args:
            run: The run.
            step: Number of batches that a worker has trained on, over all epochs. No step is reported twice, even after
                a failure.
            metrics: Training metrics, averaged over all workers and over the steps since the previous call.
        """

    def on_epoch_trained(self, run: Run) -> None:
        """Called after each epoch of a `TorchTrainer` or `TFTrainer`, before `on_result`.

        With `fit(validate="async")`, `on_result` is called one epoch later.
        """

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Called after each epoch, or for each report of a training function.

        With `fit(validate="async")`, this method is called at the end of the next epoch, or of the run, once the
        validation has finished. `run.epoch` is then the validated epoch, but the workers may already have trained the
        next epoch.

        Args:
            run: The run.
            result: The metrics. Entries that you add to this dict are stored in the history and visible to later
                callbacks.
        """

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Called after each validation inside an epoch, while all workers wait. See `validate_every_n_steps` of `fit`.

        At this point, `run.epoch` epochs and `run.step` batches of the next epoch have been trained. `run.save` saves
        exactly that state, and `run.stop` ends the run there.

        Args:
            run: The run.
            step: Number of batches that a worker has trained on, over all epochs.
            metrics: The validation metrics, named as in the history, such as `val_loss`.
        """

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        """Called after `run.save` or a training function has saved a checkpoint, with the checkpoint's path or URI.

        `Trainer.run` calls this method after a report of the function, and only for the newest checkpoint.
        """

    def on_leave(self, run: Run) -> None:
        """Called when a run stops inside an epoch, for example at `max_steps`.

        Also called when a run stops early, inside or between epochs, because of a signal or `max_time`.

        At this point, `run.epoch` epochs and `run.step` batches of the next epoch have been trained. `run.save` saves
        exactly that state.
        """

    def on_event(self, run: Run, event: GroupEvent) -> None:
        """Called once for each event in which workers were lost, added or replaced.

        The method is called at the end of the epoch of the event. For a training function, it is called at the next
        report, before `on_result`.
        """

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called once when the run ends, whether it succeeds or fails, even if another callback fails.

        If an earlier callback fails in `on_run_begin`, the later callbacks receive neither `on_run_begin` nor
        `on_run_end`.

        Args:
            run: The run.
            error: The error that ended the run, or None.
        """

    def left_behind(self, run: Run) -> str | None:
        """Return a line that names a file that this callback has written, such as "report: /tmp/run/report.html".

        `ProgressBar` prints this line at the end of the run. By default, return None, so that no line is printed.
        """
        return None

    def newest_checkpoint(self, run: Run) -> str | None:
        """Return the path or URI of the newest checkpoint that this callback finds, for `resume_from="auto"`.

        By default, return None, because most callbacks save no checkpoints.
        """
        return None

    def state_dict(self) -> Any:
        """Return state from which this callback can continue when a run resumes, as data that can be written as JSON.

        `fit` and `epochs` of `TorchTrainer` and `TFTrainer` save this state beside each checkpoint and load it when
        they resume. `fit()` of the trainers that run training functions saves the state in the run's folder after each
        checkpoint, and a restored run loads it. `Trainer.run` does not save it.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load the state that `state_dict` of this callback returned in the run that is resumed."""

    _pauses: bool = False
    """True if this callback needs pauses inside epochs, in which all workers wait between two steps."""

    def _pause_at(self, global_step: int) -> int | None:
        """Return the step after which this callback needs the next pause, or None if it needs no pause at a fixed step.

        Args:
            global_step: The current step. Like the returned step, it is counted over all epochs.
        """
        return None

    def _pauses_now(self) -> bool:
        """Return True if training must pause after the current step. Called repeatedly while an epoch runs."""
        return False

    def _on_pause(self, run: Run, global_step: int) -> None:
        """Called in each pause inside an epoch, while all workers wait after `run.step` batches of the epoch.

        `run.save` saves the state after exactly these batches.

        Args:
            run: The run.
            global_step: Number of batches that each worker has trained on, over all epochs.
        """

    _own_folder: Folder | None = None
    """The folder that the user passed, if only one program at a time may write there with this callback."""

    @property
    def _uses_folder_of_run(self) -> bool:
        """True if this callback writes to the folder of the run because the user passed no path."""
        return False

    def _check_run(self, run: Run) -> None:
        """Raise an error if this callback cannot work in this run. Called before the run begins."""


def given_path(argument: str, path: Any) -> Path | None:
    """Return the absolute path of the file or folder that the user passed to a callback. None if it is None.

    Raises:
        TypeError, ValueError: `path` is not a path, or is a URI.
    """
    if path is None:
        return None
    check_path(argument, path)
    return Path(path).expanduser().absolute()


class WritesFiles(Callback):
    """Base class of the library's callbacks that write to a file or folder.

    Two callbacks of the same class must not write to the same file or folder.

    Attributes:
        _argument: Name of the argument for the file or folder, for the error message.
        _given: The file or folder that the user passed. None to write to the folder of the run.
    """

    _argument: ClassVar[str] = "path"
    _given: Any

    @property
    def _uses_folder_of_run(self) -> bool:
        return self._given is None

    def _check_run(self, run: Run) -> None:
        others = [each for each in run.callbacks if isinstance(each, type(self)) and each is not self]
        if any(other._given == self._given for other in others):
            kind, place = type(self).__name__, self._given or "the folder of the run"
            raise ValueError(
                f"`callbacks` has two `{kind}` that write to {place}: pass another `{self._argument}` to one of "
                "them, or leave it out."
            )


class Run:
    """The run that callbacks observe and control: one call to `fit`, or one run of a training function.

    Attributes:
        trainer: The `TorchTrainer` or `TFTrainer`, or None in the run of a training function.
        name: Name of the run.
        config: The config of the trainer or the training function.
        epoch: The current or last epoch, starting at 1. 0 before the first epoch. For a training function, the number
            of its last report.
        step: If the run pauses, stops or resumes inside an epoch, the number of batches of the unfinished epoch (the
            one after `epoch`) that each worker has trained on. Otherwise 0.
        epochs: The number of the epoch with which the run ends if it does not stop early. None for a training function,
            or if only `max_steps` limits the run.
        history: The results so far. If `fit` of a `TorchTrainer` or `TFTrainer` resumes a run, this includes the
            earlier results that were saved with the checkpoint.
        callbacks: The callbacks of the run, in the order in which they are called.
        started_at: Start of the run, in seconds since the Unix epoch.
        validates_beside: True if validation runs concurrently with training, so that each epoch's results arrive one
            epoch later.
    """

    def __init__(
        self,
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        trainer: Any | None = None,
        epochs: int | None = None,
        folder: str | Path | None = None,
        callbacks: list[Callback] | None = None,
        save: Callable[[Run, str], None] | None = None,
        save_behind: Callable[[str], tuple[SubmittedWrite, Callable[[], None]]] | None = None,
        obstacle_to_stop: str | None = None,
        may_validate: bool = True,
    ) -> None:
        self.trainer = trainer
        self.name = name
        self.config = dict(config or {})
        self.epoch = self.step = 0
        self.epochs = epochs
        self.history = History()
        self.callbacks = callbacks if callbacks is not None else []
        self.started_at = time.time()
        self.validates_beside = False
        self._last_told: int | None = None
        self._global_step: int | None = None  # set only if the run resumes inside an epoch
        self._folder = folder
        self._save, self._save_behind = save, save_behind
        self._obstacle_to_stop = obstacle_to_stop
        self._may_validate = may_validate

    @cached_property
    def folder(self) -> Path:
        """The folder in which callbacks write the files of this run. It is created on first access."""
        if self._folder is None:
            moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(self.started_at))
            return make_new(open_folder(RESULTS_FOLDER), f"{self.name}_{moment}").local_path
        folder = Path(self._folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stop(self, reason: str) -> None:
        """End the run after the current epoch, or after the current report of a training function.

        If the workers pause before the epoch ends, for example to validate, the run ends at that step. Inside
        `on_validation`, this is the current step.

        Args:
            reason: Why the run ends, stored in `history.stop_reason`. After the first call, later reasons are ignored.

        Raises:
            NotImplementedError: Callbacks cannot stop a run of this kind.
        """
        if self._obstacle_to_stop is not None:
            raise NotImplementedError(self._obstacle_to_stop)
        self.history.stop_reason = self.history.stop_reason or str(reason)

    @property
    def is_stopping(self) -> bool:
        """True if `stop` has been called."""
        return self.history.stop_reason is not None

    def save(self, location: str | Path) -> None:
        """Save the training state to a file, from which `resume_from` can continue.

        A second file beside it holds the history of the run and the states of the callbacks.

        Args:
            location: A path, or the URI of a file, as for `trainer.save`.

        Raises:
            NotImplementedError: This is the run of a training function, which saves its own checkpoints.
            OSError: The file could not be written. The trainer keeps the training state.
        """
        if self._save is None:
            raise NotImplementedError(
                "`run.save` needs a class-based trainer: a training function saves its own checkpoints, with "
                "`session.report(..., checkpoint=...)` or `train.save_checkpoint(...)`."
            )
        self._save(self, str(location))
