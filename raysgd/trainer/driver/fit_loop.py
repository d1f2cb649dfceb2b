"""The loop behind `trainer.fit` and `trainer.epochs`: it trains, validates, calls callbacks, and resumes runs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd.callbacks.callback import Run
from raysgd.callbacks.calling import CallbackCalls, checked, overrides
from raysgd.callbacks.monitors import StepMetrics
from raysgd.callbacks.progress import ProgressBar, is_watched
from raysgd.callbacks.sidecar import Sidecar, Sidecars, place_of
from raysgd.callbacks.worker_callback import refuse_equal_keys
from raysgd.core import arguments as checks
from raysgd.core.engine.shared.call import Call, CallHandle
from raysgd.core.engine.shared.tracebacks import hides_library_frames
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.engine.worker import is_sendable
from raysgd.core.files import check_path, make_folder
from raysgd.core.history.history import CallRecord, History, RecordBeside
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import (
    CallbackError,
    InvalidCountError,
    NoDataError,
    OnFailure,
    RaySGDError,
    UnpicklableError,
    WorkersLostError,
)
from raysgd.storage import files
from raysgd.trainer.driver.calls import EpochCalls, EpochLeft, Listener, StepListener, asked
from raysgd.trainer.driver.leaving import Leaving
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch, summaries_as_data, summaries_from_data
from raysgd.trainer.messages.epochs import VALIDATES, EpochRequest

AUTO = "auto"
INLINE, ASYNC = "inline", "async"
_INSTEAD_OF_URI = "Callbacks that can write to a store take a URI themselves, as `Checkpointing(folder=...)` does."

_COUNTS = {
    "epochs": "a number of epochs, 0 or more",
    "validation_freq": "0 (never), 1 (after each epoch), or after how many epochs",
    "log_every_n_steps": "a number of steps, or 0 for epochs only",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `fit` and `epochs`, checked. The docstring of `fit` says what each field means.

    Raises:
        InvalidCountError: A count is out of range.
        TypeError: An argument has the wrong type.
        ValueError: A path is empty, the folder is a URI, or `validate` is unknown.
    """

    epochs: int
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

    def __post_init__(self) -> None:
        for name, needed in _COUNTS.items():
            value = getattr(self, name)
            if not checks.is_integer(value) or value < 0:
                raise InvalidCountError(f"`{name}={value!r}`: need {needed}.")
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


FitProgress = tuple[Sidecar, Any]
"""Progress of a `fit`, so that another process can continue it; and the folder for callbacks, if it is known yet."""

NoteProgress = Callable[[FitProgress], None]
"""Function that keeps the progress of a `fit`."""


@dataclass
class TrainedEpoch:
    """An epoch that was trained.

    Attributes:
        number: Its number in the run, from 1.
        trained: Result of the training call.
        row: Its row in the history of the run.
        shown: Its row in the history of the trainer.
        handle: Handle of its validation, if that runs beside the training.
        ended: Functions that add the result of that validation to the history of the trainer. Empty until it ends.
        is_told: True if callbacks know the result.
    """

    number: int
    trained: Any
    row: dict[str, Any]
    shown: dict[str, Any]
    handle: CallHandle[Any] | None = None
    ended: list[Callable[[], CallRecord]] = field(default_factory=list)
    is_told: bool = False

    def note(self, add: RecordBeside, result: Any, began_at: float, seconds: float) -> None:
        """Keep the result of the validation. Called in its thread."""
        self.ended.append(partial(add, result, began_at, seconds))


@dataclass(frozen=True)
class TrainerPort:
    """Everything that `FitRun` can use of a trainer. The trainer makes one for each run and provides the functions.

    Attributes:
        new_run: Makes the `Run` that callbacks get.
        history: Every call of the trainer.
        calls: Makes calls on the workers, and holds the listeners.
        once: Keeps what was logged already.
        runs_worker_callbacks: True if the workers can call callbacks around their steps.
        use_worker_callbacks: Lets these callbacks, and no others, run in the workers.
        train: Runs a training call: `train(request, dataset=..., of_fit=True)`.
        validate: Runs a validation in the same way.
        validates_beside: Returns True if a validation can run beside the training.
        begin_validation: Begins a validation beside the training.
        after_validation: Steps the schedulers that follow metrics. Returns True if the state has changed.
        save: Writes the state.
        load: Loads a state.
        note_progress: Keeps the progress of the run, in a detached trainer; None in others.
        left_file: File in which a detached trainer is saved when it ends without its program; None for others.
        leaves_epochs: True if a run can stop inside an epoch.
        epoch_obstacle: Says why an epoch can only begin again; None if it can continue.
        save_snapshot: Writes a snapshot that the driver holds.
        place_in: Returns how many epochs and steps a snapshot has.
        kept: Progress to continue from, in the next process of a detached trainer; else None.
    """

    new_run: Callable[..., Run]
    history: History
    calls: EpochCalls
    once: Once
    runs_worker_callbacks: bool
    use_worker_callbacks: Callable[..., None]
    train: Callable[..., Any]
    validate: Callable[..., Any]
    validates_beside: Callable[[], bool]
    begin_validation: Callable[..., CallHandle[Any]]
    after_validation: Callable[..., bool]
    save: Callable[[str], Any]
    load: Callable[[str], Any]
    note_progress: NoteProgress | None
    left_file: str | None
    leaves_epochs: bool
    epoch_obstacle: Callable[[], str | None]
    save_snapshot: Callable[[str, Snapshot], None]
    place_in: Callable[[Snapshot], tuple[int, int]]
    kept: FitProgress | None


class FitRun:
    """One call of `fit` or `epochs`.

    Args:
        trainer: The functions and parts of the trainer.
        options: The arguments of the call.

    Attributes:
        history: The history of this run.
    """

    def __init__(self, trainer: TrainerPort, options: FitOptions) -> None:
        self._trainer = trainer
        self._options = options
        self._leaving = Leaving(options.max_time)
        self._begun: BegunEpoch | None = None
        self._is_lost = False
        self._kept = trainer.kept
        self._callbacks, self._worker_callbacks = checked(options.callbacks)
        shows = is_watched(sys.stderr) if options.progress is None else options.progress
        if shows and not any(isinstance(each, ProgressBar) for each in self._callbacks):
            self._callbacks.append(ProgressBar())
        self._run = trainer.new_run(
            epochs=options.epochs,
            folder=options.folder if self._kept is None else self._kept[1],
            callbacks=self._callbacks,
            save=lambda run, location: self._save(location),
            may_validate=options.validation_freq > 0,
        )
        self.history = self._run.history
        self._calls = CallbackCalls(self._callbacks, self._run)
        self._pausing = [each for each in self._callbacks if each._pauses]
        self._steps: StepListener | None = None
        self._step_metrics: StepMetrics | None = None
        self._listeners: list[Listener] = [self._calls.progress] if self._calls.wants("on_progress") else []
        if options.log_every_n_steps and trainer.runs_worker_callbacks and self._calls.wants("on_step_metrics"):
            self._step_metrics = StepMetrics(options.log_every_n_steps)
            self._worker_callbacks.append(self._step_metrics)
            self._steps = StepListener(trainer.calls.controller, self._calls.step_metrics)
            self._listeners.append(self._steps)
        self._sidecars = Sidecars()
        self._seen = trainer.history.extent
        self._num_events = len(trainer.history.events)
        self._lacks_data = False
        self._current: TrainedEpoch | None = None
        self._awaited: TrainedEpoch | None = None
        self._pending: int | None = None
        self._saved: list[str] = []
        self._newest: str | None = None

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Train, and yield the row of each epoch when it ends. Closing the iterator stops the run.

        Raises:
            ValueError, TypeError: The run cannot work with these arguments. Nothing has begun.
            UnpicklableError: A callback for the workers cannot be sent to them.
        """
        options = self._options
        if self._kept is not None:
            self._run.epochs = self._kept[0].epochs
        elif options.resume_from is None:
            self._run.epochs = self._epochs_done() + options.epochs
        finds = self._trainer.left_file or any(overrides(each, "newest_checkpoint") for each in self._callbacks)
        if options.resume_from == AUTO and not finds:
            raise ValueError(
                '`resume_from="auto"`: no callback finds checkpoints, so there is nothing to resume from. Pass '
                "`callbacks=[Checkpointing(...)]`, or the path of a file."
            )
        if self._pausing:
            self._check_pauses()
        self._calls.check()
        for callback in self._worker_callbacks:
            name = type(callback).__name__
            if not self._trainer.runs_worker_callbacks:
                raise TypeError(
                    f"`{name}` runs in the workers, around each step, which `{type(self._run.trainer).__name__}` "
                    "cannot do: leave it out, or train with `TorchTrainer`."
                )
            if not is_sendable(callback):
                raise UnpicklableError(f"`{name}` runs in the workers, and cannot be pickled.")
        refuse_equal_keys(self._worker_callbacks)
        if options.folder is not None:
            make_folder("folder", options.folder)
        return self._epochs()

    def _check_pauses(self) -> None:
        obstacle, trainer = self._trainer.epoch_obstacle(), self._trainer
        if not trainer.leaves_epochs:
            obstacle = f"`{type(self._run.trainer).__name__}` cannot hold its workers inside an epoch"
        if self._options.dataset is not None:
            obstacle = "a file does not hold the place in the `dataset` of a call"
        if obstacle is not None:
            name = type(self._pausing[0]).__name__
            raise ValueError(
                f"`{name}(every_n_steps=...)` and `every_minutes` do not work here: {obstacle}. Leave them out, or "
                "loop over `trainer.train(num_steps=...)` and `trainer.save(path)`."
            )

    @hides_library_frames
    def _epochs(self) -> Iterator[dict[str, Any]]:
        with self._leaving.listening(self._expect_end), self._ending_afterwards(), self._in_workers():
            self._resume()
            is_asked = self._options.validate == ASYNC
            self._run.validates_beside = is_asked and self._validates and self._trainer.validates_beside()
            with self._told_of_the_run():
                self._go_on_with_pending()
                self._note_progress()
                try:
                    while self._run.epoch < self._last_epoch and not (self._run.is_stopping or self._leaves()):
                        row = self._epoch_unless_lost()
                        if row is not None:
                            yield row
                except GeneratorExit:
                    self._finish_validation()
                    raise
                self._finish_validation()
                if self._leaves():
                    self._leave()

    # ------------------------------------------------------------------------------------------------ stopped early

    def _leaves(self) -> bool:
        """Return True if the run must stop early. Called now and then, also during an epoch."""
        return self._leaving.is_due()

    def _expect_end(self) -> None:
        """Let the controller replace no lost workers any more. Called in the handler of a signal."""
        self._trainer.calls.controller.is_ending = True

    @contextmanager
    def _ending_afterwards(self) -> Iterator[None]:
        """Let the controller replace lost workers again after the block."""
        self._leaving.begin()
        try:
            yield
        finally:
            self._trainer.calls.controller.is_ending = False

    def _leave(self) -> None:
        """Let callbacks save the state at the step where the run stops. Then end the program if a signal came.

        Raises:
            Preempted: A signal came.
        """
        run, leaving = self._run, self._leaving
        is_of_time = leaving.signal is None
        if is_of_time and (run.is_stopping or run.epoch >= self._last_epoch):
            return
        if not self._is_lost or self._finds_snapshot():
            run.step = 0 if self._begun is None else self._begun.num_steps
            self._calls.tell("on_leave")
        logger.warning(
            "%s: left the run after %d epochs%s; %s",
            leaving.reason,
            run.epoch,
            f" and {run.step} batches of the next one" if run.step else "",
            "nothing is saved" if self._newest is None else f"the newest checkpoint is {self._newest}",
        )
        if is_of_time:
            run.stop(leaving.reason)
            return
        leaving.end_program(self._newest)

    def _finds_snapshot(self) -> bool:
        """Return True if the driver holds a state newer than the last file. Called after workers were lost."""
        landed = self._trainer.calls.controller.snapshots.landed
        if landed is None:
            return False
        (num_epochs, global_step), progress = self._trainer.place_in(landed), landed.progress
        if progress is not None:
            self._begun = BegunEpoch.of(progress, global_step=global_step)
            num_epochs -= self._begun.is_exhausted
        place = num_epochs, 0 if self._begun is None else self._begun.num_steps
        return num_epochs == self._run.epoch and (self._newest is None or place > place_of(self._newest))

    @contextmanager
    def _in_workers(self) -> Iterator[None]:
        """Let worker callbacks run in the workers inside the block."""
        chosen, use = self._worker_callbacks, self._trainer.use_worker_callbacks
        if not chosen:
            yield
            return

        def take_out() -> None:
            try:
                use(())
            except RaySGDError as error:  # the error that ended the run matters more
                logger.warning("could not take callbacks out of the workers: %r", error)

        with OnFailure(take_out):
            if self._kept is None:  # else the workers have them already
                use(chosen)
            yield
        use(())

    @contextmanager
    def _told_of_the_run(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            self._calls.begin_run()
            yield
        except GeneratorExit:
            if self._run.epoch < self._last_epoch:
                self._run.stop("the program has left the loop over the epochs")
            raise
        except BaseException as raised:  # Ctrl-C too
            error = raised
            raise
        finally:
            self._calls.end_run(error)

    @property
    def _last_epoch(self) -> int:
        assert self._run.epochs is not None
        return self._run.epochs

    def _epoch_unless_lost(self) -> dict[str, Any] | None:
        """Train an epoch. Return None also if all workers were lost behind it, and a signal ends the program."""
        try:
            return self._epoch()
        except (WorkersLostError, CallbackError) as error:
            lost = error.__cause__ if isinstance(error, CallbackError) else error  # the callback may have saved
            if self._leaving.signal is None or not isinstance(lost, WorkersLostError):
                raise
            self._is_lost, self._begun = True, None
            return None

    def _epoch(self) -> dict[str, Any] | None:
        """Train an epoch. Return its row, or None if the run stopped before the end of the epoch."""
        run, trainer = self._run, self._trainer
        self._calls.tell("on_epoch_begin")
        if run.is_stopping:
            return None
        run.epoch += 1
        with trainer.calls.listeners.listening(*self._listeners):
            info = {"num_epochs": self._last_epoch, VALIDATES: self._validates}
            trained = self._train(asked(None, info=info))
            if trained is None:
                run.epoch -= 1
                return None
            epoch = self._current = self._trained(trained)
            if self._begun is not None:
                epoch.row["seconds"] += self._begun.seconds
            self._begun, run.step = None, 0
            self._note_progress()
            if self._is_due(run.epoch) and not run.validates_beside:
                self._validate(epoch)
        self._calls.check_progress()
        self._tell_of_events()
        self._saved.clear()
        try:
            self._finish_validation(waits=False)  # so that a save includes a result that has come
        finally:
            self._calls.tell("on_epoch_trained")
        if self._awaited is not None:
            self._save_again(self._finish_validation())
        if self._is_due(run.epoch) and run.validates_beside:
            self._validate(epoch)
        if epoch.handle is None:
            self._tell_of_result(epoch)
        self._note_progress()
        return epoch.row

    def _train(self, request: EpochRequest) -> Any:
        """Train an epoch, or the rest of it. Return the result, or None if the run stops inside the epoch."""
        dataset, can_leave = self._options.dataset, self._trainer.leaves_epochs
        asks = self._asks if can_leave and (self._leaving.may_come or self._pausing) else None
        while True:
            try:
                return self._trainer.train(
                    replace(request, hold_at=self._next_pause()),
                    dataset=dataset,
                    of_fit=True,
                    begun=self._begun,
                    leaves=asks,
                )
            except (EpochLeft, WorkersLostError) as left:
                self._note_left(left)
            if self._is_lost or self._leaves():
                return None
            self._pause()

    def _asks(self) -> bool:
        """Return True if the running epoch must pause at its next step."""
        return self._leaves() or any(each._pauses_now() for each in self._pausing)

    def _next_pause(self) -> int | None:
        """Return after how many batches the epoch pauses, or None. Called while the workers are idle."""
        if not self._pausing:
            return None
        step: int = self._trainer.calls.controller.run(Call(replica_calls.global_step, rank=0))[0]
        begun = 0 if self._begun is None else self._begun.num_steps
        wanted = [at for each in self._pausing if (at := each._pause_at(step)) is not None]
        return min(wanted) - step + begun if wanted else None

    def _pause(self) -> None:
        """Call the callbacks that act inside epochs, while the workers wait at a step."""
        run, begun = self._run, self._begun
        if begun is None:  # before the first step
            return
        run.epoch, run.step = run.epoch - 1, begun.num_steps
        for each in self._pausing:
            self._calls.call(each, "_on_pause", run, begun.global_step)
        run.epoch, run.step = run.epoch + 1, 0

    def _note_left(self, left: EpochLeft | WorkersLostError) -> None:
        """Keep the place at which an epoch stopped.

        Raises:
            WorkersLostError: The epoch failed, and no signal had come.
        """
        if isinstance(left, WorkersLostError) and self._leaving.signal is None:
            raise left
        self._is_lost = not isinstance(left, EpochLeft) or not left.states
        self._begun = None
        if isinstance(left, EpochLeft) and left.states and left.states[0].num_steps:
            if self._steps is not None:
                self._steps.tell_rest()
            landed = self._trainer.calls.controller.snapshots.landed
            step = 0 if landed is None else self._trainer.place_in(landed)[1]
            self._begun = BegunEpoch.of(left.states, seconds=left.seconds, global_step=step)

    def _trained(self, result: Any) -> TrainedEpoch:
        recorded = self._trainer.history
        self._take_records()
        row = self.history[-1]
        number = result.get("epoch", self._run.epoch)  # Keras's `fit` returns no epoch
        if number != self._run.epoch and self._trainer.once.is_first("epochs"):
            logger.warning(
                "epoch %d of this run is epoch %d of the trainer, because something else was trained or loaded "
                'meanwhile. Files say the latter to `resume_from`. `load(path, parts=["models"])` loads no epoch',
                self._run.epoch,
                number,
            )
        row["epoch"] = self._run.epoch
        return TrainedEpoch(self._run.epoch, result, row, recorded[-1] if len(recorded) else {})

    def _is_due(self, epoch: int) -> bool:
        return self._validates and epoch % self._options.validation_freq == 0

    @property
    def _validates(self) -> bool:
        can_validate = (
            self._options.validation_dataset is not None or self._trainer.calls.controller.facts[0].has_validation
        )
        return can_validate and not self._lacks_data and self._options.validation_freq > 0

    def _validate(self, epoch: TrainedEpoch) -> None:
        """Validate. If that runs beside the training, only begin it."""
        trainer, dataset = self._trainer, self._options.validation_dataset
        if self._run.validates_beside:
            epoch.handle = trainer.begin_validation(asked(None), dataset, True, epoch.note)
            self._awaited = epoch
            return
        whole = replace(asked(None), starts_over=True)  # even if a callback has validated on some batches
        with self._noting_lack_of_data():
            trainer.after_validation(epoch.trained, trainer.validate(whole, dataset, of_fit=True))
        self._take_records()

    @contextmanager
    def _noting_lack_of_data(self) -> Iterator[None]:
        """Stop validating if the user's `validate` turns out to need data and there is none."""
        try:
            yield
        except NoDataError as error:
            self._lacks_data = True
            logger.warning("`%s.validate` needs data, so `fit` does not validate: %s", self._run.name, error.args[0])

    def _finish_validation(self, waits: bool = True) -> bool:
        """Wait for the validation beside the training, if one runs, and tell callbacks the result of its epoch.

        Without `waits`, a validation that is still running is left for later. If it lost its workers, the epoch gets
        no validation metrics.

        Returns:
            True if the result has changed the state of the training.
        """
        epoch, changes_state = self._awaited, False
        if epoch is None or epoch.handle is None or not (waits or epoch.handle.done()):
            return False
        self._awaited, validated = None, None
        with self._trainer.calls.accounts.waiting_for_validation(), self._noting_lack_of_data():
            try:
                validated = epoch.handle.result()
            except WorkersLostError as error:
                logger.warning("epoch %d has no metrics of validation: %s", epoch.number, error)
        self._take_records()
        for add in epoch.ended:
            self.history.add(add(), epoch.row)
            self._seen = self._trainer.history.extent
            changes_state = self._trainer.after_validation(epoch.trained, validated)
        self._tell_of_result(epoch)
        return changes_state

    def _tell_of_events(self) -> None:
        events = self._trainer.history.events[self._num_events :]
        self._num_events += len(events)
        for event in events:
            self.history.events.append(event)
            self._calls.tell("on_event", event)

    def _tell_of_result(self, epoch: TrainedEpoch) -> None:
        """Tell callbacks the result of the last epoch or the one before. Meanwhile `run.epoch` is that epoch."""
        run, now = self._run, self._run.epoch
        epoch.is_told, run.epoch, run._last_told = True, epoch.number, epoch.number
        try:
            self._calls.tell("on_result", epoch.row)
        finally:
            run.epoch = now
        epoch.shown.update(epoch.row)
        self._take_records()

    def _take_records(self) -> None:
        """Copy the new records of the trainer into the history of the run."""
        history, recorded = self.history, self._trainer.history
        for record in recorded.part(self._seen, recorded.extent).records:
            if record.of_fit:
                history.add(record, history[-1] if len(history) else None)
            else:  # a call by a callback, or by the program between two epochs
                history.records.append(record)
        self._seen = recorded.extent

    # ------------------------------------------------------------------------------------------- saved and resumed

    def _save(self, location: str) -> None:
        began = time.perf_counter()
        if self._is_lost:
            landed = self._trainer.calls.controller.snapshots.landed
            assert landed is not None, "it was found"
            self._trainer.save_snapshot(location, landed)
        else:
            self._trainer.save(location)
        self._sidecars.write(location, replace(self._sidecar(), open_steps=self._open_steps()))
        self._leaving.note_save(time.perf_counter() - began)
        self._saved.append(location)
        self._newest = location
        self._calls.tell("on_checkpoint", location)

    def _save_again(self, has_changed: bool) -> None:
        """Add the late result of the previous epoch to the files that were saved without it."""
        try:
            for location in self._saved:
                if has_changed:
                    self._trainer.save(location)
                self._sidecars.write(location, self._sidecar())
        except OSError as error:  # the files from the first save are still there
            logger.warning("could not add the result of the epoch before to what was saved: %s", error)

    def _sidecar(self) -> Sidecar:
        self._take_records()
        current = self._current
        epoch = self._run.epoch if current is None else current.number
        pending = None if current is None or current.is_told else epoch
        begun = None if self._begun is None else self._begun.as_data()
        return Sidecar(epoch, self.history, self._calls.states(), pending, self._run.epochs, begun)

    def _open_steps(self) -> list[Any] | None:
        """Return the step, and what each rank has measured since the last mean, as plain data. None if unknown."""
        found = () if self._steps is None or self._is_lost else self._steps.open()
        return [found[0][0], *summaries_as_data(each for _, each in found)] if found else None

    def _note_progress(self) -> None:
        """Give the progress of the run to a detached trainer."""
        run, note = self._run, self._trainer.note_progress
        if note is not None:
            note((self._sidecar(), vars(run).get("folder", run._folder)))

    def _resume(self) -> None:
        if self._kept is not None:  # do not ask the workers: they may be in the next epoch by now
            self._take_over(self._kept[0])
            self._run.epoch = self._kept[0].epoch
        else:
            location = self._place_to_resume()
            if location is not None:
                self._load(location)
            self._run.epoch = self._epochs_done() - (self._begun is not None and self._begun.is_exhausted)
            if location is not None and self._run.epoch >= self._last_epoch:
                logger.warning(
                    "`resume_from`: `%s` has %d of %d epochs, so none is left to train. For more of them pass a larger "
                    "`epochs`; to train again use another folder",
                    location,
                    self._run.epoch,
                    self._last_epoch,
                )
        if self._pending == self._run.epoch:
            self._run._last_told = self._run.epoch - 1

    def _go_on_with_pending(self) -> None:
        """Tell callbacks the result of the loaded epoch, if they did not know it at the save. Validate if necessary."""
        history, number = self.history, self._run.epoch
        if self._pending != number or not len(history):
            return
        row = history[-1]
        epoch = self._current = TrainedEpoch(number, row, row, {})
        if self._is_due(number) and "val_seconds" not in row:
            self._validate(epoch)
        if epoch.handle is None:
            self._tell_of_result(epoch)

    def _place_to_resume(self) -> str | None:
        given = self._options.resume_from
        if given != AUTO:
            return None if given is None else str(given)
        found = [each.newest_checkpoint(self._run) for each in self._callbacks]
        places, left = [str(each) for each in found if each is not None], self._trainer.left_file
        if left is not None and place_of(left)[0] >= 0:
            places.append(left)  # last: at a tie, prefer the file with the states of callbacks
        return max(places, key=place_of, default=None)

    def _load(self, location: str) -> None:
        self._trainer.load(location)
        self._newest = location
        sidecar = self._sidecars.read(location)
        if sidecar is None:
            return
        self._take_over(sidecar)
        if sidecar.open_steps and self._step_metrics is not None:
            step, *by_rank = sidecar.open_steps
            self._step_metrics.begun = int(step), summaries_from_data(by_rank)
            self._trainer.use_worker_callbacks(self._worker_callbacks)
        if sidecar.begun is not None:
            begun = self._begun = BegunEpoch.from_data(sidecar.begun)
            self._run.step, self._run._global_step = begun.num_steps, begun.global_step

    def _take_over(self, sidecar: Sidecar) -> None:
        self.history.take_over(sidecar.history)
        self._calls.load_states(sidecar.callbacks)
        self._pending = sidecar.pending

    def _epochs_done(self) -> int:
        done: list[int] = self._trainer.calls.controller.run(Call(replica_calls.epochs_done, rank=0))
        return done[0]
