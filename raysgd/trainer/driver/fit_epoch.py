"""Runs an epoch of `fit`: decides where to pause, validates, and passes the metrics of steps to callbacks.

`EpochResults` adds the metrics of epochs to the run's history. `StepReports` fetches what the workers have recorded
about their steps: metrics for callbacks, and the entries of the journal, the record of a run's steps, which the driver
writes into the run's folder. See ADR 140.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.monitors import StepMetrics, open_steps
from raysgd.callbacks.worker_callback import WorkerCallback, news_of, refuse_equal_keys
from raysgd.core.engine.shared.interface import CallHandle
from raysgd.core.engine.transfers import ask_all
from raysgd.core.history import readable
from raysgd.core.history.history import CallRecord
from raysgd.core.numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd.core.numbers.results import merge, validation_name
from raysgd.core.sending import is_sendable
from raysgd.exceptions import NoDataError, OnFailure, UnpicklableError, WorkersLostError, failure_logged
from raysgd.trainer.driver.calls import TrainerCalls, epoch_options
from raysgd.trainer.driver.life import TrainerLife
from raysgd.trainer.driver.listeners import Listener, StepReader
from raysgd.trainer.driver.live_changes import use_worker_callbacks
from raysgd.trainer.messages.epochs import OpenSteps, summaries_as_data

if TYPE_CHECKING:
    from raysgd.journal.keeper import JournalKeeper

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
        is_told: True if the `on_result` method of callbacks has been called for this epoch.
    """

    number: int
    trained: Any
    row: dict[str, Any]
    shown: dict[str, Any]
    handle: CallHandle[tuple[Any, Callable[[], CallRecord]]] | None = None
    is_told: bool = False


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
        awaited: The epoch that waits for the metrics of its validation, which runs concurrently with training, or None.
    """

    def __init__(
        self, trainer: TrainerCalls, run: Run, calls: CallbackCalls, validation_freq: int, dataset: Any
    ) -> None:
        self._trainer, self._life, self._run, self._calls = trainer, trainer.life, run, calls
        self._validation_freq, self._dataset = validation_freq, dataset
        self._seen = self._life.recorder.history.extent
        self._num_events = len(self._life.recorder.history.events)
        self._lacks_data = False
        self.awaited: TrainedEpoch | None = None
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

    def validate(self, epoch: TrainedEpoch) -> None:
        """Validate after an epoch. If validation runs concurrently with training, only start the validation."""
        trainer, dataset = self._trainer, self._dataset
        if self._run.validates_beside:
            epoch.handle = trainer.begin_validation(epoch_options(None), dataset, of_fit=True)
            self.awaited = epoch
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
        epoch, changes_state, ended = self.awaited, False, None
        if epoch is None or epoch.handle is None or not (waits or epoch.handle.done()):
            return False
        self.awaited = None
        with self._life.figures.accounts.waiting_for_validation(), self._noting_lack_of_data():
            try:
                ended = epoch.handle.result()
            except WorkersLostError as error:
                logger.warning("epoch %d has no metrics of validation: %s", epoch.number, error)
        self.take_records()
        if ended is not None:
            validated, add = ended
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


class StepMetricsMerger:
    """Averages the metrics of steps over all ranks, and passes them to callbacks.

    Args:
        tell: Function that receives the number of a step that all ranks have reached, and the metrics since the last
            report, averaged over all ranks. It receives no step twice.

    Attributes:
        source: The class of the worker callbacks that measure the metrics.
        received: Number of the last step whose metrics were passed on.
    """

    source = StepMetrics

    def __init__(self, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._tell = tell
        self.received = 0

    def receive(self, by_rank: Sequence[Mapping[int, MetricSummary]], failure: Exception | None, is_done: bool) -> None:
        """Pass on the metrics that have not been passed on yet.

        Args:
            by_rank: The metrics that each rank has sent, by step.
            failure: The reason why the metrics of a rank are missing, or None.
            is_done: True if the training call has stopped.
        """
        # A later request brings the metrics of all ranks, too. But there may be none after a rank was lost when the
        # workers had stopped, because a file of their last step may be saved now.
        if failure is not None and (not is_done or isinstance(failure, TimeoutError)):
            return
        until = (max if is_done else min)((max(steps, default=0) for steps in by_rank), default=0)
        for step in sorted({step for steps in by_rank for step in steps if self.received < step <= until}):
            self.received = step
            rows = [row for steps in by_rank if (row := steps.get(step)) and row[NUM_SAMPLES]]  # not of idle ranks
            self._tell(step, readable.chosen(merge(rows), None))


_FETCH_EVERY_S = 1.0


class StepReports:
    """Installs a run's worker callbacks in the workers, and passes on what the workers report about their steps.

    The library adds up to two internal worker callbacks to the user's worker callbacks. One averages step metrics, if
    a callback in the driver needs these metrics. The other records the steps, if the run has a journal.

    Args:
        life: The trainer's workers and settings.
        run: The run that callbacks receive.
        calls: Calls the callbacks in the driver.
        worker_callbacks: The user's worker callbacks.
        log_every_n_steps: Pass step metrics to callbacks after every n-th step. 0 for never.
        journal: Entries to write into the journal's header in addition to the trainer's settings. None to write no
            journal.
        is_taken_over: Whether another process has started this run.

    Attributes:
        listeners: Functions that receive the progress of training calls.
        journal: Writes the journal of the run. None if the run has no journal.
    """

    def __init__(
        self,
        life: TrainerLife,
        run: Run,
        calls: CallbackCalls,
        worker_callbacks: Sequence[WorkerCallback],
        log_every_n_steps: int,
        journal: Mapping[str, Any] | None,
        is_taken_over: bool,
    ) -> None:
        self._life, self._run, self._is_taken_over = life, run, is_taken_over
        self._worker_callbacks = [*worker_callbacks]
        tell_progress = partial(calls.tell_inside, "on_progress")
        self.listeners: list[Listener] = [tell_progress] if calls.wants("on_progress") else []
        self._fetched_at = 0.0
        self._step_metrics: StepMetrics | None = None
        self.journal: JournalKeeper | None = None
        self._receivers: list[StepMetricsMerger | JournalKeeper] = []
        if log_every_n_steps and life.framework.acts_between_steps and calls.wants("on_step_metrics"):
            self._step_metrics = StepMetrics(log_every_n_steps)
            self._worker_callbacks.append(self._step_metrics)
            self._receivers.append(StepMetricsMerger(partial(calls.tell_inside, "on_step_metrics")))
        if journal is not None and life.framework.acts_between_steps:
            from raysgd.journal.keeper import JournalKeeper  # imported here: not needed without a folder
            from raysgd.journal.recorder import StepRecorder

            self.journal = JournalKeeper(run, life, journal, is_taken_over)
            self._worker_callbacks.append(StepRecorder())
            self._receivers.append(self.journal)

    @property
    def reader(self) -> StepReader | None:
        """Function that fetches the workers' records of their steps. None if they keep no records."""
        return self._fetch_if_due if self._receivers else None

    def check(self) -> None:
        """Check before the run that the worker callbacks can work in it.

        Raises:
            TypeError: The workers of this trainer cannot call callbacks around their steps.
            UnpicklableError: A worker callback cannot be sent to the workers.
            ValueError: Two worker callbacks have the same key.
        """
        for callback in self._worker_callbacks:
            name = type(callback).__name__
            if not self._life.framework.acts_between_steps:
                raise TypeError(
                    f"`{name}` runs in the workers, around each step, which `{type(self._run.trainer).__name__}` "
                    "cannot do: leave it out, or train with `TorchTrainer`."
                )
            if not is_sendable(callback):
                raise UnpicklableError(f"`{name}` runs in the workers, and cannot be pickled.")
        refuse_equal_keys(self._worker_callbacks)

    @contextmanager
    def in_workers(self) -> Iterator[None]:
        """Inside the block, have the workers call the run's worker callbacks around their steps."""
        chosen, use = self._worker_callbacks, partial(use_worker_callbacks, self._life)
        if not chosen:
            yield
            return

        def take_out() -> None:
            if self.journal is not None:
                self._fetch([self.journal])  # users who look for the cause of an error need the steps before it
            # An error here must not hide the error that ended the run.
            with failure_logged(logger.warning, "could not take callbacks out of the workers: %r"):
                use(())

        with OnFailure(take_out):
            if not self._is_taken_over:  # otherwise, the process that started this run has already done it
                use(chosen)
            yield
        use(())

    def fetch(self) -> None:
        """Fetch the reports on steps that the driver lacks. Called after the workers have stopped between two steps."""
        self._fetch(self._receivers)

    def _fetch_if_due(self, is_done: bool) -> None:
        if is_done or time.monotonic() > self._fetched_at + _FETCH_EVERY_S:
            self._fetch(self._receivers, is_done)

    def _fetch(self, receivers: Sequence[StepMetricsMerger | JournalKeeper], is_done: bool = True) -> None:
        """Fetch reports on steps from all workers that respond in time. Do nothing if no workers run.

        Args:
            receivers: The objects that receive the reports.
            is_done: True if the training call has stopped.
        """
        group = self._life.controller.group
        if group is None or not receivers:
            return
        received = {each.source: each.received for each in receivers}
        answers, failure = ask_all(group, news_of, received, are_last=is_done)
        if failure is not None:  # only log the error: if the worker is alive, the next request brings these reports
            logger.debug("no news of the steps: %s", failure)
        self._fetched_at = time.monotonic()
        for each in receivers:
            each.receive([answer[each.source] for answer in answers if each.source in answer], failure, is_done)

    def open_steps(self) -> list[Any] | None:
        """Return the step metrics that have not been passed to callbacks yet, as plain data for the sidecar.

        The sidecar is the file with the run's progress beside a checkpoint. The list holds the current step,
        followed by the metrics of each rank that responds. Return None if no step metrics are measured, or if no rank
        responds.
        """
        if self._step_metrics is None:
            return None
        by_rank, failure = ask_all(self._life.controller.ensure_group(), open_steps, are_last=True)
        if failure is not None:
            logger.warning(
                "the checkpoint lacks metrics of the steps since the last log line, so the next one after a resume "
                "covers fewer steps or samples: %s",
                failure,
            )
        return [by_rank[0][0], *summaries_as_data(metrics for _, metrics in by_rank)] if by_rank else None

    def go_on_from(self, begun: OpenSteps | None) -> None:
        """Let the workers add their next steps to the metrics of steps that an earlier run has not reported."""
        if begun is not None and self._step_metrics is not None:
            self._step_metrics.begun = begun
            use_worker_callbacks(self._life, self._worker_callbacks)
