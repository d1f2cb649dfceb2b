"""Handles the reports of workers about their steps in `fit`: metrics for callbacks, and entries of the journal.

The journal is the record of a run's steps, which the driver writes into the run's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.callback import Run
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.monitors import StepMetrics
from raysgd.callbacks.worker_callback import WorkerCallback, refuse_equal_keys
from raysgd.core.engine.worker import is_sendable
from raysgd.exceptions import OnFailure, RaySGDError, UnpicklableError
from raysgd.trainer.driver.calls import Listener, StepMetricsReader, StepReader
from raysgd.trainer.driver.trainer_port import TrainerPort
from raysgd.trainer.messages.begun import OpenSteps, summaries_as_data

if TYPE_CHECKING:
    from raysgd.journal.keeper import JournalKeeper

logger = logging.getLogger(__name__)


class StepReports:
    """Installs a run's worker callbacks in the workers, and passes on what the workers report about their steps.

    The library adds up to two internal worker callbacks to the user's worker callbacks. One averages step metrics, if
    a callback in the driver needs these metrics. The other records the steps, if the run has a journal.

    Args:
        trainer: The attributes and methods of the trainer that the run uses.
        run: The run that callbacks receive.
        calls: Calls the callbacks in the driver.
        worker_callbacks: The user's worker callbacks.
        log_every_n_steps: Pass step metrics to callbacks after every n-th step. 0 for never.
        journal: Entries to write into the journal's header in addition to the trainer's settings. None to write no
            journal.

    Attributes:
        listeners: Functions that receive the progress of training calls.
        readers: Functions that fetch the workers' records of their steps.
    """

    def __init__(
        self,
        trainer: TrainerPort,
        run: Run,
        calls: CallbackCalls,
        worker_callbacks: Sequence[WorkerCallback],
        log_every_n_steps: int,
        journal: Mapping[str, Any] | None,
    ) -> None:
        self._trainer, self._run = trainer, run
        self._worker_callbacks = [*worker_callbacks]
        self.listeners: list[Listener] = [calls.progress] if calls.wants("on_progress") else []
        self.readers: list[StepReader] = []
        self._steps: StepMetricsReader | None = None
        self._step_metrics: StepMetrics | None = None
        if log_every_n_steps and trainer.runs_worker_callbacks and calls.wants("on_step_metrics"):
            self._step_metrics = StepMetrics(log_every_n_steps)
            self._worker_callbacks.append(self._step_metrics)
            self._steps = StepMetricsReader(trainer.calls.controller, calls.step_metrics)
            self.readers.append(self._steps)
        self._journal = None if journal is None else self._open_journal(journal)

    def _open_journal(self, entries: Mapping[str, Any]) -> JournalKeeper | None:
        """Return the object that writes the run's journal, the record of its steps, into the run's folder.

        Return None if the workers cannot call callbacks around their steps.
        """
        run, trainer = self._run, self._trainer
        if not trainer.runs_worker_callbacks:
            return None
        from raysgd.journal.keeper import JournalKeeper, header_of  # imported here: not needed without a folder

        before, is_taken_over = trainer.history.journal, trainer.kept is not None
        journal = JournalKeeper(
            lambda: run.folder,
            trainer.calls.controller,
            lambda: {**header_of(trainer.settings()), "epochs": run.epochs, **entries},
            lambda: is_taken_over or before == str(run.folder),
        )
        self._worker_callbacks.append(journal.recorder)
        self.readers.append(journal)
        return journal

    def check(self) -> None:
        """Check before the run that the worker callbacks can work in it.

        Raises:
            TypeError: The workers of this trainer cannot call callbacks around their steps.
            UnpicklableError: A worker callback cannot be sent to the workers.
            ValueError: Two worker callbacks have the same key.
        """
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

    @contextmanager
    def in_workers(self) -> Iterator[None]:
        """Inside the block, have the workers call the run's worker callbacks around their steps."""
        chosen, use = self._worker_callbacks, self._trainer.use_worker_callbacks
        if not chosen:
            yield
            return

        def take_out() -> None:
            if self._journal is not None:
                self._journal.fetch()  # users who look for the cause of an error need the steps before it
            try:
                use(())
            except RaySGDError as error:  # only log this error, so that it does not hide the error that ended the run
                logger.warning("could not take callbacks out of the workers: %r", error)

        with OnFailure(take_out):
            if self._trainer.kept is None:  # otherwise, the process that started this run has already done it
                use(chosen)
            yield
        use(())

    def fetch(self) -> None:
        """Fetch the reports on steps that the driver lacks. Called after the workers have stopped between two steps."""
        if self._steps is not None:
            self._steps.tell_rest()
        if self._journal is not None:
            self._journal.fetch()

    def open_steps(self) -> list[Any] | None:
        """Return the step metrics that have not been passed to callbacks yet, as plain data for the sidecar.

        The sidecar is the file with the run's progress beside a checkpoint. The list holds the current step,
        followed by the metrics of each rank that responds. Return None if no step metrics are measured, or if no rank
        responds.
        """
        by_rank = () if self._steps is None else self._steps.open()
        return [by_rank[0][0], *summaries_as_data(metrics for _, metrics in by_rank)] if by_rank else None

    def go_on_from(self, begun: OpenSteps | None) -> None:
        """Let the workers add their next steps to the metrics of steps that an earlier run has not reported."""
        if begun is not None and self._step_metrics is not None:
            self._step_metrics.begun = begun
            self._trainer.use_worker_callbacks(self._worker_callbacks)

    @property
    def journal_folder(self) -> str | None:
        """The folder with the journal of the run, or None if the run has no journal."""
        return None if self._journal is None else self._journal.folder

    @property
    def last_step(self) -> int | None:
        """The last step about which the journal has a report, or None if the run has no journal."""
        return None if self._journal is None else self._journal.last_step

    def note_checkpoint(self, location: str, step: int | None) -> None:
        """Add a checkpoint to the journal, if the run has a journal.

        Args:
            location: The path or URI of the checkpoint.
            step: The step after which the workers had the saved training state. None for the last step.
        """
        if self._journal is not None:
            self._journal.note_checkpoint(location, step)
