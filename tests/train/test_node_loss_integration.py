"""A run loses a whole node, the one that had told the state, goes on with one worker, and grows back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story
from tests.train.node_loss_scenario import GAIN_AT, LOSS_AT, NUM_GPUS, NUM_STEPS

# The loss of a node is the engine's: `tests/engine/test_node_loss_integration.py` shows it in `make test`.
pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the story of `node_loss_scenario` saw; it is told once."""
    told = run_story("tests.train.node_loss_scenario", str(tmp_path_factory.mktemp("logdir")), timeout_s=280)
    return {**found_by(told), "log": told.stderr}


def test_the_log_tells_once_of_gpus_that_nobody_uses(seen: dict[str, Any]) -> None:
    assert seen["log"].count(f"the cluster has {NUM_GPUS} GPUs, of which none is used") == 1


def test_every_step_is_seen_and_none_comes_before_one_that_was_saved(seen: dict[str, Any]) -> None:
    numbers = [step["number"] for step in seen["steps"]]
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(NUM_STEPS))
    assert all(numbers.count(number) == 1 for number in range(NUM_STEPS) if number > LOSS_AT + 1)


def test_the_number_of_workers_follows_the_cluster(seen: dict[str, Any]) -> None:
    sizes = {step["number"]: len(step["shards"]) for step in seen["steps"]}
    assert sizes[0] == 2
    assert sizes[GAIN_AT] == 1
    assert sizes[NUM_STEPS - 1] == 2
    assert [answer["size"] for answer in seen["returned"]] == [2, 2]
    assert all(step["met"] == len(step["shards"]) for step in seen["steps"])
    assert seen["kinds"] == ["started", "restored", "grown"]


def test_the_data_is_divided_anew(seen: dict[str, Any]) -> None:
    by_size = {len(step["shards"]): step["shards"] for step in seen["steps"]}
    assert by_size == {2: [[0, 2], [1, 3]], 1: [[0, 1, 2, 3]]}


def test_the_numbers_of_the_checkpoints_go_on(seen: dict[str, Any]) -> None:
    assert seen["files"] == sorted(set(seen["files"]))
    assert len(seen["files"]) in (NUM_STEPS, NUM_STEPS + 1)  # one may have been saved twice, right before the loss
