"""Fixtures for the tests of the TensorFlow front end."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.tf import TFTrainer
from tests.helpers.processes import shipped
from tests.tf import lab as lab_module
from tests.tf import loss_models, models

KERAS = ["keras3", "keras2"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make soak` what `keras_in_turns` leaves out."""
    num_seen: dict[tuple[str, str], int] = {}
    for item in items:
        turns = item.get_closest_marker("keras_in_turns")
        if turns is None or not isinstance(item, pytest.Function):
            continue
        keras = item.callspec.params["keras"]
        test = (f"{item.path}::{item.originalname}", keras)
        place = num_seen[test] = num_seen.get(test, -1) + 1
        if keras != turns.args[place % len(turns.args)]:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let workers use what a test module defines, without a path to the tests."""
    with shipped(models, loss_models, lab_module, request.module):
        yield


@pytest.fixture(scope="module", autouse=True)
def workers_are_ready(request: pytest.FixtureRequest) -> None:
    """Workers that start from now on need not import TensorFlow."""
    if request.module.__name__.endswith("_integration"):
        request.getfixturevalue("workers_have_tensorflow")


@pytest.fixture(scope="module", params=KERAS)
def keras(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which Keras the workers take for `tf.keras`: they get the driver's choice."""
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    os.environ["TF_USE_LEGACY_KERAS"] = "1" if request.param == "keras2" else "0"
    yield request.param
    del os.environ["TF_USE_LEGACY_KERAS"]
    if before is not None:
        os.environ["TF_USE_LEGACY_KERAS"] = before


@pytest.fixture(scope="module")
def keras_here(keras: str) -> Iterator[Any]:
    """The same Keras, as `tf.keras` in the driver too, which TensorFlow chooses once in the life of a process."""
    import tensorflow as tf

    module = importlib.import_module("tf_keras" if keras == "keras2" else "keras")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf, "keras", module)
        yield module


@pytest.fixture(scope="module")
def lab(ray_cluster: None, keras: str) -> Iterator[TFTrainer]:
    """Two connected workers to run replicas in."""
    with TFTrainer(training_operator_cls=models.Line, num_workers=2, seed=1, timeout_s=240) as trainer:
        yield trainer
