"""Fits the line `y = x / 2` to generated points with creator functions, like programs for `ray.util.sgd`.

Do not rename anything here, because existing programs and tests import these names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.tf.tf_trainer import TFTrainer

NUM_TRAIN_SAMPLES, NUM_TEST_SAMPLES = 1000, 400
_NUM_EPOCHS = 2


def linear_dataset(size: int) -> Any:
    """Return `size` points on the line `y = x / 2`, with random x between 0 and 1."""
    x = np.random.default_rng(size).random((size, 1), dtype="float32")
    return tf.data.Dataset.from_tensor_slices((x, x / 2))


def simple_model(config: dict[str, Any]) -> Any:
    """Return a compiled model with two dense layers."""
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(10), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1)
    model.compile(optimizer=optimizer, loss="mean_squared_error", metrics=["mean_squared_error"])
    return model


def simple_dataset(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return training and test points, repeated forever. Each batch is a global batch."""
    batch_size = config["batch_size"]
    train, test = linear_dataset(NUM_TRAIN_SAMPLES), linear_dataset(NUM_TEST_SAMPLES)
    return train.repeat().batch(batch_size), test.repeat().batch(batch_size)


def create_config(batch_size: int) -> dict[str, Any]:
    """Return the config for `simple_model` and `simple_dataset`.

    With this config, the steps of an epoch use each point about once.
    """
    return {
        "batch_size": batch_size,
        "fit_config": {"steps_per_epoch": NUM_TRAIN_SAMPLES // batch_size},
        "evaluate_config": {"steps": NUM_TEST_SAMPLES // batch_size},
    }


def train_example(num_replicas: int = 1, batch_size: int = 128, use_gpu: bool = False) -> None:
    """Train and evaluate twice, and print the results.

    Args:
        num_replicas: Number of workers.
        batch_size: Samples per step over all workers.
        use_gpu: Whether each worker gets a GPU.
    """
    config = create_config(batch_size)
    with TFTrainer(simple_model, simple_dataset, config=config, num_replicas=num_replicas, use_gpu=use_gpu) as trainer:
        for _ in range(_NUM_EPOCHS):
            print({**trainer.train(), **trainer.validate()})
        [[half]] = trainer.get_model().predict(np.array([[0.5]]), verbose=0)
    print(f"half of 0.5 is about {half:.3f}")


def tune_example(num_replicas: int = 1, use_gpu: bool = False) -> Any:
    """Run two Ray Tune trials, and return the config of the trial with the lower loss on the test points.

    Args:
        num_replicas: Number of workers per trial.
        use_gpu: Whether each worker gets a GPU.
    """
    from ray import tune

    from raysgd.tf.tf_trainable import TFTrainable

    space = {
        "model_creator": simple_model,
        "data_creator": simple_dataset,
        "num_replicas": num_replicas,
        "use_gpu": use_gpu,
        "trainer_config": create_config(batch_size=128),
    }
    tuner = tune.Tuner(
        TFTrainable,
        param_space=space,
        tune_config=tune.TuneConfig(num_samples=2, metric="validation_loss", mode="min"),
        run_config=tune.RunConfig(stop={"training_iteration": _NUM_EPOCHS}, verbose=0),
    )
    return tuner.fit().get_best_result().config


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    train_example(args.num_workers, use_gpu=args.use_gpu)
