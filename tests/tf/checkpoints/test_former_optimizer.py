"""Optimizer weights as the old library's files hold them, in optimizers of today: both train on alike."""

from __future__ import annotations

import functools
import importlib
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.tf import TFTrainer
from raysgd.tf.checkpoints import former_optimizer
from raysgd.tf.objects.registration import build_optimizer, variables_of_optimizer
from tests.tf.models import make_data, make_model, samples

# The slots of equal layers have equal shapes: there the order counts.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "rmsprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
}


def equal_layers(keras: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential([layers.Input([4]), layers.Dense(4), layers.Dense(4, use_bias=False), layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)  # a graph would take longer than the steps
    return model


def fit(model: Any) -> Any:
    x, y = samples(16)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def old_optimizer(name: str, **options: Any) -> Any:
    """Of the kind that there was when the old library was written."""
    return getattr(importlib.import_module("tf_keras").optimizers.legacy, name)(0.01, **options)


@functools.cache
def trained_with_the_old_one(case: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Weights of the model and of its optimizer after a training, and of the model after another one."""
    name, options = CASES[case]
    model = fit(equal_layers(importlib.import_module("tf_keras"), old_optimizer(name, **options)))
    weights, of_optimizer = model.get_weights(), model.optimizer.get_weights()
    return weights, of_optimizer, fit(model).get_weights()


# tf_keras keeps its slots under the same names, but for what these have.
ODD_IN_TF_KERAS = ("sgd", "amsgrad", "rmsprop")


@pytest.mark.long
@pytest.mark.parametrize(
    ("keras", "case"),
    [
        *(("keras", case) for case in CASES),
        *(pytest.param("tf_keras", case, marks=[pytest.mark.soak] * (case not in ODD_IN_TF_KERAS)) for case in CASES),
        ("legacy", "adam"),
    ],
)
def test_an_optimizer_goes_on_where_the_old_one_stopped(keras: str, case: str) -> None:
    name, options = CASES[case]
    weights, of_optimizer, expected = trained_with_the_old_one(case)
    module = importlib.import_module("keras" if keras == "keras" else "tf_keras")
    optimizers = module.optimizers.legacy if keras == "legacy" else module.optimizers
    new = equal_layers(module, getattr(optimizers, name)(0.01, **options))
    build_optimizer(new.optimizer, new.trainable_variables)
    values = former_optimizer.arranged(new.optimizer, of_optimizer)
    new.set_weights(weights)
    for variable, value in zip(variables_of_optimizer(new.optimizer), values, strict=True):
        variable.assign(value)
    fit(new)
    assert int(new.optimizer.iterations.numpy()) == 8
    for one, other in zip(expected, new.get_weights(), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_what_belongs_nowhere_is_refused_with_the_reason(keras: str) -> None:
    module = importlib.import_module(keras)

    def arranged(optimizer: Any, weights: list[Any]) -> list[Any]:
        model = equal_layers(module, optimizer)
        build_optimizer(model.optimizer, model.trainable_variables)
        return former_optimizer.arranged(model.optimizer, weights)

    adam = fit(equal_layers(importlib.import_module("tf_keras"), old_optimizer("Adam"))).optimizer.get_weights()
    with pytest.raises(ValueError, match="the file has none"):
        arranged(module.optimizers.Adam(), [])
    with pytest.raises(ValueError, match="of `Nadam` is not known; known are SGD, Adam"):
        arranged(module.optimizers.Nadam(), adam)
    with pytest.raises(
        ValueError, match="the 11 arrays in the file are not the number of steps and the slots of `SGD`"
    ):
        arranged(module.optimizers.SGD(), adam)


@pytest.mark.long
@pytest.mark.keras_in_turns("keras3")
def test_a_trainer_goes_on_from_a_file_of_the_old_library(
    keras_here: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the model that the file is of would have."""
    tf_keras = importlib.import_module("tf_keras")
    config = {"batch_size": 4, "num_samples": 16, "optimizer": "adam", "lr": 0.01, "compile": {"run_eagerly": True}}
    tf_keras.utils.set_random_seed(3)
    layers = tf_keras.layers
    old = tf_keras.Sequential([layers.Input([4]), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    old.compile(optimizer=old_optimizer("Adam"), loss="mse", run_eagerly=True)
    train, _ = make_data(config)
    old.fit(train, verbose=0)
    file = {"epoch": 1, "weights": old.get_weights(), "optimizer_weights": old.optimizer.get_weights()}
    (tmp_path / "file").write_bytes(pickle.dumps(file))
    (tmp_path / "without").write_bytes(pickle.dumps({**file, "optimizer_weights": []}))
    old.fit(train, verbose=0)
    with TFTrainer(make_model, make_data, config=config, num_replicas=1, use_local=True) as trainer:
        with caplog.at_level(logging.WARNING, logger="raysgd"):
            trainer.restore(tmp_path / "file")
        assert not [record for record in caplog.records if "old library" in record.message]
        trainer.train()
        state = trainer.state_dict()
        assert state["epoch"] == 2
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(state["models"][0], old.get_weights(), strict=True))
        with caplog.at_level(logging.WARNING, logger="raysgd"):
            trainer.restore(tmp_path / "without")
        assert "The optimizer is unchanged, because the file has none" in caplog.text
        after = trainer.state_dict()
        assert np.array_equal(after["models"][0][0], file["weights"][0])
        assert all(np.array_equal(a, b) for a, b in zip(after["optimizers"][0], state["optimizers"][0], strict=True))
