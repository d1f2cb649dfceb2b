"""Models as text."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.tf.objects import registration
from raysgd.tf.objects.registration import model_from_json, model_to_json
from tests.tf.models import samples


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def small(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(3)])


def own_loss(target: Any, output: Any) -> Any:
    return (target - output) ** 2


def test_a_compiled_model_keeps_what_it_has(keras: Any) -> None:
    model = small(keras)
    model.compile(optimizer="adam", loss=own_loss)
    copy = model_from_json(model_to_json(model), {"own_loss": own_loss})
    assert type(copy.optimizer).__name__ == "Adam"
    x = np.zeros((2, 2), "float32")
    copy.set_weights(model.get_weights())
    assert copy.evaluate(x, x[:, :1], verbose=0) == model.evaluate(x, x[:, :1], verbose=0)


@pytest.mark.parametrize("has_input", [True, False])
def test_a_layer_that_was_adapted_normalizes_with_the_weights_that_it_gets(keras: Any, has_input: bool) -> None:
    x = np.random.default_rng(0).normal(3.0, 2.0, (32, 2)).astype("float32")
    adapted = keras.layers.Normalization()
    adapted.adapt(x)
    model = keras.Sequential([*([keras.layers.Input([2])] if has_input else []), adapted, keras.layers.Dense(1)])
    expected = model.predict(x, verbose=0)
    copy = model_from_json(model_to_json(model))
    copy.set_weights(model.get_weights())
    registration.take_weights_in(copy)
    assert np.array_equal(copy.predict(x, verbose=0), expected)


class Compiled(TrainingOperator):
    """Registers a compiled model with the optimizer that it is compiled with, or with another one."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        keras = importlib.import_module(config["keras"])
        keras.mixed_precision.set_global_policy(config["policy"])
        try:
            layers = [keras.layers.Input([4]), keras.layers.Dense(1, dtype=config["policy_of_layer"])]
            model, adam = keras.Sequential(layers), keras.optimizers.Adam()
            model.compile(optimizer=adam, loss="mse")
        finally:
            keras.mixed_precision.set_global_policy("float32")
        own = model.optimizer if config["keras"] == "tf_keras" else adam  # tf_keras does not wrap an optimizer twice
        registered = own if config["registers_own"] else keras.optimizers.SGD()
        loss = keras.losses.MeanSquaredError()
        self.model, self.optimizer, self.loss = self.register(models=model, optimizers=registered, loss=loss)
        self.register_data(train_dataset=tf.data.Dataset.from_tensor_slices(samples(8)).batch(4))


@pytest.mark.parametrize(
    ("name", "policies", "registers_own"),
    [
        ("keras", ("float32", "float32"), True),
        ("keras", ("float32", "float32"), False),
        ("keras", ("mixed_float16", "mixed_float16"), True),
        ("keras", ("float32", "mixed_float16"), True),  # only the registered one scales the loss
        ("tf_keras", ("float32", "float32"), True),
        ("tf_keras", ("float32", "float32"), False),
        ("tf_keras", ("mixed_float16", "mixed_float16"), True),
    ],
)
def test_a_model_comes_with_the_state_of_its_optimizer_if_that_is_registered(
    name: str, policies: tuple[str, str], registers_own: bool
) -> None:
    policy, policy_of_layer = policies
    config = {"keras": name, "policy": policy, "policy_of_layer": policy_of_layer, "registers_own": registers_own}
    with TFTrainer(training_operator_cls=Compiled, use_local=True, config=config, seed=1) as trainer:
        for _ in range(3):  # the first steps in float16 may be left out
            trainer.train()
        model, state = trainer.get_model(), trainer.state_dict()
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), state["models"][0], strict=True))
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert type(optimizer).__name__ == "Adam"
    assert (int(optimizer.iterations.numpy()) > 0) == registers_own
