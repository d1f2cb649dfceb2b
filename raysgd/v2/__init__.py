"""`ray.util.sgd.v2` as it was: `raysgd.train` with its first names and its first order of arguments.

Its functions are strict: outside of a run they raise. The configs of the frameworks are here too, but not in `__all__`:
`import *` has to work without the frameworks.
"""

from typing import Any

from raysgd._imports import lazy_names
from raysgd.exceptions import MissingFrameworkError
from raysgd.exceptions import TrainBackendError as SGDBackendError
from raysgd.train import BackendConfig, CheckpointStrategy, TrainingCallback, TrainingIterator
from raysgd.train import TrainingCallback as SGDCallback
from raysgd.v2._strict import (
    get_dataset_shard,
    load_checkpoint,
    local_rank,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)
from raysgd.v2.trainer import SGDIterator, SGDWorkerGroup, Trainer

__all__ = [
    "BackendConfig",
    "CheckpointStrategy",
    "SGDBackendError",
    "SGDCallback",
    "SGDIterator",
    "SGDWorkerGroup",
    "Trainer",
    "TrainingCallback",
    "TrainingIterator",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

_find = lazy_names(
    __name__,
    {
        "HorovodConfig": "raysgd.train.horovod",
        "TensorflowConfig": "raysgd.train.tensorflow",
        "TorchConfig": "raysgd.train.torch",
    },
)


def __getattr__(name: str) -> Any:
    """The config of a framework, imported when it is first asked for.

    Raises:
        MissingFrameworkError: That is not installed.
    """
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(str(error), name=error.name) from error
