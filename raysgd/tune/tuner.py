"""Defines `Tuner`, which runs a trainer with many configs that Ray Tune chooses, and `ResultGrid` with the results.

`Tuner` is a thin layer over Ray's `Tuner`, for trainers that have a `fit()` method. One call to `Tuner.fit` is a sweep,
and each run of the trainer is a trial. The `RunConfig` may contain callbacks for raysgd and for Ray Tune. The driver
copies the raysgd callbacks for each trial, and calls the copies as in a run outside Ray Tune. The Ray Tune callbacks
are passed to Ray Tune.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, ScalingConfig, own_values
from raysgd.air.result import Result
from raysgd.air.trial import new_name, storage_of
from raysgd.callbacks.callback import Callback
from raysgd.callbacks.calling import FunctionCalls, of_tune_among, own_among
from raysgd.core.arguments import check_kind
from raysgd.core.text.secrets import masked
from raysgd.storage import open_folder
from raysgd.train._tune import refuse_run_config
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.checkpoint import place_of
from raysgd.train.fit.restore import SWEEP_FILE, at_place, restore, save_trainer
from raysgd.trainer.driver import tune_trial

if TYPE_CHECKING:
    import pandas
    from ray.tune import TuneConfig

logger = logging.getLogger(__name__)

_NEEDED_BY = "`raysgd.tune.Tuner`"
_CANNOT_STOP = "it is a trial of Ray Tune, which ends by `RunConfig(stop=...)` or by the scheduler"


class Tuner:
    """Runs a trainer once for each of many configs, which Ray Tune chooses.

    Args:
        trainable: A trainer that has a `fit()` method, such as `raysgd.train.torch.TorchTrainer(...)`. The trainer is
            not modified. You may also pass a class or function that Ray's `Tuner` accepts.
        param_space: Trainer arguments that contain search spaces: `{"train_loop_config": {"lr": tune.grid_search([0.1,
            1])}}`. For each trial, the chosen values are merged into the trainer's own arguments. The space may include
            `scaling_config`, as an object or a dict, and `datasets`.
        tune_config: A `TuneConfig`: metric, number of trials, search algorithm, scheduler.
        run_config: The `RunConfig` for all trials. Default: the trainer's own run config.

    Raises:
        ValueError: `param_space` has a `run_config`, `num_to_keep` is 0 and `trainable` is not a trainer, the trainer
            selects nodes by labels, its workers cannot write to the storage, or two callbacks write to the same file.
            `fit` reports other invalid values in `param_space` before it starts the trial that uses them.
        TypeError: An argument has the wrong type.
        MissingTuneError: Ray Tune is not installed.

    Examples:
        >>> from raysgd.train.torch import TorchTrainer
        >>> trainer = TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2))  # doctest: +SKIP
        >>> tuner = Tuner(trainer, param_space={"train_loop_config": {"lr": 0.1}})  # doctest: +SKIP
        >>> tuner.fit()[0].metrics  # doctest: +SKIP
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        tune = tune_trial.require_tune(_NEEDED_BY)
        check_kind("param_space", param_space, Mapping | None, "a dict, or None")
        check_kind("run_config", run_config, RunConfig | None, "a `raysgd.train.RunConfig`, or None")
        check_kind("tune_config", tune_config, tune.TuneConfig | None, "a `raysgd.tune.TuneConfig`, or None")
        run_config, space = chosen(trainable, run_config), _as_space(trainable, param_space or {})
        if run_config.checkpoint_config.num_to_keep == 0 and not isinstance(trainable, BaseTrainer):
            raise ValueError(
                "`CheckpointConfig(num_to_keep=0)`: Ray Tune keeps at least one of the checkpoints that a function or "
                "class reports. Pass 1, or report no checkpoints."
            )
        if isinstance(trainable, BaseTrainer):
            run_config = replace(run_config, name=run_config.name or new_name(type(trainable).__name__))
        self._trainable = trainable
        self._run_config: RunConfig | None = run_config
        self._tuner = tune.Tuner(
            as_trainable(trainable, run_config),
            param_space=space,
            tune_config=tune_config,
            run_config=as_ray_config(run_config),
        )

    def fit(self) -> ResultGrid:
        """Run all trials and return their results, including the results of failed trials."""
        trainer, run_config = self._trainable, self._run_config
        if isinstance(trainer, BaseTrainer) and run_config is not None:
            experiment = storage_of(run_config) / str(run_config.name)
            save_trainer(experiment, type(trainer), trainer._arguments, SWEEP_FILE)
        return ResultGrid(self._tuner.fit())

    def get_results(self) -> ResultGrid:
        """Return the results of a finished or restored sweep, without running trials."""
        return ResultGrid(self._tuner.get_results())

    @classmethod
    def restore(
        cls,
        path: str | Path,
        trainable: Any = None,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any = None,
    ) -> Tuner:
        """Return a tuner for an interrupted sweep. Its `fit` runs the remaining trials.

        Args:
            path: Path or URI of the sweep's folder, which `ResultGrid.experiment_path` returns.
            trainable: The trainer, class or function of the interrupted sweep. Default: the trainer that `fit` saved in
                the sweep's folder. Required for a class or function, and for a trainer with datasets, because these
                are not saved.
            resume_unfinished: True to continue unfinished trials from their last checkpoints.
            resume_errored: True to continue failed trials from their last checkpoints.
            restart_errored: True to restart failed trials from scratch.
            param_space: The search space of the interrupted sweep. Required if it contains datasets or other objects.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.

        Raises:
            ValueError: The folder contains no sweep; `param_space` has a `run_config`; or `trainable` was omitted
                although it is required or the trainer could not be saved.
        """
        tune = tune_trial.require_tune(_NEEDED_BY)
        tuner, place = cls.__new__(cls), _as_place(path)
        is_sweep = cls.can_restore(path, storage_filesystem)
        if trainable is None and is_sweep:
            trainable, _ = restore(None, place, storage_filesystem, saved_as=SWEEP_FILE)
        space = None if param_space is None else _as_space(trainable, param_space)
        if not is_sweep:
            raise ValueError(
                f"`path={masked(str(path))!r}`: there is no sweep. Pass the folder that has the name of the sweep."
            )
        tuner._trainable, tuner._run_config = trainable, None  # None, so that `fit` does not save the trainer again
        is_trainer = isinstance(trainable, BaseTrainer)
        run_config = at_place(trainable.run_config, place, storage_filesystem) if is_trainer else None
        tuner._tuner = tune.Tuner.restore(
            place,
            as_trainable(trainable, run_config),
            resume_unfinished=resume_unfinished,
            resume_errored=resume_errored,
            restart_errored=restart_errored,
            param_space=space,
            storage_filesystem=storage_filesystem,
        )
        return tuner

    @classmethod
    def can_restore(cls, path: str | Path, storage_filesystem: Any = None) -> bool:
        """Return True if the folder contains a sweep that `restore` can continue."""
        return bool(tune_trial.require_tune(_NEEDED_BY).Tuner.can_restore(_as_place(path), storage_filesystem))


class ResultGrid:
    """The results of a sweep, one per trial.

    Args:
        grid: The `ResultGrid` that Ray's `Tuner` returned.

    Examples:
        >>> for result in tuner.fit():  # doctest: +SKIP
        ...     print(result.metrics, result.checkpoint)
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __len__(self) -> int:
        return len(self._grid)

    def __getitem__(self, index: int) -> Result:
        return as_result(self._grid[index])

    def __iter__(self) -> Iterator[Result]:
        return (as_result(each) for each in self._grid)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the result of the best trial.

        Args:
            metric: Name of the metric that ranks the trials. Default: the metric of the `TuneConfig`.
            mode: "min" or "max": whether the lowest or the highest value is best. Default: the mode of the
                `TuneConfig`.
            scope: Which of a trial's reports count: "last" for the last report, "all" for the best report, "avg" for
                the mean of all reports, "last-5-avg" or "last-10-avg" for the mean of the last 5 or 10 reports.
            filter_nan_and_inf: True to ignore values that are NaN or infinite.

        Raises:
            ValueError: There are several trials, and no metric or mode is set.
            RuntimeError: No trial reported the metric.
        """
        return as_result(self._grid.get_best_result(metric, mode, scope, filter_nan_and_inf))

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: str | None = None) -> pandas.DataFrame:
        """Return each trial's last report as a row of a `pandas.DataFrame`.

        Args:
            filter_metric: If set with `filter_mode`, return each trial's best report by this metric instead.
            filter_mode: "min" or "max": whether the lowest or the highest value is best.
        """
        return self._grid.get_dataframe(filter_metric, filter_mode)

    @property
    def experiment_path(self) -> str:
        """The path of the sweep's folder."""
        return str(self._grid.experiment_path)

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the sweep's folder."""
        return self._grid.filesystem

    @property
    def errors(self) -> list[Exception]:
        """The exceptions that ended the failed trials."""
        return list(self._grid.errors)

    @property
    def num_errors(self) -> int:
        """The number of failed trials."""
        return int(self._grid.num_errors)

    @property
    def num_terminated(self) -> int:
        """The number of trials that ended without an error."""
        return int(self._grid.num_terminated)

    def __repr__(self) -> str:
        """Return a string that contains the `repr` of each trial's result."""
        return f"ResultGrid({list(self)!r})"


def as_trainable(trainable: Any, run_config: RunConfig | None = None) -> Any:
    """Convert a raysgd trainer to a class that Ray's `Tuner` can run as trials. Return a class or function unchanged.

    Args:
        trainable: The user's trainer, class or function.
        run_config: Run config for the trainer's trials. Default: the trainer's own run config.

    Raises:
        TypeError: `trainable` is a trainer of Ray, or a raysgd trainer whose workers are already running.
        ValueError: The workers cannot write to the storage, or the trainer selects nodes by labels.
    """
    if isinstance(trainable, BaseTrainer):
        trainable = copy(trainable)
        trainable.run_config = run_config or trainable.run_config
        return trainable.as_trainable()
    if type(trainable).__module__.startswith("ray.train."):
        raise TypeError(
            f"`trainable={trainable!r:.200}` is a trainer of Ray, and `raysgd.tune.Tuner` takes trainers of raysgd: "
            "import it from `raysgd.train`, or pass it to `ray.tune.Tuner`."
        )
    if hasattr(trainable, "as_trainable") and not isinstance(trainable, type):
        raise TypeError(
            f"`trainable={masked(trainable)!r}`: this trainer is running already. Pass the class that "
            f"`{type(trainable).__name__}.as_trainable(...)` returns."
        )
    return trainable


def chosen(trainable: Any, run_config: RunConfig | None) -> RunConfig:
    """Return the run config to use: `run_config` if it is set, else the trainer's run config, else the defaults."""
    own = trainable.run_config if isinstance(trainable, BaseTrainer) else None
    if run_config is not None and own is not None and own != RunConfig():
        logger.info("`Tuner(run_config=...)` counts, and the trainer's `run_config` does not")
    return run_config or own or RunConfig()


def _as_space(trainable: Any, param_space: Mapping[str, Any]) -> dict[str, Any]:
    """Return `param_space` with each `ScalingConfig` as a dict, so that Ray Tune finds search spaces in its fields.

    Raises:
        ValueError: `trainable` is a raysgd trainer, and `param_space` has a `run_config`.
    """
    if not isinstance(trainable, BaseTrainer):
        return dict(param_space)
    refuse_run_config(param_space)
    return {
        name: own_values(value) if isinstance(value, ScalingConfig) else value for name, value in param_space.items()
    }


def as_ray_config(config: RunConfig) -> Any:
    """Convert a raysgd `RunConfig` to Ray Tune's `RunConfig`.

    Ray Tune does not accept `num_to_keep=0`, which means to store no checkpoints. 0 is therefore replaced by None,
    which sets no limit. No checkpoints are stored nevertheless, because the trials of a raysgd trainer pass none to Ray
    Tune in this case.
    """
    tune = tune_trial.require_tune(_NEEDED_BY)
    kept = config.checkpoint_config
    return tune.RunConfig(
        name=config.name,
        storage_path=None if config.storage_path is None else _as_place(config.storage_path),
        storage_filesystem=config.storage_filesystem,
        failure_config=tune.FailureConfig(
            max_failures=config.failure_config.max_failures, fail_fast=config.failure_config.fail_fast
        ),
        checkpoint_config=tune.CheckpointConfig(
            num_to_keep=kept.num_to_keep or None,
            checkpoint_score_attribute=kept.checkpoint_score_attribute,
            checkpoint_score_order=kept.checkpoint_score_order,
        ),
        stop=config.stop,
        callbacks=None if config.callbacks is None else for_tune(config.callbacks),
        log_to_file=config.log_to_file,
        verbose=config.verbose,
        progress_reporter=config.progress_reporter,
    )


def _as_place(path: str | Path) -> str:
    """Return a path in the form that Ray expects: an absolute path or a URI."""
    text = str(path)
    return text if "://" in text else str(Path(text).expanduser().absolute())


def as_result(result: Any) -> Result:
    """Convert Ray Tune's result of a trial to a `raysgd.air.Result`, the class that a trainer's `fit()` returns."""
    made = Result(
        metrics=result.metrics,
        checkpoint=as_checkpoint(result.checkpoint) if result.checkpoint is not None else None,
        error=result.error,
        folder=open_folder(result.path, result.filesystem),
        best_checkpoints=[
            (as_checkpoint(checkpoint), metrics) for checkpoint, metrics in result.best_checkpoints or ()
        ],
    )
    made.metrics_dataframe = result.metrics_dataframe
    return made


def as_checkpoint(checkpoint: Any) -> Checkpoint:
    """Convert a Ray Tune checkpoint to a raysgd `Checkpoint` that refers to the same folder."""
    return Checkpoint(checkpoint.path, checkpoint.filesystem)


class CallsInTrials:
    """Passes the events of a sweep's trials, such as reports, from Ray Tune to the user's raysgd callbacks.

    Each trial has its own copies of the callbacks. When Ray Tune calls a method of this object for a trial, the method
    calls that trial's copies.

    Args:
        callbacks: The user's raysgd callbacks, which are copied for each trial and called in this order.

    Raises:
        ValueError: Two callbacks write to the same file, or a callback cannot work in a trial of Ray Tune.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._of_trial: dict[str, FunctionCalls] = {}
        self._saved: dict[str, Any] = {}
        self._make("trial", {}, ".")  # checks the callbacks before the first trial: raises if one cannot be used

    def on_trial_start(self, trial: Any, **info: Any) -> None:
        """Copy the callbacks for a trial that starts, and call their `on_run_begin`. Do nothing if a trial restarts."""
        if trial.trial_id not in self._of_trial:
            calls = self._make(str(trial), trial.config, trial.local_path)
            calls.load_states(self._saved.pop(trial.trial_id, ()))
            self._of_trial[trial.trial_id] = calls
        self._of_trial[trial.trial_id].begin_run()

    def on_trial_result(self, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        """Call `on_result` of the trial's callbacks with a report of the trial."""
        self._of_trial[trial.trial_id].report(result)

    def on_checkpoint(self, trial: Any, checkpoint: Any, **info: Any) -> None:
        """Call `on_checkpoint` of the trial's callbacks with the path or URI of the trial's new checkpoint."""
        self._of_trial[trial.trial_id].tell("on_checkpoint", place_of(as_checkpoint(checkpoint)))

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        """Call `on_run_end` of the trial's callbacks after the trial ended without an error."""
        self._end(trial, None)

    def on_trial_error(self, trial: Any, **info: Any) -> None:
        """Call `on_run_end` of the trial's callbacks with the trial's error. Do nothing if the trial never started."""
        self._end(trial, trial.get_error() or RuntimeError(f"the trial {trial} failed"))

    def get_state(self) -> dict[str, Any]:
        """Return the states of the running trials' callbacks, by trial ID. Ray Tune saves them to restore the sweep.

        In a restored sweep, this includes the restored states of trials that have not started yet.
        """
        return {**self._saved, **{trial: calls.states() for trial, calls in self._of_trial.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the states that `get_state` returned in an interrupted sweep.

        When a trial starts later, its callbacks load their states.
        """
        self._saved = dict(state)

    def _end(self, trial: Any, error: BaseException | None) -> None:
        calls = self._of_trial.pop(trial.trial_id, None)
        if calls is not None:
            calls.end_run(error)

    def _make(self, name: str, config: Any, folder: str) -> FunctionCalls:
        return FunctionCalls(deepcopy(self._callbacks), name, config, folder, _CANNOT_STOP)


def for_tune(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks for Ray Tune to call: the user's Ray Tune callbacks, then an object for raysgd callbacks.

    The object, a `CallsInTrials`, calls all raysgd callbacks. It is omitted if the sweep has no raysgd callbacks.

    Raises:
        TypeError: An object is not a callback, or is a `WorkerCallback`, which needs to run in the workers.
        ValueError: Two raysgd callbacks write to the same file.
    """
    own, of_tune = own_among(callbacks), of_tune_among(callbacks)
    return [*of_tune, _tune_class()(own)] if own else of_tune


@functools.cache
def _tune_class() -> type[CallsInTrials]:
    """Return `CallsInTrials` as a subclass of Ray Tune's `Callback`, so that Ray Tune accepts it."""

    class SweepCallbacks(CallsInTrials, tune_trial.require_tune(_NEEDED_BY).Callback):  # type: ignore[misc]
        """Calls a sweep's raysgd callbacks, and is itself a callback that Ray Tune accepts."""

    return SweepCallbacks
