"""A whole node is lost, with the only worker that could tell the state."""

from __future__ import annotations

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


@pytest.mark.promise("A killed node")
def test_the_state_survives_the_node_of_the_worker_that_had_told_it() -> None:
    seen = found_by(run_story("tests.core.engine.node_loss_scenario", timeout_s=270))
    assert seen["capacity"] == 2, "of 2 CPUs each, on two nodes with 3: what is left over makes no worker"
    assert seen["nodes"] == 2
    assert seen["node ranks"] == [[0, 2], [1, 2]]
    assert seen["first"] == [1.0, 1.0]
    assert seen["after the loss"] == [11.0]
    assert seen["failures"] == 1
    # On a slow machine, Ray may report that the worker cannot be reached before it reports the dead node.
    assert seen["cause"] in {f"lost rank 0 (node {seen['address']} died)", "lost rank 0 (out of reach)"}
    assert seen["after the gain"] == [111.0, 111.0], "a node that comes is used"
    assert seen["failures in the end"] == 1, "without spending a retry"
    assert len(seen["small"]) == 4
    assert seen["small"] == sorted(seen["small"]), "workers of a node have ranks that follow each other"
    assert {node_rank for node_rank, _ in seen["small"]} == {0, 1}
    assert seen["small where they say"] == seen["small where they are"]
