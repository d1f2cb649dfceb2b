"""The job of a `fit`, around its run: the folder, the record, the result, and the error that it ends with."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from raysgd.air._running import TrialFacts
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, ScalingConfig
from raysgd.air.trial import TrialFolder, new_trial_folder
from raysgd.exceptions import StorageError, training_failed_error
from raysgd.train.fit.fit_session import checkpoint_at
from raysgd.train.fit.recorder import Recorder, number_of
from raysgd.train.fit.restore import save_trainer

if TYPE_CHECKING:
    from raysgd.air.reports import ValidationConfig
    from raysgd.air.result import Result
    from raysgd.storage import Folder

logger = logging.getLogger(__name__)

CHDIR_ENV = "RAY_CHDIR_TO_TRIAL_DIR"


class FitTrainer(Protocol):
    """The trainer whose `fit` it is, as far as the job needs it."""

    run_config: RunConfig
    scaling_config: ScalingConfig
    metadata: dict[str, Any]
    resume_from_checkpoint: Checkpoint | None
    validation_config: ValidationConfig | None
    _arguments: dict[str, Any]
    _job: FitJob | None

    @property
    def _trial_config(self) -> dict[str, Any]:
        """The config that results name as theirs."""

    def _check(self) -> None:
        """Check what only a run needs."""

    def _train(self) -> None:
        """Run the loop."""


@dataclass(frozen=True)
class FitJob:
    """One `fit`.

    Attributes:
        folder: Where it writes.
        recorder: Writes down what is reported.
        run_config: What the user wants of the run.
        facts: What the function can ask.
        trainer_name: The name of the trainer's class.
        begin_from: The checkpoint that the function starts from.
        num_ahead: How many reports may wait for the driver while the function goes on.
        aborts: End what it runs, once it does, from another thread.
    """

    folder: TrialFolder
    recorder: Recorder
    run_config: RunConfig
    facts: TrialFacts
    trainer_name: str
    begin_from: Checkpoint | None
    num_ahead: int = 64
    aborts: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: FitTrainer, folder: TrialFolder | None = None) -> FitJob:
        """A job for a trainer.

        Args:
            trainer: The trainer.
            folder: Of the run that goes on; None for a new one.

        Raises:
            ValueError: The workers cannot write to the storage.
        """
        name, run_config = type(trainer).__name__, trainer.run_config
        goes_on = folder is not None
        folder = folder or new_trial_folder(run_config, name)
        check_is_shared(folder.experiment)
        save_trainer(folder.experiment, type(trainer), trainer._arguments)
        resources = trainer.scaling_config.as_placement_group_factory() if run_config.callbacks else None
        recorder = Recorder(folder, trainer._trial_config, run_config, name, resources)
        newest = _newest_in(folder) if goes_on else None
        facts = facts_of(folder, trainer)
        return cls(folder, recorder, run_config, facts, name, newest or trainer.resume_from_checkpoint)

    def run(self, train: Callable[[], None]) -> Result:
        """Calls `train`, which drives the run, and ends the record of it.

        Raises:
            TrainingFailedError: `train` failed; of the class of its error too.
        """
        logging_config = self.run_config.logging_config
        try:
            with logging_config.applied() if logging_config is not None else nullcontext():
                train()
        except BaseException as error:
            self._end_failed(error)
            if not isinstance(error, Exception) or self.run_config.failure_config.fail_fast == "raise":
                raise
            raise training_failed_error(error, self._advice, _tune_error()) from error.__cause__
        return self.recorder.end()

    @property
    def next_index(self) -> int:
        """The number of the first checkpoint: behind those in the folder, or that of the one of another run again."""
        return max(self.folder.next_index, number_of(self.begin_from) if self.begin_from is not None else 0)

    def _end_failed(self, error: BaseException) -> None:
        if isinstance(error, StorageError):
            self.folder.expect_little()
        try:
            self.recorder.end(error)
        except Exception as another:  # what ended the run matters more
            logger.error("could not complete the record of the run: %r", another)

    @property
    def _advice(self) -> str:
        max_failures = self.run_config.failure_config.max_failures
        return (
            f"The run is in {self.folder.experiment}. To continue it from its last checkpoint: "
            f"`{self.trainer_name}.restore({str(self.folder.experiment)!r}).fit()`. To have it start again by itself, "
            f"pass `RunConfig(failure_config=FailureConfig(max_failures=...))`; it was {max_failures}."
        )


def _tune_error() -> type[Exception] | None:
    """The class by which programs for Ray AIR catch the failure of a run; None where none has imported it."""
    return getattr(sys.modules.get("ray.tune.error"), "TuneError", None)


def _newest_in(folder: TrialFolder) -> Checkpoint | None:
    names = folder.checkpoint_names()
    return checkpoint_at(folder.trial / names[-1]).by_place() if names else None


def facts_of(folder: TrialFolder, trainer: FitTrainer) -> TrialFacts:
    """Return what a function can ask about a run in that folder."""
    chdir = os.environ.get(CHDIR_ENV, "1") != "0"
    return TrialFacts(
        folder=folder.trial,
        experiment_name=folder.experiment_name,
        name=folder.name,
        id=folder.id,
        scaling=trainer.scaling_config,
        metadata=trainer.metadata,
        workdir=str(folder.local_path) if chdir else None,
        keeps_files=trainer.run_config.checkpoint_config.num_to_keep != 0,
        validates=trainer.validation_config is not None,
    )


def check_is_shared(folder: Folder) -> None:
    """Checks that workers can write where the run writes.

    Raises:
        ValueError: Only this process sees that storage.
    """
    if folder.is_in_memory:
        raise ValueError(
            f"`storage_path={str(folder)!r}`: only this process sees its memory, and the workers of `fit` "
            "write checkpoints themselves. Pass a folder, or a URI such as `s3://bucket/folder`."
        )
