"""Fixtures for the tests of functions on workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raysgd.core.engine.shared.types import World
from raysgd.train._worker.function_replica import FunctionReplica


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is ended may take long to come to its next message."""
    monkeypatch.setattr("raysgd.train._worker.function_replica._NEXT_MESSAGE_S", 60.0)


@pytest.fixture
def replica() -> Iterator[FunctionReplica]:
    """Runs functions as rank 0 of two."""
    made = FunctionReplica(World(rank=0, size=2))
    yield made
    made.end_function()
