"""When a running call stops at a step boundary. How all ranks agree on the step: see `test_call_monitor.py`."""

from __future__ import annotations

import pytest

from raysgd.engine.changes.step_hold import Hold, HoldFacts, StartStandby, decide_hold
from raysgd.engine.decisions.policies import KeepGroup

ROOM = "there is room for more workers"


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (HoldFacts(), KeepGroup()),
        (HoldFacts(is_leaving=True), Hold("a node is going away")),
        (HoldFacts(is_leaving=True, may_grow=True, is_growth_due=True), Hold("a node is going away")),
        (HoldFacts(is_growth_due=True, num_ready=1), KeepGroup()),
        (HoldFacts(may_grow=True), KeepGroup()),
        (HoldFacts(may_grow=True, is_growth_due=True), StartStandby()),
        (HoldFacts(may_grow=True, is_growth_due=True, num_ready=1), StartStandby()),
        (HoldFacts(may_grow=True, num_ready=2), Hold(ROOM, step_in=True)),
        (HoldFacts(may_grow=True, num_ready=2, num_coming=1), KeepGroup()),
        (HoldFacts(may_grow=True, regroups=False), KeepGroup()),
        (HoldFacts(may_grow=True, regroups=False, num_ready=1), KeepGroup()),
        (HoldFacts(may_grow=True, regroups=False, num_more=2), Hold(ROOM)),
    ],
)
def test_a_call_stops_for_a_node_that_leaves_and_for_workers_that_are_all_ready(
    facts: HoldFacts, decision: object
) -> None:
    assert decide_hold(facts) == decision
