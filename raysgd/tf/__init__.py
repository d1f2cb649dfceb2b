"""Class-based distributed training for TensorFlow, with Keras 3 or tf_keras.

This package guarantees:

* An optimizer step of N workers equals a single-process step on the global batch, even if the shards are uneven.
* `train()` and `validate()` return the same results with any number of workers.
* If a worker dies, at most the work of the current call is lost, and usually only one step. In the worst case, the call
  is repeated from the state before the call.

You define the model, the loss and the data. Importing this package does not load TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.tf.objects.datasets import prepare_dataset_shard
    from raysgd.tf.tf_dataset import TFMLDataset
    from raysgd.tf.tf_trainable import TFTrainable
    from raysgd.tf.tf_trainer import TFTrainer
    from raysgd.tf.training_operator import TrainingOperator

__all__ = ["TFMLDataset", "TFTrainable", "TFTrainer", "TrainingOperator", "prepare_dataset_shard"]

lazy_names(
    __name__,
    {
        "TFMLDataset": "raysgd.tf.tf_dataset",
        "TFTrainable": "raysgd.tf.tf_trainable",
        "TFTrainer": "raysgd.tf.tf_trainer",
        "TrainingOperator": "raysgd.tf.training_operator",
        "prepare_dataset_shard": "raysgd.tf.objects.datasets",
    },
)
