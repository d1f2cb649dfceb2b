"""Names of the old library, such as `ray.util.sgd`, that raysgd has in another module or under another name."""

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
"""For each raysgd module, the old names that it also exports, and where each is defined: `module` or `module:name`."""


def former_names(module: str) -> None:
    """Make a module also export the old names that `MOVED` lists for it. `module` is its `__name__`."""
    lazy_names(module, MOVED.get(module, {}))
