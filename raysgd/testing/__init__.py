"""Real faults for testing how your training handles failures.

Each function arms a fault in the real processes of a running trainer: a SIGKILL, a SIGSTOP, a pause or a failing write.
Nothing is simulated, and none of this code runs unless you call one of these functions.

See `docs/recipes/test-with-faults.md`.

A fault is armed in the process that has the given rank when you call the function. The fault stays in that process,
even if the process's rank changes. Another process that later takes over the rank is not affected.
"""

from __future__ import annotations

from raysgd.testing.files import fail_save
from raysgd.testing.nodes import remove_node
from raysgd.testing.processes import IN_DRIVER, IN_WORKERS, disarm, hang_rank, kill_worker, slow_rank

__all__ = [
    "IN_DRIVER",
    "IN_WORKERS",
    "disarm",
    "fail_save",
    "hang_rank",
    "kill_worker",
    "remove_node",
    "slow_rank",
]
