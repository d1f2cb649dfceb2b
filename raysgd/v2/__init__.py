"""The former `ray.util.sgd.v2`: `raysgd.train` with the names and the argument order of that package.

Functions such as `report` raise an error if they are called outside a training function. `TorchConfig`,
`TensorflowConfig` and `HorovodConfig` can be imported from this package, but are not in `__all__`. Otherwise, `from
raysgd.v2 import *` would fail if one of these frameworks is not installed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from raysgd.core.imports import lazy_names
from raysgd.exceptions import MissingFrameworkError
from raysgd.exceptions import TrainBackendError as SGDBackendError
from raysgd.train import BackendConfig, CheckpointStrategy, TrainingCallback, TrainingIterator, session
from raysgd.train import TrainingCallback as SGDCallback
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
    """Import `TorchConfig`, `TensorflowConfig` or `HorovodConfig` when it is first used.

    Raises:
        MissingFrameworkError: The framework of the config is not installed.
    """
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(str(error), name=error.name) from error


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _strict(function: FunctionT) -> FunctionT:
    @wraps(function)
    def inside_only(*args: Any, **kwargs: Any) -> Any:
        if session.current_session() is None:
            raise ValueError(f"`{function.__name__}` was called outside a training function.")
        return function(*args, **kwargs)

    return inside_only  # type: ignore[return-value]


report = _strict(session.report)
save_checkpoint = _strict(session.save_checkpoint)
load_checkpoint = _strict(session.load_checkpoint)
world_rank = _strict(session.world_rank)
local_rank = _strict(session.local_rank)
world_size = _strict(session.world_size)
get_dataset_shard = _strict(session.get_dataset_shard)
