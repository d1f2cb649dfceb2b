"""A model that is divided over many workers fits where it does not fit whole, whatever happens to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.divided_model_story import NUM_WORKERS
from tests.stories import found_by, run_story

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(900)]

NUM_BLOCKS = 128


def test_no_worker_ever_needs_a_third_of_the_model(tmp_path: Path) -> None:
    """Through set-up, training, saving, a loss and going on. Each has a twelfth, its gradients, and a copy to send."""
    found = found_by(run_story("tests.scale.divided_model_story", str(NUM_BLOCKS), str(tmp_path), timeout_s=850))
    assert found["num_kept"] == NUM_WORKERS - 1
    assert len(found["growth_gib"]) == NUM_WORKERS
    assert max(*found["growth_before_gib"], *found["growth_gib"]) < found["model_gib"] / 3
