"""Trains a small network to learn the identity function, from an `MLDataset`, with TensorFlow.

Data: 6,400 computed numbers from 0 to 1; each number is its own label. Do not rename anything here, because existing
programs and tests import these names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from raysgd.data.examples._points import dataset_creator

__all__ = ["dataset_creator", "main", "make_data_creator", "model_creator"]


def model_creator(config: dict[str, Any]) -> Any:
    """Return a compiled model with one hidden layer of 128 units. `lr` is Adam's learning rate, 0.0001 by default."""
    import tensorflow as tf

    layers = [tf.keras.layers.Input([1]), tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile(optimizer=tf.keras.optimizers.Adam(config.get("lr", 1e-4)), loss="mse")
    return model


def make_data_creator(tf_ds: Any) -> Callable[[dict[str, Any]], tuple[Any, None]]:
    """Return a data creator for `TFTrainer` that repeats its worker's shard of a dataset indefinitely.

    Args:
        tf_ds: A `TFMLDataset` with as many shards as there are workers.
    """

    def data_creator(config: dict[str, Any]) -> tuple[Any, None]:
        from raysgd.tf import prepare_dataset_shard

        rows = tf_ds.get_shard(shard_index=_rank()).batch(config["batch_size"]).repeat()
        return prepare_dataset_shard(rows), None

    return data_creator


def _rank() -> int:
    """Return the worker's rank. With a single worker, return -1, for which `get_shard` returns all shards."""
    cluster = os.environ.get("TF_CONFIG")
    return int(json.loads(cluster)["task"]["index"]) if cluster else -1


def main(num_replicas: int = 2, num_epochs: int = 5, num_steps: int = 100) -> float:
    """Train the network, print its output for the input 0.5, and return that output.

    Args:
        num_replicas: Number of workers and of shards.
        num_epochs: Number of epochs.
        num_steps: Steps per epoch.
    """
    import numpy as np

    from raysgd.tf import TFTrainer

    dataset = dataset_creator(num_replicas).to_tf(feature_columns=[0], label_column=1)
    config = {"batch_size": 32, "lr": 0.01, "fit_config": {"steps_per_epoch": num_steps, "verbose": 0}}
    with TFTrainer(model_creator, make_data_creator(dataset), config=config, num_replicas=num_replicas) as trainer:
        for _ in range(num_epochs):
            print(trainer.train())
        [[prediction]] = trainer.get_model().predict(np.array([[0.5]]), verbose=0)
    print(f"the network takes 0.5 for {prediction:.3f}")
    return float(prediction)


if __name__ == "__main__":
    main()
