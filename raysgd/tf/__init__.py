"""Class-based distributed training for TensorFlow: Keras 3 and tf_keras.

What it guarantees:

* One optimizer step of N workers is the step of one process on the global batch, also where the shares are uneven.
* `train()` and `validate()` report, on any number of workers, the numbers that one process over the same samples would.
* A worker that dies costs at most the call in progress; the call is run again from the state before it.

What it leaves to others: the model, the loss and the data are the user's; `fit` is Keras's. Importing this package
loads no TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports import lazy_names

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
