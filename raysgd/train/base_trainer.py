"""`BaseTrainer`: the base class of all trainers with a `fit()` method. Derive from it to run your own training loop."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypedDict, TypeVar

from raysgd.air.checkpoint import Checkpoint, checkpoint_at
from raysgd.air.checkpoint import checked_metadata as checked_dict
from raysgd.air.config import RunConfig, ScalingConfig, checked_config, own_values
from raysgd.air.constants import MAX_REPR_LENGTH
from raysgd.air.session import TrialFacts
from raysgd.air.trial import TrialFolder, new_trial_folder
from raysgd.core.arguments import did_you_mean, refuse_unknown
from raysgd.core.text.secrets import masked
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import TrainingFailedError
from raysgd.storage import Folder
from raysgd.train.backend import BackendConfig
from raysgd.train.fit import restore as restoring
from raysgd.train.fit.data import check_datasets, check_preprocessor, prepared
from raysgd.train.fit.recorder import Recorder
from raysgd.train.fit.run import FitJob, FitRun
from raysgd.trainer.driver.detachable import Detachable

if TYPE_CHECKING:
    from raysgd.air.result import Result
    from raysgd.detached.protocol import Detached

__all__ = ["BaseTrainer", "GenDataset", "TrainingFailedError"]

logger = logging.getLogger(__name__)

_ADVICE = "Those of Ray have the same names, but are other classes: import it from `raysgd.train`."
CHDIR_ENV = "RAY_CHDIR_TO_TRIAL_DIR"

_NOT_RAYS_TUNER = (
    "`{name}` is a trainer of raysgd, and `ray.tune.Tuner` takes Ray's trainers: pass it to `raysgd.tune.Tuner`, which "
    "takes the same arguments."
)

TrainerType = TypeVar("TrainerType", bound="BaseTrainer")
GenDataset = Callable[[], Any] | Any
"""A dataset, or a function that returns a dataset."""


class TrainerOptions(TypedDict, total=False):
    """Arguments of `BaseTrainer` that its subclasses pass on to it."""

    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    preprocessor: Any
    metadata: dict[str, Any] | None
    resume_from_checkpoint: Checkpoint | None
    detached: str | Detached | None


@hide_library_frames
class BaseTrainer(Detachable, ABC):
    """A trainer whose `fit` runs `training_loop` once, in one worker.

    Override `training_loop`, and `setup` if you need to prepare something before it. Both can use `self.datasets`,
    `self.preprocessor`, `self.scaling_config`, `self.run_config` and `self.resume_from_checkpoint`, and call `report`
    and `get_checkpoint` of `raysgd.train`. To train on several workers, derive from `DataParallelTrainer` instead.

    Args:
        scaling_config: Resources of the worker that runs the loop. Only `trainer_resources` can be set.
        run_config: Options of the run: where it writes, which checkpoints it retains, and when it stops.
        datasets: Datasets by name, or functions that return a dataset.
        preprocessor: Ray Data preprocessor that is applied to all datasets before the loop starts. If it has not been
            fit yet, it is first fit on the dataset "train".
        metadata: A JSON-serializable dict that is added to each checkpoint.
        resume_from_checkpoint: The checkpoint that `get_checkpoint` returns until the loop has reported a checkpoint.
        detached: A name, or a `raysgd.Detached`, to let `fit` outlive this program. You then get a handle with the
            same methods. See `docs/detached.md`.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.

    Examples:
        >>> from raysgd import train
        >>> class Countdown(BaseTrainer):
        ...     def training_loop(self):
        ...         for left in range(3, 0, -1):
        ...             train.report({"left": left})
        >>> Countdown().fit().metrics["left"]  # doctest: +SKIP
        1
    """

    _scaling_config_allowed_keys: ClassVar[list[str]] = ["trainer_resources"]
    _arguments: dict[str, Any]

    if not TYPE_CHECKING:  # type checkers read the arguments and the returned class from `__init__`

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Create a trainer and remember its arguments, for `restore` and for trials of Ray Tune.

            With `detached`, return the handle of a trainer that outlives this program.
            """
            trainer = super().__new__(cls, *args, **kwargs)
            if isinstance(trainer, cls):
                names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
                trainer._arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            return trainer

    def __init__(
        self,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        preprocessor: Any = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        detached: str | Detached | None = None,
        **unknown: NoReturn,
    ) -> None:
        constructors = [vars(each).get("__init__") for each in type(self).__mro__]
        known = [name for each in constructors for name in getattr(each, "__annotations__", ())]
        refuse_unknown(type(self).__name__, unknown, known, scaling_config=ScalingConfig, run_config=RunConfig)
        self.scaling_config = checked_scaling(scaling_config)
        self.run_config: RunConfig = checked_config("run_config", run_config, RunConfig)
        self.datasets = check_datasets(datasets)
        self.preprocessor = check_preprocessor(preprocessor)
        self.metadata = checked_metadata(metadata)
        self.resume_from_checkpoint = checked_resume(resume_from_checkpoint)
        self._job: FitJob | None = None
        self._restored: TrialFolder | None = None

    # ---------------------------------------------------------------------------------------------- methods to override

    def setup(self) -> None:
        """Called before the datasets are prepared and the loop starts. Does nothing by default.

        It runs in the worker of the loop, or in the driver for a `DataParallelTrainer`.
        """

    def preprocess_datasets(self) -> None:
        """Prepare the datasets: call dataset functions and apply the preprocessor. Overrides must call `super`."""
        self.datasets = prepared(self.datasets, self.preprocessor)

    @abstractmethod
    def training_loop(self) -> None:
        """Override this with your training loop. Report results with `raysgd.train.report`."""

    # -------------------------------------------------------------------------------------------------------------- run

    def fit(self) -> Result:
        """Train until the loop finishes or a stop condition is met.

        Returns:
            The run's metrics, checkpoints and folder. If a restored run has already succeeded, it is not run again.

        Raises:
            ValueError: The configs contradict each other, or do not suit the trainer. Nothing was started.
            TrainingFailedError: The run failed more often than `FailureConfig(max_failures=...)` allows. The error is
                also an instance of the class of your loop's exception. The run's folder contains all earlier reports.
            Preempted: SIGTERM or SIGUSR1 arrived. The newest checkpoint is stored.
        """
        self._check()
        restored = self._restored
        if restored is not None and restored.is_finished:
            from raysgd.air.result import Result

            logger.info(
                "the run in %s has already ended successfully, so there is nothing left to do", restored.experiment
            )
            return Result.from_path(restored.trial.uri)
        trainer = copy.copy(self)
        trainer._settle_gpus()
        if self.resume_from_checkpoint is not None:  # send workers only the checkpoint's location, not its content
            trainer.resume_from_checkpoint = self.resume_from_checkpoint.by_place()
            trainer._arguments = {**self._arguments, "resume_from_checkpoint": trainer.resume_from_checkpoint}
        trainer._job = trainer._make_job(restored)
        return trainer._job.run(trainer._train)

    def _make_job(self, folder: TrialFolder | None) -> FitJob:
        """Create the `FitJob` of a call to `fit`.

        Args:
            folder: The folder of the run to continue; None to create the folder of a new run.

        Raises:
            ValueError: The workers cannot write to the storage.
        """
        names = [] if folder is None else folder.checkpoint_names()
        folder = folder or new_trial_folder(self.run_config, type(self).__name__)
        check_is_shared(folder.experiment)
        restoring.save_trainer(folder.experiment, type(self), self._arguments)
        recorder = Recorder(folder, self._trial_config, self.run_config)
        begin_from = checkpoint_at(folder.trial / names[-1]).by_place() if names else self.resume_from_checkpoint
        return FitJob(folder, recorder, self.run_config, self._facts(folder), begin_from)

    def _facts(self, folder: TrialFolder) -> TrialFacts:
        """Return facts about the run that the training function can query, such as the folder."""
        return TrialFacts(
            folder=folder.trial,
            experiment_name=folder.experiment_name,
            name=folder.name,
            id=folder.id,
            scaling=self.scaling_config,
            metadata=self.metadata,
            workdir=str(folder.local_path) if os.environ.get(CHDIR_ENV, "1") != "0" else None,
            keeps_files=self.run_config.checkpoint_config.num_to_keep != 0,
        )

    def as_trainable(self) -> type[Any]:
        """Return a class for `ray.tune`. Trials run this trainer with their config merged into the arguments.

        `raysgd.tune.Tuner` uses this class. Reports go to Tune, which also stores the checkpoints and restarts failed
        trials. Of the trainer's `run_config`, only the storage, `num_to_keep=0` and `worker_runtime_env` are used.

        Raises:
            MissingTuneError: Ray Tune is not installed.
            ValueError: The workers cannot write to the storage, or the trainer selects nodes by labels.
        """
        from raysgd.train._tune import trainable_of

        return trainable_of(self)

    def __call__(self, config: Any) -> Any:
        """Raise an error which says that Ray's own `Tuner` cannot run a trainer.

        Ray's `Tuner` treats a trainer as a training function, because this method makes the trainer callable. The user
        then gets this error instead of an error that does not name the cause.

        Raises:
            TypeError: Always.
        """
        raise TypeError(_NOT_RAYS_TUNER.format(name=type(self).__name__))

    @property
    def _name(self) -> str:
        """Raise an error. Only Ray's own `Tuner` reads this attribute, before it starts anything."""
        raise TypeError(_NOT_RAYS_TUNER.format(name=type(self).__name__))

    def _check(self) -> None:
        """Check the options that may change until a run starts, because Ray Tune sets them for each trial.

        Raises:
            ValueError: An option is missing or not allowed, or options contradict each other.
        """
        allowed = self._scaling_config_allowed_keys
        forbidden = [name for name in own_values(self.scaling_config) if name not in allowed]
        if forbidden:
            raise ValueError(
                f"`scaling_config` sets {', '.join(f'`{name}`' for name in forbidden)}, which `{type(self).__name__}` "
                f"does not use. Available: {', '.join(f'`{name}`' for name in allowed)}."
            )
        for name in ("checkpoint_frequency", "checkpoint_at_end"):
            if value := getattr(self.run_config.checkpoint_config, name):
                raise ValueError(
                    f"`CheckpointConfig({name}={value!r})`: your function decides when to save, with "
                    "`report(metrics, checkpoint=...)`. Leave it out."
                )

    def _settle_gpus(self) -> None:
        """Replace `use_gpu="auto"` in the scaling config by what the GPUs of the cluster allow."""

    def _train(self) -> None:
        """Run `training_loop` in one worker and process its reports."""
        bundle = self.scaling_config.trainer_bundle
        needs = ScalingConfig(num_workers=1, resources_per_worker=bundle, use_gpu=bool(bundle.get("GPU")))
        assert self._job is not None, "`fit` sets it"
        FitRun(self._job, partial(run_loop, self), BackendConfig(), needs).run()

    @property
    def _trial_config(self) -> dict[str, Any]:
        """The config that is written to each report of the run as `config`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_job": None}

    # --------------------------------------------------------------------------------------------------- continue a run

    @classmethod
    def can_restore(cls, path: str | Path, storage_filesystem: Any = None) -> bool:
        """Return True if this folder contains a run that `restore` can continue.

        Args:
            path: The run's folder, or its URI.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.
        """
        return restoring.can_restore(path, storage_filesystem)

    @classmethod
    def restore(
        cls: type[TrainerType], path: str | Path, storage_filesystem: Any = None, **replaced: Any
    ) -> TrainerType:
        """Return the trainer of an interrupted or failed run. Its `fit` continues from the last checkpoint.

        The trainer is loaded from a pickle in the folder, which may run code. Restore only runs that you trust.

        Args:
            path: The run's folder, or its URI.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.
            **replaced: Arguments of the trainer to change. Datasets are not saved with a run: pass them again, under
                the same names.

        Raises:
            ValueError: The folder contains no run, or the names of the datasets differ.
        """
        trainer: TrainerType
        trainer, trainer._restored = restoring.restore(cls, path, storage_filesystem, **replaced)
        return trainer

    def __repr__(self) -> str:
        """Return a constructor call with the arguments that were passed, shortened to one line."""
        texts = {name: _on_one_line(value) for name, value in self._arguments.items() if value is not None}
        for size in range(MAX_REPR_LENGTH, 0, -5):
            parts = [f"{name}={text if len(text) <= size else f'{text[:size]}...'}" for name, text in texts.items()]
            if len(text := f"{type(self).__name__}({', '.join(parts)})") < MAX_REPR_LENGTH:
                return text
        return f"{type(self).__name__}(...)"


def _on_one_line(value: Any) -> str:
    """Return an argument of a trainer as a string for its `repr`.

    Functions are shown by name, objects whose `repr` has several lines by class, and other values by `repr`. Secrets
    are masked.
    """
    if isinstance(value, FunctionType):
        return value.__name__
    if isinstance(value, dict) and any("\n" in repr(each) for each in value.values()):
        return f"{{{', '.join(f'{name!r}: {_on_one_line(each)}' for name, each in value.items())}}}"
    text = masked(repr(masked(value)))
    return f"<{type(value).__name__}>" if "\n" in text else text


def run_loop(trainer: BaseTrainer) -> None:
    """Run the `training_loop` of a trainer. Called in the worker."""
    trainer.setup()
    trainer.preprocess_datasets()
    trainer.training_loop()


# --------------------------------------------------------------------------- checks of arguments before anything starts


def checked_scaling(value: Any) -> ScalingConfig:
    """Return a valid `ScalingConfig`. Create it from a dict of its fields, or with defaults if `value` is None.

    Raises:
        ValueError: `value` is neither a `ScalingConfig`, a dict nor None, or a field is invalid.
    """
    if isinstance(value, Mapping):
        return changed_scaling(ScalingConfig(), value)
    return checked_config("scaling_config", value, ScalingConfig)


def changed_scaling(before: ScalingConfig, values: Mapping[str, Any]) -> ScalingConfig:
    """Return a copy of a `ScalingConfig` with some fields changed.

    Raises:
        ValueError: A field does not exist, or its value is invalid.
    """
    known = [each.name for each in fields(ScalingConfig)]
    for name in values:
        if name not in known:
            raise ValueError(
                f"`scaling_config={dict(values)!r}`: `{name}` is unknown.{did_you_mean(name, known)} Available: "
                f"{', '.join(known)}."
            )
    return replace(before, **values)


def checked_resume(value: Any) -> Checkpoint | None:
    """Check the checkpoint that a run starts from, which may be None, and return it.

    Raises:
        ValueError: `value` is neither a `Checkpoint` nor None.
    """
    if value is None or isinstance(value, Checkpoint):
        return value
    is_raw = isinstance(value, Mapping | str) or hasattr(value, "__fspath__")
    hint = "`Checkpoint.from_dict(...)` or `Checkpoint.from_directory(...)` makes one. " if is_raw else ""
    raise ValueError(f"`resume_from_checkpoint={value!r:.200}`: need a `Checkpoint`, or None. {hint}{_ADVICE}")


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of a trainer's `metadata`, converted to JSON and back. Return an empty dict for None.

    Raises:
        TypeError: `metadata` is neither a dict nor None.
        ValueError: `metadata` cannot be represented in JSON.
    """
    return {} if metadata is None else json.loads(json.dumps(dict(checked_dict(metadata))))


def check_is_shared(folder: Folder) -> None:
    """Check that the workers can write to the folder in which runs are stored.

    Raises:
        ValueError: The storage is in this process's memory.
    """
    if folder.is_in_memory:
        raise ValueError(
            f"`storage_path={masked(str(folder))!r}`: only this process sees its memory, and the workers of `fit` "
            "write checkpoints themselves. Pass a folder, or a URI such as `s3://bucket/folder`."
        )
