"""Creators and operators that the tests train, small enough to be started by the dozen.

They work with whatever `tf.keras` is in the process that calls them: Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raysgd.tf import TrainingOperator

NUM_FEATURES = 4

_DEFAULTS = {
    "num_samples": 21,
    "num_test_samples": 13,
    "batch_size": 4,
    "optimizer": "sgd",
    "lr": 0.1,
    "layers": "dense",
    "options": {},
    "compile": {},
}


def setting(config: dict[str, Any], name: str) -> Any:
    return config.get(name, _DEFAULTS[name])


def samples(number: int, seed: int = 0) -> tuple[Any, Any]:
    """Features and target."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((number, NUM_FEATURES)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) + 0.1 * generator.standard_normal((number, 1))).astype("float32")


def make_data(config: dict[str, Any]) -> tuple[Any, Any]:
    import tensorflow as tf

    train = tf.data.Dataset.from_tensor_slices(samples(setting(config, "num_samples")))
    test = tf.data.Dataset.from_tensor_slices(samples(setting(config, "num_test_samples"), seed=1))
    if config.get("shuffles"):
        train = train.shuffle(setting(config, "num_samples"))
    return train.batch(setting(config, "batch_size")), test.batch(setting(config, "batch_size"))


def make_layers(config: dict[str, Any]) -> list[Any]:
    import tensorflow as tf

    layers = tf.keras.layers
    head = {
        "dense": lambda: [layers.Dense(8, activation="tanh")],
        "batch_norm": lambda: [layers.Dense(8), layers.BatchNormalization(), layers.ReLU()],
        "regularized": lambda: [layers.Dense(8, kernel_regularizer="l2")],
        "embedding": lambda: [
            layers.Lambda(lambda x: tf.cast(tf.abs(x * 3) % 5, tf.int32)),
            layers.Embedding(5, 3),
            layers.Flatten(),
        ],
        "sequences": lambda: [layers.Reshape([2, 2]), layers.Dense(3), layers.Flatten()],
        "dropout": lambda: [layers.Dense(8), layers.Dropout(0.5)],
    }[setting(config, "layers")]()
    first = [] if config.get("unbuilt") else [layers.Input([NUM_FEATURES])]
    return [*first, *head, layers.Dense(1, dtype="float32")]


def make_optimizer(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    kinds = {"sgd": tf.keras.optimizers.SGD, "adam": tf.keras.optimizers.Adam}
    return kinds[setting(config, "optimizer")](setting(config, "lr"), **setting(config, "options"))


def make_model(config: dict[str, Any]) -> Any:
    """Compiled; with the same weights each time it is made with the same config."""
    import tensorflow as tf

    if "policy" in config:
        tf.keras.mixed_precision.set_global_policy(config["policy"])
    try:
        tf.keras.utils.set_random_seed(7)
        model = tf.keras.Sequential(make_layers(config))
        metrics = ["mae", tf.keras.metrics.TruePositives(0.5, name="hits")] if config.get("counts") else ["mae"]
        options = {"loss": "mse", "metrics": metrics, **setting(config, "compile")}
        model.compile(optimizer=make_optimizer(config), **options)
    finally:
        if "policy" in config:
            tf.keras.mixed_precision.set_global_policy("float32")
    return model


def make_model_with_a_step_of_its_own(config: dict[str, Any]) -> Any:
    """Two optimizers train a part each, one clips: attributes of it, or with `hides_optimizers` of nothing."""
    import tensorflow as tf

    class Model(tf.keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizers[0].apply_gradients(zip(gradients[:2], variables[:2], strict=True))
            optimizers[1].apply_gradients(zip(gradients[2:], variables[2:], strict=True))
            return {"loss": loss}

    tf.keras.utils.set_random_seed(7)
    model = Model(make_layers(config))
    optimizers = [tf.keras.optimizers.SGD(0.1, global_clipnorm=0.5), tf.keras.optimizers.Adam(0.05)]
    if not config.get("hides_optimizers"):
        model.first, model.others = optimizers[0], {"second": optimizers[1]}
    model.compile(loss="mse")
    return model


class Line(TrainingOperator):
    """The same as an operator."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        tf.keras.utils.set_random_seed(7)
        self.model, self.optimizer, self.loss, _ = self.register(
            models=tf.keras.Sequential(make_layers(config)),
            optimizers=make_optimizer(config),
            loss=tf.keras.losses.MeanSquaredError(),
            metrics=[tf.keras.metrics.MeanAbsoluteError(name="mae")],
        )
        train, test = make_data(config)
        self.register_data(train_dataset=train, validation_dataset=test, sharding=config.get("sharding"))


class Unfreezes(Line):
    """Trains the first layer from the second pass on, with another optimizer, which it may register."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.model.layers[0].trainable = False

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        if epoch_idx == 1:
            self.model.layers[0].trainable = True
            self.optimizer = make_optimizer(self.config)
            if self.config["registers"]:
                _, self.optimizer = self.register(models=self.model, optimizers=self.optimizer)
        return super().train_epoch(iterator, info, num_steps, epoch_idx)


class TrainsMore(Line):
    """Trains a layer that it does not register."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        layer = tf.keras.layers.Dense(1)
        layer.build([None, 1])
        self.optimizer = self.register(models=[self.model, self.model], optimizers=make_optimizer(config))[1]
        self.more = layer

    def train_step(self, batch: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.more(self.model(x)) - y) ** 2)
        variables = [*self.model.trainable_variables, *self.more.trainable_variables]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"train_loss": loss}
