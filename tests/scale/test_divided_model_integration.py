"""A model that twelve workers divide takes little of each of them, through training, saving, a loss and going on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers.stories import found_by, run_story
from tests.scale.divided_model_story import NUM_WORKERS

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_BLOCKS = 256


def test_no_worker_grows_by_a_third_of_the_model(tmp_path: Path) -> None:
    found = found_by(
        run_story("tests.scale.divided_model_story", str(NUM_BLOCKS), str(tmp_path / "state"), timeout_s=1700)
    )
    assert found["state_mib"] > 900
    assert [len(each) for each in found["growth_mib"].values()] == [NUM_WORKERS] * 5
    largest = {what: max(each) for what, each in found["growth_mib"].items()}
    assert max(largest.values()) < found["state_mib"] / 3, largest
    assert min(largest.values()) > found["state_mib"] / NUM_WORKERS, "each has its part"
    assert found["epoch"] == 3
    assert all(map(math.isfinite, found["losses"]))
