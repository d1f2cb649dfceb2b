"""Fixtures for the tests of the TensorFlow front end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray.cloudpickle

from raysgd.tf import TFTrainer
from tests.tf import lab as lab_module
from tests.tf import models


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let workers use what a test module defines, without a path to the tests."""
    modules = (models, lab_module, request.module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module", params=["keras3", "keras2"])
def keras(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which Keras the workers take for `tf.keras`: they get the driver's choice."""
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    os.environ["TF_USE_LEGACY_KERAS"] = "1" if request.param == "keras2" else "0"
    yield request.param
    del os.environ["TF_USE_LEGACY_KERAS"]
    if before is not None:
        os.environ["TF_USE_LEGACY_KERAS"] = before


@pytest.fixture(scope="module")
def lab(ray_cluster: None, keras: str) -> Iterator[TFTrainer]:
    """Two connected workers to run replicas in."""
    with TFTrainer(training_operator_cls=models.Line, num_workers=2, seed=1, timeout_s=60) as trainer:
        yield trainer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves most of the tests with tf_keras to `make soak`: they take as long as those with Keras 3 again."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("keras") == "keras2" and parameters.get("case") not in ("adam", None):
            item.add_marker(pytest.mark.soak)
