"""Runs trainers as trials of Ray Tune, which stores their checkpoints and receives every report of rank 0.

A `FunctionTrial` runs a `Trainer`. A `FitTrial` runs a trainer with a `fit()` method. Users may override the training
loop of this trainer, so a trial cannot run the loop step by step. Instead, the loop runs in a thread of the trial, and
waits at each report until Tune requests the next report.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import FailureConfig, ScalingConfig, own_values
from raysgd.air.trial import new_trial, storage_of
from raysgd.train._worker.messages import FunctionEnded, Mailbox, RunCancelled
from raysgd.train.base_trainer import changed_scaling, check_is_shared
from raysgd.train.checkpoint import CheckpointStrategy, load_checkpoint, write_checkpoint
from raysgd.train.constants import TUNE_CHECKPOINT_FILE_NAME, TUNE_CHECKPOINT_ID
from raysgd.train.fit.run import FitJob
from raysgd.trainer.driver import tune_trial
from raysgd.trainer.driver.tune_trial import TrialInfo, TrialStepResult

if TYPE_CHECKING:
    from raysgd.storage import Folder
    from raysgd.train.base_trainer import BaseTrainer
    from raysgd.train.trainer import Trainer, TrainingIterator

_FOLDER = "raysgd"
_STORE = ".raysgd"
_END_S = 30.0


def make_trainable(
    make_trainer: Callable[..., Trainer],
    train_func: Callable[..., Any],
    dataset: Any,
    bundles: list[dict[str, float]],
    strategy: str,
    refuses_more_steps: bool = False,
) -> type[Any]:
    """Return a class that `tune.Tuner` or `tune.run` can run: a trial with a `Trainer` and a training function.

    Args:
        make_trainer: Creates a trial's trainer, which writes to `logdir`.
        train_func: The training function, which receives the trial's config.
        dataset: Dataset whose shards the function's workers receive.
        bundles: Resources of one trial: a bundle for the trial itself, then the bundles of its workers.
        strategy: Ray's placement strategy for the bundles.
        refuses_more_steps: See `FunctionTrial`.

    Raises:
        MissingTuneError: Ray Tune is not installed.
    """
    return tune_trial.make_trainable(
        partial(FunctionTrial, make_trainer, train_func, dataset, refuses_more_steps),
        lambda config: bundles,
        "TrainTrainable",
        strategy=strategy,
        purpose="`to_tune_trainable`",
    )


class FunctionTrial:
    """A Ray Tune trial that runs a training function with a `Trainer`. Each step of the trial returns one report.

    Args:
        make_trainer: Creates the trainer, which writes to `logdir`.
        train_func: The training function.
        dataset: Dataset whose shards the function's workers receive.
        refuses_more_steps: True to raise an error if Tune requests another step after the function has finished. False
            to return the final result again.
        config: The trial's config, which is passed to the function.
        info: The trial's name, ID and folder.
    """

    def __init__(
        self,
        make_trainer: Callable[..., Trainer],
        train_func: Callable[..., Any],
        dataset: Any,
        refuses_more_steps: bool,
        config: dict[str, Any],
        info: TrialInfo,
    ) -> None:
        self._make_trainer, self._train_func, self._dataset = make_trainer, train_func, dataset
        self._config, self._logdir, self._refuses_more_steps = config, info.logdir / _FOLDER, refuses_more_steps
        self._begin_from: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        self._iterator: TrainingIterator | None = None
        self._first_id = 0
        self._num_saved = 0

    def step(self) -> TrialStepResult:
        """Wait for rank 0's next report, or for the function's end, and return the result.

        The result asks Tune to call `save` if the function has saved a checkpoint that Tune does not have yet.

        Raises:
            RuntimeError: The function has finished, and `refuses_more_steps` is True.
        """
        if self._iterator is None:
            self._trainer = self._make_trainer(logdir=self._logdir)
            self._trainer.start()
            # Keep no checkpoints in the run's folder, because Tune stores them and decides which to keep.
            strategy = CheckpointStrategy(num_to_keep=0)
            self._iterator = self._trainer.run_iterator(
                self._train_func, self._config, self._dataset, self._begin_from, strategy
            )
        elif self._iterator.is_finished() and self._refuses_more_steps:
            raise RuntimeError("The function has ended, so there is no further step.")
        results = next(self._iterator, None)
        is_saved = self._num_taken > self._num_saved
        if results is None:
            return TrialStepResult(None, is_saved, is_last=True)
        return TrialStepResult(results[0], is_saved)

    @property
    def _num_taken(self) -> int:
        return self._trainer.checkpoint_manager.latest_checkpoint_id if self._trainer is not None else 0

    def save(self, folder: Path) -> None:
        """Write the trial's newest checkpoint into a folder for Tune.

        If the function has not saved a checkpoint, write the checkpoint from which it started, or an empty checkpoint.
        """
        self._num_saved = self._num_taken
        checkpoint = self._trainer.latest_checkpoint if self._trainer is not None else None
        content = checkpoint if checkpoint is not None else self._begin_from or {}
        identity = self._first_id + self._num_taken
        write_checkpoint({**content, TUNE_CHECKPOINT_ID: identity}, folder / TUNE_CHECKPOINT_FILE_NAME)

    def load(self, folder: Path) -> None:
        """End the current run, and let the next step start from a checkpoint that Tune has stored in a folder."""
        self.end()
        content = load_checkpoint(folder / TUNE_CHECKPOINT_FILE_NAME) or {}
        self._first_id = content.pop(TUNE_CHECKPOINT_ID, 0)
        self._num_saved = 0
        self._begin_from = content or None

    def end(self) -> None:
        """Shut down the trial's trainer."""
        trainer, self._trainer, self._iterator = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()


# --------------------------------------------------------------------------------------- trainers with a `fit()` method


def trainable_of(trainer: BaseTrainer) -> type[Any]:
    """Return the class whose instances are a trainer's trials, for `BaseTrainer.as_trainable`.

    Raises:
        MissingTuneError: Ray Tune is not installed.
        ValueError: The workers cannot write to the storage, or the trainer selects nodes by labels.
    """
    trainer_cls, storage = type(trainer), storage_of(trainer.run_config)
    check_is_shared(storage)
    if trainer.scaling_config.label_selector:
        raise ValueError(
            f"`label_selector={trainer.scaling_config.label_selector!r}`: Ray Tune reserves the workers of a trial, "
            "and takes no labels. Use a custom resource in `resources_per_worker`."
        )
    # Do not send callbacks, reporters and stop conditions to the trials. Tune calls them in the driver, and they may
    # not be picklable.
    run_config = replace(trainer.run_config, callbacks=None, progress_reporter=None, stop=None)
    arguments = {name: run_config if name == "run_config" else value for name, value in trainer._arguments.items()}

    def make_trainer(config: dict[str, Any]) -> BaseTrainer:
        made = trainer_cls(**merged_arguments(arguments, config))
        made.run_config = run_config
        return made

    def make(config: dict[str, Any], info: TrialInfo) -> FitTrial:
        return FitTrial(partial(make_trainer, config), storage, info)

    def bundles(config: dict[str, Any]) -> list[dict[str, float]]:
        made = make_trainer(config)
        made._settle_gpus()
        scaling = made.scaling_config
        num_workers = scaling.worker_range[1] if scaling.num_workers is not None else 0
        return [scaling.trainer_bundle, *[scaling.worker_bundle] * num_workers]

    strategy = trainer.scaling_config.placement_strategy
    return tune_trial.make_trainable(make, bundles, trainer_cls.__name__, strategy=strategy, purpose="`as_trainable`")


class TrialRecorder:
    """Replaces the recorder of a `fit()` run in a Ray Tune trial, where Tune writes the results.

    It passes each report to the trial's thread and waits until Tune requests the next report.

    Args:
        mailbox: Passes messages from the trainer's thread to the trial's thread.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def begin_attempt(self) -> None:
        """Called when the run starts or restarts. There is nothing to do."""

    def fail(self, error: BaseException) -> None:
        """Called when an attempt of the run fails. There is nothing to do, because Tune handles the error."""

    def record(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> bool:
        """Pass a report to the trial's thread, and wait until Tune requests the next report.

        Return True if the run must stop because Tune stops the trial.
        """
        try:
            self._mailbox.offer((dict(metrics), checkpoint))
            self._mailbox.await_request()
        except RunCancelled:
            return True
        return False


class FitTrial:
    """A Ray Tune trial that runs a trainer with a `fit()` method. Each step of the trial returns one report.

    Args:
        make_trainer: Creates the trainer, with the trial's config merged into its arguments.
        storage: Folder where the workers store checkpoints until Tune has them. All workers must be able to access it.
        info: The trial's name, ID and folder.
    """

    def __init__(self, make_trainer: Callable[[], BaseTrainer], storage: Folder, info: TrialInfo) -> None:
        self._make_trainer, self._storage, self._info = make_trainer, storage, info
        self._begin_from: Checkpoint | None = None
        self._newest: Checkpoint | None = None
        self._mailbox: Mailbox | None = None
        self._job: FitJob | None = None

    def step(self) -> TrialStepResult:
        """Wait for rank 0's next report, or for the function's end, and return the result."""
        mailbox = self._mailbox = self._mailbox or self._begun()
        message = mailbox.next_message()
        if isinstance(message, FunctionEnded):  # also in each step after the end
            return TrialStepResult(None, is_last=True)
        metrics, checkpoint = message
        self._newest = checkpoint or self._newest
        assert self._job is not None, "the run has begun"
        return TrialStepResult(metrics, has_checkpoint=checkpoint is not None and self._job.facts.keeps_files)

    def _begun(self) -> Mailbox:
        """Start the trainer in a thread, and return the mailbox that passes its reports to the trial's thread."""
        trainer = self._make_trainer()
        trainer._check()
        trainer._settle_gpus()
        experiment = self._storage / _STORE / (self._info.identity or secrets.token_hex(4))
        folder = new_trial(experiment, type(trainer).__name__)
        mailbox = Mailbox(trainer._train, name="raysgd-fit")
        run_config = replace(trainer.run_config, failure_config=FailureConfig())  # Tune itself retries a failed trial
        begin_from = self._begin_from or trainer.resume_from_checkpoint
        own, info = trainer._facts(folder), self._info
        facts = replace(own, name=info.name or own.name, id=info.identity or own.id, workdir=None)
        recorder: Any = TrialRecorder(mailbox)
        # `num_ahead=0` makes the function wait at each report, because Tune decides there whether the trial continues.
        trainer._job = self._job = FitJob(folder, recorder, run_config, facts, begin_from, num_ahead=0)
        folder.make()
        mailbox.start()
        return mailbox

    def save(self, folder: Path) -> None:
        """Write the newest checkpoint to `folder` for Tune, and delete older checkpoints from the trial's storage.

        If the function has not reported a checkpoint, write the checkpoint that `load` has read, if any.
        """
        newest = self._newest or self._begin_from
        if newest is not None:
            newest.to_directory(folder)
        if self._job is not None:  # the run may still restart from its newest checkpoint
            for name in self._job.folder.checkpoint_names()[:-1]:
                (self._job.folder.trial / name).delete()

    def load(self, folder: Path) -> None:
        """End the current run, and let the next step start from a checkpoint that Tune has stored in a folder."""
        self.end()
        if not any(folder.iterdir()):
            return
        copy = self._info.logdir / _STORE / f"begin_from-{secrets.token_hex(3)}"
        shutil.copytree(folder, copy)
        self._begin_from = Checkpoint.from_directory(copy)

    def end(self) -> None:
        """Stop the trainer's thread, even in the middle of a step, and delete the trial's storage."""
        mailbox, job = self._mailbox, self._job
        self._mailbox = self._job = self._newest = None
        if job is None:
            return
        if mailbox is not None and not mailbox.cancel(timeout_s=0):
            for abort in job.aborts:
                abort()
            mailbox.cancel(_END_S)
        job.folder.experiment.delete()
        job.folder.remove_staging()


def merged_arguments(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a trial's config into the arguments of a trainer. Dicts and scaling configs are merged entry by entry.

    Raises:
        ValueError: The config contains a `run_config`, or an invalid field of a `ScalingConfig`.
    """
    refuse_run_config(config)
    return {**arguments, **{name: _merged(arguments.get(name), value) for name, value in config.items()}}


def refuse_run_config(config: Mapping[str, Any]) -> None:
    """Check that a trial's config contains no `run_config`.

    Raises:
        ValueError: The config contains a `run_config`.
    """
    if "run_config" in config:
        raise ValueError("`param_space` has a `run_config`: pass it to the `Tuner` itself, for all trials alike.")


def _merged(before: Any, value: Any) -> Any:
    if isinstance(before, ScalingConfig) and isinstance(value, Mapping):
        return changed_scaling(before, value)
    if isinstance(before, ScalingConfig) and isinstance(value, ScalingConfig):
        return changed_scaling(before, own_values(value))
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return tune_trial.merged(before, value)
    return value
