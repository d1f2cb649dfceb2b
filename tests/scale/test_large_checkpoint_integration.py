"""States of gigabytes leave their workers, who are not taken for dead meanwhile, and with few copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.stories import found_by, run_story
from tests.scale.large_checkpoint_story import INTERFACES, NUM_STATES

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(900)]

GIB = 2.0
OVERHEAD_GIB = 0.6


@pytest.mark.parametrize("interface", sorted(INTERFACES))
def test_a_worker_lives_through_sending_a_large_state(interface: str, tmp_path: Path) -> None:
    found = found_by(run_story("tests.scale.large_checkpoint_story", interface, str(GIB), str(tmp_path), timeout_s=850))
    assert found["kinds"] == ["started"]
    assert found["epoch"] == NUM_STATES
    assert found["worker_gib"] < 3 * GIB + OVERHEAD_GIB  # the state, and two copies in turn
    assert found["driver_gib"] < 2.5 * GIB + OVERHEAD_GIB  # the newest, the one that arrives, a tensor being written
