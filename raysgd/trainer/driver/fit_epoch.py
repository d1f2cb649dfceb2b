"""Trains the epochs of a call to `fit`, pauses inside them, validates, and adds their metrics to the run's history.

See ADR 140.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.sidecar import place_of
from raysgd.core.engine.shared.call import Call, CallHandle
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.history.history import CallRecord, RecordBeside
from raysgd.core.numbers.metric_names import validation_name
from raysgd.exceptions import NoDataError, WorkersLostError
from raysgd.trainer.driver.calls import EpochLeft, TrainerCalls, epoch_options
from raysgd.trainer.driver.leaving import Leaving
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochOptions

logger = logging.getLogger(__name__)


class Pauses:
    """Decides at which steps inside epochs the workers pause.

    A step's number is the number of batches that a worker has trained on over all epochs.

    Args:
        callbacks: The callbacks that need pauses inside epochs, for example to save a checkpoint.
        validate_every: Number of steps between validations. None to never validate inside epochs.
        last_step: The step at which the run ends, or None for no limit.
    """

    def __init__(self, callbacks: Sequence[Callback], validate_every: int | None, last_step: int | None) -> None:
        self.callbacks = callbacks
        self._validate_every, self._last_step = validate_every, last_step
        self._began_at = 0

    def next_after(self, step: int) -> int | None:
        """Return the step of the next pause after `step`, or None if no pause is planned.

        Call this method when all validations and saves that are due at `step` are done.
        """
        self._began_at, every = step, self._validate_every
        wanted = [each._pause_at(step) for each in self.callbacks]
        wanted += [None if every is None else (step // every + 1) * every, self._last_step]
        return min((each for each in wanted if each is not None and each > step), default=None)

    @property
    def is_due(self) -> bool:
        """True if a callback asks for a pause after the current step. Checked repeatedly while an epoch runs."""
        return any(each._pauses_now() for each in self.callbacks)

    def validates_at(self, step: int) -> bool:
        """Return True if a validation is due at `step`, where the run has paused."""
        every = self._validate_every
        return every is not None and step // every > self._began_at // every

    def ends_at(self, step: int) -> bool:
        """Return True if `step`, the number of steps taken so far, is the last step of the run."""
        return self._last_step is not None and step >= self._last_step


@dataclass
class TrainedEpoch:
    """An epoch that has been trained, and perhaps is still being validated.

    Attributes:
        number: The epoch's number in the run, starting at 1.
        trained: The metrics that the training call returned.
        row: The epoch's metrics in the history of this run, a dictionary.
        shown: The epoch's metrics in the trainer's history, a dictionary. The trainer's history also covers calls
            outside this run.
        handle: Handle of the epoch's validation if it runs concurrently with training. Otherwise, None.
        ended: List with the function that adds the result of the concurrent validation to the trainer's history. Empty
            until that validation has ended.
        is_told: True if the `on_result` method of callbacks has been called for this epoch.
    """

    number: int
    trained: Any
    row: dict[str, Any]
    shown: dict[str, Any]
    handle: CallHandle[Any] | None = None
    ended: list[Callable[[], CallRecord]] = field(default_factory=list)
    is_told: bool = False

    def note(self, add: RecordBeside, result: Any, began_at: float, seconds: float) -> None:
        """Keep the result of a concurrent validation until the run's thread adds it to the histories.

        The background thread that waits for the validation calls this method.
        """
        self.ended.append(partial(add, result, began_at, seconds))


class EpochResults:
    """Validates the epochs of a run, adds their metrics to the run's history, and passes them to callbacks.

    Args:
        trainer: Runs the trainer's calls.
        run: The run that callbacks receive. New rows are added to its history.
        calls: Calls the callbacks of the run.
        validation_freq: Validate every `validation_freq` epochs. 0 to never validate after epochs.
        dataset: Data to validate on instead of the registered data, or None.

    Attributes:
        current: The last epoch that has been trained, or None if this run has not completed one yet.
    """

    def __init__(
        self, trainer: TrainerCalls, run: Run, calls: CallbackCalls, validation_freq: int, dataset: Any
    ) -> None:
        self._trainer, self._life, self._run, self._calls = trainer, trainer.life, run, calls
        self._validation_freq, self._dataset = validation_freq, dataset
        self._seen = self._life.recorder.history.extent
        self._num_events = len(self._life.recorder.history.events)
        self._lacks_data = False
        self._awaited: TrainedEpoch | None = None
        self.current: TrainedEpoch | None = None

    # ------------------------------------------------------------------------------------------------------ the rows

    def add(self, result: Any) -> TrainedEpoch:
        """Add the row of an epoch to the run's history, and return the epoch as a `TrainedEpoch`.

        Args:
            result: The metrics that the training call returned.
        """
        recorded, history = self._life.recorder.history, self._run.history
        self.take_records()
        row = history[-1]
        number = result.get("epoch", self._run.epoch)  # the result of Keras's `fit` has no epoch number
        if number != self._run.epoch and self._life.once.is_first("epochs"):
            logger.warning(
                "epoch %d of this run is epoch %d of the trainer, because something else was trained or loaded "
                "meanwhile, or the data changed inside an epoch. Files say the latter to `resume_from`. "
                '`load(path, parts=["models"])` loads no epoch',
                self._run.epoch,
                number,
            )
        row["epoch"] = self._run.epoch
        self.current = TrainedEpoch(self._run.epoch, result, row, recorded[-1] if len(recorded) else {})
        return self.current

    def take_records(self) -> None:
        """Copy the records of new calls from the trainer's history to the run's history."""
        history, recorded = self._run.history, self._life.recorder.history
        for record in recorded.part(self._seen, recorded.extent).records:
            if record.of_fit:
                history.add(record, history[-1] if len(history) else None)
            else:  # the call was made by a callback, or by the user's code between two epochs
                history.records.append(record)
        self._seen = recorded.extent

    def tell(self, epoch: TrainedEpoch) -> None:
        """Call the callbacks' `on_result` with the metrics of an epoch.

        During this call, `run.epoch` is the number of that epoch, even if the next epoch is already being trained.
        Afterward, the entries that callbacks added to the metrics are also added to the trainer's history.
        """
        run, now = self._run, self._run.epoch
        epoch.is_told, run.epoch, run._last_told = True, epoch.number, epoch.number
        try:
            self._calls.tell("on_result", epoch.row)
        finally:
            run.epoch = now
        epoch.shown.update(epoch.row)
        self.take_records()

    def tell_pending(self) -> None:
        """Call `on_result` for the last epoch that a loaded checkpoint includes.

        The run that saved the checkpoint had not called `on_result` for this epoch yet. If the validation of the epoch
        is still due, validate first.
        """
        history, number = self._run.history, self._run.epoch
        if not len(history):
            return
        row = history[-1]
        epoch = self.current = TrainedEpoch(number, row, row, {})
        if self.is_due(number) and "val_seconds" not in row:
            self.validate(epoch)
        if epoch.handle is None:
            self.tell(epoch)

    def tell_events(self) -> None:
        """Add new events, such as lost or added workers, to the run's history, and call the callbacks' `on_event`."""
        events = self._life.recorder.history.events[self._num_events :]
        self._num_events += len(events)
        for event in events:
            self._run.history.events.append(event)
            self._calls.tell("on_event", event)

    # --------------------------------------------------------------------------------------------------- validations

    @property
    def can_validate(self) -> bool:
        """True unless it is known that there is no data to validate on."""
        has_data = self._dataset is not None
        return (has_data or self._life.controller.facts[0].has_validation) and not self._lacks_data

    @property
    def validates(self) -> bool:
        """True if this run validates after epochs."""
        return self.can_validate and self._validation_freq > 0

    def is_due(self, epoch: int) -> bool:
        """Return True if a validation follows the epoch with this number."""
        return self.validates and epoch % self._validation_freq == 0

    @property
    def validates_beside(self) -> bool:
        """True if this run can validate its epochs on spare workers, while the other workers train."""
        return self.validates and self._trainer.validates_beside

    @property
    def awaits_validation(self) -> bool:
        """True if an epoch waits for the metrics of its validation, which runs concurrently with training."""
        return self._awaited is not None

    def validate(self, epoch: TrainedEpoch) -> None:
        """Validate after an epoch. If validation runs concurrently with training, only start the validation."""
        trainer, dataset = self._trainer, self._dataset
        if self._run.validates_beside:
            epoch.handle = trainer.begin_validation(epoch_options(None), dataset, True, epoch.note)
            self._awaited = epoch
            return
        # Validate on all data from the start, even if a callback has just validated on its first few batches.
        whole = replace(epoch_options(None), starts_over=True)
        with self._noting_lack_of_data():
            validated = trainer.validate(whole, dataset, of_fit=True)
            self._life.framework.after_validation(self._life, epoch.trained, validated)
        self.take_records()

    def validate_inside(self, global_step: int) -> dict[str, Any] | None:
        """Validate while the workers wait inside an epoch.

        Args:
            global_step: Number of batches that each worker has trained on, over all epochs.

        Returns:
            The metrics, named as in the history. None if there is no data to validate on.
        """
        place, result = (self._run.epoch, global_step), {}
        options = replace(epoch_options(None), starts_over=True, is_inside=True)
        with self._noting_lack_of_data():
            result = self._trainer.validate(options, self._dataset, of_fit=True, inside=place)
        if self._lacks_data:
            return None
        self.take_records()
        return {validation_name(name): value for name, value in result.items()}

    def finish_validation(self, waits: bool = True) -> bool:
        """Wait for the concurrent validation, if there is one, and pass the metrics of its epoch to callbacks.

        If the validation has lost its workers, the epoch gets no validation metrics.

        Args:
            waits: If False and the validation is still running, do nothing.

        Returns:
            True if the validation metrics have changed the training state, through a learning rate scheduler.
        """
        epoch, changes_state, validated = self._awaited, False, {}
        if epoch is None or epoch.handle is None or not (waits or epoch.handle.done()):
            return False
        self._awaited = None
        with self._life.figures.accounts.waiting_for_validation(), self._noting_lack_of_data():
            try:
                validated = epoch.handle.result()
            except WorkersLostError as error:
                logger.warning("epoch %d has no metrics of validation: %s", epoch.number, error)
        self.take_records()
        for add in epoch.ended:
            self._run.history.add(add(), epoch.row)
            self._seen = self._life.recorder.history.extent
            changes_state = self._life.framework.after_validation(self._life, epoch.trained, validated)
        self.tell(epoch)
        return changes_state

    @contextmanager
    def _noting_lack_of_data(self) -> Iterator[None]:
        """If a validation in the block fails because there is no validation data, stop validating in this run."""
        try:
            yield
        except NoDataError as error:
            self._lacks_data = True
            logger.warning("`%s.validate` needs data, so `fit` does not validate: %s", self._run.name, error.args[0])


class EpochTraining:
    """Trains the epochs of one run, one after the other.

    Args:
        trainer: Runs the trainer's calls.
        run: The run that callbacks receive.
        calls: Calls the callbacks of the run.
        results: Validates inside the epochs.
        leaving: Decides when the run must stop early.
        dataset: Data to train on instead of the registered data, or None.
        on_left: Function to call when the workers have stopped between two steps of an epoch.
        on_paused: Function to call in each pause, after the callbacks.

    Attributes:
        begun: The epoch that has been trained in part, and that `train` continues. None at the start of an epoch.
        is_lost: True if the workers' training state was lost, because all workers were lost or because a call was ended
            in the middle of a step. The driver may still have a snapshot.
        has_left: True if the run ends inside the epoch that `train` was called for.
        pauses: Decides at which steps the run pauses. None if no option needs pauses.
        known_step: If this process took over the run from a previous process, the step that the previous process stored
            last. It is used in place of asking the workers, which may still be running a call of that process. None
            as soon as this process trains, and in all other runs.
    """

    def __init__(
        self,
        trainer: TrainerCalls,
        run: Run,
        calls: CallbackCalls,
        results: EpochResults,
        leaving: Leaving,
        dataset: Any,
        on_left: Callable[[], None],
        on_paused: Callable[[], None],
    ) -> None:
        self._trainer, self._life, self._run, self._calls = trainer, trainer.life, run, calls
        self._results, self._leaving, self._dataset = results, leaving, dataset
        self._on_left, self._on_paused = on_left, on_paused
        self.begun: BegunEpoch | None = None
        self.is_lost = self.has_left = False
        self.pauses: Pauses | None = None
        self.known_step: int | None = None

    def check_pauses(
        self, callbacks: Sequence[Callback], *, max_steps: int | None, validate_every_n_steps: int | None
    ) -> None:
        """Check that the workers can pause inside epochs.

        Args:
            callbacks: The callbacks that need pauses.
            max_steps: The user's option, or None.
            validate_every_n_steps: The user's option, or None.

        Raises:
            ValueError: The workers cannot pause inside epochs, or have nothing to validate on there.
        """
        obstacle = self._life.facts.epoch_obstacle
        if not self._life.framework.leaves_epochs:
            obstacle = f"`{type(self._run.trainer).__name__}` cannot hold its workers inside an epoch"
        if self._dataset is not None:
            obstacle = "a file does not hold the place in the `dataset` of a call"
        if obstacle is not None:
            options = {"max_steps": max_steps, "validate_every_n_steps": validate_every_n_steps}
            used = [f"`{name}`" for name, value in options.items() if value is not None]
            used += [f"`{type(each).__name__}(every_n_steps=...)` and `every_minutes`" for each in callbacks[:1]]
            raise ValueError(
                f"{' and '.join(used)} cannot work here: {obstacle}. Leave them out, or loop over "
                "`trainer.train(num_steps=100)`, `trainer.validate()` and `trainer.save(path)`."
            )
        if validate_every_n_steps is not None and not self._results.can_validate:
            raise ValueError(
                f"`validate_every_n_steps={validate_every_n_steps}`: there is nothing to validate on. Register "
                "validation data in `setup`, or pass `validation_dataset`."
            )

    def train(self, options: EpochOptions) -> Any:
        """Train an epoch, or the rest of an epoch, with the pauses that are due inside it.

        Return the training call's result. Return None if the run stops inside the epoch.
        """
        can_leave = self._life.framework.leaves_epochs
        asks = self._asks if can_leave and (self._leaving.may_come or self.pauses is not None) else None
        self.has_left = self.begun is not None and self.begun.owes_validation and not self._pause()
        while not self.has_left:
            hold_at, self.known_step = self._next_pause(), None
            try:
                return self._trainer.train(
                    replace(options, hold_at=hold_at),
                    dataset=self._dataset,
                    of_fit=True,
                    begun=self.begun,
                    leaves=asks,
                )
            except (EpochLeft, WorkersLostError) as left:
                self._note_left(left)
            self.has_left = self.is_lost or self._leaving.is_due() or not self._pause()
        return None

    def _asks(self) -> bool:
        """Return True if the running epoch must stop after its current step.

        It must stop if a callback asks for a pause, for example to save, or if the run must end early.
        """
        return self._leaving.is_due() or (self.pauses is not None and self.pauses.is_due)

    def _next_pause(self) -> int | None:
        """Return the number of batches after which the epoch must pause next. Return None if no pause is planned.

        The batches are counted from the start of the epoch. Called while the workers are idle.
        """
        if self.pauses is None:
            return None
        step = self.global_step()
        pause = self.pauses.next_after(step)
        return None if pause is None else pause - step + (0 if self.begun is None else self.begun.num_steps)

    def _pause(self) -> bool:
        """Validate and save, if due, while the workers wait between two steps. Return False if the run stops there."""
        begun, pauses = self.begun, self.pauses
        if begun is None or pauses is None:  # no step of the epoch was taken yet, or the run has no pauses
            return True
        if begun.owes_validation:
            self._validate(begun)
        with self._between_epochs(begun):
            for each in pauses.callbacks:
                self._calls.call(each, "_on_pause", self._run, begun.global_step)
            self._on_paused()
        if begun.is_exhausted:  # no batches are left: continue, so that the epoch is completed
            return not self._leaving.is_due()
        return not (self._run.is_stopping or self._leaving.is_due() or pauses.ends_at(begun.global_step))

    def _validate(self, begun: BegunEpoch) -> None:
        """Validate while the workers wait inside an epoch, and pass the metrics to the callbacks' `on_validation`."""
        metrics = self._results.validate_inside(begun.global_step)
        self.begun = replace(begun, owes_validation=False)
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

    # ------------------------------------------------------------------------------------------ the unfinished epoch

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
        self.is_lost = not isinstance(left, EpochLeft) or not left.states
        self.begun = None
        if isinstance(left, EpochLeft) and left.states and left.states[0].num_steps:
            self._on_left()
            landed = self._life.controller.snapshots.landed
            step = 0 if landed is None else self._life.framework.place_in(landed)[1]
            begun = BegunEpoch.of(left.states, seconds=left.seconds, global_step=step)
            self.begun = replace(begun, owes_validation=self._owes_validation(begun))

    def _owes_validation(self, begun: BegunEpoch) -> bool:
        """Return True if `validate_every_n_steps` requires a validation at the step where the epoch paused.

        Return False if that step is the epoch's last step and a validation follows the epoch anyway.
        """
        is_due = self.pauses is not None and self.pauses.validates_at(begun.global_step)
        return is_due and not (begun.is_exhausted and self._results.is_due(self._run.epoch))

    def go_on_inside(self, begun: BegunEpoch) -> None:
        """Let the run continue with the rest of an epoch that an earlier run left unfinished."""
        self.begun = begun
        self._run.step, self._run._global_step = begun.num_steps, begun.global_step

    def note_loss(self) -> None:
        """Record that all workers were lost, and the unfinished epoch with them."""
        self.is_lost, self.begun = True, None

    def finds_snapshot(self, newest: str | None) -> bool:
        """Return True if the last snapshot in the driver is newer than the last checkpoint file.

        Return False if the run has completed an epoch since the snapshot. Called after the workers' training state was
        lost. A snapshot is a copy of the training state that the workers sent to the driver. If the snapshot was taken
        inside an epoch, set `begun` to that epoch.

        Args:
            newest: The last checkpoint file of the run, or None if nothing was saved.
        """
        landed = self._life.controller.snapshots.landed
        if landed is None:
            return False
        (num_epochs, global_step), progress = self._life.framework.place_in(landed), landed.progress
        if progress is not None:
            self.begun = BegunEpoch.of(progress, global_step=global_step)
            num_epochs -= self.begun.is_exhausted
        place = num_epochs, 0 if self.begun is None else self.begun.num_steps
        return num_epochs == self._run.epoch and (newest is None or place > place_of(newest))

    @property
    def left_snapshot(self) -> Snapshot | None:
        """The snapshot to save in place of the workers' training state if that state was lost. Otherwise, None."""
        if not self.is_lost:
            return None
        landed = self._life.controller.snapshots.landed
        assert landed is not None, "it was found"
        return landed

    def global_step(self) -> int:
        """Return how many batches each worker has trained on over all epochs. Called while workers are idle."""
        if self.known_step is not None:
            return self.known_step
        step: list[int] = self._life.controller.run(Call(replica_calls.global_step, rank=0))
        return step[0]

    def epochs_done(self) -> int:
        """Return how many epochs the workers have completed. Called while workers are idle."""
        done: list[int] = self._life.controller.run(Call(replica_calls.epochs_done, rank=0))
        return done[0]
