"""A trainer of `fit` as a trial of Ray Tune: its reports go to Tune one by one, and Tune keeps the record.

The trainer's loop runs in a thread of the trial, because users may override it, and waits at each report until Tune
wants the next one.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air._running import TrialFacts
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import FailureConfig
from raysgd.air.reports import NO_VALIDATION
from raysgd.air.trial import TrialFolder, new_trial, storage_of
from raysgd.driver import tune_trial
from raysgd.driver.tune_trial import TrialInfo, TrialStepResult
from raysgd.train._worker.mailbox import FunctionEnded, Mailbox, RunCancelled
from raysgd.train.fit.job import FitJob, FitTrainer, check_is_shared, facts_of
from raysgd.train.fit.space import merged_arguments

if TYPE_CHECKING:
    from raysgd.engine.shared.group_events import GroupEvent
    from raysgd.storage import Folder

_FOLDER = ".raysgd"
_BEGIN_FROM = "begin_from"
_END_S = 30.0


def make_trainable(trainer: FitTrainer) -> type[Any]:
    """The class behind `BaseTrainer.as_trainable`.

    Raises:
        MissingTuneError: Ray Tune is not installed.
        ValueError: The workers cannot write to the storage, are to be on nodes with certain labels, or checkpoints are
            to be validated beside the training.
    """
    trainer_cls, storage = type(trainer), storage_of(trainer.run_config)
    check_is_shared(storage)
    if trainer.scaling_config.label_selector:
        raise ValueError(
            f"`label_selector={trainer.scaling_config.label_selector!r}`: Ray Tune reserves the workers of a trial, "
            "and takes no labels. Use a custom resource in `resources_per_worker`."
        )
    if trainer.validation_config is not None:
        raise ValueError(NO_VALIDATION.format("In a trial, Ray Tune keeps the checkpoints."))
    # What Ray Tune calls stays in the driver: it may hold what cannot travel.
    run_config = replace(trainer.run_config, callbacks=None, progress_reporter=None, stop=None)
    given = {name: run_config if name == "run_config" else value for name, value in trainer._arguments.items()}

    def make_trainer(config: dict[str, Any]) -> FitTrainer:
        made: FitTrainer = trainer_cls(**merged_arguments(given, config))
        made.run_config = run_config
        return made

    def make(config: dict[str, Any], info: TrialInfo) -> FitTrial:
        return FitTrial(partial(make_trainer, config), storage, info)

    def bundles(config: dict[str, Any]) -> list[dict[str, float]]:
        scaling = make_trainer(config).scaling_config
        num_workers = scaling.worker_range[1] if scaling.num_workers is not None else 0
        return [scaling.trainer_bundle, *[scaling.worker_bundle] * num_workers]

    strategy = trainer.scaling_config.placement_strategy
    return tune_trial.make_trainable(make, bundles, trainer_cls.__name__, strategy=strategy, purpose="`as_trainable`")


class TrialRecorder:
    """Takes the place of the recorder: hands each report to the thread of the trial, and waits until it wants another.

    Args:
        mailbox: Runs the trainer.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def begin(self) -> None:
        """An attempt starts."""

    def watch(self, events: Callable[[], Sequence[GroupEvent]]) -> None:
        """Do nothing: Ray Tune does not ask what happens to the workers."""

    def reported(self) -> None:
        """Ray Tune keeps the checkpoints: there is nothing to tell."""

    def fail(self, error: BaseException) -> None:
        """An attempt ended with an error."""

    def take(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> bool:
        """There is a report. Returns whether the run is to stop, because the trial does."""
        try:
            self._mailbox.offer((dict(metrics), checkpoint))
            self._mailbox.await_request()
        except RunCancelled:
            return True
        return False


class FitTrial:
    """One run of a trainer.

    Args:
        make_trainer: Makes the trainer, with the config of the trial merged in.
        storage: Where the workers put checkpoints until Tune has them: all of them see it.
        info: What the trial knows of itself.
    """

    def __init__(self, make_trainer: Callable[[], FitTrainer], storage: Folder, info: TrialInfo) -> None:
        self._make_trainer, self._storage, self._info = make_trainer, storage, info
        self._begin_from: Checkpoint | None = None
        self._newest: Checkpoint | None = None
        self._mailbox: Mailbox | None = None
        self._folder: TrialFolder | None = None
        self._job: FitJob | None = None
        self._keeps_files = True
        self._has_ended = False

    def step(self) -> TrialStepResult:
        """The next report of rank 0."""
        if self._has_ended:
            return TrialStepResult(None, is_last=True)
        mailbox = self._mailbox = self._mailbox or self._begun()
        found = mailbox.take()
        if isinstance(found, FunctionEnded):
            self._has_ended = True
            return TrialStepResult(None, is_last=True)
        metrics, checkpoint = found
        self._newest = checkpoint or self._newest
        return TrialStepResult(metrics, has_checkpoint=checkpoint is not None and self._keeps_files)

    def _begun(self) -> Mailbox:
        """Starts the trainer, in a thread."""
        trainer = self._make_trainer()
        trainer._check()
        self._folder = self._new_folder(type(trainer).__name__)
        mailbox = Mailbox(trainer._train, name="raysgd-fit")
        run_config = replace(trainer.run_config, failure_config=FailureConfig())  # Tune begins a trial again
        begin_from = self._begin_from or trainer.resume_from_checkpoint
        facts = self._facts(trainer)
        recorder: Any = TrialRecorder(mailbox)
        # Tune decides after each report whether the trial goes on: what it did ahead of it may be for nothing.
        trainer._job = self._job = FitJob(
            self._folder, recorder, run_config, facts, type(trainer).__name__, begin_from, num_ahead=0
        )
        self._keeps_files = facts.keeps_files
        mailbox.start()
        return mailbox

    def _new_folder(self, trainer_name: str) -> TrialFolder:
        experiment = self._storage / _FOLDER / (self._info.identity or secrets.token_hex(4))
        folder = new_trial(experiment, trainer_name)
        folder.make()
        return folder

    def _facts(self, trainer: FitTrainer) -> TrialFacts:
        assert self._folder is not None
        own = facts_of(self._folder, trainer)
        return replace(own, name=self._info.name or own.name, id=self._info.identity or own.id, workdir=None)

    def save(self, folder: Path) -> None:
        """Writes the newest checkpoint for Tune, and drops those before it."""
        newest = self._newest or self._begin_from
        if newest is not None:
            newest.to_directory(folder)
        self._drop_older()

    def _drop_older(self) -> None:
        """Of what the workers stored, only the newest is needed: for a run that changes its number of workers."""
        if self._folder is None:
            return
        for name in self._folder.checkpoint_names()[:-1]:
            (self._folder.trial / name).delete()

    def load(self, folder: Path) -> None:
        """Begins from a checkpoint that Tune kept."""
        self.end()
        if not any(folder.iterdir()):
            return
        copy = self._info.logdir / _FOLDER / f"{_BEGIN_FROM}-{secrets.token_hex(3)}"
        shutil.copytree(folder, copy)
        self._begin_from = Checkpoint.from_directory(copy)

    def end(self) -> None:
        """Ends the run, wherever it is."""
        mailbox, folder = self._mailbox, self._folder
        self._mailbox = self._folder = self._newest = None
        self._has_ended = False
        if mailbox is not None and not mailbox.cancel(timeout_s=0):
            for abort in self._job.aborts if self._job is not None else ():
                abort()
            mailbox.cancel(_END_S)
        if folder is not None:
            folder.experiment.delete()
            folder.close()
