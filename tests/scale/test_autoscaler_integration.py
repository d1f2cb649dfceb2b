"""A trainer that lacks workers makes Ray's autoscaler start nodes for them."""

from __future__ import annotations

import pytest

from tests.helpers.stories import found_by, run_story
from tests.scale.autoscaler_story import MAX_WORKERS, MIN_WORKERS

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(400)]


def test_nodes_are_started_for_the_workers_that_are_needed_and_requested_for_those_that_are_wanted() -> None:
    found = found_by(run_story("tests.scale.autoscaler_story", timeout_s=350))
    sizes = found["sizes"]
    assert sizes == sorted(sizes)
    assert sizes[0] >= MIN_WORKERS
    assert sizes[-1] + found["num_pending"] == MAX_WORKERS
