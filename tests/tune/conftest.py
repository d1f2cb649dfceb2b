"""What tests of trials share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.processes import shipped


@pytest.fixture(scope="module")
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let workers use what a file of tests defines."""
    with shipped(request.module):
        yield
