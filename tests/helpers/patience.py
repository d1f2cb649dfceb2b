"""Patience with workers on a slow machine, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from raysgd.core.engine import gathering
from raysgd.core.engine.recovery import interpreter

PATIENCE_S = 150.0


@contextmanager
def hearing_all_ranks() -> Iterator[None]:
    """After an exception on one rank all others are heard, however late. Only for ranks that come to an end at all."""
    with (
        patch.object(gathering, "_USER_GRACE_S", PATIENCE_S),
        patch.object(gathering, "_LONGEST_USER_GRACE_S", PATIENCE_S),
    ):
        yield


@contextmanager
def hearing_all_losses() -> Iterator[None]:
    """After a loss all ranks are heard: the lost ones of Ray, the others of themselves."""
    with (
        patch.object(gathering, "_DEATH_GRACE_S", PATIENCE_S),
        patch.object(gathering, "_SHORT_CONNECTION_GRACE_S", PATIENCE_S),
    ):
        yield


@contextmanager
def awaiting_new_workers() -> Iterator[None]:
    """Survivors that wait for a new worker get it, however long its process takes to start."""
    with patch.object(interpreter, "STANDBY_WAIT_S", PATIENCE_S):
        yield
