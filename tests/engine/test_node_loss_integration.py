"""A whole node is lost, with the only worker that could tell the state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the story of `node_loss_scenario` saw; it is told once."""
    return found_by(run_story("tests.engine.node_loss_scenario", timeout_s=270))


def test_what_is_left_over_on_two_nodes_makes_no_worker(seen: dict[str, Any]) -> None:
    assert seen["capacity"] == 2  # of 2 CPUs each, on two nodes with 3


def test_workers_are_spread_and_ranked_by_node(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2
    assert seen["node ranks"] == [[0, 2], [1, 2]]


def test_workers_of_a_node_have_ranks_that_follow_each_other(seen: dict[str, Any]) -> None:
    assert len(seen["small"]) == 4
    assert seen["small"] == sorted(seen["small"])
    assert {node_rank for node_rank, _ in seen["small"]} == {0, 1}
    assert seen["small where they say"] == seen["small where they are"]


@pytest.mark.promise("A killed node")
def test_the_state_survives_the_node_of_the_worker_that_had_told_it(seen: dict[str, Any]) -> None:
    assert seen["first"] == [1.0, 1.0]
    assert seen["after the loss"] == [11.0]
    assert seen["failures"] == 1


def test_a_node_that_comes_is_used_without_spending_a_retry(seen: dict[str, Any]) -> None:
    assert seen["after the gain"] == [111.0, 111.0]
    assert seen["failures in the end"] == 1
