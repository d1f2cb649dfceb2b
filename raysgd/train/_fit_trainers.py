"""The trainers of `fit` for PyTorch, TensorFlow and Horovod: each chooses how its workers are connected.

They are imported from `raysgd.train.torch`, `raysgd.train.tensorflow` and `raysgd.train.horovod`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, ScalingConfig, checked_config
from raysgd.air.reports import ValidationConfig
from raysgd.host.protocol import Host
from raysgd.train.backend import BackendConfig, resolve
from raysgd.train.data_parallel_trainer import DataParallelTrainer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FurtherOptions(TypedDict, total=False):
    """The arguments of `DataParallelTrainer` that these trainers pass on."""

    scaling_config: ScalingConfig | None
    dataset_config: Any
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    metadata: dict[str, Any] | None
    preprocessor: Any
    resume_from_checkpoint: Checkpoint | None
    validation_config: ValidationConfig | None
    host: str | Host | None


class TorchTrainer(DataParallelTrainer):
    """Runs a function on several workers that are connected by a process group of `torch.distributed`.

    It has the name of `raysgd.TorchTrainer`, but is another class. Here you write the loop, as a function, and `fit`
    runs it once. There you write an operator, a class with a step, and the trainer calls it as often as you say, with
    the workers kept alive in between. See "Two ways to train with PyTorch" in the documentation.

    Args:
        train_loop_per_worker: The function. `prepare_model` and `prepare_data_loader` of `raysgd.train.torch` make
            what it has ready for several workers.
        train_loop_config: Its argument.
        torch_config: How the workers are connected. Default: NCCL where each has a GPU, else gloo.
        torch_backend: Another name of `torch_config`, from the guide of the old library.
        **options: As `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is wrong. Nothing was started.

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
    """Runs a function on several workers that know each other by `TF_CONFIG`.

    Make a `MultiWorkerMirroredStrategy` in it.

    Args:
        train_loop_per_worker: The function.
        train_loop_config: Its argument.
        tensorflow_config: How the workers are connected.
        tensorflow_backend: Another name of `tensorflow_config`, from the guide of the old library.
        **options: As `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is wrong. Nothing was started.
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
    """Runs a function on several workers that are connected by Horovod, which is initialized when the function begins.

    Args:
        train_loop_per_worker: The function.
        train_loop_config: Its argument.
        horovod_config: How the workers are connected.
        **options: As `DataParallelTrainer`: `scaling_config`, `run_config`, `datasets` and so on.

    Raises:
        ValueError, TypeError: An argument is wrong. Nothing was started.
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
    """The config of a framework out of its names; a new one if none was given.

    Raises:
        ValueError: There are two, or it is of another framework.
    """
    given = {name: config for name, config in configs.items() if config is not None}
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        raise ValueError(f"{names} are two names of one option: pass `{framework}_config`.")
    default = resolve(framework)
    for name, config in given.items():
        chosen: BackendConfig = checked_config(name, config, type(default))
        return chosen
    return default
