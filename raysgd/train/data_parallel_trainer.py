"""`DataParallelTrainer`: its `fit` runs a training function on several workers, each with its shard of the data.

The trainers for PyTorch, TensorFlow and Horovod determine how the workers are connected. Import them from
`raysgd.train.torch`, `raysgd.train.tensorflow` and `raysgd.train.horovod`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from raysgd.air.config import DatasetConfig, ScalingConfig, checked_config
from raysgd.train._workers import check_elastic
from raysgd.train.backend import BackendConfig, resolve
from raysgd.train.base_trainer import BaseTrainer, TrainerOptions, TrainerType, run_loop
from raysgd.train.fit.data import OWN_CONFIG, merged_config, prepared
from raysgd.train.fit.run import FitRun, num_restarts
from raysgd.train.utils import without_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DataParallelTrainer", "HorovodTrainer", "TensorflowTrainer", "TorchTrainer"]


class DataParallelTrainer(BaseTrainer):
    """Runs a training function on several workers and collects its reports in a `Result`.

    Every worker must call `raysgd.train.report(metrics, checkpoint=...)` the same number of times. The metrics of rank
    0 are the results. If the function fails or a worker is lost, the run fails. With `FailureConfig(max_failures=3)`,
    it restarts from its newest checkpoint up to three times. `FailureConfig` explains when the count starts again.

    To build a trainer with your own loop, derive from this class and pass the loop to `super().__init__`. To connect
    the workers differently, pass your own `BackendConfig`.

    Args:
        train_loop_per_worker: Training function that every worker runs. It takes either no argument or
            `train_loop_config`. Its return value on rank 0 becomes `Result.return_value`, if it is plain data.
        train_loop_config: Argument for the function.
        backend_config: How to connect the workers. Default: the workers run without a connection to each other.
        scaling_config: Number and resources of the workers. With `num_workers=(least, most)`, the run starts with as
            many workers as the resources allow, continues with the remaining workers after a failure, and grows again
            after a checkpoint.
        dataset_config: Which worker gets which data: a `DataConfig`, or a dict of `DatasetConfig`. By default, "train"
            is sharded, and every worker gets the other datasets in full.
        run_config: Options of the run: where it writes, which checkpoints it retains, and when it stops.
        datasets: Datasets by name, or functions that return a dataset; see `raysgd.train.get_dataset_shard`.
        metadata: A JSON-serializable dict that is added to each checkpoint.
        preprocessor: Ray Data preprocessor that is applied to all datasets before the function starts. If it has not
            been fit, it is first fit on the dataset "train". `dataset_config` can change both.
        resume_from_checkpoint: The checkpoint that `raysgd.train.get_checkpoint` returns until the function has
            reported a checkpoint.
        detached: A name, to let `fit` outlive this program; see `BaseTrainer`.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.

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

    _scaling_config_allowed_keys: ClassVar[list[str]] = [each.name for each in fields(ScalingConfig)]
    _dataset_config: ClassVar[Mapping[str, DatasetConfig]] = OWN_CONFIG

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        dataset_config: Any = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(**options)
        if self.scaling_config.num_workers is None:
            self.scaling_config = replace(self.scaling_config, num_workers=1)
        without_arguments(train_loop_per_worker, None, "train_loop_per_worker", "train_loop_config")
        self._loop = train_loop_per_worker
        self._loop_config = train_loop_config
        self._backend_config = checked_config("backend_config", backend_config, BackendConfig)
        self._data_config = merged_config(dataset_config, self.datasets, self._dataset_config)

    def get_dataset_config(self) -> Any:
        """Return the config that decides which worker gets which data: a `DataConfig`, or a dict of `DatasetConfig`."""
        return copy(self._data_config)

    def preprocess_datasets(self) -> None:
        """Prepare the datasets: call dataset functions and apply the preprocessor. Overrides must call `super`."""
        self.datasets = prepared(self.datasets, self.preprocessor, self._data_config)

    def training_loop(self) -> None:
        """Run the training function on the workers and process its reports. Call `super` if you override this."""
        function = without_arguments(self._loop, self._loop_config)
        assert self._job is not None, "`fit` sets it"
        run = FitRun(
            self._job,
            function,
            self._backend_config,
            self.scaling_config,
            self.datasets,
            self._data_config,
            self.preprocessor,
        )
        run.run()

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
        """Return the trainer of an interrupted or failed run. Its `fit` continues from the last checkpoint.

        Loading a trainer executes code that the folder names. Restore only runs that you trust.

        Args:
            path: The run's folder, or its URI.
            train_loop_per_worker: Training function to use instead; None for the run's own function.
            train_loop_config: Argument for the function to use instead; None for the run's own argument.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.
            **replaced: Other arguments of the trainer to change. Datasets are not saved with a run: pass them again,
                under the same names.

        Raises:
            ValueError: The folder contains no run, or the names of the datasets differ.
        """
        replaced |= {"train_loop_per_worker": train_loop_per_worker, "train_loop_config": train_loop_config}
        return super().restore(path, storage_filesystem, **replaced)

    def _check(self) -> None:
        super()._check()
        check_elastic(self._backend_config, self.scaling_config, num_restarts(self.run_config))

    def _settle_gpus(self) -> None:
        self.scaling_config = self.scaling_config.with_gpus_chosen(self._backend_config.view_of_driver())

    def _train(self) -> None:
        run_loop(self)

    @property
    def _trial_config(self) -> dict[str, Any]:
        return {"train_loop_config": dict(self._loop_config)} if isinstance(self._loop_config, Mapping) else {}


class FurtherOptions(TrainerOptions, total=False):
    """Arguments of `DataParallelTrainer` that `TorchTrainer` and the other trainers pass on to it."""

    dataset_config: Any


class TorchTrainer(DataParallelTrainer):
    """Runs a training function on several workers that are connected by a `torch.distributed` process group.

    This is not `raysgd.TorchTrainer`. Here you write the training loop as a function, and `fit` runs it once. There
    you write an operator, a class with a training step, and call the trainer as often as you like while the workers
    stay alive. `docs/train.md` compares the two.

    Args:
        train_loop_per_worker: Training function that every worker runs. It prepares its model and loader for several
            workers with `prepare_model` and `prepare_data_loader` from `raysgd.train.torch`.
        train_loop_config: Argument for the function.
        torch_config: How to connect the workers. Default: NCCL if each worker has a GPU, else gloo.
        torch_backend: Alias of `torch_config`, used in the old library's guide.
        **options: See `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.

    Examples:
        >>> from raysgd import train
        >>> from raysgd.train import ScalingConfig
        >>> from raysgd.train.torch import TorchTrainer, prepare_model
        >>> def train_loop():
        ...     import torch
        ...
        ...     model = prepare_model(torch.nn.Linear(1, 1))
        ...     train.report({"rank": train.get_context().get_world_rank()})
        >>> TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit().metrics[
        ...     "rank"
        ... ]  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: BackendConfig | None = None,
        torch_backend: BackendConfig | None = None,
        **options: Unpack[FurtherOptions],
    ) -> None:
        config = _chosen("torch", torch_config=torch_config, torch_backend=torch_backend)
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **options)


class TensorflowTrainer(DataParallelTrainer):
    """Runs a training function on several workers that find each other through `TF_CONFIG`.

    Create a `MultiWorkerMirroredStrategy` in the function.

    Args:
        train_loop_per_worker: Training function that every worker runs.
        train_loop_config: Argument for the function.
        tensorflow_config: How to connect the workers.
        tensorflow_backend: Alias of `tensorflow_config`, used in the old library's guide.
        **options: See `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        tensorflow_config: BackendConfig | None = None,
        tensorflow_backend: BackendConfig | None = None,
        **options: Unpack[FurtherOptions],
    ) -> None:
        config = _chosen("tensorflow", tensorflow_config=tensorflow_config, tensorflow_backend=tensorflow_backend)
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **options)


class HorovodTrainer(DataParallelTrainer):
    """Runs a training function on several workers that Horovod connects. `hvd.init()` is called before the function.

    Args:
        train_loop_per_worker: Training function that every worker runs.
        train_loop_config: Argument for the function.
        horovod_config: How to connect the workers.
        **options: See `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        horovod_config: BackendConfig | None = None,
        **options: Unpack[FurtherOptions],
    ) -> None:
        config = _chosen("horovod", horovod_config=horovod_config)
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **options)


def _chosen(framework: str, **configs: BackendConfig | None) -> BackendConfig:
    """Return the backend config that the user passed to a trainer, possibly under an alias, or a default config.

    Args:
        framework: Name of the trainer's framework.
        configs: The values that the user passed, by argument name.

    Raises:
        ValueError: Two configs were passed, or a config of another framework.
    """
    passed = {name: config for name, config in configs.items() if config is not None}
    if len(passed) > 1:
        names = " and ".join(f"`{name}`" for name in passed)
        raise ValueError(f"{names} are two names of one option: pass `{framework}_config`.")
    default = resolve(framework)
    for name, config in passed.items():
        return checked_config(name, config, type(default))
    return default
