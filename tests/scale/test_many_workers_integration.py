"""As many real workers as fit into a machine."""

from __future__ import annotations

import pytest

from tests.helpers.stories import found_by, run_story
from tests.scale.many_workers_story import NUM_WORKERS

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(900)]


def test_one_of_thirty_two_workers_is_killed_and_replaced_and_each_sample_is_used_once() -> None:
    found = found_by(run_story("tests.scale.many_workers_story", timeout_s=850))
    assert found["num_workers"] == NUM_WORKERS
    assert found["kinds"] == ["started", "continued"]
    assert found["used"] == [[2.0]] * NUM_WORKERS, "each sample once in each of two passes, on every worker"
