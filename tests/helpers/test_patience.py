"""A slow machine changes no test: survivors wait longer for new workers, in every change of the group."""

from __future__ import annotations

from raysgd.core.engine import repair
from raysgd.core.engine.repair import GroupChange
from tests.helpers.patience import PATIENCE_S, awaiting_new_workers


def change_of_now() -> GroupChange:
    return GroupChange("continued", str, (0,), began=0.0, num_awaited=1)


def test_survivors_of_a_loss_wait_as_long_as_the_block_says() -> None:
    with awaiting_new_workers():
        assert change_of_now().wait_s == PATIENCE_S
    assert change_of_now().wait_s == repair.STANDBY_WAIT_S < PATIENCE_S
