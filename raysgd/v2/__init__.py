"""`ray.util.sgd.v2` as it was: the names of `raysgd.train` under their first names, strict outside of a run."""

from raysgd.exceptions import TrainBackendError as SGDBackendError
from raysgd.train import BackendConfig, CheckpointStrategy, Trainer
from raysgd.train import TrainingCallback as SGDCallback
from raysgd.train import TrainingIterator as SGDIterator
from raysgd.train import TrainWorkerGroup as SGDWorkerGroup
from raysgd.train._strict import load_checkpoint, local_rank, report, save_checkpoint, world_rank

__all__ = [
    "BackendConfig",
    "CheckpointStrategy",
    "SGDBackendError",
    "SGDCallback",
    "SGDIterator",
    "SGDWorkerGroup",
    "Trainer",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
]


def __getattr__(name: str) -> object:
    """Import the config of a framework when it is first asked for."""
    if name == "TorchConfig":
        from raysgd.train.torch import TorchConfig

        return TorchConfig
    if name == "TensorflowConfig":
        from raysgd.train.tensorflow import TensorflowConfig

        return TensorflowConfig
    if name == "HorovodConfig":
        from raysgd.train.horovod import HorovodConfig

        return HorovodConfig
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
