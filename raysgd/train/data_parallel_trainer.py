"""`DataParallelTrainer`: `fit` runs a function on several workers at once, each with its part of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from raysgd._arguments import refuse_unknown
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, ScalingConfig, checked_config
from raysgd.air.reports import ValidationConfig
from raysgd.host.protocol import Host
from raysgd.train._rules.settings import check_elastic, check_spares
from raysgd.train.backend import BackendConfig
from raysgd.train.base_trainer import BaseTrainer, TrainerType
from raysgd.train.fit.data import merged_config, prepared
from raysgd.train.fit.run import FitPlan, as_max_retries
from raysgd.train.utils import without_arguments

__all__ = ["DataParallelTrainer"]


class DataParallelTrainer(BaseTrainer):
    """Runs a function on several workers, and makes a `Result` of what it reports.

    The function calls `raysgd.train.report(metrics, checkpoint=...)` on every worker, equally often. The metrics of
    rank 0 are the results. When it fails, or a worker is lost, it is started again from its newest checkpoint, as
    often as `FailureConfig(max_failures=...)` says.

    To make a trainer with another loop, derive from this class and pass the loop to `super().__init__`. To connect
    the workers in another way, pass your own `BackendConfig`.

    Args:
        train_loop_per_worker: The function. It takes nothing, or one argument, `train_loop_config`. What it returns
            stays in the worker.
        train_loop_config: Its argument.
        backend_config: How the workers are connected. Default: not at all.
        scaling_config: How many workers, and what each needs. With `num_workers=(least, most)` the run begins with as
            many as there is room for, goes on with what is left after a loss, and grows back after a checkpoint.
        dataset_config: Who gets which data: a `DataConfig`, or a dict of `DatasetConfig`. By itself "train" is divided,
            and every worker gets all of the others.
        run_config: Where the run writes, what it keeps, when it stops.
        datasets: Datasets, or functions that return one, by name; see `raysgd.train.get_dataset_shard`.
        metadata: What each checkpoint says of itself, as a dict of what JSON can hold.
        preprocessor: Fit on and applied to the datasets before the function starts.
        resume_from_checkpoint: What `raysgd.train.get_checkpoint` returns at first.
        validation_config: How checkpoints are validated beside the training, which `report(..., validation=True)` asks
            for.
        host: The name of a host for the trainer, as in `BaseTrainer`.

    Raises:
        ValueError, TypeError: An argument is wrong. Nothing was started.

    Examples:
        >>> from raysgd import train
        >>> from raysgd.train import ScalingConfig
        >>> def train_loop(config):
        ...     for epoch in range(config["num_epochs"]):
        ...         train.report({"epoch": epoch})
        >>> trainer = DataParallelTrainer(
        ...     train_loop, train_loop_config={"num_epochs": 3}, scaling_config=ScalingConfig(num_workers=2)
        ... )
        >>> trainer.fit().metrics["epoch"]  # doctest: +SKIP
        2
    """

    _scaling_config_allowed_keys: ClassVar[list[str]] = [
        "trainer_resources",
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "_max_cpu_fraction_per_node",
        "elastic_resize_monitor_interval_s",
        "label_selector",
        "elastic",
        "spare_workers",
    ]

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: Any = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        preprocessor: Any = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
        host: str | Host | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, DataParallelTrainer.__init__.__annotations__)
        super().__init__(
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            preprocessor=preprocessor,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )
        if self.scaling_config.num_workers is None:
            self.scaling_config = replace(self.scaling_config, num_workers=1)
        without_arguments(train_loop_per_worker, None, "train_loop_per_worker", "train_loop_config")
        self._loop = train_loop_per_worker
        self._loop_config = train_loop_config
        self._backend_config = checked_config("backend_config", backend_config, BackendConfig)
        self._data_config = merged_config(dataset_config, self.datasets)
        if validation_config is not None:
            self.validation_config = checked_config("validation_config", validation_config, ValidationConfig)

    def get_dataset_config(self) -> Any:
        """Returns who gets which data: the `DataConfig` you passed, or a copy of the dict of `DatasetConfig` in use."""
        return copy(self._data_config)

    def preprocess_datasets(self) -> None:
        """Makes the datasets ready: calls functions, applies the preprocessor. Call super if you override it."""
        self.datasets = prepared(self.datasets, self.preprocessor, self._data_config)

    def training_loop(self) -> None:
        """Runs the function on the workers, and hands over what it reports. Call super if you override it."""
        function = without_arguments(self._loop, self._loop_config)
        plan = FitPlan(
            function,
            self._backend_config,
            self.scaling_config,
            self.datasets,
            self._data_config,
            self.preprocessor,
            self.validation_config,
        )
        self._drive(plan)

    @classmethod
    def restore(  # type: ignore[override]  # its second argument is the function, as in Ray
        cls: type[TrainerType],
        path: str | Path,
        train_loop_per_worker: Callable[..., Any] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        *,
        storage_filesystem: Any = None,
        **replaced: Any,
    ) -> TrainerType:
        """The trainer of a run that was interrupted or failed; its `fit` continues the run from its last checkpoint.

        Loading it runs code that it names: restore only runs that you trust.

        Args:
            path: The folder with the run's name, or its URI.
            train_loop_per_worker: Another function; None for that of the run.
            train_loop_config: Another argument of the function; None for that of the run.
            storage_filesystem: A `pyarrow.fs.FileSystem`, for which `path` is a path.
            **replaced: Other arguments of the trainer that are to be other ones. Datasets are not saved with a run:
                pass them again, under the same names.

        Raises:
            ValueError: There is no run, or datasets are missing or others than it had.
        """
        replaced |= {"train_loop_per_worker": train_loop_per_worker, "train_loop_config": train_loop_config}
        return super().restore(path, storage_filesystem, **replaced)

    def _check(self) -> None:
        super()._check()
        scaling, max_failures = self.scaling_config, self.run_config.failure_config.max_failures
        workers = scaling.worker_range
        check_spares(scaling.spare_workers, scaling.elastic)
        if scaling.elastic:
            check_elastic(self._backend_config, workers, scaling.num_gpus_per_worker, as_max_retries(max_failures))

    def _train(self) -> None:
        self.setup()
        self.preprocess_datasets()
        self.training_loop()

    @property
    def _trial_config(self) -> dict[str, Any]:
        return {"train_loop_config": dict(self._loop_config)} if isinstance(self._loop_config, Mapping) else {}
