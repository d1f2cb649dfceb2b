"""Many random kills in one training: it ends, and every sample of every pass was used once."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


def told(num_faults: int, num_nodes: int, seed: int, timeout_s: float) -> dict[str, Any]:
    """What `chaos_run` saw; where it failed, with the seed to see it again."""
    arguments = ["--faults", str(num_faults), "--nodes", str(num_nodes), "--seed", str(seed)]
    return found_by(run_story("tests.torch.chaos_run", *arguments, timeout_s=timeout_s))


def assert_that_nothing_was_lost(seen: dict[str, Any]) -> None:
    again = f"seed {seen['seed']}: " + "\n".join(seen["events"])
    assert seen["gave up"] == "", again
    assert seen["books"] == [[number] for number in range(1, len(seen["books"]) + 1)], again
    assert seen["equal"], again
    assert seen["loss"] == pytest.approx(seen["undisturbed loss"], rel=0.1), again
    assert seen["leaks"] == [], again


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_thirty_random_kills_lose_nothing() -> None:
    seed = int(os.environ.get("RAYSGD_CHAOS_SEED", "1"))
    seen = told(num_faults=30, num_nodes=1, seed=seed, timeout_s=480)
    assert_that_nothing_was_lost(seen)
    assert seen["kills"] >= 30
    assert seen["rejoins"] >= 20
    assert seen["rebuilds"] >= 3


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_hundreds_of_random_kills_lose_nothing() -> None:
    seen = told(num_faults=300, num_nodes=20, seed=random.SystemRandom().randrange(10**6), timeout_s=7000)
    assert_that_nothing_was_lost(seen)
    assert seen["kills"] >= 300
