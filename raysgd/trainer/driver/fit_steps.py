"""Handles the reports of workers about their steps in `fit`: metrics for callbacks, and entries of the journal.

The journal is the record of a run's steps, which the driver writes into the run's folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.callback import Run
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.monitors import StepMetrics, open_steps, summaries_of_steps
from raysgd.callbacks.worker_callback import WorkerCallback, refuse_equal_keys
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.transfers import ask_all
from raysgd.core.history import readable
from raysgd.core.numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd.core.numbers.results import merge
from raysgd.core.sending import is_sendable
from raysgd.exceptions import OnFailure, RaySGDError, UnpicklableError
from raysgd.trainer.driver.life import TrainerLife
from raysgd.trainer.driver.listeners import Listener, StepReader
from raysgd.trainer.driver.live_changes import LiveChanges
from raysgd.trainer.messages.epochs import OpenSteps, summaries_as_data

if TYPE_CHECKING:
    from raysgd.journal.keeper import JournalKeeper

logger = logging.getLogger(__name__)

_ASK_FOR_STEPS_S = 1.0


class StepMetricsReader:
    """Asks all ranks for the metrics of their last steps, once a second and at the end of a training call.

    Args:
        controller: Controller of the workers.
        tell: Function that receives the number of a step that all ranks have reached, and the metrics since the last
            report, averaged over all ranks. It receives no step twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, is_done: bool) -> None:
        if is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S:
            self._ask(is_done)

    def tell_rest(self) -> None:
        """Report the metrics that have not been reported yet, up to the step where the training call stopped."""
        self._ask(is_done=True)

    def open(self) -> tuple[tuple[int, MetricSummary], ...]:
        """Return the metrics that each rank has measured since they were last averaged over all ranks and reported.

        There is one pair per rank that responds: the rank's current step, and its metrics.
        """
        metrics, failure = ask_all(self._controller.ensure_group(), open_steps, are_last=True)
        if failure is not None:
            logger.warning(
                "the checkpoint lacks metrics of the steps since the last log line, so the next one after a resume "
                "covers fewer steps or samples: %s",
                failure,
            )
        return tuple(metrics)

    def _ask(self, is_done: bool) -> None:
        by_rank: list[Mapping[int, MetricSummary]]
        group = self._controller.ensure_group()
        by_rank, failure = ask_all(group, summaries_of_steps, self._last_step, are_last=is_done)
        if failure is not None:
            logger.debug("no news of the steps: %s", failure)
            # A later request brings the metrics of all ranks, too. But there may be none after a rank was lost when the
            # workers had stopped, because a file of their last step may be saved now.
            if not by_rank or not is_done or isinstance(failure, TimeoutError):
                by_rank = [{}]
        self._asked_at = time.monotonic()
        until = (max if is_done else min)(max(steps, default=0) for steps in by_rank)
        for step in sorted({step for steps in by_rank for step in steps if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for steps in by_rank if (row := steps.get(step)) and row[NUM_SAMPLES]]  # not of idle ranks
            self._tell(step, readable.chosen(merge(rows), None))


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
        readers: Functions that fetch the workers' records of their steps.
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
        self._changes = LiveChanges(life)
        self._worker_callbacks = [*worker_callbacks]
        self.listeners: list[Listener] = [calls.progress] if calls.wants("on_progress") else []
        self.readers: list[StepReader] = []
        self._steps: StepMetricsReader | None = None
        self._step_metrics: StepMetrics | None = None
        if log_every_n_steps and life.framework.runs_worker_callbacks and calls.wants("on_step_metrics"):
            self._step_metrics = StepMetrics(log_every_n_steps)
            self._worker_callbacks.append(self._step_metrics)
            self._steps = StepMetricsReader(life.controller, calls.step_metrics)
            self.readers.append(self._steps)
        self.journal = None if journal is None else self._open_journal(journal)

    def _open_journal(self, entries: Mapping[str, Any]) -> JournalKeeper | None:
        """Return the object that writes the run's journal, the record of its steps, into the run's folder.

        Return None if the workers cannot call callbacks around their steps.
        """
        run, life = self._run, self._life
        if not life.framework.runs_worker_callbacks:
            return None
        from raysgd.journal.keeper import JournalKeeper, header_of  # imported here: not needed without a folder

        before, is_taken_over = life.recorder.history.journal, self._is_taken_over
        journal = JournalKeeper(
            lambda: run.folder,
            life.controller,
            lambda: {**header_of(life.settings), "epochs": run.epochs, **entries},
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
            if not self._life.framework.runs_worker_callbacks:
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
        chosen, use = self._worker_callbacks, self._changes.use_worker_callbacks
        if not chosen:
            yield
            return

        def take_out() -> None:
            if self.journal is not None:
                self.journal.fetch()  # users who look for the cause of an error need the steps before it
            try:
                use(())
            except RaySGDError as error:  # only log this error, so that it does not hide the error that ended the run
                logger.warning("could not take callbacks out of the workers: %r", error)

        with OnFailure(take_out):
            if not self._is_taken_over:  # otherwise, the process that started this run has already done it
                use(chosen)
            yield
        use(())

    def fetch(self) -> None:
        """Fetch the reports on steps that the driver lacks. Called after the workers have stopped between two steps."""
        if self._steps is not None:
            self._steps.tell_rest()
        if self.journal is not None:
            self.journal.fetch()

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
            self._changes.use_worker_callbacks(self._worker_callbacks)
