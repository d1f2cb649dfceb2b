"""A slow machine changes no test: survivors wait longer for new workers, in every change of the group."""

from __future__ import annotations

from raysgd.core.engine.recovery import interpreter
from tests.helpers.patience import PATIENCE_S, awaiting_new_workers


def test_survivors_of_a_loss_wait_as_long_as_the_block_says() -> None:
    with awaiting_new_workers():
        assert interpreter.STANDBY_WAIT_S == PATIENCE_S
    assert interpreter.STANDBY_WAIT_S < PATIENCE_S
