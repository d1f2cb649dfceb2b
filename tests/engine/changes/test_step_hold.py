"""When a running call stops at a step boundary. How all ranks agree on the step: see `test_call_monitor.py`."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.engine.changes.step_hold import decide_hold


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (dict(), None),
        (dict(is_leaving=True), "leave"),
        (dict(is_leaving=True, may_grow=True, is_growth_due=True), "leave"),
        (dict(is_growth_due=True, num_ready=1), None),
        (dict(may_grow=True), None),
        (dict(may_grow=True, is_growth_due=True), "start standby"),
        (dict(may_grow=True, is_growth_due=True, num_ready=1), "start standby"),
        (dict(may_grow=True, num_ready=2), "step in"),
        (dict(may_grow=True, num_ready=2, num_coming=1), None),
        (dict(may_grow=True, regroups=False), None),
        (dict(may_grow=True, regroups=False, num_ready=1), None),
        (dict(may_grow=True, regroups=False, num_more=2), "rebuild larger"),
    ],
)
def test_a_call_stops_for_a_node_that_leaves_and_for_workers_that_are_all_ready(
    facts: dict[str, Any], decision: str | None
) -> None:
    assert decide_hold(**facts) == decision
