"""Decides where a call to `fit` pauses inside epochs, validates them, and adds their metrics to the run's history.

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
from raysgd.core.engine.shared.interface import CallHandle
from raysgd.core.history.history import CallRecord, RecordBeside
from raysgd.core.numbers.results import validation_name
from raysgd.exceptions import NoDataError, WorkersLostError
from raysgd.trainer.driver.calls import TrainerCalls, epoch_options

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
