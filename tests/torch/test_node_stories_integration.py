"""A spare in the place of a lost node, Ctrl-C while nothing is free, and two trainers at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the story of a wait saw; it is told once."""
    return found_by(run_story("tests.torch.node_stories", timeout_s=280))


@pytest.mark.soak
def test_two_trainers_recover_at_the_same_time_each_for_itself() -> None:
    found = found_by(run_story("tests.torch.node_stories", "two", timeout_s=280))
    assert found["left over"] == []
    assert found["two"] == {"kinds": [["continued"]] * 2, "sizes": [2, 2], "uses": [[1], [1]], "num_results": 2}


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_worker_whose_node_is_gone() -> None:
    found = found_by(run_story("tests.torch.node_stories", "spare", timeout_s=280))
    assert found["left over"] == []
    assert found["spare"] == {"kinds": ["continued"], "size": 2, "uses": [1], "is on the lost node": False}


@pytest.mark.soak
def test_a_wait_for_nodes_ends_with_ctrl_c_at_once_and_the_state_is_kept(found: dict[str, Any]) -> None:
    wait = found["wait"]
    assert wait["seconds"] is not None
    assert wait["seconds"] < 30.0, "not when the wait would have been over"
    assert wait["kind"] == "ended"
    assert wait["cause"].endswith("KeyboardInterrupt")
    assert wait["uses then"] == [1], "that of the last completed call"


@pytest.mark.soak
def test_after_the_interruption_the_next_call_uses_the_node_that_came(found: dict[str, Any]) -> None:
    wait = found["wait"]
    assert (wait["size"], wait["uses"], wait["kinds"]) == (3, [2], ["ended", "restarted"])


@pytest.mark.soak
def test_nothing_is_left_over(found: dict[str, Any]) -> None:
    assert found["left over"] == []


@pytest.mark.soak
def test_a_partner_has_the_part_of_a_divided_model_that_a_node_took_along() -> None:
    found = found_by(run_story("tests.torch.node_stories", "parts", timeout_s=280))
    # Until Ray knows of the loss of a node, the trainer may try to grow into it.
    assert [kind for kind in found["kinds"] if kind != "grown"] == ["restored", "restored"]
    assert found["sizes"] == [3, 2]
    assert found["nodes of parts"] == [[2, 2, 2, 2], [2, 2, 2]], "its rank's and a partner's, not the driver's"
    assert found["after"] == pytest.approx(found["before"], rel=1e-9)
    assert found["before"][0] != found["before"][1]
