"""Trains a Keras model of handwritten digits on two workers, class-based, and tests what was saved.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn. 64 % are trained on, 16 % show during the
training how it goes, and the remaining 20 % only test the result.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported: it says a lot otherwise

import keras
import numpy as np
import ray
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from raysgd import TFTrainer
from raysgd.tf import TrainingOperator
from raysgd.utils import BATCH_SIZE

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load_data() -> tuple[Arrays, Arrays, Arrays]:
    """Returns train, validation and test data, the same ones every time."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    rest, test = train_test_split(np.arange(len(digits)), test_size=0.2, stratify=digits, random_state=0)
    train, validation = train_test_split(rest, test_size=0.2, stratify=digits[rest], random_state=0)
    train, validation, test = [(images[part], digits[part]) for part in (train, validation, test)]
    return train, validation, test


class DigitsOperator(TrainingOperator):
    """What each worker trains, and on what. Workers take different samples and keep equal models."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer, self.loss, _ = self.register(
            models=keras.Sequential(
                [
                    keras.Input([8, 8, 1]),
                    keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
                    keras.layers.BatchNormalization(),
                    keras.layers.ReLU(),
                    keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                    keras.layers.MaxPool2D(),
                    keras.layers.Flatten(),
                    keras.layers.Dropout(0.5),
                    keras.layers.Dense(10),
                ]
            ),
            optimizers=keras.optimizers.Adam(config["lr"]),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")],
        )
        train, validation, _ = load_data()
        dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[1]))
        self.register_data(
            train_dataset=dataset.batch(config[BATCH_SIZE]),
            validation_dataset=tf.data.Dataset.from_tensor_slices(validation).batch(config[BATCH_SIZE]),
        )


def train(trainer: TFTrainer, num_epochs: int) -> None:
    for _ in range(num_epochs):
        trained, validated = trainer.train(), trainer.validate()
        print(
            f"epoch {trained['epoch']:2d}: train loss {trained['train_loss']:.3f} on {trained['num_samples']} samples, "
            f"validation loss {validated['val_loss']:.3f}, accuracy {validated['val_accuracy']:.3f}, "
            f"among the first two {validated['val_top_2']:.3f}",
            flush=True,
        )


def start_ray(address: str | None, num_workers: int) -> None:
    """Connects to a running cluster, or starts one on this machine for as long as this program runs."""
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        num_cpus = max(num_workers, os.cpu_count() or 1)
        options.update(address="local", num_cpus=num_cpus, include_dashboard=False)
    else:
        options.update(address=address)
    ray.init(**options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2, help="processes that train together (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="only one epoch, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    began, num_epochs = time.monotonic(), 1 if args.smoke_test else 8

    start_ray(args.address, args.num_workers)
    config = {"lr": 0.002, BATCH_SIZE: 64}  # 64 samples in each step, however many workers share them
    print(f"training on the digits of scikit-learn with {args.num_workers} worker(s)", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="raysgd-") as folder,
        TFTrainer(
            training_operator_cls=DigitsOperator,
            config=config,
            num_workers=args.num_workers,
            use_gpu=args.use_gpu,
            seed=0,
        ) as trainer,
    ):
        train(trainer, num_epochs)
        trainer.save(Path(folder) / "digits.npz")
        trainer.load(Path(folder) / "digits.npz")
        model = trainer.get_model()
    ray.shutdown()

    *_, (images, digits) = load_data()
    test_accuracy = float(np.mean(np.argmax(model.predict(images, verbose=0), axis=1) == digits))
    print(f"accuracy on {len(digits)} held-out digits: {test_accuracy:.3f}")
    seconds = round(time.monotonic() - began, 1)
    result = {"test_accuracy": test_accuracy, "num_workers": args.num_workers, "epochs": num_epochs, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
