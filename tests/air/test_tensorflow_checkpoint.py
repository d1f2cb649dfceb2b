from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.train.tensorflow import TensorflowCheckpoint
from tests.helpers.lazily import imported

keras = imported("tensorflow", "keras")


def net(value: float) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.set_weights([weight + value for weight in model.get_weights()])
    return model


def test_weights_come_back_through_all_forms(tmp_path: Path) -> None:
    checkpoint = TensorflowCheckpoint.from_model(net(3.0), preprocessor="scaler")
    read = TensorflowCheckpoint.from_directory(checkpoint.to_directory(tmp_path))
    for each in (checkpoint, read):
        assert [weight.tolist() for weight in each.get_model_weights()] == [[[3.0], [3.0]], [3.0]]
        assert each.get_preprocessor() == "scaler"


def test_a_model_gets_them() -> None:
    checkpoint, target = TensorflowCheckpoint.from_model(net(3.0)), net(0.0)
    assert checkpoint.get_model(target) is target
    for model in (target, checkpoint.get_model(lambda: net(0.0))):
        assert model.get_weights()[0].tolist() == [[3.0], [3.0]]


def test_a_checkpoint_without_weights_says_so() -> None:
    with pytest.raises(RuntimeError, match=r'no "model", but \[\'epoch\'\]'):
        TensorflowCheckpoint.from_dict({"epoch": 1}).get_model_weights()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="`model=3`"):
        TensorflowCheckpoint.from_model(3)
