"""Fixtures for the tests of functions on workers."""

from __future__ import annotations

import pytest


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is ended may take long to come to its next message."""
    monkeypatch.setattr("raysgd.train._worker.function_replica._NEXT_MESSAGE_S", 60.0)
