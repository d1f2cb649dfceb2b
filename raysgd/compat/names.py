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
"""For each module the names that it also offers, and their places: `module`, or `module:name` if renamed."""


def former_names(module: str) -> None:
    """Let a module, given by its `__name__`, offer its former names."""
    lazy_names(module, MOVED.get(module, {}))
