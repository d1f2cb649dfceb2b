"""Pure: with how many workers the survivors of a loss go on, and when a smaller group looks for more. Why: ADR 11."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ResizeCheck = float | Literal["auto"] | None
"""The setting of users: seconds; "auto"; None for groups that grow between calls only."""

AUTO: Literal["auto"] = "auto"
_AUTO_S = 60.0
_LARGEST_SHARE = 1.5  # times that with all workers: as much memory is free, and batch norms see about the same


@dataclass(frozen=True)
class Resizing:
    """The ways in which the number of workers changes.

    Attributes:
        check_s: How often a running call looks for room to grow; None: growing waits for the next call.
        num_awaited: Survivors of a loss wait for new workers until they are so many.
        num_awaited_by_call: So does a call that can grow while it runs, before it begins.
        waits_for_memory: Whether survivors that went on wait after all where memory runs out in their first step.
    """

    check_s: float | None
    num_awaited: int
    num_awaited_by_call: int
    waits_for_memory: bool = False


def resizing(option: ResizeCheck, keeps_joint_batch: bool, max_workers: int, num_short: int = 0) -> Resizing:
    """Return how the number of workers changes.

    Args:
        option: What the user set.
        keeps_joint_batch: Whether survivors can go on, with steps that do not depend on their number.
        max_workers: How many there are meant to be.
        num_short: With how many, at most, memory has run out; 0 if it never has.
    """
    if option == AUTO and keeps_joint_batch:
        enough = min(max_workers, max(math.ceil(max_workers / _LARGEST_SHARE), num_short + 1))
        return Resizing(_AUTO_S, enough, enough, waits_for_memory=True)
    if option is None or option == AUTO:
        return Resizing(None, max_workers, max_workers)
    return Resizing(option, 1, max_workers)
