"""Optimizer weights as the old library's files hold them, in optimizers of today: both train on alike."""

from __future__ import annotations

import importlib
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.tf import TFTrainer
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.objects.registration import build_optimizer, variables_of_optimizer
from tests.tf.models import make_data, make_model, samples

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adam", {"amsgrad": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
]


def equal_layers(keras: Any, optimizer: Any) -> Any:
    """A model whose slots have equal shapes, so that their order counts."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential([layers.Input([4]), layers.Dense(4), layers.Dense(4, use_bias=False), layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)  # a graph would take longer than the steps
    build_optimizer(model.optimizer, model.trainable_variables)
    return model


def fit(model: Any) -> Any:
    x, y = samples(16)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def old_optimizer(name: str, **options: Any) -> Any:
    """Of the kind that there was when the old library was written."""
    return getattr(importlib.import_module("tf_keras").optimizers.legacy, name)(0.01, **options)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_optimizer_goes_on_where_the_old_one_stopped(name: str, options: dict[str, Any]) -> None:
    tf_keras, keras = importlib.import_module("tf_keras"), importlib.import_module("keras")
    old = fit(equal_layers(tf_keras, old_optimizer(name, **options)))
    weights, of_optimizer = old.get_weights(), old.optimizer.get_weights()
    fit(old)
    kinds = [(tf_keras, tf_keras.optimizers.legacy)] if name == "Adam" else []
    for module, optimizers in [(keras, keras.optimizers), (tf_keras, tf_keras.optimizers), *kinds]:
        new = equal_layers(module, getattr(optimizers, name)(0.01, **options))
        values = checkpoint_file.former_slots(new.optimizer, of_optimizer)
        assert values is not None
        new.set_weights(weights)
        for variable, value in zip(variables_of_optimizer(new.optimizer), values, strict=True):
            variable.assign(value)
        fit(new)
        assert int(new.optimizer.iterations.numpy()) == 8
        for one, other in zip(old.get_weights(), new.get_weights(), strict=True):
            assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_scale_of_losses_stays_with_weights_of_the_old_optimizer() -> None:
    tf_keras = importlib.import_module("tf_keras")
    scaled = equal_layers(tf_keras, tf_keras.mixed_precision.LossScaleOptimizer(old_optimizer("Adam"))).optimizer
    weights = fit(equal_layers(tf_keras, old_optimizer("Adam"))).optimizer.get_weights()
    values = checkpoint_file.former_slots(scaled, weights)
    assert values is not None
    assert values[:2] == [2**15, 0]
    assert all(np.array_equal(a, b) for a, b in zip(values[2:], weights, strict=True))


@pytest.mark.parametrize("name", ["SGD", "Nadam"])
def test_what_belongs_nowhere_is_left_alone(name: str) -> None:
    tf_keras, keras = importlib.import_module("tf_keras"), importlib.import_module("keras")
    adam = fit(equal_layers(tf_keras, old_optimizer("Adam"))).optimizer.get_weights()
    optimizer = equal_layers(keras, getattr(keras.optimizers, name)()).optimizer
    assert checkpoint_file.former_slots(optimizer, adam) is None
    assert checkpoint_file.former_slots(optimizer, []) is None


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
        assert "the optimizer is unchanged" in caplog.text
        after = trainer.state_dict()
        assert np.array_equal(after["models"][0][0], file["weights"][0])
        assert all(np.array_equal(a, b) for a, b in zip(after["optimizers"][0], state["optimizers"][0], strict=True))
