"""Names that programs for the old library import from their former modules, or under their former names."""

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
"""For each module, the names that it also exports, and their locations: `module`, or `module:name` if renamed."""


def former_names(module: str) -> None:
    """Make the module with this `__name__` export its former names too."""
    lazy_names(module, MOVED.get(module, {}))
