"""Programs and trainers are killed at random moments: nothing of the training is lost, nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

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
