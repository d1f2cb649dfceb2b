"""Runs `trainer.fit` and `trainer.epochs`: trains epoch by epoch, validates, calls callbacks, and resumes runs."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import CallbackCalls, checked, overrides
from raysgd.callbacks.progress import ProgressBar, is_watched
from raysgd.callbacks.sidecar import Sidecar, Sidecars, place_of
from raysgd.callbacks.sidecar import location as sidecar_location
from raysgd.core import arguments as checks
from raysgd.core.files import check_path, make_folder
from raysgd.core.text.log_lines import errors_printable
from raysgd.core.text.tracebacks import hides_library_frames
from raysgd.exceptions import CallbackError, InvalidCountError, WorkersLostError
from raysgd.storage import files, open_folder
from raysgd.storage.background_writer import SubmittedWrite
from raysgd.storage.owner import owning
from raysgd.trainer.driver.calls import EpochLeft, TrainerCalls, epoch_options
from raysgd.trainer.driver.fit_epoch import EpochResults, Pauses, StepReports
from raysgd.trainer.driver.leaving import Leaving, answer_signal
from raysgd.trainer.messages.epochs import VALIDATES, BegunEpoch, open_steps_from_data

AUTO = "auto"
INLINE, ASYNC = "inline", "async"
_INSTEAD_OF_URI = "Callbacks that can write to a store take a URI themselves, as `Checkpointing(folder=...)` does."

_COUNTS = {
    "epochs": "a number of epochs, 0 or more",
    "validation_freq": "0 (never), 1 (after each epoch), or after how many epochs",
    "log_every_n_steps": "a number of steps, or 0 for epochs only",
    "max_steps": "a number of steps, 0 or more, or None for no limit",
    "validate_every_n_steps": "a number of steps of at least 1, or None to validate after epochs only",
}
_MAY_BE_NONE = {"epochs", "max_steps", "validate_every_n_steps"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitOptions:
    """The arguments that the user has passed to `fit` or `epochs`. The docstring of `fit` explains each field.

    The arguments are checked when an object is created.

    Raises:
        InvalidCountError: A count is out of range.
        TypeError: An argument has the wrong type.
        ValueError: A path is empty, `folder` is a URI, `progress` is a string, `validate` is unknown, or two options
            exclude each other.
    """

    epochs: int | None = None
    _: KW_ONLY
    callbacks: Any = ()
    validation_freq: int = 1
    dataset: Any = None
    validation_dataset: Any = None
    resume_from: Any = None
    folder: Any = None
    validate: Any = INLINE
    progress: Any = False
    log_every_n_steps: int = 50
    max_time: Any = None
    max_steps: int | None = None
    validate_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise InvalidCountError("Without `epochs`, pass `max_steps`: the number of steps after which the run ends.")
        for name, needed in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not checks.is_integer(value) or value < (name == "validate_every_n_steps"):
                raise InvalidCountError(f"`{name}={value!r}`: need {needed}.")
        if self.validate_every_n_steps is not None and self.validate == ASYNC:
            raise ValueError(
                f'`validate_every_n_steps` with `validate="{ASYNC}"` cannot work: inside an epoch, the workers that '
                "train also validate. Leave one of them out."
            )
        if self.validate not in (INLINE, ASYNC):
            raise ValueError(
                f'`validate={self.validate!r}`: allowed are "{INLINE}" (the next epoch follows the validation) and '
                f'"{ASYNC}" (it begins at once).'
            )
        if self.progress is not None:
            checks.refuse_text(progress=self.progress)
        if self.resume_from is not None:
            files.check_location("resume_from", self.resume_from)
        if self.folder is not None:
            check_path("folder", self.folder, instead=_INSTEAD_OF_URI)


class FitRun:
    """Runs one call to `fit` or `epochs`.

    Args:
        trainer: The trainer, for callbacks and to save and load it.
        calls: Runs the trainer's calls.
        options: The user's arguments to `fit` or `epochs`.

    Attributes:
        history: The history of this run.
        newest: The last checkpoint that was saved or loaded, or None.
    """

    def __init__(self, trainer: Any, calls: TrainerCalls, options: FitOptions) -> None:
        answer_signal()
        life = self._life = calls.life
        self._trainer, self._trainer_calls, self._options = trainer, calls, options
        self._leaving = Leaving(options.max_time)
        self._kept, life.fit_progress = life.fit_progress, None
        self._begun_before, life.begun_epoch = life.begun_epoch, None
        if options.epochs is not None:
            life.framework.check_fit(life, options.epochs)
        life.framework.check_dataset(life, options.dataset, training=True)
        life.framework.check_dataset(life, options.validation_dataset, training=False, name="validation_dataset")
        self._callbacks: list[Callback]
        self._callbacks, worker_callbacks = checked(options.callbacks)
        shows = is_watched(sys.stderr) if options.progress is None else options.progress
        if shows and not any(isinstance(each, ProgressBar) for each in self._callbacks):
            self._callbacks.append(ProgressBar())
        self._run = Run(
            trainer=trainer,
            name=life.settings.training_operator_cls.__name__,
            config=trainer.config,
            epochs=options.epochs,
            folder=options.folder if self._kept is None else self._kept[1],
            callbacks=self._callbacks,
            save=lambda run, location: self._save(location),
            save_behind=self._save_behind,
            may_validate=options.validation_freq > 0 or options.validate_every_n_steps is not None,
        )
        self.history = self._run.history
        self._calls = CallbackCalls(self._callbacks, self._run)
        has_folder = options.folder is not None or any(each._uses_folder_of_run for each in self._callbacks)
        in_header = {"validation_freq": options.validation_freq, "has_dataset": options.dataset is not None}
        self._reports = StepReports(
            life,
            self._run,
            self._calls,
            worker_callbacks,
            options.log_every_n_steps,
            journal=in_header if has_folder else None,
            is_taken_over=self._kept is not None,
        )
        self._sidecars = Sidecars()
        self.newest: str | None = None
        self._saved_in_epoch: list[str] = []
        self._results = EpochResults(calls, self._run, self._calls, options.validation_freq, options.validation_dataset)
        # The epoch that has been trained in part, and that the next training call continues. None between two epochs.
        self._begun: BegunEpoch | None = None
        # True if the workers' training state was lost, because all workers were lost or because a call was ended in the
        # middle of a step. The driver may still have a snapshot.
        self._is_lost = False
        self._has_left = False  # True if the run ends inside an epoch
        # If this process took over the run from a previous process: the step that the previous process stored last. It
        # is used in place of asking the workers, which may still be running a call of that process. None as soon as
        # this process trains, and in all other runs.
        self._known_step: int | None = None
        self._max_step: int | None = None
        if self._kept is not None:
            self._run.epochs, self._max_step = self._kept[0].epochs, self._kept[0].max_step
        else:
            is_new = options.resume_from is None
            if options.epochs is not None:
                self._run.epochs = options.epochs + (life.of_first("epochs_done") if is_new else 0)
            if options.max_steps is not None:
                self._max_step = options.max_steps + (self._global_step() if is_new else 0)
        finds = life.left_file or any(overrides(each, "newest_checkpoint") for each in self._callbacks)
        if options.resume_from == AUTO and not finds:
            raise ValueError(
                '`resume_from="auto"`: no callback finds checkpoints, so there is nothing to resume from. Pass '
                "`callbacks=[Checkpointing(...)]`, or the path of a file."
            )
        self._pauses = self._checked_pauses()
        self._calls.check()
        self._reports.check()
        if options.folder is not None:
            make_folder("folder", options.folder)

    def _checked_pauses(self) -> Pauses | None:
        """Return where the workers pause inside epochs. Return None if nothing in the run needs pauses.

        Raises:
            ValueError: The workers cannot pause inside epochs, or have nothing to validate on there.
        """
        options, obstacle = self._options, self._life.facts.epoch_obstacle
        pausing = [each for each in self._callbacks if each._pauses]
        if not pausing and self._max_step is None and options.validate_every_n_steps is None:
            return None
        if not self._life.framework.acts_between_steps:
            obstacle = f"`{type(self._trainer).__name__}` cannot hold its workers inside an epoch"
        if options.dataset is not None:
            obstacle = "a file does not hold the place in the `dataset` of a call"
        if obstacle is not None:
            names = ("max_steps", "validate_every_n_steps")
            used = [f"`{name}`" for name in names if getattr(options, name) is not None]
            used += [f"`{type(each).__name__}(every_n_steps=...)` and `every_minutes`" for each in pausing[:1]]
            raise ValueError(
                f"{' and '.join(used)} cannot work here: {obstacle}. Leave them out, or loop over "
                "`trainer.train(num_steps=100)`, `trainer.validate()` and `trainer.save(path)`."
            )
        if options.validate_every_n_steps is not None and not self._results.can_validate:
            raise ValueError(
                f"`validate_every_n_steps={options.validate_every_n_steps}`: there is nothing to validate on. Register "
                "validation data in `setup`, or pass `validation_dataset`."
            )
        return Pauses(pausing, options.validate_every_n_steps, self._max_step)

    @hides_library_frames
    def rows(self) -> Iterator[dict[str, Any]]:
        """Train, and yield each epoch's metrics when it ends. Closing the iterator stops the run."""
        leaving = self._leaving
        leaving.begin()
        try:
            with (
                leaving.listening(self._life.controller.expect_end),
                self._owning_folders(),
                self._reports.in_workers(),
            ):
                yield from self._rows()
        except GeneratorExit:
            if leaving.signal is not None:
                leaving.end_program_soon(self.newest)
            raise
        finally:  # the trainer's next run can continue an unfinished epoch
            self._life.begun_epoch = None if self._is_lost else self._begun
        if leaving.signal is not None:  # it came too late to be seen in `_rows`, for example in `on_run_end`
            leaving.end_program(self.newest)

    @contextmanager
    def _owning_folders(self) -> Iterator[None]:
        """Inside the block, let no other program write to the folders of this run.

        Raises:
            ValueError: Another program writes there.
            Preempted: A signal came while this program waited for the end of another.
        """

        def check_signal() -> None:
            if self._leaving.signal is not None:
                self._leaving.end_program(None)

        own = [each._own_folder for each in self._callbacks]
        if self._options.folder is not None:
            own.append(open_folder(self._options.folder))
        with ExitStack() as stack:
            for folder in dict.fromkeys(each for each in own if each is not None):
                stack.enter_context(owning(folder, check_signal))
            yield

    def _rows(self) -> Iterator[dict[str, Any]]:
        run, results, leaving = self._run, self._results, self._leaving
        is_pending = self._resume()
        if self._reports.journal is not None:
            self.history.journal = self._life.recorder.history.journal = str(run.folder)
        is_asked = self._options.validate == ASYNC and results.validates
        run.validates_beside = is_asked and self._trainer_calls.validates_beside
        error: BaseException | None = None
        try:
            self._calls.begin_run()
            if is_pending:
                results.tell_pending()
            self._note_progress()
            try:
                while self._goes_on():
                    row = self._epoch_unless_lost()
                    if row is not None:
                        yield row
            except GeneratorExit:
                results.finish_validation()
                if leaving.signal is not None:
                    self._save_left()
                raise
            results.finish_validation()
            if self._has_left or leaving.is_due():
                self._leave()
        except GeneratorExit:
            if run.epoch < self._last_epoch:
                run.stop("the program has left the loop over the epochs")
            raise
        except BaseException as raised:  # also on Ctrl-C
            error = raised
            raise
        finally:
            self._calls.end_run(error)

    @property
    def _last_epoch(self) -> float:
        return math.inf if self._run.epochs is None else self._run.epochs

    def _goes_on(self) -> bool:
        """Return True if the run still has an epoch, or the rest of an epoch, to train."""
        run = self._run
        if run.is_stopping or self._has_left or self._leaving.is_due() or run.epoch >= self._last_epoch:
            return False
        return self._max_step is None or self._global_step() < self._max_step

    def _epoch_unless_lost(self) -> dict[str, Any] | None:
        """Train an epoch, and return its metrics.

        Return None if the run stops inside the epoch, or if all workers are lost after the program received a signal.
        """
        try:
            return self._epoch()
        except (WorkersLostError, CallbackError) as error:
            # A callback that tried to save may have failed because the workers were lost. The cause of the
            # `CallbackError` is then that loss.
            lost = error.__cause__ if isinstance(error, CallbackError) else error
            if self._leaving.signal is None or not isinstance(lost, WorkersLostError):
                raise
            self._is_lost, self._begun = True, None
            return None

    def _epoch(self) -> dict[str, Any] | None:
        """Train an epoch, and return its metrics. Return None if the run stopped before the end of the epoch."""
        run, reports, results = self._run, self._reports, self._results
        self._calls.tell("on_epoch_begin")
        if run.is_stopping:
            return None
        run.epoch += 1
        with self._life.listeners.listening(*reports.listeners, step_reader=reports.reader):
            trained = self._trained({"num_epochs": run.epochs, VALIDATES: results.validates})
            if trained is None:
                run.epoch -= 1
                return None
            epoch = results.add(trained)
            if self._begun is not None:
                epoch.row["seconds"] += self._begun.seconds
            self._begun, run.step = None, 0
            self._note_progress()
            is_validated = results.is_due(run.epoch)
            if is_validated and not run.validates_beside:
                results.validate(epoch)
        self._calls.check_progress()
        results.tell_events()
        self._saved_in_epoch.clear()
        try:
            # Add the previous epoch's validation result if it has arrived, so that the next checkpoint includes it.
            results.finish_validation(waits=False)
        finally:
            self._calls.tell("on_epoch_trained")
        if results.awaited is not None:
            self._save_again(results.finish_validation())
        if is_validated and run.validates_beside:
            results.validate(epoch)
        if epoch.handle is None:
            results.tell(epoch)
        self._note_progress()
        return epoch.row

    # ------------------------------------------------------------------------------------------------ stopped early

    def _leave(self) -> None:
        """If the run stops early, let the callbacks save the training state. If a signal came, then end the program.

        Raises:
            Preempted: A signal stopped the run.
        """
        run, leaving = self._run, self._leaving
        is_early, is_at_end = leaving.is_due(), run.is_stopping or run.epoch >= self._last_epoch
        if leaving.signal is None and not self._has_left and is_at_end:
            return
        self._save_left()
        if leaving.signal is not None:
            leaving.end_program(self.newest)
        if is_early:
            run.stop(leaving.reason)

    def _save_left(self) -> None:
        """Call the callbacks' `on_leave`, in which they save the current training state.

        Do not call `on_leave` if that state is lost and the driver has no snapshot that is newer than the last
        checkpoint.
        """
        run, leaving = self._run, self._leaving
        is_early = leaving.is_due()
        if not self._is_lost or self._finds_snapshot():
            run.step = self._num_begun
            self._calls.tell("on_leave")
        logger.log(
            logging.WARNING if is_early else logging.INFO,
            "%s: left the run after %d epochs%s; %s",
            leaving.reason if is_early else run.history.stop_reason or f"`max_steps` of {self._max_step}",
            run.epoch,
            _more_batches(run.step),
            "nothing is saved" if self.newest is None else f"the newest checkpoint is {self.newest}",
        )

    @property
    def _num_begun(self) -> int:
        """The number of batches of the unfinished epoch that each worker has trained on. 0 between two epochs."""
        return 0 if self._begun is None else self._begun.num_steps

    # ------------------------------------------------------------------------------------------- inside an epoch

    def _trained(self, info: Mapping[str, Any]) -> Any:
        """Train an epoch, or the rest of an epoch, with the pauses that are due inside it.

        Return the training call's result. Return None if the run stops inside the epoch.
        """
        can_leave, options = self._life.framework.acts_between_steps, epoch_options(None, info=info)
        asks = self._asks if can_leave and (self._leaving.may_come or self._pauses is not None) else None
        self._has_left = self._begun is not None and self._begun.owes_validation and not self._pause()
        while not self._has_left:
            hold_at, self._known_step = self._next_pause(), None
            try:
                return self._trainer_calls.train(
                    replace(options, hold_at=hold_at),
                    dataset=self._options.dataset,
                    of_fit=True,
                    begun=self._begun,
                    leaves=asks,
                )
            except (EpochLeft, WorkersLostError) as left:
                self._note_left(left)
            self._has_left = self._is_lost or self._leaving.is_due() or not self._pause()
        return None

    def _asks(self) -> bool:
        """Return True if the running epoch must stop after its current step.

        It must stop if a callback asks for a pause, for example to save, or if the run must end early.
        """
        return self._leaving.is_due() or (self._pauses is not None and self._pauses.is_due)

    def _next_pause(self) -> int | None:
        """Return the number of batches after which the epoch must pause next. Return None if no pause is planned.

        The batches are counted from the start of the epoch. Called while the workers are idle.
        """
        if self._pauses is None:
            return None
        step = self._global_step()
        pause = self._pauses.next_after(step)
        return None if pause is None else pause - step + self._num_begun

    def _pause(self) -> bool:
        """Validate and save, if due, while the workers wait between two steps. Return False if the run stops there."""
        begun, pauses = self._begun, self._pauses
        if begun is None or pauses is None:  # no step of the epoch was taken yet, or the run has no pauses
            return True
        if begun.owes_validation:
            self._validate(begun)
        with self._between_epochs(begun):
            for each in pauses.callbacks:
                self._calls.call(each, "_on_pause", self._run, begun.global_step)
            self._note_progress()
        if begun.is_exhausted:  # no batches are left: continue, so that the epoch is completed
            return not self._leaving.is_due()
        return not (self._run.is_stopping or self._leaving.is_due() or pauses.ends_at(begun.global_step))

    def _validate(self, begun: BegunEpoch) -> None:
        """Validate while the workers wait inside an epoch, and pass the metrics to the callbacks' `on_validation`."""
        metrics = self._results.validate_inside(begun.global_step)
        self._begun = replace(begun, owes_validation=False)
        if metrics is not None:
            with self._between_epochs(begun):
                self._calls.tell("on_validation", begun.global_step, metrics)

    @contextmanager
    def _between_epochs(self, begun: BegunEpoch) -> Iterator[None]:
        """Inside the block, show callbacks the progress of an unfinished epoch in the `run` that they receive.

        Let `run.epoch` be the number of completed epochs, and `run.step` the number of batches of the unfinished epoch.
        """
        run = self._run
        run.epoch, run.step = run.epoch - 1, begun.num_steps
        try:
            yield
        finally:
            run.epoch, run.step = run.epoch + 1, 0

    def _note_left(self, left: EpochLeft | WorkersLostError) -> None:
        """Record the step at which an epoch stopped before its end.

        Args:
            left: The exception that ended the training call: an `EpochLeft` with the state of the workers, or the loss
                of all workers.

        Raises:
            WorkersLostError: All workers were lost, and the program has received no signal that would explain the loss.
        """
        if isinstance(left, WorkersLostError) and self._leaving.signal is None:
            raise left
        self._is_lost = not isinstance(left, EpochLeft) or not left.states
        self._begun = None
        if isinstance(left, EpochLeft) and left.states and left.states[0].num_steps:
            self._reports.fetch()
            landed = self._life.controller.snapshots.landed
            step = 0 if landed is None else self._life.framework.place_in(landed)[1]
            begun = BegunEpoch.of(left.states, seconds=left.seconds, global_step=step)
            is_due = self._pauses is not None and self._pauses.validates_at(step)
            follows_anyway = begun.is_exhausted and self._results.is_due(self._run.epoch)
            self._begun = replace(begun, owes_validation=is_due and not follows_anyway)

    def _finds_snapshot(self) -> bool:
        """Return True if the last snapshot in the driver is newer than the last checkpoint file.

        Return False if the run has completed an epoch since the snapshot. Called after the workers' training state was
        lost. A snapshot is a copy of the training state that the workers sent to the driver. If the snapshot was taken
        inside an epoch, set `_begun` to that epoch.
        """
        landed = self._life.controller.snapshots.landed
        if landed is None:
            return False
        (num_epochs, global_step), progress = self._life.framework.place_in(landed), landed.progress
        if progress is not None:
            self._begun = BegunEpoch.of(progress, global_step=global_step)
            num_epochs -= self._begun.is_exhausted
        place = num_epochs, self._num_begun
        return num_epochs == self._run.epoch and (self.newest is None or place > place_of(self.newest))

    def _global_step(self) -> int:
        """Return how many batches each worker has trained on over all epochs. Called while workers are idle."""
        if self._known_step is not None:
            return self._known_step
        return int(self._life.of_first("operator.global_step"))

    # ------------------------------------------------------------------------------------------- saved and resumed

    def _save(self, location: str) -> None:
        """Save a checkpoint, and call the callbacks' `on_checkpoint`.

        If the workers' training state was lost, save the last snapshot in its place.

        Args:
            location: Path or URI of the checkpoint.
        """
        began, step = time.perf_counter(), None
        if self._is_lost:
            lost = self._life.controller.snapshots.landed
            assert lost is not None, "it was found"
            self._life.saves.write(location, self._life.framework.content_of(lost))
            step = self._life.framework.place_in(lost)[1]
        else:
            self._trainer.save(location)
        self._sidecars.write(location, self._sidecar(True))
        self._saved_in_epoch.append(location)
        self._note_checkpoint(location, step, time.perf_counter() - began)

    def _save_behind(self, location: str) -> tuple[SubmittedWrite, Callable[[], None]]:
        """Save a checkpoint in the background. Return the write, and a function to call when the file is complete.

        Write the sidecar before the checkpoint. A complete checkpoint then always has a sidecar.
        """
        self._sidecars.write(location, self._sidecar(True))
        write = self._life.saves.submitted_by(partial(self._trainer.save, location, blocking=False))
        # The step after which the workers copied the training state that is now being written.
        step = None if self._reports.journal is None else self._reports.journal.last_step
        self._saved_in_epoch.append(location)
        return write, lambda: self._note_checkpoint(location, step, write.seconds)

    def _note_checkpoint(self, location: str, step: int | None, seconds: float) -> None:
        self._leaving.note_save(seconds)
        self.newest = location
        if self._reports.journal is not None:
            self._reports.journal.note_checkpoint(location, step)
        self._calls.tell("on_checkpoint", location)

    def _save_again(self, has_changed: bool) -> None:
        """Save again the files that were saved before the validation result of their epoch arrived.

        Args:
            has_changed: True if the validation result has changed the training state, through a learning rate
                scheduler. Otherwise, only write the sidecars again.
        """
        try:
            for location in self._saved_in_epoch:
                if has_changed:
                    self._trainer.save(location)
                self._sidecars.write(location, self._sidecar())
        except OSError as error:  # only a warning, because the files of the first save still exist
            logger.warning("could not add the result of the epoch before to what was saved: %s", error)

    def _find_checkpoint(self) -> str | None:
        """Return the newest checkpoint that the callbacks, or a detached trainer, have saved. None if there is none."""
        newest = [each.newest_checkpoint(self._run) for each in self._callbacks]
        locations, left = [str(location) for location in newest if location is not None], self._life.left_file
        if left is not None and place_of(left)[0] >= 0:
            # `left` comes last, because `max` takes the first of equally new files. The callbacks' files also have the
            # callbacks' states.
            locations.append(left)
        return max(locations, key=place_of, default=None)

    def _load(self, location: str) -> None:
        """Load a checkpoint into the workers."""
        self._trainer.load(location)
        self.newest = location

    def _sidecar(self, with_open_steps: bool = False) -> Sidecar:
        """Return the run's progress, as it is saved beside each checkpoint."""
        self._results.take_records()
        current = self._results.current
        epoch = self._run.epoch if current is None else current.number
        pending = None if current is None or current.is_told else epoch
        begun = None if self._begun is None else self._begun.as_data()
        states = self._calls.states()
        open_steps = self._reports.open_steps() if with_open_steps and not self._is_lost else None
        return Sidecar(epoch, self.history, states, pending, self._run.epochs, begun, open_steps, self._max_step)

    def _note_progress(self) -> None:
        """In a detached trainer, which outlives the program that created it, store the run's progress."""
        run, note = self._run, self._life.note_fit
        if note is not None:
            step = None if self._pauses is None else self._global_step()
            note((self._sidecar(), vars(run).get("folder", run._folder), step))

    @errors_printable()
    def _resume(self) -> bool:
        """Let the run continue where an earlier run, or an earlier process, has stopped, if there is one.

        Return True if the callbacks have not received the result of the last epoch yet.
        """
        run, kept, resume_from, pending = self._run, self._kept, self._options.resume_from, None
        if kept is not None:
            # This process took over a run from another process. The workers may already be training the next epoch, so
            # do not call them.
            pending = self._take_over(kept[0])
            run.epoch, self._known_step = kept[0].epoch, kept[2]
        else:
            location = self._find_checkpoint() if resume_from == AUTO else resume_from and str(resume_from)
            sidecar = None if location is None else self._sidecars.read(location)
            if sidecar is not None:
                pending = self._take_over(sidecar, location)
            elif location is not None:
                self._load(location)
                logger.warning(
                    "`resume_from`: `%s` has no `%s` beside it. The training state is loaded, but the run begins "
                    "without the earlier rows of its history and the states of callbacks. Bring that file back to have "
                    "them",
                    location,
                    files.shown(sidecar_location(location)),
                )
            elif self._begun_before is not None and self._begun_before.global_step == self._global_step():
                self._go_on_inside(self._begun_before)
            is_exhausted = self._begun is not None and self._begun.is_exhausted
            run.epoch = self._life.of_first("epochs_done") - is_exhausted
            if location is not None:
                if resume_from == AUTO:  # otherwise the program itself names the file
                    more = _more_batches(0 if is_exhausted else self._num_begun)
                    logger.warning("resumed from `%s`, which has %d epochs%s", location, run.epoch, more)
                self._warn_if_complete(location)
        is_pending = pending == run.epoch
        if is_pending:
            run._last_told = run.epoch - 1
        return is_pending

    def _warn_if_complete(self, location: str) -> None:
        counts = [("epochs", "epochs", self._run.epoch, self._run.epochs)]
        if self._max_step is not None:
            counts.append(("steps", "max_steps", self._global_step(), self._max_step))
        for counted, argument, done, total in counts:
            if total is not None and done >= total:
                logger.warning(
                    "`resume_from`: `%s` has %d of %d %s, so none is left to train. For more of them pass a larger "
                    "`%s`; to train again use another folder",
                    location,
                    done,
                    total,
                    counted,
                    argument,
                )

    def _take_over(self, sidecar: Sidecar, location: str | None = None) -> int | None:
        """Continue the run in a sidecar. Return the epoch whose result callbacks have not received, or None.

        Args:
            sidecar: Content of the sidecar. If it is damaged, nothing is loaded into the workers.
            location: Checkpoint to load into the workers. None if they have this state already.
        """
        begun = None if sidecar.begun is None else BegunEpoch.from_data(sidecar.begun)
        open_steps = open_steps_from_data(sidecar.open_steps)
        self._calls.load_states(sidecar.callbacks)
        if location is not None:
            self._load(location)
        self.history.take_over(sidecar.history)
        if begun is not None:
            self._go_on_inside(begun)
        if location is not None:
            self._reports.go_on_from(open_steps)
        return sidecar.pending

    def _go_on_inside(self, begun: BegunEpoch) -> None:
        """Let the run continue with the rest of an epoch that an earlier run left unfinished."""
        self._begun = begun
        self._run.step, self._run._global_step = begun.num_steps, begun.global_step


def _more_batches(num_batches: int) -> str:
    """Return the words for the batches of an unfinished epoch, to follow the number of completed epochs."""
    return f" and {num_batches} batches of the next one" if num_batches else ""
