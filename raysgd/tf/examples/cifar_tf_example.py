"""Trains a small convolutional network on CIFAR-10 with creator functions, like programs for `ray.util.sgd`.

On first use, Keras downloads the images (170 MB). A smoke test uses noise instead. Do not rename `main`, because
existing programs and tests import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.tf.tf_trainer import TFTrainer

NUM_CLASSES = 10
_NUM_EPOCHS = 3
_SHAPE = (32, 32, 3)


def model_creator(config: dict[str, Any]) -> Any:
    """Return a compiled network with two convolutional blocks and a dense layer."""
    layers = tf.keras.layers
    blocks = [
        [
            layers.Conv2D(num_filters, 3, padding="same", activation="relu"),
            layers.Conv2D(num_filters, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
        ]
        for num_filters in (32, 64)
    ]
    head = [layers.Flatten(), layers.Dense(config["num_hidden"], activation="relu"), layers.Dropout(0.5)]
    model = tf.keras.Sequential(
        [layers.Input(_SHAPE), *blocks[0], *blocks[1], *head, layers.Dense(NUM_CLASSES, activation="softmax")]
    )
    optimizer = tf.keras.optimizers.RMSprop(config["lr"])
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data_creator(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return shuffled training images and test images, scaled to 0..1."""
    train, test = _noise() if config["smoke_test"] else tf.keras.datasets.cifar10.load_data()
    train_dataset, test_dataset = (
        tf.data.Dataset.from_tensor_slices((images, labels.astype("int32"))) for images, labels in (train, test)
    )
    train_dataset = train_dataset.shuffle(len(train[1])).map(_scaled)
    if config["augment_data"]:
        train_dataset = train_dataset.map(_augmented)
    return train_dataset.batch(config["batch_size"]), test_dataset.map(_scaled).batch(config["batch_size"])


def main(
    smoke_test: bool, num_replicas: int, use_gpu: bool = False, augment_data: bool = False, batch_size: int = 32
) -> dict[str, float]:
    """Train and evaluate, print the results of each epoch, and return the last results.

    Args:
        smoke_test: Whether to only check that the example runs, with one epoch of a smaller network on a few noise
            images.
        num_replicas: Number of workers.
        use_gpu: Whether each worker gets a GPU.
        augment_data: Whether to randomly flip and crop the images.
        batch_size: Images per step over all workers.
    """
    config = {
        "smoke_test": smoke_test,
        "augment_data": augment_data,
        "batch_size": batch_size,
        "num_hidden": 16 if smoke_test else 512,
        "lr": 1e-4,
    }
    results: dict[str, float] = {}
    with TFTrainer(model_creator, data_creator, config=config, num_replicas=num_replicas, use_gpu=use_gpu) as trainer:
        for _ in range(1 if smoke_test else _NUM_EPOCHS):
            results = {**trainer.train(), **trainer.validate()}
            print(results)
    return results


def _noise() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(0)
    return [
        (generator.integers(0, 256, (size, *_SHAPE), dtype="uint8"), generator.integers(0, NUM_CLASSES, (size, 1)))
        for size in (64, 32)
    ]


def _scaled(image: Any, label: Any) -> tuple[Any, Any]:
    return tf.cast(image, tf.float32) / 255, label


def _augmented(image: Any, label: Any) -> tuple[Any, Any]:
    padded = tf.pad(tf.image.random_flip_left_right(image), [[4, 4], [4, 4], [0, 0]])
    return tf.image.random_crop(padded, _SHAPE), label


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    main(args.smoke_test, args.num_workers, args.use_gpu)
