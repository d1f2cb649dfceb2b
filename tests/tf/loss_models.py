"""Creators and operators whose losses are no means over the samples, or that report in ways of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from raysgd.tf import TrainingOperator
from tests.tf.models import NUM_FEATURES, samples

NUM_STEPS_OF_SEQUENCE = 5


def weights_of_samples(number: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).uniform(0.1, 3.0, number).astype("float32")


def reduction_by_weights(keras: Any) -> str:
    """tf_keras has no mean by weights: there the weights go into the mean over the samples."""
    return "mean_with_sample_weight" if "tf_keras" not in keras.losses.Loss.__module__ else "sum_over_batch_size"


def cubed_error(y_true: Any, y_pred: Any) -> Any:
    """The mean of a batch, as one number."""
    import tensorflow as tf

    return tf.reduce_mean(tf.abs(y_true - y_pred) ** 3)


def make_model_of_losses(config: dict[str, Any]) -> Any:
    """A sum, a mean by weights, a loss of its own and a regularization, all at once; with two metrics."""
    import tensorflow as tf

    keras = tf.keras

    class Own(keras.losses.Loss):  # type: ignore[misc, name-defined]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(tf.abs(y_true - y_pred), axis=-1)

    keras.utils.set_random_seed(7)
    inputs = keras.layers.Input([NUM_FEATURES])
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b", "c")})
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.5),
        loss={
            "a": keras.losses.MeanSquaredError(reduction="sum"),
            "b": keras.losses.Huber(reduction=reduction_by_weights(keras)),
            "c": Own(reduction="sum"),
        },
        loss_weights={"a": 0.3, "b": 1.0, "c": 0.2},
        metrics={"a": ["mae", cubed_error]},
        weighted_metrics={"b": ["mae"]},
        run_eagerly=config.get("run_eagerly", False),
    )
    return model


def make_data_of_losses(config: dict[str, Any]) -> tuple[Any, Any]:
    import tensorflow as tf

    def of(number: int, seed: int) -> Any:
        x, y = samples(number, seed)
        weights = {name: weights_of_samples(number, index) for index, name in enumerate("abc")}
        return tf.data.Dataset.from_tensor_slices((x, dict.fromkeys("abc", y), weights)).batch(config["batch_size"])

    return of(21, 0), of(13, 1)


def make_masked_model(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(7)
    layers = [
        keras.layers.Input([NUM_STEPS_OF_SEQUENCE], dtype="int32"),
        keras.layers.Embedding(7, 4, mask_zero=True),
        keras.layers.SimpleRNN(4, return_sequences=True),
        keras.layers.Dense(7),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=config.get("ignore_class"))
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss, metrics=["accuracy"])
    return model


def make_masked_data(config: dict[str, Any]) -> tuple[Any, Any]:
    import tensorflow as tf

    def of(number: int, seed: int) -> Any:
        generator = np.random.default_rng(seed)
        tokens = generator.integers(1, 7, (number, NUM_STEPS_OF_SEQUENCE)).astype("int32")
        lengths = generator.integers(1, NUM_STEPS_OF_SEQUENCE + 1, (number, 1))
        tokens[np.arange(NUM_STEPS_OF_SEQUENCE) >= lengths] = 0
        return tf.data.Dataset.from_tensor_slices((tokens, tokens)).batch(config["batch_size"])

    return of(21, 0), of(13, 1)


def make_model_that_reports(config: dict[str, Any]) -> Any:
    """Keras's own pattern for a step: its results are those of its metrics, and a number of the last batch."""
    import tensorflow as tf

    keras = tf.keras

    class Model(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.told(loss, y, predicted)

        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            predicted = self(x, training=False)
            return self.told(tf.reduce_mean((y - predicted) ** 2), y, predicted)

        def told(self, loss: Any, y: Any, predicted: Any) -> dict[str, Any]:
            self.mean.update_state(loss, sample_weight=tf.shape(y)[0])
            self.error.update_state(y, predicted)
            return {"raw": loss, **{metric.name: metric.result() for metric in self.metrics}}

        @property
        def metrics(self) -> list[Any]:
            return [self.mean, self.error]

    keras.utils.set_random_seed(7)
    model = Model([keras.layers.Input([NUM_FEATURES]), keras.layers.Dense(1)])
    model.mean, model.error = keras.metrics.Mean(name="mean"), keras.metrics.RootMeanSquaredError(name="error")
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.MeanSquaredError(reduction="sum"))
    return model


class Weighted(TrainingOperator):
    """An operator with such a loss, under `config["loss"]`."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        keras = tf.keras
        keras.utils.set_random_seed(7)
        reduction = reduction_by_weights(keras) if config["loss"] == "weights" else config["loss"]
        model = keras.Sequential([keras.layers.Input([NUM_FEATURES]), keras.layers.Dense(1, kernel_regularizer="l2")])
        self.model, self.optimizer, self.loss = self.register(
            models=model,
            optimizers=keras.optimizers.SGD(0.05),
            loss=keras.losses.MeanSquaredError(reduction=reduction),
        )
        x, y = samples(21)
        data = tf.data.Dataset.from_tensor_slices((x, y, weights_of_samples(21))).batch(config["batch_size"])
        self.register_data(train_dataset=data, validation_dataset=data, sharding="global")


class Tokens(TrainingOperator):
    """A loss over the steps of sequences of different lengths, one of which is empty; says how many there were."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        keras = tf.keras
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Input([NUM_STEPS_OF_SEQUENCE]), keras.layers.Embedding(7, 4), keras.layers.Dense(7)]
        self.model, self.optimizer = self.register(
            models=keras.Sequential(layers), optimizers=keras.optimizers.SGD(0.5, momentum=0.5)
        )
        train, test = make_masked_data(config)
        self.register_data(train_dataset=train, validation_dataset=test, sharding="global")

    def forward(self, features: Any, target: Any, sample_weight: Any = None, training: bool = False) -> tuple[Any, ...]:
        import tensorflow as tf

        output = self.model(features, training=training)
        counts = tf.cast(target > 0, tf.float32)
        errors = tf.keras.losses.sparse_categorical_crossentropy(target, output, from_logits=True)
        weight = tf.reduce_sum(counts)
        return (
            output,
            tf.math.divide_no_nan(tf.reduce_sum(errors * counts), weight),
            weight * self.config.get("sign", 1),
        )
