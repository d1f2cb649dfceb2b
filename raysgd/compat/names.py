"""Names that programs for the old library import from where they no longer are, or under which they no longer go."""

from __future__ import annotations

from raysgd._imports import lazy_names

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
"""For each module the names that are found there too, and where they are: `module`, or `module:name` if renamed."""


def former_names(module: str) -> None:
    """Let a module, given by its `__name__`, find those of these names that are looked for in it."""
    lazy_names(module, MOVED.get(module, {}))
