"""Workers killed every few seconds, also while they start: the training goes on, and its numbers are the same."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story
from tests.torch.storm import MODES

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", MODES)
def test_kills_every_few_seconds_change_no_number_and_each_minute_has_its_passes(mode: str) -> None:
    seed = os.environ.get("RAYSGD_CHAOS_SEED", "1")
    arguments = ["--seconds", "600", "--mode", mode, "--seed", seed]
    seen: dict[str, Any] = found_by(run_story("tests.torch.storm", *arguments, timeout_s=1400))
    again = f"seed {seen['seed']}: " + "\n".join(seen["events"])
    assert seen["kills"] >= 150, again
    assert seen["books"] == [seen["passes"]], again
    assert all(seen["passes a minute"]), again
    assert seen["apart"] < 1e-6, again
    assert seen["metrics apart"] < (1e-12 if mode == "deterministic" else 1e-6), again
    assert seen["leaks"] == [], again
