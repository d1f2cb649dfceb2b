"""Runs one call to `fit`: runs the function on workers, records its reports, and returns the result.

After a failure, the engine retries if `FailurePolicy` says so. Nothing is retried in this module. Reports are
recorded in order. A report with a checkpoint is recorded when the checkpoint is written.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, ScalingConfig
from raysgd.air.session import TrialFacts
from raysgd.air.trial import TrialFolder
from raysgd.core.cluster.ray_cluster import ensure_ray
from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.placement import Reservation
from raysgd.core.engine.policies import Diagnosis, FailurePolicy, RetryBudget, words
from raysgd.core.worker_errors import training_failed_error, worker_error
from raysgd.exceptions import StorageError, WorkerError, WorkersLostError, failure_logged
from raysgd.train import _workers
from raysgd.train._function_run import FunctionRun
from raysgd.train._workers import FunctionWorkers
from raysgd.train.backend import BackendConfig
from raysgd.train.checkpoint import FitCheckpoints, place_of
from raysgd.train.constants import TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, env_integer
from raysgd.train.fit.data import DatasetShards
from raysgd.train.fit.fit_session import FitSession
from raysgd.train.fit.recorder import Recorder, number_of
from raysgd.trainer.configuration import Placement
from raysgd.trainer.driver.leaving import Leaving

if TYPE_CHECKING:
    from raysgd.air.result import Result

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0

WORDS = replace(
    _workers.WORDS,
    when_shut_down="Call `fit` again for new workers.",
    when_spent="Saved checkpoints are kept.",
    when_not_granted=(
        "Ask for fewer workers or less per worker in `ScalingConfig`, free what is held, add nodes, or wait longer by "
        "setting the environment variable TRAIN_PLACEMENT_GROUP_TIMEOUT_S."
    ),
)
"""Advice for users of `fit`, which the engine adds to its messages."""


class StopConditionMet(BaseException):
    """Raised in the driver to end a run whose stop condition is met. This is not an error."""


@dataclass(frozen=True)
class FitJob:
    """One call to `fit`, with everything that its run needs.

    Attributes:
        folder: The run's folders.
        recorder: Object that records the reports.
        run_config: The user's `RunConfig`.
        facts: Facts about the run that the training function can query, such as its folder.
        begin_from: The checkpoint that the function starts from.
        num_ahead: Number of reports that may wait for the driver before the function is blocked.
        aborts: Functions that end the run from another thread. `FitRun` adds its function when it is created.
        leaving: Reports whether a signal has asked the program to end.
    """

    folder: TrialFolder
    recorder: Recorder
    run_config: RunConfig
    facts: TrialFacts
    begin_from: Checkpoint | None
    num_ahead: int = 64
    aborts: list[Callable[[], None]] = field(default_factory=list)
    leaving: Leaving = field(default_factory=Leaving)

    def run(self, train: Callable[[], None]) -> Result:
        """Run the training function with `train`, then complete the run's files and return the `Result`.

        Args:
            train: Function that runs the training function on the workers.

        Raises:
            TrainingFailedError: `train` failed. The error is also an instance of the class that `train` raised. With
                `FailureConfig(fail_fast="raise")`, the exception from `train` is raised unchanged instead.
            Preempted: A signal arrived.
        """
        try:
            train()
        except BaseException as error:  # also Ctrl-C, because the run's files must record what ended the run
            if isinstance(error, StorageError):
                self.folder.expect_little()
            with failure_logged(logger.error, "could not complete the record of the run: %r"):
                self.recorder.end_run(error)
            if not isinstance(error, Exception) or self.run_config.failure_config.fail_fast == "raise":
                raise
            # Ray AIR programs catch Ray Tune's `TuneError` when a run fails.
            tune_error = getattr(sys.modules.get("ray.tune.error"), "TuneError", None)
            failed = training_failed_error(error, self._advice, tune_error)
            raise failed from failed.__cause__ if isinstance(error, WorkerError) else error.__cause__
        result = self.recorder.end_run()
        if self.leaving.is_due():  # the run has succeeded, but a signal has asked the program to end
            self.leaving.end_program(place_of(result.checkpoint))
        return result

    @property
    def next_index(self) -> int:
        """The number to give to the next checkpoint.

        It is higher than the numbers of all checkpoints in the folder, and not lower than the number of `begin_from`.
        """
        return max(self.folder.next_index, number_of(self.begin_from) if self.begin_from is not None else 0)

    @property
    def _advice(self) -> str:
        folder, max_failures = self.folder, self.run_config.failure_config.max_failures
        return (
            f"The run is in {folder.experiment}. To continue it from its last checkpoint: "
            f"`{folder.trainer_name}.restore({str(folder.experiment)!r}).fit()`. To have it start again by itself, "
            f"pass `RunConfig(failure_config=FailureConfig(max_failures=...))`; it was {max_failures}."
        )


@dataclass(frozen=True, kw_only=True)
class RenewingPolicy(FailurePolicy):
    """Counts retries from zero again after each new checkpoint.

    ADR 94 gives the reason, and explains why checkpoints have no effect on the count after the function has raised an
    exception.

    Attributes:
        take_landing: Function that returns True if a checkpoint was written since its last call.
    """

    take_landing: Callable[[], bool]

    def renew_if_due(self, budget: RetryBudget, *, can_continue: bool) -> None:
        """Reset the budget if a checkpoint was written since the last failure.

        If the workers must restart or no retry is left, first wait for a checkpoint that is just being received.
        """
        is_needed = budget.is_spent or not (self.continues and can_continue)
        if is_needed and self.take_landing():
            budget.renew()


class FitRun:
    """Runs a user's training function on workers, for one call to `fit`.

    Args:
        job: The call to `fit`. Its recorder receives rank 0's reports with their checkpoints, the start of each
            attempt, and the failure of the previous attempt.
        function: The user's function, with its config bound.
        backend: Configures how the workers are connected.
        scaling: Number and resources of the workers.
        datasets: The prepared datasets.
        dataset_config: Configures how the datasets are sharded across the workers.
        preprocessor: Preprocessor to add to checkpoints that lack a preprocessor.
    """

    def __init__(
        self,
        job: FitJob,
        function: Callable[[], Any],
        backend: BackendConfig,
        scaling: ScalingConfig,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        preprocessor: Any = None,
    ) -> None:
        self._function, self._own_resources = function, scaling.trainer_resources
        self._shards = DatasetShards(datasets, dataset_config) if datasets else None
        self._facts, self._recorder, self._leaving = job.facts, job.recorder, job.leaving
        self._checkpoints = FitCheckpoints(
            job.facts.folder if job.facts.keeps_files else None,
            job.next_index,
            job.begin_from,
            job.facts.metadata,
            preprocessor,
            self._begin_attempt,
        )
        self._workers = FunctionWorkers(
            backend,
            scaling,
            num_restarts(job.run_config),
            self._checkpoints,
            placement=Placement(
                scaling.additional_resources_per_worker,
                placement_strategy=followed(scaling.placement_strategy),
                runtime_env=job.run_config.worker_runtime_env,
                labels=scaling.label_selector,
            ),
            failures=RenewingPolicy(retries_user_errors=True, take_landing=self._take_landing),
            on_failure=self._note_failure,
            words=WORDS,
            num_ahead=job.num_ahead,
        )
        self._run: FunctionRun | None = None
        self._reports: deque[tuple[dict[str, Any], Future[Any] | None]] = deque()
        self._has_met_condition = False
        self._failure: Exception | None = None
        self._has_raised = False
        job.aborts.append(partial(self._workers.stop, patience_s=0))

    def run(self) -> None:
        """Run the function until it finishes on all workers or a stop condition is met. Always stop the workers.

        Raises:
            WorkerError: The function raised too often. The error is also an instance of the class that was raised.
            WorkersLostError: Workers were lost too often.
            StepMismatchError: The workers did not report equally often.
            Preempted: A signal arrived, and the newest checkpoint is stored.
        """
        with reserved(self._own_resources):
            try:
                self._workers.start(self)
                self._recorder.events = self._workers.controller.history.events
                spec = self._workers.function_spec(self._function, make_session=partial(FitSession, facts=self._facts))
                self._run = FunctionRun(self._workers, spec, self._shards, self._hand_over, self._leaving)
                # The workers have started: Ray sets its own signal handlers when it starts.
                with self._leaving.listening(self._workers.expect_end):
                    self._run.start()
                    while self.step(self._run):
                        pass
            except StopConditionMet:
                logger.info("the stop condition of the run is met")
                self._has_met_condition = True
            finally:
                self.stop()

    def step(self, run: FunctionRun) -> bool:
        """Wait for the next report of all workers and process it. Return False if the functions have finished.

        Raises:
            StopConditionMet: A stop condition was met.
            Exception: See `run`.
        """
        step = run.next_step()
        if step.kind is None:
            self._recorder.returned = step.data[0]
        else:
            landing = self._checkpoints.landing if step.checkpoint_ref is not None else None
            self._reports.append((run.decoded(step.data[0]), landing))
        self._hand_over()
        return step.kind is not None

    def stop(self) -> None:
        """Stop the workers, even if the function is still running, and record the last reports.

        A second call does nothing.
        """
        is_over = self._run is not None and self._run.is_over
        self._workers.stop(patience_s=5 if is_over else 0)
        # Ignore an error of `flush`: after a failed run, the run's own error is raised. The last step of a successful
        # run has already called `flush` without an error.
        with suppress(Exception):
            self._checkpoints.flush()
        if self._has_met_condition:
            self._delete_waiting()
        words = "could not write down what was reported last: %r"
        with failure_logged(logger.error, words), suppress(StopConditionMet):
            self._hand_over(is_end=True)

    def _delete_waiting(self) -> None:
        """Delete the checkpoints of reports that arrived after the stop condition was met."""
        while self._reports:
            checkpoint = _landed(self._reports.popleft()[1])
            if checkpoint is not None and self._facts.keeps_files:
                with suppress(OSError):
                    (self._facts.folder / PurePosixPath(checkpoint.path).name).delete()

    def _hand_over(self, is_end: bool = False) -> None:
        """Record the waiting reports in order, up to the first report whose checkpoint is not written yet.

        Args:
            is_end: True if the attempt has ended. Then record all waiting reports, even without their checkpoints.
        """
        while self._reports:
            metrics, landing = self._reports[0]
            if not (is_end or landing is None or landing.done()):
                break
            self._reports.popleft()
            if self._recorder.record(metrics, _landed(landing)):
                raise StopConditionMet

    def _take_landing(self) -> bool:
        """Return True if a new checkpoint must reset the count of failures.

        This is the case if a checkpoint was written since the last failure, and the function has never raised an error.
        """
        return self._checkpoints.take_landing() and not self._has_raised

    def _note_failure(self, diagnosis: Diagnosis) -> None:
        is_of_user = diagnosis.kind == "user"
        self._has_raised = self._has_raised or is_of_user
        self._failure = worker_error(diagnosis.faults) if is_of_user else WorkersLostError(words(diagnosis))

    def _begin_attempt(self) -> None:
        """Record the remaining reports and the failure of the last attempt, and the start of another attempt."""
        self._hand_over(is_end=True)
        failure, self._failure = self._failure, None
        if failure is not None:
            self._recorder.fail(failure)
        self._recorder.begin_attempt()


def _landed(landing: Future[Any] | None) -> Checkpoint | None:
    """Return the checkpoint of a future, or None if the checkpoint was lost or is not written yet."""
    return landing.result() if landing is not None and landing.done() and landing.exception() is None else None


@contextmanager
def reserved(own: Mapping[str, float] | None) -> Iterator[None]:
    """Inside the block, reserve the `trainer_resources` of a scaling config, in addition to the workers' resources.

    In a Ray Tune trial, use the placement group that Tune has reserved for the trial instead.
    """
    if not own or not any(own.values()):
        yield
        return
    ensure_ray()
    custom = {name: amount for name, amount in own.items() if name not in ("CPU", "GPU")}
    reservation = Reservation(Resources(own.get("CPU", 0), own.get("GPU", 0), custom), 1, words=WORDS)
    try:
        reservation.wait(env_integer(TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, 100))
        yield
    finally:
        reservation.close(_CLOSE_S)


def followed(placement_strategy: str) -> Literal["PACK", "SPREAD"] | None:
    """Convert the `placement_strategy` of a scaling config for an executor, which has no strict strategies.

    A strict strategy becomes the plain strategy, which Ray follows as far as possible. The default, "PACK", becomes
    None.

    >>> [followed(strategy) for strategy in ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")]
    [None, 'PACK', 'SPREAD', 'SPREAD']
    """
    strategy = placement_strategy.removeprefix("STRICT_")
    if strategy != placement_strategy:
        logger.warning(
            "`placement_strategy=%r` is followed as far as there is room, as %r is", placement_strategy, strategy
        )
    elif strategy == "PACK":  # None lets the environment variable for spreading take effect
        return None
    return "PACK" if strategy == "PACK" else "SPREAD"


def num_restarts(run_config: RunConfig) -> float:
    """Return how many times a run restarts before a failure is raised as an error."""
    max_failures = run_config.failure_config.max_failures
    return float("inf") if max_failures < 0 else max_failures
