"""Stops of a running call at a step boundary, because workers are to leave or can step in.

Why all ranks agree on a step before they stop: ADR 10.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from raysgd.engine.changes.growth import Growth
from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.group import WorkerGroup
from raysgd.engine.shared import replica

_NODES_S = 2.0
_HOLD_AHEAD_S = 0.05
_MIN_MARGIN = 2

ROOM = "there is room for more workers"
LEAVING = "a node is going away"


def decide_hold(
    *,
    is_leaving: bool = False,
    may_grow: bool = False,
    is_growth_due: bool = False,
    regroups: bool = True,
    num_more: int = 0,
    num_ready: int = 0,
    num_coming: int = 0,
) -> Literal["leave", "rebuild larger", "step in", "start standby"] | None:
    """Pure: why the running call has to stop for a change of the group; or to start workers that can step in later.

    Args:
        is_leaving: Whether some of the workers are on nodes that are going away.
        may_grow: Whether more workers are wanted, and looked for while a call runs.
        is_growth_due: Whether it is time to look for room again.
        regroups: Whether workers can step in without a rebuild.
        num_more: How many more workers a rebuild would give; 0 if unknown.
        num_ready: Standby workers that are ready.
        num_coming: Standby workers that are starting.
    """
    if is_leaving:
        return "leave"
    if not may_grow:
        return None
    if not regroups:
        return "rebuild larger" if num_more else None
    if is_growth_due:
        return "start standby"
    return "step in" if num_ready and not num_coming else None


class StepHold:
    """Stops a running call at a step boundary where that is due."""

    def __init__(self, lifecycle: Lifecycle, growth: Growth) -> None:
        self._lifecycle, self._growth = lifecycle, growth
        now = lifecycle.now()
        self._next_nodes = now + _NODES_S
        self._next_growth = now
        self._margin = _MIN_MARGIN
        self._is_holding = False
        self.reason = "the process of the host that died had stopped it for that"

    def poll(self, steps_per_s: float) -> None:
        """Does what is due. `steps_per_s` says how fast the ranks are."""
        group = self._lifecycle.group
        if group is None or self._is_holding:
            return
        facts = self._facts(group)
        decision = decide_hold(**facts)
        if decision == "start standby":
            self._growth.start_standby()
            decision = decide_hold(**{**facts, "is_growth_due": False, **_standby_of(group)})
        if decision is None:
            return
        self.reason = LEAVING if decision == "leave" else ROOM
        if decision == "step in":
            group.standby.kill_unresponsive()
            if not group.standby.num_ready:
                return
        self._agree(group, steps_per_s)

    def _facts(self, group: WorkerGroup) -> dict[str, Any]:
        """Return what there is to know; the cluster is asked only when that is due."""
        lifecycle, now = self._lifecycle, self._lifecycle.now()
        is_leaving = False
        if now >= self._next_nodes:
            self._next_nodes = now + _NODES_S
            is_leaving = bool(lifecycle.leaving_nodes_in_use())
        check_s, regroups = lifecycle.resizing.check_s, lifecycle.spec.regroups
        if is_leaving or check_s is None or len(group) >= lifecycle.scaling.max_workers:
            return {"is_leaving": is_leaving}
        is_due = now >= self._next_growth
        if is_due:
            self._next_growth = now + check_s
        num_more = self._growth.find_room() if is_due and not regroups else 0
        room = {"may_grow": True, "is_growth_due": is_due, "regroups": regroups, "num_more": num_more}
        return {**room, **_standby_of(group)}

    def _agree(self, group: WorkerGroup, steps_per_s: float) -> None:
        """Agrees with all ranks on a step to stop at; if one of them is past it, the next round looks further ahead."""
        margin = max(self._margin, math.ceil(steps_per_s * _HOLD_AHEAD_S))
        self._lifecycle.num_holds += 1
        number = self._lifecycle.num_holds
        first = group.ask_beside("beside", replica.propose_hold, number, margin, None, ranks=[0])
        at = first.get(0)
        answers = {0: at}
        if at is not None:
            answers |= group.ask_beside("beside", replica.propose_hold, number, margin, at, ranks=range(1, len(group)))
        is_agreed = len(answers) == len(group) and all(answer == at for answer in answers.values()) and at is not None
        group.ask_beside("beside", replica.settle_hold, number, is_agreed)
        self._is_holding = is_agreed
        self._margin = _MIN_MARGIN if is_agreed else self._margin * 2


def _standby_of(group: WorkerGroup) -> dict[str, int]:
    return {"num_ready": group.standby.num_ready, "num_coming": group.standby.num_coming}
