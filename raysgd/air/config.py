"""Configs of a run: number of workers, data, checkpoints, and handling of failures.

Each config validates its values when you create it. `ScalingConfig` does not validate Ray Tune search spaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raysgd.air.constants import WILDCARD_KEY
from raysgd.core.arguments import (
    MAX_WORKERS,
    accelerator,
    check_amount,
    check_kind,
    check_runtime_env,
    check_seconds,
    is_integer,
    is_number,
    refuse_text,
)
from raysgd.core.cluster.resources import DriverView, choose_gpus
from raysgd.core.numbers.ranking import MAX, MIN
from raysgd.core.text.secrets import masked
from raysgd.exceptions import InvalidCountError
from raysgd.storage import open_folder

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory


__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "FailureConfig",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
]
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_HINT_WORKERS = "Pass a number, `num_workers=2`, or the least and the most, `num_workers=(1, 4)`."


def _shown(config: Any) -> str:
    """Return the `repr` of a config: a constructor call with the values that differ from the defaults.

    API keys and passwords are masked.
    """
    shown = [f"{name}={masked(value)!r}" for name, value in own_values(config).items()]
    return masked(f"{type(config).__name__}({', '.join(shown)})")


def own_values(config: Any) -> dict[str, Any]:
    """Return the fields of a config whose values differ from the defaults, as a dict."""
    default = type(config)()
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


@dataclass
class CheckpointConfig:
    """Decides which checkpoints of a run are kept in the run's folder.

    Attributes:
        num_to_keep: Number of best checkpoints to keep. `fit` also keeps the newest checkpoint. None keeps all. With 0,
            checkpoints are not written to disk, and only the newest is kept, in memory.
        checkpoint_score_attribute: The reported metric that ranks checkpoints. None ranks newer checkpoints higher. A
            checkpoint without this metric ranks last. In `Trainer.run`, this is a key of the checkpoint's dict, which
            every checkpoint must contain.
        checkpoint_score_order: "max" if the highest value is best, "min" if the lowest is.
        checkpoint_frequency: Accepted for compatibility. `fit` requires 0 or None, because training functions decide
            when to save.
        checkpoint_at_end: Accepted for compatibility. `fit` requires False or None.

    Raises:
        ValueError: A value is not allowed.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = MAX
    checkpoint_frequency: int | None = 0
    checkpoint_at_end: bool | None = None

    __repr__ = _shown

    def __post_init__(self) -> None:
        _check_count("num_to_keep", self.num_to_keep, "None, for all of them, or 0 or more")
        _check_count("checkpoint_frequency", self.checkpoint_frequency, "0 or more")
        if self.checkpoint_score_attribute is not None and not isinstance(self.checkpoint_score_attribute, str):
            raise ValueError(
                f"`checkpoint_score_attribute={self.checkpoint_score_attribute!r}`: need the name of a metric, or None."
            )
        if self.checkpoint_score_order not in (MAX, MIN):
            raise ValueError(
                f'`checkpoint_score_order={self.checkpoint_score_order!r}`: allowed are "{MAX}" and "{MIN}".'
            )


def _check_count(name: str, value: Any, allowed: str) -> None:
    if value is not None and (not is_integer(value) or value < 0):
        raise ValueError(f"`{name}={masked(value)!r}`: need {allowed}.")


@dataclass
class FailureConfig:
    """Decides what happens when a run fails.

    Attributes:
        max_failures: Maximum number of restarts from the last checkpoint. 0, the default, ends the run at the first
            failure; -1 sets no limit. Worker deaths and exceptions in your function both count as failures. In `fit`,
            each new checkpoint resets the count to 0 until your function first raises an exception. From then on, the
            count is not reset.
        fail_fast: For runs of several trials. True ends all trials when one fails; "raise" raises the trial's error
            immediately. In `fit` of a trainer, "raise" raises the error itself instead of a `TrainingFailedError`.

    Raises:
        ValueError: A value is not allowed, or both options are set.
    """

    max_failures: int = 0
    fail_fast: bool | str = False

    __repr__ = _shown

    def __post_init__(self) -> None:
        if not is_integer(self.max_failures) or self.max_failures < -1:
            raise ValueError(f"`max_failures={self.max_failures!r}`: need 0 or more, or -1 for any number of failures.")
        if not isinstance(self.fail_fast, bool) and self.fail_fast != "raise":
            raise ValueError(f'`fail_fast={self.fail_fast!r}`: allowed are True, False and "raise".')
        if self.fail_fast and self.max_failures != 0:
            raise ValueError(
                f"`max_failures={self.max_failures!r}` and `fail_fast={self.fail_fast!r}` contradict each other: pass "
                "one of them."
            )


@dataclass
class SyncConfig:
    """Options for syncing files to storage, accepted for programs written for Ray AIR.

    A run writes directly to its `storage_path`, so there is no periodic sync. Only `upload_dir` has an effect.

    Attributes:
        upload_dir: Former name of `RunConfig(storage_path=...)`. The value is moved to `storage_path`.
        syncer: No effect.
        sync_period: No effect.
        sync_timeout: No effect.
        sync_artifacts: No effect.
        sync_artifacts_on_checkpoint: No effect.
        sync_on_checkpoint: No effect.
    """

    upload_dir: str | None = None
    syncer: Any = "auto"
    sync_period: float = 300
    sync_timeout: float = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    sync_on_checkpoint: bool = True

    __repr__ = _shown

    def __post_init__(self) -> None:
        _check_place("upload_dir", self.upload_dir)
        for name in ("sync_period", "sync_timeout"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"`{name}={masked(value)!r}`: need a number of seconds, 0 or more.")


@dataclass
class RunConfig:
    """Options of a run: where it stores files, which checkpoints it keeps, and when it stops.

    Attributes:
        name: Name of the run's folder. Default: the trainer's class and the time.
        storage_path: Folder or URI that contains the run's folder. Default: `~/ray_results`.
        storage_filesystem: The `pyarrow.fs.FileSystem` that contains `storage_path`.
        failure_config: What happens when the run fails.
        checkpoint_config: Which checkpoints to keep.
        sync_config: Accepted for programs written for Ray AIR. See `SyncConfig`.
        verbose: Verbosity, from 0 (silent) to 3 (most output).
        stop: Condition that stops the run before your function returns: a dict of metrics and limits, which stops the
            run when a metric is equal to or greater than its limit; or a function that gets the trial's id and the
            metrics and returns True to stop; or a list of such conditions, each of which stops the run.
        callbacks: Ray Tune callbacks, such as loggers, or raysgd callbacks.
        progress_reporter: A Ray Tune progress reporter, for a `Tuner`.
        log_to_file: For a `Tuner`. True to redirect output to files in the trial's folder; or one file name; or two,
            for stdout and stderr.
        local_dir: Former name of `storage_path`. The value is moved to `storage_path`.
        worker_runtime_env: Ray runtime environment for the worker processes. It does not affect the driver. Default:
            the job's runtime environment.

    Raises:
        ValueError: A value is not allowed, or `storage_path` and `local_dir` differ.
        TypeError: A value has the wrong type.
        ModuleNotFoundError: A package that is needed for the URI in `storage_path` is missing.
    """

    name: str | None = None
    storage_path: str | Path | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig = None  # type: ignore[assignment]  # `__post_init__` replaces None
    checkpoint_config: CheckpointConfig = None  # type: ignore[assignment]
    sync_config: SyncConfig = None  # type: ignore[assignment]
    verbose: int | None = None
    stop: Mapping[str, Any] | Callable[[str, Any], bool] | Sequence[Any] | None = None
    callbacks: list[Any] | None = None
    progress_reporter: Any = None
    log_to_file: bool | str | tuple[str, str] = False
    local_dir: str | Path | None = None
    worker_runtime_env: Mapping[str, Any] | None = None

    __repr__ = _shown

    def __post_init__(self) -> None:
        self.failure_config = checked_config("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = checked_config("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        self.sync_config = checked_config("sync_config", self.sync_config, SyncConfig)
        # Move the former names of `storage_path` to it.
        _check_place("storage_path", self.storage_path)
        _check_place("local_dir", self.local_dir)
        upload_dir = self.sync_config.upload_dir
        for name, value in (("local_dir", self.local_dir), ("upload_dir", upload_dir)):
            if None not in (value, self.storage_path) and str(value) != str(self.storage_path):
                raise ValueError(
                    f"`storage_path={masked(str(self.storage_path))!r}` and `{name}={masked(str(value))!r}`: these are "
                    "two names of one option. Pass `storage_path`."
                )
        self.storage_path = self.storage_path or upload_dir or self.local_dir
        self.local_dir, self.sync_config = None, replace(self.sync_config, upload_dir=None)
        if self.storage_path is not None:
            open_folder(self.storage_path, self.storage_filesystem, argument="storage_path")
        own: Any = self.name
        is_name = isinstance(own, str) and own.strip() not in ("", ".", "..") and not {"/", "\0"} & {*own}
        if own is not None and not is_name:
            raise ValueError(
                f"`name={masked(self.name)!r}`: need the name of a folder, without slashes, or None. "
                "`storage_path` says where it is."
            )
        if self.verbose is not None and not is_integer(self.verbose):
            raise ValueError(f"`verbose={self.verbose!r}`: need 0, 1, 2 or 3, or None.")
        check_kind("callbacks", self.callbacks, list | tuple | None, "a list of callbacks, or None")
        check_runtime_env("worker_runtime_env", self.worker_runtime_env)
        is_stop = self.stop is None or callable(self.stop) or isinstance(self.stop, Mapping | list | tuple)
        if not is_stop:
            raise TypeError(
                f'`stop={masked(self.stop)!r}`: need a dict such as `{{"training_iteration": 10}}`, a function of the '
                "trial's id and its metrics, or None."
            )


def checked_config(name: str, value: Any, config_class: type[Any]) -> Any:
    """Check a config's class and return the config. For None, return a config with defaults.

    Raises:
        ValueError: `value` is an instance of another class.
    """
    if value is None:
        return config_class()
    if not isinstance(value, config_class):
        raise ValueError(
            f"`{name}={masked(value)!r}`: need a `{config_class.__name__}`, or None. Those of Ray have the same names, "
            "but are other classes: import it from `raysgd.train`."
        )
    return value


def _check_place(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value)):
        raise ValueError(
            f"`{name}={masked(value)!r}`: need a folder or a URI, as a `str` or a `pathlib.Path`, or None."
        )


@dataclass(eq=False)
class ScalingConfig:
    """The number of workers in a run, and their resources.

    Examples:
        >>> ScalingConfig(num_workers=2).total_resources
        {'CPU': 3.0}
        >>> ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 2}).worker_range
        (1, 4)

    Attributes:
        trainer_resources: Resources of a Ray Tune trial besides its workers. Default: one CPU. `fit` runs in the driver
            and reserves only resources that you pass explicitly. For a trainer derived directly from
            `BaseTrainer`, these are the resources of the worker that runs `training_loop`.
        num_workers: Number of workers, or `(min, max)` to use as many as the free resources allow.
        use_gpu: True to assign a GPU to each worker. "auto" to go by the cluster when a run starts: a GPU for each
            worker; if there are fewer GPUs, at most 4 workers share one; without GPUs, workers run on CPUs. Until then,
            the properties of the config count no GPUs.
        resources_per_worker: Resources of each worker. Default: one CPU, or one GPU with `use_gpu`. In a dict, a
            missing "CPU" means 0, and a missing "GPU" means 1 with `use_gpu`.
        placement_strategy: How Ray places the workers: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD". `fit` does
            not enforce a strict strategy: it treats "STRICT_PACK" as "PACK", and "STRICT_SPREAD" as "SPREAD".
        _max_cpu_fraction_per_node: Accepted for programs written for Ray AIR. Current Ray ignores it.
        elastic_resize_monitor_interval_s: Seconds between checks for free resources while a run has fewer workers than
            the maximum. If resources are free, the run adds workers after its next checkpoint. With `elastic`, workers
            can join without waiting for a checkpoint.
        accelerator_type: The GPU type that workers need, as Ray names it, such as "A100".
        label_selector: Labels that the workers' nodes must have, in Ray's format: `{"region": "us-west"}`. Requires a
            fixed number of workers.
        elastic: True to let surviving workers continue in the middle of the training function after a failure, instead
            of restarting the function from its checkpoint. Requires `num_workers=(min, max)`; see
            `raysgd.train.Trainer`.
        spare_workers: Number of extra workers that stand by to replace lost workers. Requires `elastic`.

    Raises:
        ValueError, TypeError: A value is not allowed, or the "GPU" resource contradicts `use_gpu`.
    """

    trainer_resources: dict[str, float] | None = None
    num_workers: int | tuple[int, int] | None = None
    use_gpu: bool | Literal["auto"] = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    _max_cpu_fraction_per_node: float | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    elastic: bool = False
    spare_workers: int = 0

    __repr__ = _shown

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Validate the values again, for example after you changed a value. Search spaces are not validated.

        Raises:
            ValueError, TypeError: A value is not allowed, or the "GPU" resource contradicts `use_gpu`.
        """
        refuse_text(elastic=self.elastic, **({} if self.use_gpu == "auto" else {"use_gpu": self.use_gpu}))
        if not is_open(self.elastic_resize_monitor_interval_s):
            check_seconds("elastic_resize_monitor_interval_s", self.elastic_resize_monitor_interval_s)
        if self.num_workers is not None and not is_open(self.num_workers):
            self.num_workers = _checked_workers(self.num_workers)
        if not is_open(self.placement_strategy) and self.placement_strategy not in _STRATEGIES:
            allowed = ", ".join(f'"{name}"' for name in _STRATEGIES)
            raise ValueError(f"`placement_strategy={self.placement_strategy!r}`: allowed are {allowed}.")
        if not is_open(self.accelerator_type):
            accelerator(self.accelerator_type)
        for name in ("trainer_resources", "resources_per_worker"):
            _check_resources(name, getattr(self, name))
        labels = {} if self.label_selector is None else self.label_selector
        if not isinstance(labels, dict) or not all(isinstance(text, str) for each in labels.items() for text in each):
            raise ValueError(
                f"`label_selector={labels!r}`: need a dict of labels and values for all workers alike, such as "
                '`{"region": "us-west"}`, or None.'
            )
        if labels and self.is_elastic:
            raise ValueError(
                f"`label_selector={labels!r}` and `num_workers={self.num_workers!r}`: with a range, resources are "
                "counted on all nodes. Pass a fixed `num_workers`, or a custom resource in `resources_per_worker`."
            )
        if is_open(self.use_gpu) or is_open(self.resources_per_worker):
            return
        num_gpus = (self.resources_per_worker or {}).get("GPU", int(bool(self.use_gpu)))
        if is_open(num_gpus):
            return
        if not self.use_gpu and num_gpus > 0:
            raise ValueError(
                f'`resources_per_worker` has "GPU": {num_gpus!r}, and `use_gpu=False`: pass `use_gpu=True`, or leave '
                '"GPU" out.'
            )
        if self.use_gpu and num_gpus == 0:
            raise ValueError(
                f'`use_gpu={self.use_gpu!r}`, and `resources_per_worker` has "GPU": 0: leave one of them out.'
            )

    # ------------------------------------------------------------------------------------------------ number of workers

    @property
    def worker_range(self) -> tuple[int, int]:
        """The minimum and maximum number of workers. They are equal if the number is fixed.

        Raises:
            InvalidCountError: The number is not set, or is a search space.
        """
        workers = self.num_workers
        if workers is None or is_open(workers):
            raise InvalidCountError(f"`num_workers={workers!r}`: a run needs a number of workers. {_HINT_WORKERS}")
        return workers if isinstance(workers, tuple) else (workers, workers)

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during the run."""
        return isinstance(self.num_workers, tuple) and self.num_workers[0] < self.num_workers[1]

    # ------------------------------------------------------------------------------------------------------- resources

    @property
    def worker_bundle(self) -> dict[str, float]:
        """The resources of one worker, without resources whose amount is 0."""
        kind = accelerator(self.accelerator_type)
        if self.resources_per_worker is None:
            return {"GPU" if self._has_gpus else "CPU": 1.0, **kind}
        resources = {"GPU": 1, **self.resources_per_worker, **kind}
        return _without_zeros(resources if self._has_gpus else {**resources, "GPU": 0})

    @property
    def _has_gpus(self) -> bool:
        return bool(self.use_gpu) and self.use_gpu != "auto"

    def with_gpus_chosen(self, driver: DriverView) -> ScalingConfig:
        """Return this config with `use_gpu="auto"` replaced by what the GPUs of the cluster allow.

        With "auto", connect to Ray. Any other config is returned unchanged.

        Args:
            driver: What the framework sees in this process.

        Raises:
            ValueError: More than four workers would share a GPU.
        """
        if self.use_gpu != "auto":
            return self
        from raysgd.core.cluster.ray_cluster import gpus_of_cluster

        resources = dict(self.resources_per_worker or {})
        num_gpus = choose_gpus(
            "auto",
            self.worker_range[1] + self.spare_workers,
            driver,
            lambda: gpus_of_cluster(self.additional_resources_per_worker),
            num_gpus_per_worker=resources.pop("GPU", 1),
        ).num_gpus
        if num_gpus not in (0, 1):
            resources["GPU"] = num_gpus
        return replace(self, use_gpu=num_gpus > 0, resources_per_worker=resources or None)

    @property
    def trainer_bundle(self) -> dict[str, float]:
        """The resources of the trial besides its workers, without resources whose amount is 0."""
        return {"CPU": 1.0} if self.trainer_resources is None else _without_zeros(self.trainer_resources)

    @property
    def total_resources(self) -> dict[str, float]:
        """Total resources of the trial and its workers. If `num_workers` is a range, its minimum is counted."""
        total: dict[str, float] = {}
        for bundle in self._bundles():
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @property
    def num_cpus_per_worker(self) -> float:
        """Number of CPUs that each worker gets."""
        return self.worker_bundle.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """Number of GPUs that each worker gets."""
        return self.worker_bundle.get("GPU", 0.0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """Each worker's resources other than CPUs and GPUs."""
        return {name: amount for name, amount in self.worker_bundle.items() if name not in ("CPU", "GPU")}

    def _bundles(self) -> list[dict[str, float]]:
        num_workers = 0 if self.num_workers is None else self.worker_range[0]
        return [self.trainer_bundle, *(self.worker_bundle for _ in range(num_workers))]

    def as_placement_group_factory(self) -> PlacementGroupFactory:
        """Return the resources as Ray Tune bundles: one bundle for the trial, then one for each worker.

        If `num_workers` is a range, return bundles for the minimum number of workers, which the run needs to start. A
        `Tuner` reserves the maximum for each trial.
        """
        from ray.tune import PlacementGroupFactory

        return PlacementGroupFactory(self._bundles(), strategy=self.placement_strategy)

    @classmethod
    def from_placement_group_factory(cls, pgf: PlacementGroupFactory) -> ScalingConfig:
        """Create a config from a Ray Tune placement group factory.

        The first bundle belongs to the trial itself, and each other bundle to one worker.

        Raises:
            ValueError: The worker bundles differ from each other.
        """
        trainer, *workers = [dict(bundle) for bundle in pgf.bundles]
        if pgf.head_bundle_is_empty:
            trainer, workers = {}, [trainer, *workers]
        if any(worker != workers[0] for worker in workers):
            raise ValueError(f"`pgf={pgf!r}`: all bundles after the first must be equal, like all workers.")
        return cls(
            trainer_resources=trainer or {"CPU": 0},
            num_workers=len(workers) or None,
            use_gpu=bool(workers and workers[0].get("GPU")),
            resources_per_worker=workers[0] if workers else None,
            placement_strategy=pgf.strategy,
        )

    # ------------------------------------------------------------------------------------------------------ comparison

    def __eq__(self, other: object) -> bool:
        """Return True if both configs request the same resources, number of workers, placement and node labels."""
        return isinstance(other, ScalingConfig) and self._needs() == other._needs()

    __hash__ = None  # type: ignore[assignment]  # configs are mutable

    def _needs(self) -> Any:
        values = [getattr(self, each.name) for each in fields(self)]
        inner = [amount for value in values if isinstance(value, Mapping) for amount in value.values()]
        if any(is_open(value) for value in values + inner):
            return values
        workers = self.worker_range if self.num_workers is not None else None
        bundle = self.worker_bundle if workers else None
        is_auto = self.use_gpu == "auto"
        return self.trainer_bundle, bundle, is_auto, workers, self.placement_strategy, self.label_selector or None


def is_open(value: Any) -> bool:
    """Return True if the value is a grid search or a search space, from which Ray Tune has yet to choose a value."""
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"}
    return any(owner.__module__.startswith("ray.tune.") for owner in type(value).__mro__)


def _checked_workers(num_workers: Any) -> int | tuple[int, int]:
    pair = tuple(num_workers) if isinstance(num_workers, tuple | list) else (num_workers, num_workers)
    are_counts = all(is_integer(each) and 1 <= each <= MAX_WORKERS for each in pair)
    if len(pair) != 2 or not are_counts or pair[0] > pair[1]:
        raise InvalidCountError(
            f"`num_workers={num_workers!r}`: need an integer from 1 to {MAX_WORKERS}, or two, the smaller one first. "
            f"{_HINT_WORKERS}"
        )
    least, most = map(int, pair)
    return (least, most) if isinstance(num_workers, tuple | list) else most


def _check_resources(name: str, resources: Any) -> None:
    if resources is None or is_open(resources):
        return
    if not isinstance(resources, Mapping) or not all(isinstance(key, str) for key in resources):
        raise ValueError(f'`{name}={resources!r}`: need a dict of names and amounts, such as `{{"CPU": 2}}`, or None.')
    for key, amount in resources.items():
        if not is_open(amount):
            check_amount(f"{name}[{key!r}]", amount)


def _without_zeros(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in resources.items() if amount}


_GIB = 1 << 30


@dataclass
class DatasetConfig:
    """Decides how a trainer handles one dataset.

    If a value is None, the value from the trainer's own `DatasetConfig` applies, or else the default.

    Attributes:
        fit: True to fit the preprocessor on the dataset. Default: True for `train`, False for other datasets.
        split: True to shard the dataset, False to give the whole dataset to each worker. Default: True for `train`,
            False for other datasets.
        required: True if the dataset must be passed. Default: False.
        transform: True to apply the preprocessor to the dataset. Default: True.
        use_stream_api: Accepted for programs written for Ray AIR. No effect. Default: False.
        stream_window_size: Accepted for programs written for Ray AIR. No effect. Default: 1 GiB.
        global_shuffle: True to shuffle all rows before each epoch. Default: False.
        randomize_block_order: True to randomize the order of the blocks in each epoch. Ray Data then reads the whole
            dataset before the first batch. Blocks therefore keep their order if this is None, although `fill_defaults`
            returns True as in Ray AIR.
    """

    fit: bool | None = None
    split: bool | None = None
    required: bool | None = None
    transform: bool | None = None
    use_stream_api: bool | None = None
    stream_window_size: float | None = None
    global_shuffle: bool | None = None
    randomize_block_order: bool | None = None

    __repr__ = _shown

    def fill_defaults(self) -> DatasetConfig:
        """Return a copy of this config in which the default replaces each None."""
        return _DATASET_DEFAULTS.updated(self)

    def updated(self, other: DatasetConfig) -> DatasetConfig:
        """Return a copy of this config in which the values of `other` that are not None replace this config's."""
        values = {each.name: getattr(other, each.name) for each in fields(DatasetConfig)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    @staticmethod
    def merge(a: Mapping[str, DatasetConfig], b: Mapping[str, DatasetConfig] | None) -> dict[str, DatasetConfig]:
        """Return a trainer's configs `a`, updated field by field with a user's configs `b`. `a` itself is unchanged.

        Raises:
            ValueError: `b` has a dataset name that is not in `a`, and `a` has no "*" entry for all other names; or `b`
                is not a dict of configs.
        """
        merged = dict(a)
        if b is not None and not isinstance(b, Mapping):
            raise ValueError(f"`dataset_config={b!r}`: need a dict of names and `DatasetConfig`s.")
        for name, config in (b or {}).items():
            if not isinstance(config, DatasetConfig):
                raise ValueError(f"`dataset_config[{name!r}]={config!r}`: need a `DatasetConfig`.")
            before = a.get(name, a.get(WILDCARD_KEY))
            if before is None:
                raise ValueError(f"`dataset_config` names {name!r}. Available: {sorted(a)}.")
            merged[name] = before.updated(config)
        return merged

    @staticmethod
    def validated(config: Mapping[str, DatasetConfig], datasets: Mapping[str, Any]) -> dict[str, DatasetConfig]:
        """Check that the configs by dataset name match the datasets. Return the configs with defaults filled in.

        Raises:
            ValueError: The configs do not match the datasets, or contradict each other.
        """
        filled = {name: each.fill_defaults() for name, each in config.items()}
        fit = [name for name, each in filled.items() if each.fit]
        if len(fit) > 1:
            raise ValueError(
                f"`dataset_config` has `fit=True` for {sorted(fit)}: a preprocessor is fit on one dataset."
            )
        if fit and not filled[fit[0]].transform:
            raise ValueError(
                f"`dataset_config[{fit[0]!r}]` has `fit=True` and `transform=False`: leave one of them out."
            )
        missing = [name for name, each in filled.items() if each.required and name not in (WILDCARD_KEY, *datasets)]
        if missing:
            raise ValueError(f"`datasets` lacks {sorted(missing)}, which `dataset_config` requires.")
        unknown = [] if WILDCARD_KEY in filled else sorted(set(datasets) - set(filled))
        if unknown:
            raise ValueError(f"`datasets` has {unknown}, but `dataset_config` has only {sorted(filled)}.")
        return filled


_DATASET_DEFAULTS = DatasetConfig(False, False, False, True, False, _GIB, False, True)
