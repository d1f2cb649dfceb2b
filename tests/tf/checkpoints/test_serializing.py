"""Models as text: what they are compiled with goes along where Keras can make it again."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np
import pytest

from raysgd.tf.checkpoints.serializing import model_from_json, model_to_json
from raysgd.tf.objects import registration


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def small(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(3)])


def own_loss(target: Any, output: Any) -> Any:
    return (target - output) ** 2


def test_optimizer_loss_and_metrics_go_along(keras: Any) -> None:
    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    metrics = [keras.metrics.MeanAbsoluteError(name="distance")]
    text = model_to_json(small(keras), optimizer, keras.losses.MeanSquaredError(), metrics)
    model = model_from_json(text)
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    x, y = np.zeros((1, 2)), np.ones((1, 3))
    assert model.evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "distance"}


def test_a_model_that_is_compiled_keeps_what_it_has(keras: Any) -> None:
    model = small(keras)
    model.compile(optimizer="adam", loss="mse")
    text = model_to_json(model, keras.optimizers.SGD(0.25), keras.losses.MeanSquaredError())
    assert type(model_from_json(text).optimizer).__name__ == "Adam"


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


def test_a_loss_that_keras_does_not_know_has_to_be_named(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = model_to_json(small(keras), keras.optimizers.SGD(0.25), lambda target, output: own_loss(target, output))
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        assert getattr(model_from_json(text), "optimizer", None) is None
    assert "handed out without its optimizer" in caplog.text
    text = model_to_json(small(keras), keras.optimizers.SGD(0.25), own_loss)
    assert model_from_json(text, {"own_loss": own_loss}).optimizer is not None
