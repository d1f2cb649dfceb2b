"""Programs, trainers and the head of a cluster are killed: nothing of the training is lost, nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.run_if import RunIf
from tests.helpers.stories import found_by, run_story


def check(found: dict[str, Any], num_epochs: int) -> None:
    assert found["faults"] == []
    assert found["not_once"] == []
    assert found["epochs"] >= num_epochs
    assert [found["left"], found["actors"], found["reservations"]] == [0, [], []]


@pytest.mark.soak
def test_nothing_is_lost_with_programs_that_are_killed() -> None:
    kinds = "train,validate,predict,save,fit,none,replaced"
    check(found_by(run_story("tests.detached.storm", "14", "3", kinds, timeout_s=900)), num_epochs=8)


@pytest.mark.soak
def test_nothing_is_lost_with_trainers_that_are_killed() -> None:
    kinds = "process,process and worker,process between calls"
    check(found_by(run_story("tests.detached.storm", "12", "3", kinds, timeout_s=900)), num_epochs=8)


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
