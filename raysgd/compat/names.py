"""Lists names of `ray.util.sgd` and the former `ray.train` that raysgd defines elsewhere or has renamed."""

from __future__ import annotations

from raysgd.core.imports import lazy_names

MOVED = {
    "raysgd.tf.tf_trainer": {"TFTrainable": "raysgd.tf.tf_trainable"},
    "raysgd.torch.torch_trainer": {"BaseTorchTrainable": "raysgd.torch.torch_trainable"},
    "raysgd.train.backend": {
        "BackendExecutor": "raysgd.train.executor",
        "CheckpointManager": "raysgd.train.checkpoint",
        "SGDBackendError": "raysgd.exceptions:TrainBackendError",
    },
    "raysgd.train.callbacks.logging": {"TrainCallbackLogdirManager": "raysgd.train.callbacks.logging:LogdirManager"},
    "raysgd.train.trainer": {
        "BaseTrainer": "raysgd.train.base_trainer",
        "GenDataset": "raysgd.train.base_trainer",
        "TrainingFailedError": "raysgd.exceptions",
        "SGDIterator": "raysgd.train.trainer:TrainingIterator",
        "SGDWorkerGroup": "raysgd.train.trainer:TrainWorkerGroup",
    },
}
"""For each module of raysgd, the old names that it exports although it does not define them.

The value of a name is the module that defines it, or `module:name` if the name differs there.
"""


def former_names(module: str) -> None:
    """Make a module of raysgd export the old names that `MOVED` lists for it. `module` is the module's `__name__`."""
    lazy_names(module, MOVED.get(module, {}))
