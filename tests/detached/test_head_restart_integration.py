"""The head of a cluster is killed and started again, with the GCS's tables in Redis and no worker on the head."""

from __future__ import annotations

import pytest

from tests.helpers.run_if import RunIf
from tests.helpers.stories import found_by, run_story


@pytest.mark.soak
@RunIf(programs=["redis-server"])
def test_a_training_goes_on_while_the_head_is_away() -> None:
    found = found_by(run_story("tests.detached.head_restart", timeout_s=600))
    assert found["num_steps_while_away"] > 0
    assert found["same_workers"]
    assert found["each_sample_once"]
    assert found["epochs"] == [1, 2]
    assert [found["epoch_after_a_loss"], found["epoch_after_the_host_died"]] == [3, 4]
    assert found["left"] == 0
