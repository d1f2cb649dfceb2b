"""A run loses a whole node, goes on with one worker, grows back, and ends with the right number of epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.stories import found_by, run_story
from tests.train.fit.elastic_story import GAIN_AT, NUM_EPOCHS

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["dict", "folder"])
def test_a_run_that_loses_a_node_ends_with_the_right_number_of_epochs(kind: str, tmp_path: Path) -> None:
    seen = found_by(run_story("tests.train.fit.elastic_story", str(tmp_path), kind, timeout_s=280))
    epochs = [epoch for epoch, _ in seen["seen"]]
    sizes = dict(seen["seen"])
    assert seen["error"] == "None"
    assert seen["metrics"]["epoch"] == NUM_EPOCHS - 1
    assert sorted(set(epochs)) == list(range(NUM_EPOCHS))
    assert epochs == sorted(epochs)
    assert len(epochs) - NUM_EPOCHS <= 2, "more than a checkpoint was lost"
    assert (sizes[0], sizes[GAIN_AT], sizes[NUM_EPOCHS - 1]) == (2, 1, 2)
    assert seen["metrics"]["training_iteration"] == len(epochs)
    assert len(seen["checkpoints"]) in (len(epochs), len(epochs) - 1)
    assert seen["told"] | {"nodes": None} == {"nodes": None, "num_ranks": 1, "is_soon": True, "is_that_node": True}
