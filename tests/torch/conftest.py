"""Fixtures for the tests of the class API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray.cloudpickle

from tests.torch import operators_for_tests


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let workers use what a test module defines, without a path to the tests."""
    modules = (operators_for_tests, request.module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)
