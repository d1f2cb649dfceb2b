"""Trains a Keras model of handwritten digits on two workers, with an operator class, and tests the saved model.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation, and the
remaining 20 % only test the result.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running  # isort: split

import keras
import numpy as np
import tensorflow as tf

from raysgd import TFTrainer
from raysgd.tf import TrainingOperator


class DigitsOperator(TrainingOperator):
    """Defines the model and the data of each worker. Workers see different samples and keep their models in sync."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer, self.loss, _ = self.register(
            models=keras.Sequential(
                [
                    keras.Input([8, 8]),
                    keras.layers.Reshape([8, 8, 1]),
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
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2"),
            ],
        )
        train, validation, _ = load_digits()
        dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[1]))
        self.register_data(
            train_dataset=dataset.batch(config["batch_size"]),
            validation_dataset=tf.data.Dataset.from_tensor_slices(validation).batch(config["batch_size"]),
        )


def train(num_epochs: int, **options: Any) -> float:
    """Train with these trainer options. Return the accuracy on the test data."""
    config = {"lr": 0.002, "batch_size": 64}  # 64 samples in each step, over all workers
    with (
        tempfile.TemporaryDirectory(prefix="raysgd-") as folder,
        TFTrainer(
            training_operator_cls=DigitsOperator, config=config, seed=0, split_batches=True, **options
        ) as trainer,
    ):
        for _ in range(num_epochs):
            trained, validated = trainer.train(), trainer.validate()
            print(
                f"epoch {trained['epoch']:2d}: train loss {trained['train_loss']:.3f}, "
                f"validation loss {validated['val_loss']:.3f}, accuracy {validated['val_accuracy']:.3f}, "
                f"among the first two {validated['val_top_2']:.3f}",
                flush=True,
            )
        trainer.save(Path(folder) / "digits.npz")
        trainer.load(Path(folder) / "digits.npz")
        model = trainer.get_model()
    *_, (images, digits) = load_digits()
    return float(np.mean(np.argmax(model.predict(images, verbose=0), axis=1) == digits))


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 1 if args.smoke_test else 8
    with ray_running(args):
        found = [train(num_epochs, **options) for options in one_process_then_workers(args)]
    print(f"accuracy on held-out digits: {found[-1]:.3f}, of one process {found[0]:.3f}")
    print_result(args, test_accuracy=found[-1], test_accuracy_of_one_process=found[0], epochs=num_epochs)


if __name__ == "__main__":
    main()
