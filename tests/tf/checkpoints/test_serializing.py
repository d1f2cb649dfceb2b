"""Models as text."""

from __future__ import annotations

import importlib
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
