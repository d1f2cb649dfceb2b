"""The parts of a divided model outlive the nodes that they were on."""

from __future__ import annotations

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


@pytest.mark.soak
def test_a_partner_has_the_part_of_a_divided_model_that_a_node_took_along() -> None:
    found = found_by(run_story("tests.torch.node_stories", timeout_s=280))
    # Until Ray knows of the loss of a node, the trainer may try to grow into it.
    assert [kind for kind in found["kinds"] if kind != "grown"] == ["restored", "restored"]
    assert found["sizes"] == [3, 2]
    assert found["nodes of parts"] == [[2, 2, 2, 2], [2, 2, 2]], "its rank's and a partner's, not the driver's"
    assert found["after"] == pytest.approx(found["before"], rel=1e-9)
    assert found["before"][0] != found["before"][1]
